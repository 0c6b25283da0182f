// Where an image comes from: dropped, pasted, chosen, photographed, or one of the samples.

import { api, counted, Problem, showProblem } from "./api.js";
import { percent } from "./predictions.js";
import { TEXT } from "./text.js";

const LONGEST_SIDE = 1024;
const MOST_IMAGES = 32; // of one request
const element = (id) => document.getElementById(id);

// The image at a size for sending again and again; only what is larger than the page needs is made smaller.
export async function shrunk(blob, name) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(blob);
  } catch {
    return { blob, name }; // the service supports more formats, and reports what is wrong with others
  }
  const scale = LONGEST_SIDE / Math.max(bitmap.width, bitmap.height);
  if (scale >= 1) return { blob, name };
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const pen = canvas.getContext("2d");
  pen.imageSmoothingQuality = "high";
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  const small = await new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.95));
  return { blob: small, name, scaled: true };
}

const isDigit = (name) => /^\d$/.test(name);
export const sampleFile = (name) => `page/${isDigit(name) ? `digit${name}.png` : `${name}.jpg`}`;

export async function sample(name) {
  const response = await fetch(sampleFile(name));
  if (!response.ok) throw new Problem(TEXT.noSample(name));
  return { blob: await response.blob(), name, sample: name };
}

// Calls `use` with the images that a visitor gives, each as `prepare` returns it.
export function listenForImages(use, prepare = shrunk) {
  const take = counted(async (files) => {
    const images = [...files].filter((file) => !file.type || file.type.startsWith("image/"));
    if (!images.length) {
      if (files.length) showProblem(TEXT.notImage(files[0].name));
      return;
    }
    const chosen = images.slice(0, MOST_IMAGES);
    const using = use(await Promise.all(chosen.map((file) => prepare(file, file.name || TEXT.pastedName))));
    if (images.length > MOST_IMAGES) showProblem(TEXT.tooMany(MOST_IMAGES));
    await using;
  });
  const drop = element("drop");
  for (const [button, field] of [["choose", "file"], ["photograph", "camera"]]) {
    element(button).addEventListener("click", () => element(field).click());
    element(field).addEventListener("change", async (event) => {
      await take([...event.target.files]);
      event.target.value = ""; // the same file may be chosen again
    });
  }
  window.addEventListener("paste", (event) => {
    const items = [...(event.clipboardData?.files || [])].filter((file) => file.type.startsWith("image/"));
    if (items.length) take(items);
  });
  window.addEventListener("dragover", (event) => { event.preventDefault(); drop.classList.add("over"); });
  window.addEventListener("dragleave", (event) => { if (!event.relatedTarget) drop.classList.remove("over"); });
  window.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    take([...event.dataTransfer.files]);
  });
}

// Several images as a strip, each with its best prediction; `labels` is null for a model that makes none.
export const showFilm = counted(async (images, chosen, choose, model, labels) => {
  const place = element("film");
  place.hidden = images.length < 2;
  if (place.hidden) return;
  place.replaceChildren(...images.map((image) => {
    const [button, thumbnail, name] = ["button", "img", "span"].map((tag) => document.createElement(tag));
    thumbnail.src = URL.createObjectURL(image.blob);
    thumbnail.alt = image.name;
    button.type = "button";
    button.title = image.name;
    button.setAttribute("aria-pressed", String(image === chosen));
    button.append(thumbnail, name);
    button.addEventListener("click", counted(() => choose(image)));
    return button;
  }));
  if (labels === null) return;
  const best = await api.labels(model, images, labels).catch(() => []);
  best.forEach((prediction, i) => {
    const name = place.children[i]?.lastElementChild;
    if (name && prediction) name.textContent = `${prediction.label} ${prediction.value === undefined ? percent(prediction.probability) : Number(prediction.value.toPrecision(3))}`;
  });
});

export function showSamples(names, chosen, choose) {
  const place = element("samples");
  place.classList.toggle("small", names.length > 4);
  place.replaceChildren(...names.map((name) => {
    const button = document.createElement("button");
    const thumbnail = document.createElement("img");
    thumbnail.src = sampleFile(name);
    thumbnail.alt = isDigit(name) ? `sample digit ${name}` : `sample: ${name}`;
    button.type = "button";
    button.dataset.sample = name;
    button.setAttribute("aria-pressed", String(name === chosen));
    button.append(thumbnail);
    button.addEventListener("click", counted(() => choose(name)));
    return button;
  }));
}

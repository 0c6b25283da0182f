// Where an image comes from: dropped, pasted, chosen, photographed, or one of the samples.

import { Problem, showProblem } from "./api.js";

const LONGEST_SIDE = 1024;
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

export async function sample(name) {
  const response = await fetch(/^\d$/.test(name) ? `page/digit/${name}` : `page/${name}.jpg`);
  if (!response.ok) throw new Problem(`There is no sample called ${name}.`);
  return { blob: await response.blob(), name, sample: name };
}

export function listenForImages(use) {
  async function take(file) {
    if (!file) return;
    if (file.type && !file.type.startsWith("image/")) {
      showProblem(`${file.name || "This"} is not an image.`);
      return;
    }
    use(await shrunk(file, file.name || "pasted image"));
  }
  const drop = element("drop");
  for (const [button, field] of [["choose", "file"], ["photograph", "camera"]]) {
    element(button).addEventListener("click", () => element(field).click());
    element(field).addEventListener("change", (event) => {
      take(event.target.files[0]);
      event.target.value = ""; // the same file may be chosen again
    });
  }
  window.addEventListener("paste", (event) => {
    const item = [...(event.clipboardData?.files || [])].find((file) => file.type.startsWith("image/"));
    if (item) take(item);
  });
  window.addEventListener("dragover", (event) => { event.preventDefault(); drop.classList.add("over"); });
  window.addEventListener("dragleave", (event) => { if (!event.relatedTarget) drop.classList.remove("over"); });
  window.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    take(event.dataTransfer.files[0]);
  });
}

export function showSamples(names, chosen, choose) {
  const place = element("samples");
  place.classList.toggle("small", names.length > 4);
  place.replaceChildren(...names.map((name) => {
    const button = document.createElement("button");
    const thumbnail = document.createElement("img");
    const digit = /^\d$/.test(name);
    thumbnail.src = digit ? `page/digit/${name}` : `page/${name}.jpg`;
    thumbnail.alt = digit ? `sample digit ${name}` : `sample: ${name}`;
    button.type = "button";
    button.dataset.sample = name;
    button.setAttribute("aria-pressed", String(name === chosen));
    button.append(thumbnail);
    button.addEventListener("click", () => choose(name));
    return button;
  }));
}

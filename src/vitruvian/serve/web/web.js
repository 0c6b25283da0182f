// The page of an exported folder: an image, its predictions, and a brush that erases patches.

import { api, busy, latest, pending, Problem, showProblem } from "./api.js";
import { PatchGrid } from "./grid.js";
import { fillTexts } from "./guide.js";
import { listenForImages, sample, showFilm, showSamples } from "./input.js";
import { facts, predict, prepare } from "./model.js";
import { headline, showPredictions } from "./predictions.js";
import { TEXT } from "./text.js";

const PHOTOS = ["cat", "coffee", "rocket"];
const byId = (id) => document.getElementById(id);
const erased = new Set();
let about = null;
let image = null;
let input = null;
let before = null;
let pointed = null;
let restoring = false;

const grid = new PatchGrid(TEXT.webGrid, {
  hover: (patch) => { pointed = patch; draw(); },
  hold: () => {},
  paint(patch, first) {
    if (!about.grid) return;
    if (first) restoring = erased.has(patch);
    if (restoring) erased.delete(patch); else erased.add(patch);
    draw();
    update();
  },
});

function draw() {
  if (!input) return;
  const [height, width] = input.size;
  const name = image.sample ? TEXT.sampleName(image.sample) : image.name;
  const patches = about.grid && erased.size ? `; ${TEXT.withErased(erased.size, about.grid[0] * about.grid[1])}` : "";
  grid.draw({ erased, patch: about.grid ? pointed : null, caption: `${name}: ${TEXT.webPart(width, height, input.share)}${patches}` });
  byId("restore").hidden = !erased.size;
}

function show(predictions, marks) {
  showPredictions(byId("predictions"), predictions, { before: marks });
  byId("headline").textContent = headline(predictions);
}

// Errors are shown, and nothing of an earlier image stays beside them.
async function reporting(task) {
  showProblem("");
  try {
    await task();
  } catch (error) {
    showProblem(error instanceof Problem ? error.message : TEXT.wrong);
    byId("predictions").textContent = TEXT.noPrediction;
    byId("headline").textContent = byId("time").textContent = "";
    if (!(error instanceof Problem)) throw error;
  }
}

// The predictions without the patches that are erased now.
const update = latest(() => reporting(async () => {
  if (!before) return;
  const of = input;
  const now = erased.size ? await busy(TEXT.predicting(about.name), () => predict(of, { erased: [...erased] })) : before;
  if (of === input) show(now.predictions, erased.size ? before.predictions : null);
}));

const use = latest((next) => reporting(async () => {
  image = next;
  for (const button of byId("samples").children) button.setAttribute("aria-pressed", String(button.dataset.sample === next.sample));
  erased.clear();
  [input, before] = [null, null];
  byId("brush").hidden = true;
  input = await busy(TEXT.preparing, () => prepare(next));
  const { view, rows, columns } = input;
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [columns, rows];
  canvas.getContext("2d").putImageData(new ImageData(view, columns, rows), 0, 0);
  grid.setImage(canvas, ...(about.grid ?? [1, 1]));
  byId("brush").hidden = false;
  draw();
  before = await busy(TEXT.predicting(about.name), () => predict(input));
  byId("time").textContent = TEXT.milliseconds(Math.round(before.milliseconds));
  show(before.predictions, null);
  if (erased.size) await update();
}));

async function useSample(name) {
  byId("film").hidden = true;
  await reporting(async () => use(await sample(name)));
}

async function useOwn(images) {
  const film = (chosen) => showFilm(images, chosen, async (other) => { film(other); await use(other); }, about.name, "");
  film(images[0]);
  await use(images[0]);
}

// The best prediction of each image of the strip.
api.labels = async (_, images) => {
  const best = [];
  for (const each of images) best.push(await prepare(each).then(predict).then(({ predictions }) => predictions[0], () => null));
  return best;
};

// Keeps a copy of the folder in the browser, where it allows that: over HTTPS and on this computer.
async function keepOffline() {
  if (!navigator.serviceWorker) return;
  try {
    await navigator.serviceWorker.register("offline.js");
    await navigator.serviceWorker.ready;
    byId("offline").textContent = TEXT.webOffline;
  } catch {
    // the page works without
  }
}

async function start() {
  about = await busy(TEXT.webLoading, () => facts);
  document.title = `${about.name}: ${TEXT.predictions}`;
  byId("name").textContent = about.name;
  const [rows, columns] = about.preprocess.image_size;
  byId("about").textContent = [about.labels && TEXT.classes(about.labels.length), `${columns} × ${rows} px`, about.origin.split(";")[0]].filter(Boolean).join(" · ");
  byId("brush-tip").hidden = !about.grid;
  byId("brush").classList.toggle("erasing", Boolean(about.grid));
  grid.erasing = Boolean(about.grid);
  showSamples(PHOTOS, "", useSample);
  listenForImages(useOwn, (file, name) => ({ blob: file, name }));
  await useSample(PHOTOS[0]);
}

fillTexts();
byId("brush").append(grid.figure);
byId("restore").addEventListener("click", () => { erased.clear(); draw(); update(); });
pending(() => reporting(start)).then(keepOffline);

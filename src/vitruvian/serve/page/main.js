// The page: models, image and controls.

import { api, busy, Problem, saved, showProblem } from "./api.js";
import { drawColorBar } from "./arrays.js";
import { digitImage, listenForDrawing } from "./draw.js";
import { listenForImages, sample, showSamples } from "./input.js";
import { Panel, LABELS } from "./panel.js";
import { download, savedPage } from "./save.js";
import { change, onChange, readState, state } from "./state.js";

const SHOWS = { attention: "Attention", similarity: "Similar patches", rollout: "Rollout", class: "Class map", erase: "Erase" };
const PHOTOS = ["cat", "coffee", "rocket"];
const byId = (id) => document.getElementById(id);
const offline = saved();

let models = [];
let panels = [];
let image = null;

const factsOf = (name) => models.find((facts) => facts.name === name);

function fillModels() {
  const options = (names, chosen) => names.map(([value, label]) => new Option(label, value, false, value === chosen));
  byId("model").replaceChildren(...options(models.map(({ name }) => [name, name]), state.model));
  const others = models.filter(({ name }) => name !== state.model).map(({ name }) => [name, name]);
  byId("compare").replaceChildren(...options([["", "none"], ...others], state.with));
  byId("compare-label").hidden = models.length < 2;
}

function makePanels() {
  const facts = factsOf(state.model) || models[0];
  const other = state.with && state.with !== facts.name ? factsOf(state.with) : null;
  const first = new Panel(facts, shareHover, null);
  panels = other ? [first, new Panel(other, shareHover, first)] : [first];
  byId("panels").classList.toggle("two", panels.length > 1);
  byId("panels").replaceChildren(...panels.map((panel) => panel.place));
  const digits = facts.digits;
  byId("labels").hidden = offline || !panels.some((panel) => panel.facts.accepts_labels);
  byId("labels-text").value = state.labels || LABELS;
  byId("drawing").hidden = !digits;
  if (!offline) showSamples(digits ? [..."0123456789"] : PHOTOS, state.sample, (name) => useSample(name));
  fitControls();
}

// Hovering a patch of one model shows the same place in the other.
function shareHover(from, patch) {
  for (const panel of panels) {
    if (panel === from || !panel.grid || patch === null) panel.hover(patch);
    else {
      const down = (Math.floor(patch / from.columns) + 0.5) / from.grid[0];
      const across = ((patch % from.columns) + 0.5) / from.columns;
      panel.hover(Math.floor(down * panel.grid[0]) * panel.columns + Math.floor(across * panel.columns));
    }
  }
}

function fitControls() {
  const { vit } = panels[0].facts;
  byId("controls").hidden = !vit || !image;
  if (!vit) return;
  const [layer, head] = [byId("layer"), byId("head")];
  [layer.max, head.max] = [vit.depth - 1, vit.num_heads - 1];
  layer.value = state.layer < 0 ? vit.depth - 1 : state.layer;
  head.value = state.head;
  byId("layer-text").value = `${layer.value} of ${vit.depth - 1}`;
  byId("head-text").value = Number(head.value) < 0 ? "mean" : head.value;
  byId("layer-label").hidden = !["attention", "similarity"].includes(state.show);
  byId("head-label").hidden = state.show !== "attention";
  byId("restore").hidden = !state.erased;
  byId("scale").hidden = state.show === "erase";
  for (const button of byId("show").children) {
    const chosen = button.dataset.show === state.show;
    button.setAttribute("aria-checked", String(chosen));
    button.hidden = button.dataset.show === "class" && !panels[0].facts.num_classes;
    button.tabIndex = chosen ? 0 : -1;
  }
}

function makeShows() {
  byId("show").replaceChildren(...Object.entries(SHOWS).map(([show, label]) => {
    const button = document.createElement("button");
    [button.type, button.textContent, button.dataset.show] = ["button", label, show];
    button.setAttribute("role", "radio");
    button.addEventListener("click", () => change({ show }));
    return button;
  }));
  byId("show").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const names = Object.keys(SHOWS).filter((name) => name !== "class" || panels[0].facts.num_classes);
    change({ show: names[(names.indexOf(state.show) + step + names.length) % names.length] });
    byId("show").querySelector("[aria-checked=true]").focus();
  });
}

async function use(next, { keep = false } = {}) {
  image = next;
  change({ sample: next.sample || "", digit: next.digit || "", ...(keep ? {} : { patch: "", erased: "", class: -1 }) });
  for (const button of byId("samples").children) button.setAttribute("aria-pressed", String(button.dataset.sample === state.sample));
  fitControls();
  await Promise.all(panels.map((panel) => panel.ask(next)));
}

async function useSample(name, options) {
  try {
    await use(await sample(name), options);
  } catch (error) {
    showProblem(error instanceof Problem ? error.message : "The service cannot be reached. Is `vit serve` still running?");
  }
}

function listenToState() {
  onChange((changed) => {
    if (["model", "with", "labels"].some((name) => changed.has(name))) {
      fillModels();
      makePanels();
      if (image) for (const panel of panels) panel.ask(image);
      return;
    }
    fitControls();
    for (const panel of panels) {
      if (changed.has("erased")) panel.askErased();
      if (changed.has("show") || changed.has("class")) panel.showPredictions();
      if (changed.has("layer") && panel.vit) panel.showLayers();
      if (["show", "layer", "class"].some((name) => changed.has(name))) panel.askInside();
      panel.draw();
    }
  });
}

function listenToControls() {
  byId("model").addEventListener("change", (event) => {
    const other = state.with === event.target.value ? "" : state.with;
    change({ model: event.target.value, with: other, layer: -1, head: -1, patch: "", erased: "", class: -1 });
  });
  byId("compare").addEventListener("change", (event) => change({ with: event.target.value }));
  byId("layer").addEventListener("input", (event) => change({ layer: Number(event.target.value) }));
  byId("head").addEventListener("input", (event) => change({ head: Number(event.target.value) }));
  byId("labels").addEventListener("submit", (event) => {
    event.preventDefault();
    change({ labels: byId("labels-text").value.trim(), erased: "" });
  });
  byId("restore").addEventListener("click", () => change({ erased: "" }));
  byId("link").addEventListener("click", async () => {
    await navigator.clipboard.writeText(location.href);
    byId("link").textContent = "Copied";
    setTimeout(() => { byId("link").textContent = "Copy link"; }, 1500);
  });
  byId("save").addEventListener("click", async () => {
    if (!image) return;
    try {
      download(await savedPage(panels), "vitruvian.html");
    } catch (error) {
      showProblem(error instanceof Problem ? error.message : "The page could not be saved.");
    }
  });
  byId("key").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem("key", byId("key-text").value);
    byId("key").hidden = true;
    start();
  });
}

function openSaved() {
  readState(offline.state);
  for (const id of ["input", "link", "save", "docs"]) byId(id).hidden = true;
  for (const id of ["model", "compare"]) byId(id).disabled = true;
}

async function start() {
  try {
    models = await busy("loading the models", () => api.models());
  } catch (error) {
    showProblem(error.message);
    return;
  }
  showProblem("");
  if (!factsOf(state.model)) state.model = models[0].name;
  if (!factsOf(state.with)) state.with = "";
  fillModels();
  makePanels();
  if (offline) await use({ sample: state.sample, digit: state.digit, name: "saved" }, { keep: true });
  else if (state.digit) await use(await digitImage(state.digit), { keep: true });
  else await useSample(state.sample || (models[0].digits ? "3" : PHOTOS[0]), { keep: true });
}

if (offline) openSaved();
else {
  readState(location.hash);
  listenForImages((next) => use(next));
  listenForDrawing(async (text) => use(await digitImage(text)));
}
makeShows();
drawColorBar(byId("bar"));
listenToState();
listenToControls();
start();

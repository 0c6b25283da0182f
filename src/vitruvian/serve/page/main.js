// The page: models, image and controls.

import { api, busy, Problem, saved, showProblem } from "./api.js";
import { drawColorBar } from "./arrays.js";
import { digitImage, listenForDrawing } from "./draw.js";
import { patchAt } from "./grid.js";
import { listenForImages, sample, showSamples } from "./input.js";
import { Panel, LABELS } from "./panel.js";
import { download, savedPage } from "./save.js";
import { change, onChange, readState, state, stateText } from "./state.js";

const SHOWS = { attention: "Attention", similarity: "Similar patches", rollout: "Rollout", class: "Class map", erase: "Erase" };
const PHOTOS = ["cat", "coffee", "rocket"];
const byId = (id) => document.getElementById(id);
const offline = saved();

let models = [];
let panels = [];
let image = null;
let awaited = false; // whether the link is to an image that is not part of it, and still to be chosen

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
    panel.hover(panel.grid && patch !== null ? patchAt(patch, from.grid, panel.grid) : patch);
  }
}

function setSlider(name, { max, value, text, hidden }) {
  [byId(name).max, byId(name).value] = [max, value];
  byId(name).setAttribute("aria-valuetext", text);
  byId(`${name}-text`).textContent = text;
  byId(`${name}-control`).hidden = hidden;
}

const hasClasses = () => panels.some(({ facts }) => facts.vit && facts.num_classes);

// The controls act on all panels. Layers are those of the first model; a deeper or shallower one shows the layer at the
// same relative depth. Heads are those of the model with the most; one with fewer shows its mean and says so.
function fitControls() {
  const vits = panels.map(({ vit }) => vit).filter(Boolean);
  byId("controls").hidden = !vits.length || !image;
  if (!vits.length) return;
  const last = vits[0].depth - 1;
  const layer = state.layer < 0 ? last : Math.min(state.layer, last);
  setSlider("layer", { max: last, value: layer, text: `${layer} of ${last}`, hidden: !["attention", "similarity"].includes(state.show) });
  const heads = Math.max(...vits.map(({ num_heads: count }) => count));
  const head = Math.min(state.head, heads - 1);
  setSlider("head", { max: heads - 1, value: head, text: head < 0 ? "mean" : `${head} of ${heads - 1}`, hidden: state.show !== "attention" });
  byId("restore").hidden = !state.erased || offline;
  byId("scale").hidden = state.show === "erase";
  for (const button of byId("show").children) {
    const chosen = button.dataset.show === state.show;
    button.setAttribute("aria-checked", String(chosen));
    button.hidden = button.dataset.show === "class" && !hasClasses();
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
    const names = Object.keys(SHOWS).filter((name) => name !== "class" || hasClasses());
    change({ show: names[(names.indexOf(state.show) + step + names.length) % names.length] });
    byId("show").querySelector("[aria-checked=true]").focus();
  });
}

async function use(next, { keep = false } = {}) {
  image = next;
  waitForImage(false);
  const origin = { sample: next.sample || "", digit: next.digit || "", image: next.sample || next.digit ? "" : "own" };
  change({ ...origin, ...(keep ? {} : { patch: "", erased: "", class: -1, of: -1 }) });
  for (const button of byId("samples").children) button.setAttribute("aria-pressed", String(button.dataset.sample === state.sample));
  fitControls();
  await Promise.all(panels.map((panel) => panel.ask(next)));
}

// A link does not contain an image of one's own: ask for it instead of showing another.
function waitForImage(needed) {
  awaited = needed;
  byId("missing").hidden = !needed;
  byId("panels").hidden = needed;
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
    byId("copied").hidden = true; // the link of the view before
    if (["model", "with", "labels"].some((name) => changed.has(name))) {
      fillModels();
      makePanels();
      if (image) for (const panel of panels) panel.ask(image);
      return;
    }
    fitControls();
    for (const panel of panels) {
      if (changed.has("erased")) panel.askErased();
      if (["show", "class", "of"].some((name) => changed.has(name))) panel.showPredictions();
      if (changed.has("layer") && panel.vit) panel.showLayers();
      if (["show", "layer", "class", "of", "erased"].some((name) => changed.has(name))) panel.askInside();
      panel.draw();
    }
  });
}

function listenToControls() {
  byId("model").addEventListener("change", (event) => {
    const other = state.with === event.target.value ? "" : state.with;
    change({ model: event.target.value, with: other, layer: -1, head: -1, patch: "", erased: "", class: -1, of: -1 });
  });
  byId("compare").addEventListener("change", (event) => change({ with: event.target.value }));
  byId("layer").addEventListener("input", (event) => change({ layer: Number(event.target.value) }));
  byId("head").addEventListener("input", (event) => change({ head: Number(event.target.value) }));
  byId("labels").addEventListener("submit", (event) => {
    event.preventDefault();
    change({ labels: byId("labels-text").value.trim(), erased: "" });
  });
  byId("restore").addEventListener("click", () => change({ erased: "" }));
  byId("link").addEventListener("click", copyLink);
  byId("choose-missing").addEventListener("click", () => byId("file").click());
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the state is in the place of the fragment
    byId("panels").focus();
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

// The link in a field, selected. Browsers offer the clipboard only over HTTPS and on this computer; elsewhere an older
// command may work, and otherwise the keys for copying do.
async function copyLink() {
  const field = byId("copied-link");
  byId("copied").hidden = false;
  field.value = `${location.href.split("#")[0]}#${stateText()}`;
  field.select();
  let done = true;
  try {
    await navigator.clipboard.writeText(field.value);
  } catch {
    done = document.execCommand("copy");
  }
  const text = done ? "Copied" : "Copy this link";
  byId("copied-text").textContent = state.image ? `${text}. The image is not part of it:` : `${text}:`;
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
  else if (state.image && !state.sample) waitForImage(true);
  else await useSample(state.sample || (models[0].digits ? "3" : PHOTOS[0]), { keep: true });
}

if (offline) openSaved();
else {
  readState(location.hash);
  window.addEventListener("hashchange", () => location.reload()); // another link in the same tab
  listenForImages((next) => use(next, { keep: awaited }));
  listenForDrawing(async (text) => use(await digitImage(text)));
}
makeShows();
drawColorBar(byId("bar"));
listenToState();
listenToControls();
start();

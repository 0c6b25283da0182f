// The page: models, images and controls.

import { api, busy, counted, Problem, saved, showProblem } from "./api.js";
import { digitImage, listenForDrawing } from "./draw.js";
import { patchAt } from "./grid.js";
import { fillTexts, makeGuide, patchesIn, showStories } from "./guide.js";
import { listenForImages, sample, showFilm, showSamples } from "./input.js";
import { Panel } from "./panel.js";
import { headline } from "./predictions.js";
import { download, savedPage } from "./save.js";
import { change, onChange, patchesToText, readState, state, stateText } from "./state.js";
import { currentStep } from "./steps.js";
import { listenForSwipe, showSwipe } from "./swipe.js";
import { TEXT } from "./text.js";

const PHOTOS = ["cat", "coffee", "rocket"];
const STEP_MS = 1500;
const LAYER_MS = 700;
const byId = (id) => document.getElementById(id);
const offline = saved();

let models = [];
let panels = [];
let image = null;
let story = null; // the example that is told
let player = null; // the timer of what is played
let awaited = false; // whether the link is to an image that is not part of it, and still to be chosen

const factsOf = (name) => models.find((facts) => facts.name === name);
const vitPanels = () => panels.filter(({ vit }) => vit);

function fillModels() {
  const options = (names, chosen) => names.map(([value, label]) => new Option(label, value, false, value === chosen));
  byId("model").replaceChildren(...options(models.map(({ name }) => [name, name]), state.model));
  const others = models.filter(({ name }) => name !== state.model).map(({ name }) => [name, name]);
  byId("compare").replaceChildren(...options([["", TEXT.none], ...others], state.with));
  byId("compare-label").hidden = models.length < 2;
}

function makePanels() {
  const facts = factsOf(state.model) || models[0];
  const other = state.with && state.with !== facts.name ? factsOf(state.with) : null;
  const page = { hover: shareHover, copy: copyCode, scored: refresh, fit: fitControls, playLayers };
  const first = new Panel(facts, page, null);
  panels = other ? [first, new Panel(other, page, first)] : [first];
  byId("panels").classList.toggle("two", panels.length > 1);
  byId("heroes").replaceChildren(...panels.map((panel) => panel.place));
  byId("way-list").replaceChildren(...vitPanels().map(({ steps }) => steps.place));
  byId("map-list").replaceChildren(...vitPanels().map(({ maps }) => maps));
  byId("ways").hidden = byId("maps").hidden = !vitPanels().length;
  const digits = facts.digits;
  byId("labels").hidden = offline || !panels.some((panel) => panel.facts.accepts_labels);
  byId("labels-text").value = state.labels || TEXT.defaultLabels;
  byId("drawing").hidden = !digits;
  if (!offline) {
    showSamples(digits ? [..."0123456789"] : PHOTOS, state.sample, (name) => useSample(name));
    showStories(digits ? "digits" : "photos", tellStory);
  }
  byId("stories").hidden = offline || !vitPanels().length;
  fitControls();
}

// Hovering a patch of one model shows the same place in the other.
function shareHover(from, patch) {
  for (const panel of panels) {
    panel.hover(panel.grid && patch !== null ? patchAt(patch, from.grid, panel.grid) : patch);
  }
  if (panels.length > 1) showSwipe(panels);
}

const hasClasses = () => panels.some(({ facts }) => facts.vit && facts.num_classes);

// The controls act on all panels. Layers are those of the first model; a deeper or shallower one shows the layer at the
// same relative depth. Heads are those of the chosen model; one with fewer shows its mean and says so.
function fitControls() {
  const [first] = vitPanels();
  byId("controls").hidden = byId("transport").hidden = !first || !image;
  byId("meaning").hidden = !first || !image;
  if (!first) return;
  const { show } = first;
  const { steps, index } = currentStep(first.vit.depth);
  const title = TEXT.stepTitle(steps[index].name, steps[index].layer);
  [byId("step").max, byId("step").value] = [steps.length - 1, index];
  byId("step").setAttribute("aria-valuetext", TEXT.stepOf(index + 1, steps.length, title));
  byId("step-text").textContent = TEXT.stepOf(index + 1, steps.length, title);
  [byId("back").disabled, byId("next").disabled] = [index === 0, index === steps.length - 1];
  byId("opacity").value = state.opacity;
  byId("opacity").setAttribute("aria-valuetext", `${state.opacity}%`);
  byId("opacity-control").hidden = show === "erase";
  const sinks = first.grid && first.sinkLayer >= 0 ? first.sinksOfLayer(first.sinkLayer).size : 0;
  byId("sinks-control").hidden = !sinks;
  byId("sinks-control").title = TEXT.leaveOutTip;
  byId("sinks").checked = state.sinks === "out";
  byId("sinks-text").textContent = TEXT.leaveOut(sinks);
  byId("restore").hidden = !state.erased || offline;
  [byId("can").textContent, byId("cannot").textContent] = [TEXT.can[show], TEXT.cannot[show]];
  for (const button of byId("show").children) {
    const chosen = button.dataset.show === show;
    button.setAttribute("aria-checked", String(chosen));
    button.hidden = button.dataset.show === "class" && !hasClasses();
    button.tabIndex = chosen ? 0 : -1;
  }
}

function makeShows() {
  byId("show").replaceChildren(...Object.entries(TEXT.shows).map(([show, label]) => {
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
    const names = Object.keys(TEXT.shows).filter((name) => name !== "class" || hasClasses());
    change({ show: names[(names.indexOf(vitPanels()[0].show) + step + names.length) % names.length] });
    byId("show").querySelector("[aria-checked=true]").focus();
  });
}

// Everything that depends on the chosen map, after the scores of maps have arrived.
function refresh() {
  fitControls();
  for (const panel of vitPanels()) {
    panel.showPredictions();
    panel.askInside();
    panel.draw();
  }
}

async function use(next, { keep = false } = {}) {
  image = next;
  waitForImage(false);
  if (!keep) tell(null);
  const origin = { sample: next.sample || "", digit: next.digit || "", image: next.sample || next.digit ? "" : "own" };
  change({ ...origin, ...(keep ? {} : { patch: "", erased: "", class: -1, of: -1 }) });
  for (const button of byId("samples").children) button.setAttribute("aria-pressed", String(button.dataset.sample === state.sample));
  fitControls();
  await Promise.all(panels.map((panel) => panel.ask(next)));
  if (panels.length > 1) showSwipe(panels);
}

// One or several images of one's own: the first is shown, and all are offered as a strip.
async function useOwn(images) {
  const keep = awaited;
  const film = (chosen) => showFilm(images, chosen, async (other) => { film(other); await use(other); }, panels[0].facts.name, panels[0].labels);
  film(images[0]);
  await use(images[0], { keep });
}

// A link does not contain an image of one's own: ask for it instead of showing another.
function waitForImage(needed) {
  awaited = needed;
  byId("missing").hidden = !needed;
  byId("panels").hidden = needed;
}

async function useSample(name, options) {
  byId("film").hidden = true;
  try {
    await use(await sample(name), options);
  } catch (error) {
    showProblem(error instanceof Problem ? error.message : TEXT.unreachable);
  }
}

// An example: its image, what to look at, and what to try.
async function tellStory(chosen) {
  stop();
  await useSample(chosen.sample);
  const [first] = vitPanels();
  if (!first?.grid) return;
  const show = chosen.show === "class" && !hasClasses() ? "rollout" : chosen.show;
  const erased = chosen.erase ? patchesToText(patchesIn(chosen.erase, first.grid), first.patches) : "";
  change({ show, erased, step: chosen.step || state.step, layer: chosen.layer ?? -1, sinks: chosen.sinks || "out", patch: "", head: -1 });
  tell(chosen);
  const reduced = matchMedia("(prefers-reduced-motion: reduce)").matches;
  byId(chosen.step ? "ways" : chosen.erase ? "heroes" : "maps").scrollIntoView({ behavior: reduced ? "auto" : "smooth", block: "start" });
}

function tell(chosen) {
  story = chosen;
  byId("story").hidden = !story;
  if (!story) return;
  [byId("story-title").textContent, byId("story-text").textContent] = [`${story.title}.`, story.text];
  const [panel] = panels;
  byId("story-facts").textContent = panel?.before ? TEXT.storyFacts(headline(panel.before), panel.now ? headline(panel.now) : "") : "";
}

function listenToState() {
  onChange((changed) => {
    byId("copied").hidden = true; // the link of the view before
    if (["model", "with", "labels"].some((name) => changed.has(name))) {
      stop();
      fillModels();
      makePanels();
      if (image) for (const panel of panels) panel.ask(image);
      return;
    }
    fitControls();
    for (const panel of panels) {
      if (changed.has("erased")) panel.askErased().then(() => { if (story) tell(story); });
      if (["show", "class", "of"].some((name) => changed.has(name))) panel.showPredictions();
      if (!panel.vit) continue;
      if (changed.has("layer")) panel.showLayers();
      if (["show", "layer", "class", "of", "erased"].some((name) => changed.has(name))) panel.askInside();
      if (["step", "layer", "patch", "erased"].some((name) => changed.has(name))) panel.askStep();
      panel.draw();
    }
    if (panels.length > 1) showSwipe(panels);
  });
}

// Play: one step after the other, or one layer after the other, until the end or until stopped.
function stop() {
  clearInterval(player?.timer);
  player = null;
  byId("play").textContent = TEXT.play;
  for (const button of document.querySelectorAll(".play-layers")) button.textContent = TEXT.playLayers;
}

function playSteps() {
  if (player) return stop();
  const [{ vit: { depth } }] = vitPanels();
  if (currentStep(depth).index === currentStep(depth).steps.length - 1) goTo(0);
  byId("play").textContent = TEXT.pause;
  const advance = () => {
    const { steps, index } = currentStep(depth);
    if (index >= steps.length - 1) stop(); else goTo(index + 1);
  };
  player = { timer: setInterval(advance, STEP_MS) };
  return advance();
}

function playLayers() {
  if (player) return stop();
  const [{ vit: { depth } }] = vitPanels();
  for (const button of document.querySelectorAll(".play-layers")) button.textContent = TEXT.pause;
  let layer = -1;
  const advance = () => {
    layer += 1;
    if (layer >= depth) stop(); else change({ layer });
  };
  player = { timer: setInterval(advance, LAYER_MS) };
  return advance();
}

function goTo(index) {
  const { steps } = currentStep(vitPanels()[0].vit.depth);
  const step = steps[Math.min(steps.length - 1, Math.max(0, index))];
  change(step.layer === undefined ? { step: step.name } : { step: step.name, layer: step.layer });
}

function listenToControls() {
  byId("model").addEventListener("change", (event) => {
    const other = state.with === event.target.value ? "" : state.with;
    change({ model: event.target.value, with: other, layer: -1, head: -1, patch: "", erased: "", class: -1, of: -1 });
  });
  byId("compare").addEventListener("change", (event) => change({ with: event.target.value }));
  byId("play").addEventListener("click", playSteps);
  for (const [id, by] of [["back", -1], ["next", 1]]) {
    byId(id).addEventListener("click", () => { stop(); goTo(currentStep(vitPanels()[0].vit.depth).index + by); });
  }
  byId("step").addEventListener("input", (event) => { stop(); goTo(Number(event.target.value)); });
  byId("opacity").addEventListener("input", (event) => change({ opacity: Number(event.target.value) }));
  byId("sinks").addEventListener("change", (event) => change({ sinks: event.target.checked ? "out" : "in" }));
  byId("labels").addEventListener("submit", (event) => {
    event.preventDefault();
    change({ labels: byId("labels-text").value.trim(), erased: "" });
  });
  byId("restore").addEventListener("click", () => change({ erased: "" }));
  byId("story-close").addEventListener("click", () => tell(null));
  byId("link").addEventListener("click", copyLink);
  byId("choose-missing").addEventListener("click", () => byId("file").click());
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the state is in the place of the fragment
    byId("panels").focus();
  });
  byId("save").addEventListener("click", counted(async () => {
    if (!image) return;
    try {
      download(await savedPage(panels), "vitruvian.html");
    } catch (error) {
      showProblem(error instanceof Problem ? error.message : TEXT.notSaved);
    }
  }));
  byId("key").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem("key", byId("key-text").value);
    byId("key").hidden = true;
    start();
  });
  listenForSwipe(() => panels);
}

// A text in a field, selected. Browsers offer the clipboard only over HTTPS and on this computer; elsewhere an older
// command may work, and otherwise the keys for copying do.
const copy = counted(async (text, failed, note) => {
  const field = byId("copied-link");
  byId("copied").hidden = false;
  [field.value, field.rows] = [text, text.split("\n").length];
  field.select();
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    done = document.execCommand("copy");
  }
  byId("copied-text").textContent = `${done ? TEXT.copied : failed}${note ? `. ${note}` : ":"}`;
});

const copyLink = () => copy(`${location.href.split("#")[0]}#${stateText()}`, TEXT.copyThisLink, state.image ? TEXT.imageNotPart : "");

// The request of this prediction, for other programs.
function copyCode(panel, kind) {
  const url = new URL("predict", location.href.split("#")[0]).href;
  const file = panel.image.sample && !panel.facts.digits ? `${panel.image.sample}.jpg` : panel.image.name;
  const fields = { model: panel.facts.name, ...(panel.labels ? { labels: panel.labels } : {}), ...(panel.grid && panel.erased.size ? { erased: [...panel.erased].join(",") } : {}) };
  const quoted = (text) => `'${text.replaceAll("'", "'\\\\''")}'`;
  const key = sessionStorage.getItem("key") ? " -H 'X-API-Key: KEY'" : "";
  const curl = `curl${key} -F ${quoted(`image=@${file}`)} ${Object.entries(fields).map(([name, value]) => `-F ${quoted(`${name}=${value}`)}`).join(" ")} ${url}`;
  const headers = `{"Content-Type": "application/json"${key ? ', "X-API-Key": "KEY"' : ""}}`;
  const python = `import base64, json
from pathlib import Path
from urllib.request import Request, urlopen

data = base64.b64encode(Path(${JSON.stringify(file)}).read_bytes()).decode()
body = json.dumps({"images": [{"data": data}], ${Object.entries(fields).map(([name, value]) => `${JSON.stringify(name)}: ${JSON.stringify(value)}`).join(", ")}}).encode()
with urlopen(Request(${JSON.stringify(url)}, body, ${headers})) as response:
    print(json.load(response))`;
  return copy(kind === "curl" ? curl : python, TEXT.copyThis, "");
}

function openSaved() {
  readState(offline.state);
  for (const id of ["input", "link", "save", "docs", "stories"]) byId(id).hidden = true;
  for (const id of ["model", "compare"]) byId(id).disabled = true;
}

const start = counted(async () => {
  try {
    models = await busy(TEXT.loading, () => api.models());
  } catch (error) {
    showProblem(error.message);
    return;
  }
  showProblem("");
  if (!factsOf(state.model)) state.model = models[0].name;
  if (!factsOf(state.with)) state.with = "";
  fillModels();
  makePanels();
  if (offline) {
    const photos = Object.fromEntries(offline.panels.map(({ facts, photo }) => [facts.name, photo]));
    await use({ sample: state.sample, digit: state.digit, name: offline.name, photos }, { keep: true });
  } else if (state.digit) await use(await digitImage(state.digit), { keep: true });
  else if (state.image && !state.sample) waitForImage(true);
  else await useSample(state.sample || (models[0].digits ? "3" : PHOTOS[0]), { keep: true });
});

fillTexts();
if (offline) openSaved();
else {
  readState(location.hash);
  window.addEventListener("hashchange", () => location.reload()); // another link in the same tab
  listenForImages(useOwn);
  listenForDrawing(async (text) => use(await digitImage(text)));
}
makeGuide(Boolean(offline));
makeShows();
listenToState();
listenToControls();
start();

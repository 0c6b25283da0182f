// The way through the model, step by step: where we are, the picture, one sentence and the numbers of this image.

import { attentionOf, headMatrix, levelsOf, scaleOf } from "./arrays.js";
import { drawPatch } from "./grid.js";
import { richText } from "./guide.js";
import { moveCursor, percent, showLayers } from "./predictions.js";
import { Scene } from "./scene.js";
import { change, state } from "./state.js";
import { TEXT } from "./text.js";

const FIRST_NUMBERS = 6; // of a vector, as text
const FIRST_PIXELS = 4;
const LISTED = 5;

// The steps of a model: before the blocks, two for each block, after the blocks.
export function stepsOf(depth) {
  const blocks = Array.from({ length: depth }, (_, layer) => [{ name: "attention", layer }, { name: "mlp", layer }]).flat();
  return [{ name: "image" }, { name: "patches" }, { name: "tokens" }, ...blocks, { name: "head" }, { name: "probabilities" }];
}

export function currentStep(depth) {
  const steps = stepsOf(depth);
  const layer = state.layer < 0 || state.layer >= depth ? depth - 1 : state.layer;
  const index = steps.findIndex((step) => step.name === state.step && (step.layer === undefined || step.layer === layer));
  return { steps, index: Math.max(0, index) };
}

export class StepView {
  constructor(panel, on) {
    this.panel = panel;
    const made = (tag, name, ...children) => {
      const element = document.createElement(tag);
      element.className = name;
      element.append(...children);
      return element;
    };
    this.scene = new Scene(on);
    this.spine = made("div", "spine");
    this.spine.setAttribute("role", "group");
    this.spine.setAttribute("aria-label", TEXT.spine);
    this.layersTitle = made("h3", "");
    this.layersTitle.textContent = TEXT.layersTitle;
    this.layersPlace = made("div", "layers");
    this.chart = made("div", "chart last", this.layersTitle, this.layersPlace);
    this.told = made("div", "told");
    this.told.setAttribute("aria-live", "polite");
    this.place = made("div", "way", made("div", "track", this.spine, this.chart), made("div", "stage", made("div", "", this.scene.canvas), this.told));
    this.place.dataset.model = panel.facts.name;
    this.place.hidden = true;
    this.makeSpine();
    new ResizeObserver(() => this.showLayers()).observe(this.spine);
    new IntersectionObserver(([entry]) => {
      this.visible = entry.isIntersecting;
      if (this.visible) this.draw();
    }).observe(this.place);
  }

  makeSpine() {
    const { depth } = this.panel.vit;
    const button = (step, text, title) => {
      const made = document.createElement("button");
      [made.type, made.textContent] = ["button", text];
      if (title) made.setAttribute("aria-label", title);
      if (title) made.title = title;
      made.addEventListener("click", () => change(this.panel.stepHere(step)));
      made.step = step;
      if (step.layer !== undefined) made.className = "block";
      return made;
    };
    const blocks = Array.from({ length: depth }, (_, layer) => button({ name: "attention", layer }, String(layer), TEXT.block(layer)));
    const named = (name) => button({ name }, TEXT.stepNames[name]);
    this.spine.replaceChildren(...["image", "patches", "tokens"].map(named), ...blocks, ...["head", "probabilities"].map(named));
  }

  setImage(image) {
    const { panel } = this;
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [image.width, image.height];
    const pen = canvas.getContext("2d", { willReadFrequently: true });
    pen.drawImage(image, 0, 0);
    [this.image, this.pixels] = [image, pen];
    const names = panel.prefixTokens.flatMap(([, from, to, short]) => Array.from({ length: to - from }, (_, i) => (to - from > 1 ? `${short}${i + 1}` : short)));
    this.scene.setImage(image, ...panel.grid, names);
    this.place.hidden = false;
    this.key = "";
  }

  get layer() { return this.panel.layer; }
  get name() { return TEXT.stepNames[state.step] ? state.step : "image"; }

  // The patch that is followed: the hovered or held one, else the one in the middle.
  get patch() {
    const { panel } = this;
    const [rows, columns] = panel.grid;
    return panel.hovered ?? panel.held ?? Math.floor(rows / 2) * columns + Math.floor(columns / 2);
  }

  // The token that attends: the one of a hovered or held patch, else the one that the head reads; null for the mean.
  get query() {
    const { panel } = this;
    const patch = panel.hovered ?? panel.held;
    return patch === null ? panel.queryToken : panel.vit.prefix_tokens + patch;
  }

  // The token whose numbers are shown. Hovering does not change it: each needs a request.
  get traced() {
    const { panel } = this;
    const { held } = panel;
    const followsPatch = held !== null || panel.queryToken === null || this.name === "tokens";
    const [rows, columns] = panel.grid;
    return followsPatch ? panel.vit.prefix_tokens + (held ?? Math.floor(rows / 2) * columns + Math.floor(columns / 2)) : panel.queryToken;
  }

  // The tokens whose numbers a saved page contains: that of the followed patch, and the one that the head reads.
  get tokens() {
    const { panel } = this;
    const [rows, columns] = panel.grid;
    const patch = panel.held ?? Math.floor(rows / 2) * columns + Math.floor(columns / 2);
    return [...new Set([panel.vit.prefix_tokens + patch, panel.queryToken ?? panel.vit.prefix_tokens + patch])];
  }

  // Key, part and fields of the numbers that this step needs; null for none.
  needed() {
    const { layer, traced: token } = this;
    if (this.name === "attention") return [`attention ${layer}`, "attention", { layer }];
    if (["tokens", "mlp", "head"].includes(this.name)) return [`trace ${token}`, "trace", { token }];
    return null;
  }

  draw() {
    const { panel, name, layer } = this;
    if (!this.image || !panel.grid) return;
    const needed = this.needed();
    const data = needed ? panel.inside[needed[0]] : null;
    for (const button of this.spine.children) {
      const here = button.step.layer === undefined ? button.step.name === name : ["attention", "mlp"].includes(name) && button.step.layer === layer;
      if (here) button.setAttribute("aria-current", "step"); else button.removeAttribute("aria-current");
      button.dataset.part = here ? name : "";
    }
    moveCursor(this.layersPlace, this.cursor());
    const track = this.spine.parentElement; // scrolls on small screens
    if (track.scrollWidth > track.clientWidth) track.scrollTo({ left: this.cursor() - track.clientWidth / 2 });
    const { erased } = panel;
    const look = { erased, patch: this.framed(), reads: name === "head" ? panel.queryToken : null };
    if (name === "attention" && data) {
      const { prefix_tokens: prefix } = panel.vit;
      const weights = attentionOf(headMatrix(data, panel.head), data.shape[1], this.query, prefix);
      const sinks = panel.sinksLeftOut(layer);
      const patches = weights.subarray(prefix);
      Object.assign(look, { weights, sinks, query: this.query, levels: levelsOf(patches, scaleOf(patches, sinks)).map(Math.sqrt) });
    }
    this.scene.show(name, look);
    const key = [name, layer, needed?.[0], Boolean(data), Boolean(panel.inside.layers), Boolean(panel.inside.sinks), this.patch, panel.head, panel.now?.[0].probability, panel.before?.[0].probability, erased.size, state.sinks].join();
    if (key !== this.key) this.tell(data);
    this.key = key;
  }

  framed() {
    const { panel, name } = this;
    if (["patches", "tokens"].includes(name)) return this.patch;
    if (name === "mlp") return this.traced >= panel.vit.prefix_tokens ? this.traced - panel.vit.prefix_tokens : null;
    return name === "attention" ? panel.hovered ?? panel.held : null;
  }

  // Where the current step is on the spine, in pixels.
  cursor() {
    const button = [...this.spine.children].find((each) => each.hasAttribute("aria-current")) ?? this.spine.firstElementChild;
    const part = { attention: 0.3, mlp: 0.7 }[this.name] ?? 0.5;
    return button.offsetLeft + part * button.offsetWidth;
  }

  showLayers() {
    const { layers } = this.panel.grid ? this.panel.inside : {};
    if (!layers || !this.spine.offsetWidth) return;
    const centers = [...this.spine.children].slice(2, -2).map((button) => button.offsetLeft + button.offsetWidth / 2);
    const choose = (layer) => change(this.panel.stepHere({ name: ["attention", "mlp"].includes(state.step) ? state.step : "mlp", layer }));
    showLayers(this.layersPlace, layers, this.layer, { across: (step) => centers[step], width: this.spine.offsetWidth, now: this.cursor(), choose });
  }

  // The sentence and the numbers of the step.
  tell(data) {
    const [title, sentence, numbers] = ["h3", "p", "div"].map((tag) => document.createElement(tag));
    title.textContent = TEXT.stepTitle(this.name, this.layer);
    sentence.className = "sentence";
    sentence.append(...richText(this.sentence()));
    numbers.className = "numbers";
    numbers.append(...this.numbers(data).filter(Boolean));
    this.told.replaceChildren(title, sentence, numbers);
  }

  sentence() {
    const { panel, name } = this;
    const { vit, facts } = panel;
    const [gridRows, gridColumns] = panel.grid;
    const prefix = [vit.cls_token ? TEXT.prefixClass : "", vit.reg_tokens ? TEXT.prefixRegisters(vit.reg_tokens) : ""].filter(Boolean).join(" ");
    const pooled = panel.queryToken === 0 ? TEXT.pooledToken : vit.pool === "map" ? TEXT.pooledMap : TEXT.pooledMean;
    const first = panel.before?.[0];
    const kind = !first ? TEXT.noHeadSentence : panel.labels ? TEXT.zeroShotOut : first.value !== undefined ? TEXT.numbersOut : first.predicted !== undefined ? TEXT.sigmoid : TEXT.softmax;
    if (name === "head" && !facts.num_classes) return `${pooled} ${panel.labels ? TEXT.zeroShotOut : TEXT.noHeadSentence}`;
    return TEXT.sentences[name]({
      rows: this.image.height, columns: this.image.width, channels: facts.in_channels, gridRows, gridColumns, side: vit.stride, width: vit.width, prefix, pooled, kind, who: this.who(),
    });
  }

  who() {
    const { query, panel } = this;
    if (query === null) return TEXT.theMean;
    return query < panel.vit.prefix_tokens ? TEXT.theClassToken : TEXT.theFramed;
  }

  numbers(data) {
    const { panel, name, layer } = this;
    const { layers } = panel.inside;
    if (name === "image" || name === "patches") return [this.pixelNumbers()];
    if (name === "attention") return data ? [this.attentionNumbers(data)] : [];
    if (name === "probabilities") return [this.resultNumbers()];
    if (!data) return [];
    if (name === "tokens") return this.tokenNumbers(data);
    if (name === "head") return [strips([[TEXT.pooled, data.pooled.values]]), layers && bars(TEXT.logits, logitsOf(layers, layers.logits.length - 1))];
    const width = data.vectors.shape[1];
    const [before, after] = [layer, layer + 1].map((row) => data.vectors.values.subarray(row * width, (row + 1) * width));
    const drawn = strips([[TEXT.before(layer), before], [TEXT.changed, after.map((value, i) => value - before[i])], [TEXT.after(layer), after]]);
    return [this.whose(), drawn, layers && bars(TEXT.ifHead(layer), logitsOf(layers, layer + 1))];
  }

  // Which token the numbers belong to.
  whose() {
    const { panel, traced } = this;
    const line = document.createElement("p");
    const prefix = panel.vit.prefix_tokens;
    line.className = "whose";
    line.append(...(traced < prefix ? [TEXT.classToken] : [panel.left.chip(traced - prefix, TEXT.Patch(panel.name(traced - prefix)))]));
    return line;
  }

  pixelNumbers() {
    const { panel, patch } = this;
    const [rows, columns] = panel.grid;
    const [wide, high] = [this.image.width / columns, this.image.height / rows];
    const [left, top] = [(patch % columns) * wide, Math.floor(patch / columns) * high];
    const [made, canvas, text, lead] = ["div", "canvas", "div", "p"].map((tag) => document.createElement(tag));
    [made.className, canvas.className, canvas.width, canvas.height] = ["pixels", "patch", 192, 192];
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${TEXT.Patch(panel.name(patch))}. ${TEXT.pixelsOf}`);
    drawPatch(canvas, this.image, patch, rows, columns);
    const gray = panel.facts.in_channels === 1;
    lead.textContent = `${TEXT.Patch(panel.name(patch))}, ${gray ? TEXT.pixelRowGray : TEXT.pixelRow}`;
    text.append(lead);
    const { data } = this.pixels.getImageData(left, top, Math.min(FIRST_PIXELS, wide), 1);
    for (let i = 0; i < data.length; i += 4) {
      const [line, color] = [document.createElement("p"), document.createElement("i")];
      color.style.background = `rgb(${data[i]} ${data[i + 1]} ${data[i + 2]})`;
      line.className = "pixel";
      line.append(color, ...values(gray ? [data[i]] : data.subarray(i, i + 3), String));
      text.append(line);
    }
    made.append(canvas, text);
    return made;
  }

  tokenNumbers(data) {
    const { vectors: { values: all, shape: [, width] }, patch, position } = data;
    const token = all.subarray(0, width);
    const rows = [[TEXT.patchVector, patch.values]];
    if (position) rows.push([TEXT.position, position.values]);
    const sum = token.every((value, i) => Math.abs(value - patch.values[i] - (position ? position.values[i] : 0)) < 1e-3 * (1 + Math.abs(value)));
    rows.push([sum ? TEXT.token : TEXT.tokenNormalized, token]);
    return [this.whose(), strips(rows)];
  }

  attentionNumbers(data) {
    const { panel, query } = this;
    const { prefix_tokens: prefix } = panel.vit;
    const weights = attentionOf(headMatrix(data, panel.head), data.shape[1], query, prefix);
    const order = [...weights.keys()].sort((a, b) => weights[b] - weights[a]).slice(0, LISTED);
    const who = this.who();
    const sinks = panel.sinksOfLayer(this.layer);
    return bars(`${TEXT.listensTo(who[0].toUpperCase() + who.slice(1))} (${TEXT.headColumn(panel.head)})`, order.map((token) => {
      const patch = token - prefix;
      const name = token === query ? TEXT.itself : token < prefix ? panel.prefixTokens.find(([, from, to]) => token >= from && token < to)[0] : "";
      const node = name ? name : panel.left.chip(patch, TEXT.patch(panel.name(patch)));
      return { label: sinks.has(patch) ? [node, ` ${TEXT.terms.sink[0].toLowerCase()}`] : [node], share: weights[token] / weights[order[0]], text: percent(weights[token]), value: weights[token] };
    }));
  }

  resultNumbers() {
    const shown = this.panel.now || this.panel.before;
    if (!shown || shown[0].probability === undefined) return null;
    return bars(TEXT.predictions, shown.map(({ label, probability }) => ({ label: [label], share: probability, text: percent(probability), value: probability })));
  }
}

function logitsOf({ classes, logits }, row) {
  const entries = classes.map(({ label }, i) => ({ label: [label], value: logits[row][i] })).sort((a, b) => b.value - a.value).slice(0, LISTED);
  const most = Math.max(...entries.map(({ value }) => Math.abs(value)), 1e-6);
  return entries.map((entry) => ({ ...entry, share: Math.max(0, entry.value / most), text: entry.value.toFixed(2) }));
}

// Numbers as text, each in an element of its own.
function values(numbers, text) {
  return [...numbers].map((number) => {
    const made = document.createElement("span");
    [made.className, made.textContent] = ["value", text(number)];
    return made;
  });
}

function bars(title, entries) {
  const [made, heading] = [document.createElement("div"), document.createElement("p")];
  [made.className, heading.textContent, heading.className] = ["bars", title, "soft"];
  made.append(heading, ...entries.map(({ label: name, share, text, value }) => {
    const [row, label, track, fill, number] = ["div", "span", "span", "span", "span"].map((tag) => document.createElement(tag));
    [row.className, track.className, fill.className, number.className] = ["bar-row", "track", "fill", "number value"];
    label.append(...name);
    fill.style.width = `${100 * share}%`;
    [number.textContent, number.dataset.value] = [text, value];
    track.append(fill);
    row.append(label, track, number);
    return row;
  }));
  return made;
}

// Vectors as strips of colors, blue below zero and orange above, on one scale.
function strips(rows) {
  const made = document.createElement("div");
  made.className = "strips";
  const all = Float32Array.from(rows.flatMap(([, vector]) => [...vector]), Math.abs).sort();
  const most = all[Math.floor(0.98 * (all.length - 1))] || 1;
  made.append(...rows.flatMap(([title, vector]) => {
    const [heading, canvas, first] = ["p", "canvas", "p"].map((tag) => document.createElement(tag));
    heading.textContent = title;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", TEXT.stripLabel(title, vector.length));
    [canvas.width, canvas.height] = [vector.length, 1];
    const pen = canvas.getContext("2d");
    const pixels = pen.createImageData(vector.length, 1);
    vector.forEach((value, i) => pixels.data.set([...diverging(value / most), 255], 4 * i));
    pen.putImageData(pixels, 0, 0);
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      const index = Math.min(vector.length - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * vector.length)));
      canvas.title = TEXT.vectorValue(index, vector[index].toFixed(3));
    });
    first.className = "soft first";
    first.append(`${TEXT.firstNumbers} `, ...values(vector.subarray(0, FIRST_NUMBERS), (value) => value.toFixed(3)), " …");
    return [heading, canvas, first];
  }));
  return made;
}

function diverging(value) {
  const part = Math.min(1, Math.abs(value));
  const end = value < 0 ? [0, 96, 168] : [214, 94, 0];
  return [244, 244, 244].map((light, i) => Math.round(light + (end[i] - light) * part));
}

// One model: its predictions, the predictions after each layer, the patches and the heads.

import { showPredictions, showLayers, percent } from "./predictions.js";
import { api, busy, latest, Problem, showProblem } from "./api.js";
import { headMatrix, line, softened, unpack } from "./arrays.js";
import { PatchGrid } from "./grid.js";
import { showHeads } from "./heads.js";
import { change, patchesToText, state, textToPatches } from "./state.js";

export const LABELS = "a photo of a cat, a photo of a dog, a cup of coffee, a rocket";

function part(kind, name, title) {
  const made = document.createElement("div");
  made.className = kind;
  if (title) {
    const heading = document.createElement("h3");
    heading.textContent = title;
    made.append(heading);
  }
  const inner = document.createElement("div");
  inner.className = name;
  made.append(inner);
  return [made, inner];
}

export class Panel {
  constructor(facts, hover, first) {
    [this.facts, this.vit, this.first] = [facts, facts.vit, first || this];
    this.hovered = undefined;
    this.makePlaces(hover);
    this.ask = latest((image) => this.load(image));
    this.askErased = latest(() => this.loadErased());
    this.askInside = latest(() => this.loadInside());
  }

  makePlaces(hover) {
    this.place = document.createElement("article");
    this.place.className = "panel";
    this.place.dataset.model = this.facts.name;
    const [head, about] = [document.createElement("div"), document.createElement("p")];
    const title = document.createElement("h2");
    title.textContent = this.facts.name;
    about.className = "about soft";
    about.textContent = described(this.facts);
    head.append(title, about);
    const [predictions, layers] = [part("card first", "predictions", "Predictions"), part("card chart last", "layers", "Predictions after each layer")];
    [this.predictionsPlace, this.layersPlace] = [predictions[1], layers[1]];
    const body = document.createElement("div");
    body.className = "body";
    layers[0].hidden = !this.vit || !this.facts.num_classes;
    this.grids = document.createElement("div");
    this.grids.className = "grids";
    const on = { hover: (patch) => hover(this, patch), hold: (patch) => this.hold(patch), paint: (p, f) => this.paint(p, f) };
    [this.left, this.right] = [new PatchGrid("The image in patches", on), new PatchGrid("The other side", on)];
    this.grids.append(this.left.figure, this.right.figure);
    const heads = part("heads-part", "heads", "All heads of this layer");
    [this.headsPart, this.headsPlace] = heads;
    this.grids.hidden = heads[0].hidden = true;
    body.append(predictions[0], this.grids, layers[0]);
    this.place.append(head, body, heads[0]);
  }

  get columns() { return this.grid[1]; }
  get patches() { return this.grid[0] * this.grid[1]; }
  get layer() {
    const { depth } = this.vit;
    const [own, theirs] = [depth - 1, (this.first.vit || this.vit).depth - 1];
    const asked = state.layer < 0 ? theirs : Math.min(state.layer, theirs);
    return theirs ? Math.round((asked / theirs) * own) : own;
  }
  // Labels for a zero-shot model, empty for one with a head, null for one that makes no predictions.
  get labels() { return this.facts.num_classes ? "" : this.facts.accepts_labels ? state.labels || LABELS : null; }
  get head() { return state.head < this.vit.num_heads ? state.head : -1; }

  // The panel whose grid the patches of the URL belong to: the first one where it has a grid.
  get reference() { return this.first.grid ? this.first : this; }

  // A patch of the reference's grid, here.
  here(patch) {
    if (patch === null || this.reference === this) return patch;
    const [rows, columns] = this.reference.grid;
    const [down, across] = [(Math.floor(patch / columns) + 0.5) / rows, ((patch % columns) + 0.5) / columns];
    return Math.floor(down * this.grid[0]) * this.columns + Math.floor(across * this.columns);
  }

  get held() {
    const [row, column] = state.patch.split(",").map(Number);
    if (!state.patch || Number.isNaN(row + column)) return null;
    const patch = row * this.reference.columns + column;
    return patch < this.reference.patches ? this.here(patch) : null;
  }

  get erased() {
    const theirs = textToPatches(state.erased, this.reference.patches);
    if (this.reference === this) return theirs;
    const own = new Set();
    for (let patch = 0; patch < this.patches; patch += 1) {
      const [down, across] = [(Math.floor(patch / this.columns) + 0.5) / this.grid[0], ((patch % this.columns) + 0.5) / this.columns];
      const [rows, columns] = this.reference.grid;
      if (theirs.has(Math.floor(down * rows) * columns + Math.floor(across * columns))) own.add(patch);
    }
    return own;
  }

  // A new image: first the input and the predictions, then the intermediate results.
  async load(image) {
    [this.image, this.inside, this.before, this.now, this.layers] = [image, {}, null, null, null];
    const input = this.vit ? this.loadInput(image) : null;
    this.inputLoaded = Promise.allSettled([input]);
    try {
      await Promise.all([this.loadPredictions(image), input]);
      showProblem("");
      if (!this.vit) return;
      await Promise.all([this.loadLayers(image), state.erased ? this.askErased() : null, this.askInside()]);
    } catch (error) {
      await this.inputLoaded;
      this.clear(image);
      this.showError(error);
    }
  }

  // Nothing of an earlier image stays below the problem with this one.
  clear(image) {
    if (!this.before && this.labels !== null) this.predictionsPlace.textContent = "No prediction.";
    if (!this.layers) this.layersPlace.replaceChildren();
    if (this.seen === image) return;
    this.grids.hidden = this.headsPart.hidden = true;
    this.left.image = this.right.image = null;
  }

  async loadPredictions(image) {
    const { name } = this.facts;
    const { labels } = this;
    if (labels === null) this.predictionsPlace.textContent = "This model has no head: it returns vectors, not predictions.";
    else this.before = await busy(`${name}: predicting`, () => api.predict(name, image, { labels }));
    this.showPredictions();
  }

  async loadInput(image) {
    const result = await busy("preparing the image", () => api.inspect(this.facts.name, image, { parts: "input" }));
    const input = await loadPng(result.input);
    [this.grid, this.seen] = [result.grid, image];
    for (const grid of [this.left, this.right]) grid.setImage(input, ...result.grid);
    this.grids.hidden = false;
    if (this.first !== this) await this.first.inputLoaded;
    this.draw();
  }

  async loadLayers(image) {
    if (!this.facts.num_classes) return;
    const result = await busy(`${this.facts.name}: predictions after each layer`, () => api.inspect(this.facts.name, image, { parts: "layers" }));
    this.layers = result.layers;
    this.showLayers();
  }

  showError(error) {
    if (!(error instanceof Problem)) console.error(error);
    showProblem(error instanceof Problem ? error.message : "Something went wrong on this page; see the console.");
  }

  async loadErased() {
    if (!this.image || !this.before || !this.grid) return;
    const erased = [...this.erased];
    const { name } = this.facts;
    const { labels } = this;
    try {
      this.now = erased.length ? await busy(`${name}: predicting`, () => api.predict(name, this.image, { erased, labels })) : null;
      this.showPredictions();
    } catch (error) {
      this.showError(error);
    }
  }

  // Key, kind and fields of the array that the selected display needs.
  needed() {
    const { show } = state;
    if (show === "rollout") return ["rollout", "rollout", {}];
    if (show === "class") return [`class ${state.class}`, "gradient", state.class >= 0 ? { target: state.class } : {}];
    const kind = show === "similarity" ? "similarity" : "attention";
    return [`${kind} ${this.layer}`, kind, { layer: this.layer }];
  }

  async loadInside() {
    if (!this.grid || !this.image) return;
    const [key, kind, fields] = this.needed();
    const { image } = this;
    try {
      if (!this.inside[key]) {
        const text = `${this.facts.name}: ${kind}`;
        const result = await busy(text, () => api.inspect(this.facts.name, image, { parts: kind, ...fields }));
        if (image !== this.image) return;
        this.inside[key] = unpack(result[kind]);
      }
      this.draw();
    } catch (error) {
      this.showError(error);
    }
  }

  hover(patch) {
    this.hovered = patch === null ? undefined : patch;
    this.draw();
  }

  hold(patch) {
    this.hovered = undefined;
    if (patch === null) change({ patch: "" });
    else {
      const [rows, columns] = this.reference.grid;
      const down = (Math.floor(patch / this.columns) + 0.5) / this.grid[0];
      const across = ((patch % this.columns) + 0.5) / this.columns;
      const text = `${Math.floor(down * rows)},${Math.floor(across * columns)}`;
      change({ patch: text === state.patch ? "" : text });
    }
    this.draw();
  }

  // Erase a patch, or give it back where the stroke began on one that was erased.
  paint(patch, first) {
    const erased = textToPatches(state.erased, this.reference.patches);
    const theirs = this.reference === this ? [patch] : [...Array(this.reference.patches).keys()].filter((each) => this.here(each) === patch);
    if (first) this.restoring = theirs.some((each) => erased.has(each));
    for (const each of theirs) if (this.restoring) erased.delete(each); else erased.add(each);
    change({ erased: patchesToText(erased, this.reference.patches) });
  }

  showPredictions() {
    if (!this.before) return;
    const chosen = state.show === "class" ? (state.class >= 0 ? state.class : this.before[0].index) : -1;
    const choose = (index) => change(this.vit && this.facts.num_classes ? { show: "class", class: index } : {});
    showPredictions(this.predictionsPlace, this.now || this.before, { before: this.now ? this.before : null, chosen, choose });
  }

  showLayers() {
    if (this.layers) showLayers(this.layersPlace, this.layers, this.layer);
  }

  draw() {
    if (!this.grid || !this.left.image) return;
    const patch = this.hovered ?? this.held;
    const { erased } = this;
    const erasing = state.show === "erase";
    for (const grid of [this.left, this.right]) grid.erasing = erasing;
    this.grids.classList.toggle("erasing", erasing);
    this.headsPart.hidden = state.show !== "attention";
    const data = this.inside[this.needed()[0]];
    if (erasing) {
      this.right.figure.hidden = true;
      const share = percent(erased.size / this.patches);
      const caption = erased.size ? `${erased.size} of ${this.patches} patches erased (${share})` : "Brush over patches to erase them.";
      this.left.draw({ patch, erased, caption });
      return;
    }
    this.right.figure.hidden = false;
    if (!data) {
      this.left.draw({ patch, erased });
      this.right.draw({ patch, erased });
    } else if (state.show === "attention") this.drawAttention(data, patch, erased);
    else if (state.show === "similarity") this.drawSimilarity(data, patch, erased);
    else {
      const caption = state.show === "rollout" ? "Attention rollout: attention multiplied over all layers" : this.classCaption();
      this.left.draw({ values: data.values, patch, erased, caption });
      this.right.draw({ patch, erased, caption: this.where(patch, data.values) });
    }
  }

  drawAttention(data, patch, erased) {
    const { prefix_tokens: prefix } = this.vit;
    const tokens = data.shape[1];
    const token = patch === null ? (prefix ? 0 : null) : prefix + patch;
    const matrix = headMatrix(data, this.head);
    const [to, from] = [line(matrix, tokens, token, true), line(matrix, tokens, token, false)];
    const who = patch === null ? (prefix ? "The class token" : "The mean patch") : `Patch ${this.name(patch)}`;
    const other = prefix ? `, ${percent(to.subarray(0, prefix).reduce((a, b) => a + b, 0))} to the class token` : "";
    const strongest = this.where(patch, to.subarray(prefix)) && `most to ${this.strongest(to.subarray(prefix))}${other}`;
    this.left.draw({ values: softened(to.subarray(prefix)), patch, erased, caption: `${who} attends to these patches: ${strongest}` });
    const by = patch === null ? `Patches that attend to ${who.toLowerCase()}` : `Patches that attend to ${who.toLowerCase()}, most of all ${this.strongest(from.subarray(prefix))}`;
    this.right.draw({ values: softened(from.subarray(prefix)), patch, erased, caption: by });
    const [rows, columns] = this.grid;
    const choose = (head) => change({ head: head === state.head ? -1 : head });
    showHeads(this.headsPlace, data, { token, prefix, rows, columns, chosen: this.head, choose });
  }

  drawSimilarity(data, patch, erased) {
    const chosen = patch ?? Math.floor(this.grid[0] / 2) * this.columns + Math.floor(this.columns / 2);
    const values = line(data.values, this.patches, chosen, true);
    const caption = `Similarity of the patches to patch ${this.name(chosen)} after layer ${this.layer}`;
    this.left.draw({ values, patch: chosen, erased, caption });
    const mean = values.reduce((a, b) => a + b, 0) / values.length;
    this.right.draw({ patch: chosen, erased, caption: `Mean cosine ${mean.toFixed(2)}` });
  }

  name(patch) { return `${Math.floor(patch / this.columns)},${patch % this.columns}`; }

  strongest(values) {
    let best = 0;
    values.forEach((value, i) => { if (value > values[best]) best = i; });
    return `${this.name(best)} (${percent(values[best])})`;
  }

  where(patch, values) { return patch === null ? "The input of the model" : `Patch ${this.name(patch)}: ${values[patch].toPrecision(2)}`; }

  classCaption() {
    const known = [...(this.layers?.classes || []), ...(this.before || [])];
    const index = state.class >= 0 ? state.class : this.before[0].index;
    return `Gradient-weighted attention: evidence for ${known.find((each) => each.index === index)?.label ?? `class ${index}`}`;
  }
}

function described({ parameters, image_size: size, vit, num_classes: classes, accepts_labels: labels, origin }) {
  const millions = parameters >= 1e6 ? `${(parameters / 1e6).toFixed(1)}M` : `${Math.round(parameters / 1e3)}k`;
  const shape = vit ? `${vit.depth} layers, ${vit.num_heads} heads, ${vit.grid[0]} × ${vit.grid[1]} patches of ${vit.stride} px` : parameters ? "no attention" : "attention needs the weights";
  return [parameters ? `${millions} parameters` : "exported graph", shape, `${size[0]} × ${size[1]} px`, labels ? "zero-shot" : classes ? `${classes} classes` : "no head", origin.split(";")[0]].filter(Boolean).join(" · ");
}

function loadPng(base64) {
  return new Promise((done, failed) => {
    const made = new Image();
    made.onload = () => done(made);
    made.onerror = () => failed(new Problem("The input image could not be shown."));
    made.src = `data:image/png;base64,${base64}`;
  });
}

// One model: its predictions, the predictions after each layer, the patches and the heads.

import { headline, showPredictions, showLayers, percent } from "./predictions.js";
import { api, busy, latest, Problem, saved, showProblem } from "./api.js";
import { attentionOf, columnOf, headMatrix, rowOf, softened, unpack } from "./arrays.js";
import { PatchGrid, patchAt } from "./grid.js";
import { showHeads } from "./heads.js";
import { change, patchesToText, state, textToPatches } from "./state.js";

export const LABELS = "a photo of a cat, a photo of a dog, a cup of coffee, a rocket";

// A titled part of a panel: the part, the place of its content, its title.
function part(kind, name, title) {
  const [made, inner, heading] = ["div", "div", "h3"].map((tag) => document.createElement(tag));
  [made.className, inner.className, heading.textContent] = [kind, name, title];
  made.append(heading, inner);
  return [made, inner, heading];
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
    const [head, title, about] = ["div", "h2", "p"].map((tag) => document.createElement(tag));
    title.textContent = this.facts.name;
    about.className = "about soft";
    about.textContent = described(this.facts);
    this.headline = document.createElement("p");
    this.headline.className = "headline";
    this.headline.setAttribute("role", "status");
    head.append(title, about, this.headline);
    const [predictions, layers] = [part("card first", "predictions", "Predictions"), part("card chart last", "layers", "Predictions after each layer")];
    this.predictionsPlace = predictions[1];
    [, this.layersPlace, this.layersTitle] = layers;
    const body = document.createElement("div");
    body.className = "body";
    layers[0].hidden = !this.vit || !this.facts.num_classes;
    this.grids = document.createElement("div");
    this.grids.className = "grids";
    const on = { hover: (patch) => hover(this, patch), hold: (patch) => this.hold(patch), paint: (p, f) => this.paint(p, f) };
    [this.left, this.right] = [new PatchGrid("First map of the patches", on), new PatchGrid("Second map of the patches", on)];
    this.grids.append(this.left.figure, this.right.figure);
    const heads = part("heads-part", "heads", "All heads");
    [this.headsPart, this.headsPlace, this.headsTitle] = heads;
    this.grids.hidden = heads[0].hidden = true;
    body.append(this.grids, predictions[0], layers[0]);
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

  // The class whose map is shown: the chosen one if it was chosen among as many classes, else the top prediction.
  get target() {
    const { num_classes: count } = this.facts;
    const here = state.class >= 0 && state.class < count && (state.of < 0 || state.of === count);
    return here ? state.class : this.before[0].index;
  }

  // The panel whose grid the patches of the URL belong to: the first one where it has a grid.
  get reference() { return this.first.grid ? this.first : this; }

  // A patch of the reference's grid, here.
  here(patch) {
    return patch === null ? null : patchAt(patch, this.reference.grid, this.grid);
  }

  // A patch of this grid, in the reference's.
  there(patch) { return patchAt(patch, this.grid, this.reference.grid); }

  get held() {
    const [row, column] = state.patch.split(",").map(Number);
    if (!state.patch || Number.isNaN(row + column)) return null;
    const patch = row * this.reference.columns + column;
    return patch < this.reference.patches ? this.here(patch) : null;
  }

  get erased() {
    const theirs = textToPatches(state.erased, this.reference.patches);
    return new Set([...Array(this.patches).keys()].filter((patch) => theirs.has(this.there(patch))));
  }

  // Intermediate results of the image with the patches that are erased now; those of the whole image are kept, too.
  get inside() {
    const key = [...this.erased].join();
    if (!this.results.has(key)) {
      for (const other of this.results.keys()) if (other) this.results.delete(other);
      this.results.set(key, {});
    }
    return this.results.get(key);
  }

  // A new image: first the input and the predictions, then the intermediate results.
  async load(image) {
    [this.image, this.results, this.before, this.now] = [image, new Map(), null, null];
    const input = this.vit ? this.loadInput(image) : null;
    this.inputLoaded = Promise.allSettled([input]);
    try {
      await Promise.all([this.loadPredictions(image), input]);
      showProblem("");
      if (!this.vit) return;
      await Promise.all([state.erased ? this.askErased() : this.loadLayers(), this.askInside()]);
    } catch (error) {
      await this.inputLoaded;
      this.clear(image);
      this.showError(error);
    }
  }

  // Nothing of an earlier image stays below the problem with this one.
  clear(image) {
    if (!this.before && this.labels !== null) this.predictionsPlace.textContent = this.headline.textContent = "No prediction.";
    if (!this.grid || !this.inside.layers) this.layersPlace.replaceChildren();
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

  async loadLayers() {
    if (!this.facts.num_classes) return;
    const { image, inside } = this;
    const erased = [...this.erased];
    if (!inside.layers) {
      this.layersPlace.classList.add("outdated");
      const text = `${this.facts.name}: predictions after each layer`;
      inside.layers = (await busy(text, () => api.inspect(this.facts.name, image, { parts: "layers", erased }))).layers;
    }
    if (image === this.image) this.showLayers();
  }

  showError(error) {
    if (!(error instanceof Problem)) console.error(error);
    showProblem(error instanceof Problem ? error.message : "Something went wrong on this page; see the console.");
  }

  async loadErased() {
    if (!this.image || !this.grid) return;
    const { image, labels } = this;
    const erased = [...this.erased];
    const { name } = this.facts;
    try {
      const predict = () => api.predict(name, image, { erased, labels });
      const now = this.before && erased.length ? await busy(`${name}: predicting`, predict) : null;
      if (image !== this.image) return;
      this.now = now;
      this.showPredictions();
      await this.loadLayers();
    } catch (error) {
      this.showError(error);
    }
  }

  // Class maps need a head, and wait for the predictions.
  get lacksMap() { return state.show === "class" && !(this.facts.num_classes && this.before); }

  // Key, kind and fields of the array that the selected display needs.
  needed() {
    const { show } = state;
    if (show === "rollout") return ["rollout", "rollout", {}];
    if (show === "class") return [`class ${this.target}`, "gradient", { target: this.target }];
    const kind = show === "similarity" ? "similarity" : "attention";
    return [`${kind} ${this.layer}`, kind, { layer: this.layer }];
  }

  async loadInside() {
    if (!this.grid || !this.image || state.show === "erase" || this.lacksMap) return;
    const [key, kind, fields] = this.needed();
    const { image, inside } = this;
    const erased = [...this.erased];
    try {
      if (!inside[key]) {
        const text = `${this.facts.name}: ${kind}`;
        const result = await busy(text, () => api.inspect(this.facts.name, image, { parts: kind, erased, ...fields }));
        inside[key] = unpack(result[kind]);
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
      const text = this.reference.name(this.there(patch));
      change({ patch: text === state.patch ? "" : text });
    }
    this.draw();
  }

  // Erase a patch, or give it back where the stroke began on one that was erased.
  paint(patch, first) {
    if (saved()) {
      showProblem("This is a saved page: erasing patches needs the running service.");
      return;
    }
    const erased = textToPatches(state.erased, this.reference.patches);
    const theirs = [this.there(patch), ...[...Array(this.reference.patches).keys()].filter((each) => this.here(each) === patch)];
    if (first) this.restoring = theirs.some((each) => erased.has(each));
    for (const each of theirs) if (this.restoring) erased.delete(each); else erased.add(each);
    change({ erased: patchesToText(erased, this.reference.patches) });
  }

  showPredictions() {
    if (!this.before) return;
    const { num_classes: count } = this.facts;
    const chosen = state.show === "class" && count ? this.target : -1;
    const choose = this.vit && count ? (index) => change({ show: "class", class: index, of: count }) : null;
    const predictions = this.now || this.before;
    showPredictions(this.predictionsPlace, predictions, { before: this.now ? this.before : null, chosen, choose });
    const text = headline(predictions);
    if (this.headline.textContent !== text) this.headline.textContent = text;
  }

  showLayers() {
    if (!this.grid || !this.inside.layers) return;
    this.layersPlace.classList.remove("outdated");
    this.layersTitle.textContent = this.noted("Predictions after each layer");
    showLayers(this.layersPlace, this.inside.layers, this.layer);
  }

  // Maps and charts say that they are of the image with erased patches.
  noted(text) { return this.erased.size ? `${text}, with ${this.erased.size} of ${this.patches} patches erased` : text; }

  draw() {
    if (!this.grid || !this.left.image) return;
    const patch = this.hovered ?? this.held;
    const { erased } = this;
    const erasing = state.show === "erase";
    for (const grid of [this.left, this.right]) grid.erasing = erasing;
    this.grids.classList.toggle("erasing", erasing);
    this.headsPart.hidden = state.show !== "attention";
    if (erasing) {
      this.right.figure.hidden = true;
      const share = percent(erased.size / this.patches);
      const caption = erased.size ? `${erased.size} of ${this.patches} patches erased (${share})` : "Brush over patches to erase them.";
      this.left.draw({ patch, erased, caption });
      return;
    }
    this.right.figure.hidden = false;
    const data = this.lacksMap ? null : this.inside[this.needed()[0]];
    if (!data) {
      this.left.draw({ patch, erased, caption: this.lacksMap && !this.facts.num_classes ? "This model has no head, so there is no class map." : "" });
      this.right.draw({ patch, erased });
    } else if (state.show === "attention") this.drawAttention(data, patch, erased);
    else if (state.show === "similarity") this.drawSimilarity(data, patch, erased);
    else {
      const caption = state.show === "rollout" ? "Attention rollout: attention multiplied over all layers" : this.classCaption();
      this.left.draw({ values: data.values, patch, erased, caption: this.noted(caption) });
      this.right.draw({ patch, erased, caption: this.where(patch, data.values) });
    }
  }

  // The token that the head reads; null for a head that reads the patches.
  get queryToken() { return ["token", "token_mean"].includes(this.vit.pool) ? 0 : null; }

  // The tokens before the patches, by name: where they begin and end.
  get prefixTokens() {
    const { cls_token: first, reg_tokens: registers, prefix_tokens: end } = this.vit;
    const all = [["the class token", 0, Number(first)], ["the distillation token", Number(first), end - registers]];
    all.push([registers === 1 ? "the register token" : `the ${registers} register tokens`, end - registers, end]);
    return all.filter(([, from, to]) => to > from);
  }

  drawAttention(data, patch, erased) {
    const { prefix_tokens: prefix, num_heads: count } = this.vit;
    const tokens = data.shape[1];
    const token = patch === null ? this.queryToken : prefix + patch;
    const matrix = headMatrix(data, this.head);
    const to = attentionOf(matrix, tokens, token, prefix);
    const who = patch === null ? "the class token" : `patch ${this.name(patch)}`;
    const begin = token === null ? "On average, patches attend" : `${who[0].toUpperCase()}${who.slice(1)} attends`;
    const others = this.prefixTokens.map(([name, from, end]) => `, ${percent(to.subarray(from, end).reduce((a, b) => a + b, 0))} to ${name === who ? "itself" : name}`);
    const most = `most to ${this.strongest(to.subarray(prefix))}${others.join("")}`;
    this.left.draw({ values: softened(to.subarray(prefix)), patch, erased, caption: this.noted(`${begin} to these patches: ${most}`) });
    if (token === null) this.right.draw({ patch, erased, caption: this.where(null) });
    else {
      const from = columnOf(matrix, tokens, token).subarray(prefix);
      const best = patch === null ? "" : `, most of all ${this.strongest(from)}`;
      this.right.draw({ values: softened(from), patch, erased, caption: this.noted(`Patches that attend to ${who}${best}`) });
    }
    const missing = state.head >= count ? `; this model has no head ${state.head}, so the mean is shown` : "";
    this.headsTitle.textContent = `All heads of layer ${this.layer}${missing}`;
    const [rows, columns] = this.grid;
    const choose = (head) => change({ head: head === state.head ? -1 : head });
    showHeads(this.headsPlace, data, { token, prefix, rows, columns, chosen: this.head, choose });
  }

  drawSimilarity(data, patch, erased) {
    const chosen = patch ?? Math.floor(this.grid[0] / 2) * this.columns + Math.floor(this.columns / 2);
    const values = rowOf(data.values, this.patches, chosen);
    const caption = `Similarity of the patches to patch ${this.name(chosen)} after layer ${this.layer}`;
    this.left.draw({ values, patch: chosen, erased, caption: this.noted(caption) });
    const mean = values.reduce((a, b) => a + b, 0) / values.length;
    this.right.draw({ patch: chosen, erased, caption: `Mean cosine ${mean.toFixed(2)}` });
  }

  name(patch) { return `${Math.floor(patch / this.columns)},${patch % this.columns}`; }

  strongest(values) {
    let best = 0;
    values.forEach((value, i) => { if (value > values[best]) best = i; });
    return `${this.name(best)} (${percent(values[best])})`;
  }

  where(patch, values) { return patch === null ? this.noted("The input of the model") : `Patch ${this.name(patch)}: ${values[patch].toPrecision(2)}`; }

  classCaption() {
    const known = [...this.before, ...(this.now || []), ...(this.inside.layers?.classes || [])];
    return `Gradient-weighted attention: evidence for ${known.find(({ index }) => index === this.target)?.label ?? `class ${this.target}`}`;
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

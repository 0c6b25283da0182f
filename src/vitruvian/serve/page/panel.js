// One model: the image and its predictions, the way through it, and the maps of its patches.

import { headline, showPredictions, percent } from "./predictions.js";
import { afterPause, api, busy, counted, latest, Problem, saved, showProblem } from "./api.js";
import { attentionOf, columnOf, headMatrix, rowOf, sinksOf, unpack } from "./arrays.js";
import { PatchGrid, patchAt } from "./grid.js";
import { LayerGrid } from "./heads.js";
import { change, patchesToText, state, textToPatches } from "./state.js";
import { StepView } from "./steps.js";
import { TEXT } from "./text.js";

const PHOTO_SIDE = 760;
const MOST_SCORED = 30e6; // parameters of a model whose maps are scored without being asked: 36 forward passes

const SCORE_AFTER_MS = 300; // not while one image follows the other

const NO_PATCHES = new Set();

function build(tag, name = "", ...children) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(...children);
  return made;
}

const numberOf = (value) => String(Number(value.toPrecision(2)));

export class Panel {
  // `page` has functions: hover(panel, patch), copy(panel, kind), scored().
  constructor(facts, page, first) {
    [this.facts, this.vit, this.first, this.page] = [facts, facts.vit, first || this, page];
    this.hovered = undefined;
    this.scores = null;
    this.makeHero();
    this.makeMaps();
    this.steps = this.vit ? new StepView(this, { hover: (patch) => page.hover(this, patch), hold: (patch) => this.hold(patch) }) : null;
    this.ask = latest((image) => this.load(image));
    this.askErased = latest(() => this.loadErased());
    this.askInside = latest(() => this.loadInside());
    this.askStep = latest(() => this.loadStep());
    this.askScores = afterPause(saved() ? 0 : SCORE_AFTER_MS, (image) => this.loadScores(image));
  }

  // The image, unobscured, beside its predictions.
  makeHero() {
    this.photo = build("canvas");
    this.photo.setAttribute("role", "img");
    this.photoCaption = build("figcaption");
    this.photoPart = build("figure", "photo", this.photo, this.photoCaption);
    this.photoPart.hidden = true;
    this.headline = build("p", "headline");
    this.headline.setAttribute("role", "status");
    this.predictionsPlace = build("div", "predictions");
    this.time = build("span", "soft time");
    this.time.title = TEXT.millisecondsTip;
    const copies = ["curl", "python"].map((kind) => {
      const button = build("button", "", kind === "curl" ? TEXT.copyCurl : TEXT.copyPython);
      [button.type, button.dataset.copy] = ["button", kind];
      button.addEventListener("click", () => this.page.copy(this, kind));
      return button;
    });
    const tools = build("div", "row tools", this.time, ...(saved() ? [] : copies));
    const about = build("p", "about soft", described(this.facts));
    const card = build("div", "card first", build("h2", "", this.facts.name), about, this.headline, this.predictionsPlace, tools);
    this.place = build("article", "panel", this.photoPart, card);
    this.place.dataset.model = this.facts.name;
  }

  makeMaps() {
    const on = { hover: (patch) => this.page.hover(this, patch), hold: (patch) => this.hold(patch), paint: (p, f) => this.paint(p, f) };
    [this.left, this.right] = [new PatchGrid(TEXT.firstMap, on), new PatchGrid(TEXT.secondMap, on)];
    this.grids = build("div", "grids", this.left.figure, this.right.figure);
    this.sinksLine = build("p", "sinks soft");
    this.scoresLine = build("p", "scores soft");
    this.layerGrid = new LayerGrid((layer, head) => change({ ...this.stepHere({ name: state.step, layer }), head }));
    [this.headsTitle, this.headsLead, this.play] = [build("h3", "", TEXT.headsTitle), build("p", "soft"), build("button", "", TEXT.playLayers)];
    this.play.type = "button";
    this.play.className = "play-layers";
    this.play.addEventListener("click", () => this.page.playLayers());
    const lead = build("div", "lead", build("div", "", this.headsTitle, this.headsLead), this.play);
    this.headsPart = build("div", "heads-part", lead, this.layerGrid.place);
    this.maps = build("div", "maps", this.grids, this.sinksLine, this.scoresLine, this.headsPart);
    this.maps.dataset.model = this.facts.name;
    this.grids.hidden = this.headsPart.hidden = true;
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
  get labels() { return this.facts.num_classes ? "" : this.facts.accepts_labels ? state.labels || TEXT.defaultLabels : null; }
  // The step of this model as values of the state, whose layers are those of the first model.
  stepHere({ name, layer }) {
    if (layer === undefined) return { step: name };
    const [own, theirs] = [this.vit.depth - 1, (this.first.vit || this.vit).depth - 1];
    return { step: name, layer: own ? Math.round((layer / own) * theirs) : theirs };
  }
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

  // The map that is shown: the chosen one, else the one with the best deletion score, else the class map.
  get show() {
    if (state.show) return state.show;
    const { scores, facts } = this.first;
    if (scores) return Object.keys(TEXT.shows).filter((name) => name in scores).sort((a, b) => scores[a] - scores[b])[0];
    return facts.num_classes ? "class" : "rollout";
  }

  // A new image: first the input and the predictions, then the intermediate results.
  async load(image) {
    [this.image, this.results, this.before, this.now, this.scores] = [image, new Map(), null, null, null];
    this.scoresLine.textContent = "";
    const input = this.vit ? this.loadInput(image) : this.showPhoto(image, null);
    this.inputLoaded = Promise.allSettled([input]);
    try {
      await Promise.all([this.loadPredictions(image), input]);
      showProblem("");
      if (!this.vit) return;
      await Promise.all([state.erased ? this.askErased() : this.loadLayers(), this.askInside(), this.askStep(), this.loadHeads(image)]);
      if (this.facts.parameters > MOST_SCORED) this.showScores();
      else this.askScores(image);
    } catch (error) {
      await this.inputLoaded;
      this.clear(image);
      this.showError(error);
    }
  }

  // Nothing of an earlier image stays below the problem with this one.
  clear(image) {
    if (!this.before && this.labels !== null) this.predictionsPlace.textContent = this.headline.textContent = TEXT.noPrediction;
    if (!this.before) this.time.textContent = "";
    if (this.steps && (!this.grid || !this.inside.layers)) this.steps.layersPlace.replaceChildren();
    if (this.seen === image) return;
    this.grids.hidden = this.headsPart.hidden = this.photoPart.hidden = true;
    this.sinksLine.textContent = this.scoresLine.textContent = "";
    if (this.steps) this.steps.place.hidden = true;
    this.left.image = this.right.image = null;
  }

  async loadPredictions(image) {
    const { name } = this.facts;
    const { labels } = this;
    if (labels === null) this.predictionsPlace.textContent = TEXT.noHead;
    else this.before = await busy(TEXT.predicting(name), () => api.predict(name, image, { labels }));
    if (this.before?.milliseconds !== undefined) this.time.textContent = TEXT.milliseconds(Math.round(this.before.milliseconds));
    this.showPredictions();
  }

  async loadInput(image) {
    const result = await busy(TEXT.preparing, () => api.inspect(this.facts.name, image, { parts: "input" }));
    const input = await loadImage(`data:image/png;base64,${result.input}`);
    [this.grid, this.seen, this.input] = [result.grid, image, input];
    for (const grid of [this.left, this.right]) grid.setImage(input, ...result.grid);
    this.steps.setImage(input);
    this.grids.hidden = false;
    await this.showPhoto(image, result);
    if (this.first !== this) await this.first.inputLoaded;
    this.draw();
  }

  // The whole image with a frame around what the model sees.
  async showPhoto(image, input) {
    let whole = null;
    try {
      whole = image.blob ? await createImageBitmap(image.blob) : await loadImage(image.photos[this.facts.name]);
    } catch {
      whole = this.input ?? null; // a format that the browser does not know
    }
    if (!whole) return;
    [this.whole, this.crop, this.size] = [whole, input?.crop ?? null, input?.size ?? [whole.height, whole.width]];
    this.photoPart.hidden = false;
    this.drawPhoto();
  }

  drawPhoto() {
    if (!this.whole) return;
    const { whole, photo, size: [high, wide] } = this;
    const cropped = this.crop && whole !== this.input;
    const scale = PHOTO_SIDE / Math.max(whole.width, whole.height);
    [photo.width, photo.height] = [Math.round(whole.width * scale), Math.round(whole.height * scale)];
    const pen = photo.getContext("2d");
    pen.imageSmoothingEnabled = whole.width > 64;
    pen.drawImage(whole, 0, 0, photo.width, photo.height);
    const [left, top, right, bottom] = cropped ? this.crop.map((edge, i) => (edge / (i % 2 ? high : wide)) * (i % 2 ? photo.height : photo.width)) : [0, 0, photo.width, photo.height];
    if (this.grid) this.drawErased(pen, left, top, right - left, bottom - top);
    const share = ((right - left) * (bottom - top)) / (photo.width * photo.height);
    if (cropped && share < 0.995) {
      const outside = new Path2D();
      outside.rect(0, 0, photo.width, photo.height);
      outside.rect(left, top, right - left, bottom - top);
      pen.fillStyle = "rgb(0 0 0 / 0.45)";
      pen.fill(outside, "evenodd");
      [pen.lineWidth, pen.strokeStyle] = [4, "#fff"];
      pen.strokeRect(left, top, right - left, bottom - top);
      [pen.lineWidth, pen.strokeStyle] = [1.5, "#000"];
      pen.strokeRect(left, top, right - left, bottom - top);
    }
    const name = this.image.sample ? TEXT.sampleName(this.image.sample) : this.image.name;
    const erased = this.grid && this.erased.size ? `; ${TEXT.withErased(this.erased.size, this.patches)}` : "";
    const text = build("strong", "", name);
    this.photoCaption.replaceChildren(text, ` ${TEXT.frame(wide, high, share)}${erased}`);
    photo.setAttribute("aria-label", `${name}, ${TEXT.frame(wide, high, share)}${erased}`);
  }

  // The whole image as a data URL, for a saved page.
  get photoUrl() {
    const { whole } = this;
    const canvas = build("canvas");
    const scale = Math.min(1, PHOTO_SIDE / Math.max(whole.width, whole.height));
    [canvas.width, canvas.height] = [whole.width * scale, whole.height * scale];
    canvas.getContext("2d").drawImage(whole, 0, 0, canvas.width, canvas.height);
    return whole.width > 64 ? canvas.toDataURL("image/jpeg", 0.9) : canvas.toDataURL();
  }

  drawErased(pen, left, top, wide, high) {
    const [rows, columns] = this.grid;
    pen.fillStyle = this.left.mean;
    for (const patch of this.erased) {
      pen.fillRect(left + ((patch % columns) * wide) / columns, top + (Math.floor(patch / columns) * high) / rows, wide / columns, high / rows);
    }
  }

  async loadLayers() {
    if (!this.facts.num_classes) return;
    const { image, inside } = this;
    const erased = [...this.erased];
    if (!inside.layers) {
      this.steps.layersPlace.classList.add("outdated");
      inside.layers = (await busy(TEXT.computing(this.facts.name, "layers"), () => api.inspect(this.facts.name, image, { parts: "layers", erased }))).layers;
    }
    if (image === this.image) this.showLayers();
  }

  // Attention of all layers and heads, and what each patch receives.
  async loadHeads(image) {
    const { inside } = this;
    const erased = [...this.erased];
    if (!inside.heads) {
      const result = await busy(TEXT.computing(this.facts.name, "heads"), () => api.inspect(this.facts.name, image, { parts: "heads", erased }));
      const { shape: [layers, patches], values } = unpack(result.received);
      inside.received = Array.from({ length: layers }, (_, layer) => values.subarray(layer * patches, (layer + 1) * patches));
      inside.sinks = inside.received.map(sinksOf);
      inside.heads = unpack(result.heads);
    }
    if (image !== this.image || inside !== this.inside) return;
    this.layerGrid.setMaps(inside.heads, ...this.grid, inside.sinks);
    this.page.fit();
    this.draw();
  }

  async loadScores(image) {
    if (image !== this.image || this.before?.[0].probability === undefined || !this.facts.num_classes) return;
    try {
      this.scoresLine.textContent = `${TEXT.scores}: ${TEXT.scoring}`;
      const { scores } = await api.inspect(this.facts.name, image, { parts: "scores", target: this.before[0].index });
      if (image !== this.image) return;
      this.scores = scores;
      this.showScores();
      this.page.scored();
    } catch (error) {
      this.showError(error);
    }
  }

  // The score of each map, or a button that computes them.
  showScores() {
    const { scores } = this;
    if (!this.facts.num_classes) return;
    const title = build("strong", "", TEXT.scores);
    title.title = TEXT.scoresTip;
    if (!scores) {
      const button = build("button", "", TEXT.scoreMaps);
      button.type = "button";
      button.addEventListener("click", counted(() => this.loadScores(this.image)));
      this.scoresLine.replaceChildren(button);
      return;
    }
    const maps = Object.keys(TEXT.shows).filter((name) => name in scores).sort((a, b) => scores[a] - scores[b]);
    const entries = [...maps.map((name, i) => `${TEXT.shows[name]} ${scores[name].toFixed(2)}${i ? "" : ` ${TEXT.best}`}`), `${TEXT.random} ${scores.random.toFixed(2)}`];
    const warning = scores.random < scores[maps[0]] ? TEXT.noneBeatsRandom : "";
    this.scoresLine.replaceChildren(title, `: ${TEXT.scoresText(entries.join(" · "))}`, build("strong", "", warning));
    this.scoresLine.title = TEXT.scoresTip;
  }

  // Attention sinks of a layer, and those that are left out of the colors.
  sinksOfLayer(layer) { return this.grid && this.inside.sinks ? this.inside.sinks[layer] : NO_PATCHES; }
  sinksLeftOut(layer) { return state.sinks === "in" ? NO_PATCHES : this.sinksOfLayer(layer); }

  showError(error) {
    if (!(error instanceof Problem)) console.error(error);
    showProblem(error instanceof Problem ? error.message : TEXT.wrong);
  }

  async loadErased() {
    if (!this.image || !this.grid) return;
    const { image, labels } = this;
    const erased = [...this.erased];
    const { name } = this.facts;
    try {
      const predict = () => api.predict(name, image, { erased, labels });
      const now = this.before && erased.length ? await busy(TEXT.predicting(name), predict) : null;
      if (image !== this.image) return;
      this.now = now;
      this.showPredictions();
      await this.loadLayers();
      await this.loadHeads(image);
    } catch (error) {
      this.showError(error);
    }
  }

  // Class maps need a head, and wait for the predictions.
  get lacksMap() { return this.show === "class" && !(this.facts.num_classes && this.before); }

  // Key, kind and fields of the array that the selected display needs.
  needed() {
    const { show } = this;
    if (show === "rollout") return ["rollout", "rollout", {}];
    if (show === "class") return [`class ${this.target}`, "gradient", { target: this.target }];
    const kind = show === "similarity" ? "similarity" : "attention";
    return [`${kind} ${this.layer}`, kind, { layer: this.layer }];
  }

  async loadInside() {
    if (!this.grid || !this.image || this.show === "erase" || this.lacksMap) return;
    await this.loadPart(this.needed());
  }

  async loadStep() {
    const needed = this.grid && this.image ? this.steps.needed() : null;
    if (needed) await this.loadPart(needed);
  }

  // One part of the intermediate results, unless it is there.
  async loadPart([key, kind, fields]) {
    const { image, inside } = this;
    const erased = [...this.erased];
    try {
      if (!inside[key]) {
        const result = await busy(TEXT.computing(this.facts.name, kind), () => api.inspect(this.facts.name, image, { parts: kind, erased, ...fields }));
        inside[key] = kind === "trace" ? Object.fromEntries(Object.entries(result.trace).map(([name, packed]) => [name, unpack(packed)])) : unpack(result[kind]);
      }
      this.draw();
    } catch (error) {
      this.showError(error);
    }
  }

  hover(patch) {
    this.hovered = patch === null ? undefined : patch;
    this.draw(true);
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
      showProblem(TEXT.savedErase);
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
    const chosen = this.show === "class" && count ? this.target : -1;
    const choose = this.vit && count ? (index) => change({ show: "class", class: index, of: count }) : null;
    const predictions = this.now || this.before;
    showPredictions(this.predictionsPlace, predictions, { before: this.now ? this.before : null, chosen, choose });
    const text = headline(predictions);
    if (this.headline.textContent !== text) this.headline.textContent = text;
  }

  showLayers() {
    if (!this.grid || !this.inside.layers) return;
    this.steps.layersPlace.classList.remove("outdated");
    this.steps.layersTitle.textContent = this.noted(TEXT.layersTitle);
    this.steps.showLayers();
  }

  // Maps and charts say that they are of the image with erased patches.
  noted(text) { return this.erased.size ? TEXT.erasedPart(text, this.erased.size, this.patches) : text; }

  // While the pointer moves, the picture of the steps is drawn only where it can be seen.
  draw(hovering = false) {
    if (!this.grid || !this.left.image) return;
    const patch = this.hovered ?? this.held;
    const { erased, show } = this;
    const erasing = show === "erase";
    if (this.drawnErased !== state.erased) this.drawPhoto();
    this.drawnErased = state.erased;
    for (const grid of [this.left, this.right]) grid.erasing = erasing;
    this.grids.classList.toggle("erasing", erasing);
    this.headsPart.hidden = !["attention", "similarity"].includes(show) || !this.inside.heads;
    this.layerGrid.place.classList.toggle("only-layers", show === "similarity"); // which has no heads
    if (!hovering || this.steps.visible) this.steps.draw();
    this.showSinks();
    if (erasing) {
      this.right.figure.hidden = true;
      const caption = erased.size ? TEXT.erasedShare(erased.size, this.patches, percent(erased.size / this.patches)) : TEXT.brush;
      this.left.draw({ patch, erased, caption });
      return;
    }
    this.right.figure.hidden = false;
    const data = this.lacksMap ? null : this.inside[this.needed()[0]];
    const look = { patch, erased, opacity: state.opacity / 100 };
    if (!data) {
      this.left.draw({ ...look, caption: this.lacksMap && !this.facts.num_classes ? TEXT.noClassMap : "" });
      this.right.draw(look);
    } else if (show === "attention") this.drawAttention(data, look);
    else if (show === "similarity") this.drawSimilarity(data, look);
    else {
      const caption = show === "rollout" ? TEXT.rolloutCaption : this.classCaption();
      this.left.draw({ ...look, values: data.values, text: numberOf, leftOut: this.sinksLeftOut(this.vit.depth - 1), caption: this.noted(caption) });
      this.right.draw({ ...look, caption: this.where(patch, data.values) });
    }
  }

  // The layer whose sinks concern the shown map; -1 for none.
  get sinkLayer() { return { attention: this.layer, rollout: this.vit.depth - 1, class: this.vit.depth - 1 }[this.show] ?? -1; }

  showSinks() {
    const sinks = this.sinkLayer < 0 ? NO_PATCHES : this.sinksOfLayer(this.sinkLayer);
    const key = [...sinks].join();
    if (this.shownSinks === `${key} ${this.sinkLayer}`) return;
    this.shownSinks = `${key} ${this.sinkLayer}`;
    this.sinksLine.replaceChildren();
    if (!sinks.size) return;
    const total = [...sinks].reduce((sum, patch) => sum + this.inside.received[this.sinkLayer][patch], 0);
    const [name, text] = TEXT.sinksNote(sinks.size, percent(total));
    this.sinksLine.append(build("strong", "", name), " ", ...[...sinks].map((patch) => this.left.chip(patch, this.name(patch))), text);
  }

  // The token that the head reads; null for a head that reads the patches.
  get queryToken() { return ["token", "token_mean"].includes(this.vit.pool) ? 0 : null; }

  // The tokens before the patches, by name: where they begin and end, and a short name.
  get prefixTokens() {
    const { cls_token: first, reg_tokens: registers, prefix_tokens: end } = this.vit;
    const all = [[TEXT.theClassToken, 0, Number(first), "cls"], [TEXT.theDistillationToken, Number(first), end - registers, "dist"]];
    all.push([TEXT.theRegisters(registers), end - registers, end, "r"]);
    return all.filter(([, from, to]) => to > from);
  }

  drawAttention(data, look) {
    const { prefix_tokens: prefix, num_heads: count } = this.vit;
    const { patch } = look;
    const tokens = data.shape[1];
    const token = patch === null ? this.queryToken : prefix + patch;
    const matrix = headMatrix(data, this.head);
    const to = attentionOf(matrix, tokens, token, prefix);
    const leftOut = this.sinksLeftOut(this.layer);
    const drawn = { ...look, text: percent, root: true, leftOut };
    const begin = token === null ? [TEXT.onAverage] : patch === null ? [TEXT.attends(TEXT.theClassToken)] : [this.chipOf(patch, TEXT.Patch), TEXT.attends("x").slice(1)];
    const others = this.prefixTokens.map(([name, from, end]) => TEXT.share(percent(to.subarray(from, end).reduce((a, b) => a + b, 0)), patch === null && name === TEXT.theClassToken ? TEXT.itself : name));
    const [best, share] = this.strongest(to.subarray(prefix));
    this.left.draw({ ...drawn, values: to.subarray(prefix), caption: [...begin, TEXT.toThese, best, this.noted(`${share}${others.join("")}`)] });
    if (token === null) this.right.draw({ ...look, caption: this.where(null) });
    else {
      const from = columnOf(matrix, tokens, token).subarray(prefix);
      const who = patch === null ? [TEXT.attendTo(TEXT.theClassToken)] : [TEXT.attendTo(""), this.chipOf(patch, TEXT.patch), TEXT.mostOfAll, ...this.strongest(from)];
      this.right.draw({ ...drawn, leftOut: NO_PATCHES, values: from, caption: [...who, this.noted("")] });
    }
    const missing = state.head >= count ? `; ${TEXT.headMissing(state.head)}` : "";
    this.headsTitle.textContent = `${TEXT.headsTitle}${missing}`;
    this.headsLead.textContent = TEXT.headsLead(this.queryToken === null ? TEXT.theMean : TEXT.theClassToken);
    this.layerGrid.mark(this.layer, this.head);
  }

  drawSimilarity(data, look) {
    const chosen = look.patch ?? Math.floor(this.grid[0] / 2) * this.columns + Math.floor(this.columns / 2);
    const values = rowOf(data.values, this.patches, chosen);
    const caption = [TEXT.similarTo, this.chipOf(chosen, TEXT.patch), this.noted(TEXT.afterLayer(this.layer))];
    this.left.draw({ ...look, values, patch: chosen, text: (value) => value.toFixed(2), caption });
    const mean = values.reduce((a, b) => a + b, 0) / values.length;
    this.right.draw({ ...look, patch: chosen, caption: TEXT.meanCosine(mean.toFixed(2)) });
    [this.headsTitle.textContent, this.headsLead.textContent] = [TEXT.layersLead, ""];
    this.layerGrid.mark(this.layer, -1);
  }

  name(patch) { return `${Math.floor(patch / this.columns)},${patch % this.columns}`; }

  // A patch in a caption: a thumbnail, with its name for screen readers.
  chipOf(patch, text) { return { patch, text: text(this.name(patch)) }; }

  strongest(values) {
    let best = 0;
    values.forEach((value, i) => { if (value > values[best]) best = i; });
    return [this.chipOf(best, String), ` (${percent(values[best])})`];
  }

  where(patch, values) { return patch === null ? this.noted(TEXT.inputOf) : [this.chipOf(patch, TEXT.Patch), `: ${values[patch].toPrecision(2)}`]; }

  classCaption() {
    const known = [...this.before, ...(this.now || []), ...(this.inside.layers?.classes || [])];
    return TEXT.classCaption(known.find(({ index }) => index === this.target)?.label ?? TEXT.classNumber(this.target));
  }
}

function described({ parameters, image_size: size, vit, num_classes: classes, accepts_labels: labels, origin }) {
  const millions = parameters >= 1e6 ? `${(parameters / 1e6).toFixed(1)}M` : `${Math.round(parameters / 1e3)}k`;
  const shape = vit ? TEXT.shape(vit.depth, vit.num_heads, ...vit.grid, vit.stride) : parameters ? TEXT.noAttention : TEXT.needsWeights;
  const kind = labels ? TEXT.zeroShot : classes ? TEXT.classes(classes) : TEXT.headless;
  return [parameters ? TEXT.parameters(millions) : TEXT.graph, shape, `${size[0]} × ${size[1]} px`, kind, origin.split(";")[0]].filter(Boolean).join(" · ");
}

function loadImage(url) {
  return new Promise((done, failed) => {
    const made = new Image();
    made.onload = () => done(made);
    made.onerror = () => failed(new Problem(TEXT.noPng));
    made.src = url;
  });
}

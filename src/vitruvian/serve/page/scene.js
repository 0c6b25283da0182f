// The picture of the step view: the image, cut into patches, with tokens and attention, in motion between the steps.

import { colorOf } from "./arrays.js";
import { TEXT } from "./text.js";

const SCENE_SIDE = 640;
const MARGIN = 8;
const LINES = 14; // attention lines to the patches with the most weight
const EASE_MS = 420;
const FLOW_MS = 1600; // how long lines flow after a step

// What is drawn at each step, from 0 to 1: gaps between patches, tokens before the patches, colors, lines, dots, focus.
const LOOKS = {
  image: { gap: 0, prefix: 0, heat: 0, lines: 0, dots: 0, dim: 0, frame: 0 },
  patches: { gap: 1, prefix: 0, heat: 0, lines: 0, dots: 0, dim: 0, frame: 1 },
  tokens: { gap: 1, prefix: 1, heat: 0, lines: 0, dots: 0.6, dim: 0.35, frame: 1 },
  attention: { gap: 0.6, prefix: 1, heat: 1, lines: 1, dots: 0, dim: 0.5, frame: 1 },
  mlp: { gap: 1, prefix: 1, heat: 0, lines: 0, dots: 1, dim: 0.5, frame: 1 },
  head: { gap: 0.4, prefix: 1, heat: 0, lines: 0, dots: 0, dim: 0.7, frame: 0 },
  probabilities: { gap: 0, prefix: 0, heat: 0, lines: 0, dots: 0, dim: 0, frame: 0 },
};

export class Scene {
  // `on` has functions: hover(patch or null), hold(patch or null).
  constructor(on) {
    this.on = on;
    this.canvas = document.createElement("canvas");
    this.canvas.className = "scene";
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-label", TEXT.scene);
    this.now = { ...LOOKS.image };
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.frames = 0; // drawn so far, to measure the rate
    this.listen();
  }

  setImage(image, rows, columns, prefix) {
    [this.image, this.rows, this.columns, this.names] = [image, rows, columns, prefix];
    this.top = prefix.length ? 52 : 0;
    const scale = (SCENE_SIDE - 2 * MARGIN) / Math.max(image.width, image.height);
    [this.wide, this.high] = [image.width * scale, image.height * scale];
    [this.canvas.width, this.canvas.height] = [Math.round(this.wide + 2 * MARGIN), Math.round(this.high + 2 * MARGIN + this.top)];
    this.show("image", {});
  }

  // Move to a step. `levels`: colors of patches from 0 to 1; `weights`: attention to all tokens; `query`: the token that
  // attends, null for the mean of all; `patch`: the framed patch; `erased` and `sinks`: sets of patches.
  show(name, { levels = null, weights = null, query = null, patch = null, erased = new Set(), sinks = new Set(), reads = null }) {
    if (!this.image) return;
    const key = `${name} ${query}`;
    if (key !== this.key) [this.key, this.begun, this.from] = [key, performance.now(), { ...this.now }];
    Object.assign(this, { name, levels, weights, query, patch, erased, sinks, reads });
    this.strongest = weights ? this.chooseLines(weights) : [];
    this.run();
  }

  chooseLines(weights) {
    const prefix = this.names.length;
    const order = [...weights.keys()].filter((token) => token >= prefix && token !== this.query && !this.sinks.has(token - prefix));
    return order.sort((a, b) => weights[b] - weights[a]).slice(0, LINES);
  }

  run() {
    if (this.pending) return;
    this.pending = requestAnimationFrame((time) => {
      this.pending = 0;
      const passed = Math.max(0, time - this.begun);
      const part = this.still.matches ? 1 : Math.min(1, passed / EASE_MS);
      const eased = part * part * (3 - 2 * part);
      for (const [look, goal] of Object.entries(LOOKS[this.name])) this.now[look] = this.from[look] + (goal - this.from[look]) * eased;
      this.paint(time);
      this.frames += 1;
      const flows = !this.still.matches && LOOKS[this.name].lines && passed < FLOW_MS;
      if (part < 1 || flows) this.run();
    });
  }

  // The image makes room for the tokens before the patches.
  get lowered() { return this.top * this.now.prefix; }

  tile(patch) {
    const gap = this.now.gap * Math.min(6, (0.22 * this.wide) / this.columns);
    const [wide, high] = [this.wide / this.columns, this.high / this.rows];
    const [column, row] = [patch % this.columns, Math.floor(patch / this.columns)];
    return [MARGIN + column * wide + gap / 2, MARGIN + this.lowered + row * high + gap / 2, wide - gap, high - gap];
  }

  box(token) {
    const prefix = this.names.length;
    if (token >= prefix) return this.tile(token - prefix);
    const side = 34;
    return [MARGIN + this.wide / 2 + (token - this.names.length / 2) * (side + 8), MARGIN, side, side];
  }

  center(token) {
    const [x, y, wide, high] = this.box(token);
    return [x + wide / 2, y + high / 2];
  }

  paint(time) {
    const pen = this.canvas.getContext("2d");
    const { now, image } = this;
    const count = this.rows * this.columns;
    const [wide, high] = [image.width / this.columns, image.height / this.rows];
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    pen.imageSmoothingEnabled = image.width > 64;
    if (now.gap < 0.02) pen.drawImage(image, MARGIN, MARGIN + this.lowered, this.wide, this.high);
    for (let patch = 0; patch < count; patch += 1) {
      const place = this.tile(patch);
      if (this.erased.has(patch)) {
        pen.fillStyle = "#808080";
        pen.fillRect(...place);
      } else if (now.gap >= 0.02) pen.drawImage(image, (patch % this.columns) * wide, Math.floor(patch / this.columns) * high, wide, high, ...place);
      if (now.dim > 0.01 && patch !== this.patch) {
        pen.fillStyle = `rgb(20 22 26 / ${0.75 * now.dim})`;
        pen.fillRect(...place);
      }
      if (now.heat > 0.01 && this.levels && !this.sinks.has(patch)) {
        pen.globalAlpha = now.heat * (0.15 + 0.6 * this.levels[patch]);
        pen.fillStyle = colorOf(this.levels[patch]);
        pen.fillRect(...place);
        pen.globalAlpha = 1;
      }
      if (now.dots > 0.01) this.dot(pen, place, now.dots);
    }
    if (now.lines > 0.01) this.paintLines(pen, time);
    if (now.prefix > 0.01) this.paintPrefix(pen);
    if (this.patch !== null && now.frame > 0.01) this.paintFrame(pen, this.tile(this.patch), now.frame);
  }

  // Each token by itself: a small bar in every tile.
  dot(pen, [x, y, wide, high], strength) {
    pen.fillStyle = `rgb(255 255 255 / ${0.75 * strength})`;
    pen.fillRect(x + 0.2 * wide, y + 0.42 * high, 0.6 * wide, 0.16 * high);
  }

  paintPrefix(pen) {
    pen.globalAlpha = this.now.prefix;
    const style = getComputedStyle(this.canvas);
    this.names.forEach((name, token) => {
      const [x, y, wide, high] = this.box(token);
      const active = token === this.query || token === this.reads;
      pen.fillStyle = style.getPropertyValue(active ? "--c0" : "--card");
      pen.strokeStyle = style.getPropertyValue("--c0");
      pen.lineWidth = 2;
      pen.beginPath();
      pen.roundRect(x, y, wide, high, 6);
      pen.fill();
      pen.stroke();
      pen.fillStyle = style.getPropertyValue(active ? "--back" : "--text");
      pen.font = "600 13px system-ui, sans-serif";
      [pen.textAlign, pen.textBaseline] = ["center", "middle"];
      pen.fillText(name, x + wide / 2, y + high / 2);
    });
    pen.globalAlpha = 1;
  }

  paintLines(pen, time) {
    const most = this.strongest.length ? this.weights[this.strongest[0]] : 1;
    const grown = Math.min(1, Math.max(0.02, (time - this.begun) / EASE_MS));
    const from = this.query === null ? null : this.center(this.query);
    if (!from) return;
    for (const token of this.strongest) {
      const share = this.weights[token] / most;
      const [x, y] = this.center(token);
      const [middleX, middleY] = [(from[0] + x) / 2 + (from[1] - y) * 0.18, (from[1] + y) / 2 + (x - from[0]) * 0.18];
      pen.beginPath();
      pen.moveTo(x, y);
      pen.quadraticCurveTo(middleX, middleY, ...from);
      pen.lineCap = "round";
      [pen.lineWidth, pen.strokeStyle] = [2.5 + 3 * share, `rgb(0 0 0 / ${0.5 * this.now.lines})`];
      pen.setLineDash(this.still.matches ? [] : [1400 * grown, 1400]);
      pen.lineDashOffset = 0;
      pen.stroke();
      [pen.lineWidth, pen.strokeStyle] = [1 + 2.5 * share, `rgb(255 208 112 / ${(0.35 + 0.65 * share) * this.now.lines})`];
      pen.stroke();
      if (!this.still.matches && time - this.begun < FLOW_MS) {
        pen.setLineDash([3, 22]);
        pen.lineDashOffset = -(time - this.begun) / 9;
        [pen.lineWidth, pen.strokeStyle] = [2.5 + 2.5 * share, "#fff"];
        pen.stroke();
      }
    }
    pen.setLineDash([]);
  }

  paintFrame(pen, [x, y, wide, high], strength) {
    pen.globalAlpha = strength;
    [pen.lineWidth, pen.strokeStyle] = [6, "#000"];
    pen.strokeRect(x, y, wide, high);
    [pen.lineWidth, pen.strokeStyle] = [3, "#ffb000"];
    pen.strokeRect(x, y, wide, high);
    pen.globalAlpha = 1;
  }

  at(event) {
    const place = this.canvas.getBoundingClientRect();
    const x = ((event.clientX - place.left) / place.width) * this.canvas.width - MARGIN;
    const y = ((event.clientY - place.top) / place.height) * this.canvas.height - MARGIN - this.lowered;
    const [column, row] = [Math.floor((x / this.wide) * this.columns), Math.floor((y / this.high) * this.rows)];
    return row >= 0 && row < this.rows && column >= 0 && column < this.columns ? row * this.columns + column : null;
  }

  listen() {
    const { canvas, on } = this;
    let last = null;
    canvas.addEventListener("pointermove", (event) => {
      const patch = this.at(event);
      if (patch !== last) on.hover(patch);
      last = patch;
    });
    canvas.addEventListener("pointerleave", () => { last = null; on.hover(null); });
    canvas.addEventListener("click", (event) => on.hold(this.at(event)));
    canvas.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
      const patch = this.patch ?? Math.floor((this.rows / 2) * this.columns + this.columns / 2);
      const next = patch + (moves[event.key] ?? 0);
      if (event.key in moves) {
        const wraps = Math.abs(moves[event.key]) === 1 && Math.floor(next / this.columns) !== Math.floor(patch / this.columns);
        if (!wraps && next >= 0 && next < this.rows * this.columns) on.hover(next);
      } else if (event.key === "Enter") on.hold(patch);
      else if (event.key === "Escape") on.hold(null);
      else return;
      event.preventDefault();
    });
  }
}

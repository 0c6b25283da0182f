// One image with its patches: a map laid over it, a patch to hover, hold or erase, by pointer and by keyboard.

import { drawColorBar, heat, levelsOf, scaleOf } from "./arrays.js";
import { TEXT } from "./text.js";

const CANVAS_SIDE = 560;

// The mean color of an image, by which the service replaces erased patches.
function meanColor(pixels) {
  const sums = [0, 0, 0];
  for (let i = 0; i < pixels.length; i += 1) if (i % 4 < 3) sums[i % 4] += pixels[i];
  return `rgb(${sums.map((sum) => Math.round((4 * sum) / pixels.length)).join(" ")})`;
}

// The patch of a grid (rows, columns) where the center of a patch of another grid lies.
export function patchAt(patch, [rows, columns], [toRows, toColumns]) {
  const [down, across] = [(Math.floor(patch / columns) + 0.5) / rows, ((patch % columns) + 0.5) / columns];
  return Math.floor(down * toRows) * toColumns + Math.floor(across * toColumns);
}

export function drawPatch(canvas, image, patch, rows, columns) {
  const pen = canvas.getContext("2d");
  const [wide, high] = [image.width / columns, image.height / rows];
  pen.imageSmoothingEnabled = false;
  pen.drawImage(image, (patch % columns) * wide, Math.floor(patch / columns) * high, wide, high, 0, 0, canvas.width, canvas.height);
}

export class PatchGrid {
  // `on` has functions: hover(patch or null), hold(patch or null), paint(patch, first).
  constructor(label, on) {
    this.figure = document.createElement("figure");
    this.canvas = document.createElement("canvas");
    this.caption = document.createElement("figcaption");
    this.caption.setAttribute("aria-live", "polite");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-label", TEXT.gridKeys(label));
    this.bar = document.createElement("p");
    this.bar.className = "bar soft";
    const [low, colors, high] = ["span", "canvas", "span"].map((tag) => document.createElement(tag));
    [colors.width, colors.height] = [160, 10];
    colors.setAttribute("role", "img");
    colors.setAttribute("aria-label", TEXT.scale);
    drawColorBar(colors);
    this.bar.append(low, colors, high);
    this.figure.append(this.canvas, this.bar, this.caption);
    this.on = on;
    this.erasing = false;
    this.listen();
  }

  setImage(image, rows, columns) {
    [this.image, this.rows, this.columns] = [image, rows, columns];
    const scale = CANVAS_SIDE / Math.max(image.width, image.height);
    this.caption.textContent = ""; // thumbnails of the image before
    this.canvas.width = Math.round(image.width * scale);
    this.canvas.height = Math.round(image.height * scale);
    this.gray = document.createElement("canvas");
    [this.gray.width, this.gray.height] = [image.width, image.height];
    const pen = this.gray.getContext("2d", { willReadFrequently: true });
    pen.drawImage(image, 0, 0);
    this.mean = meanColor(pen.getImageData(0, 0, image.width, image.height).data);
    pen.filter = "grayscale(1)";
    pen.drawImage(image, 0, 0);
  }

  // values: a number for each patch, or null for the image alone. Patches of `leftOut` have no part in the colors. `text`
  // formats a number of the color bar; `root` draws square roots, for shares of which a few are much larger than others.
  draw({ values = null, patch = null, erased = new Set(), caption = "", leftOut = new Set(), opacity = 0.7, text = String, root = false }) {
    if (!this.image) return;
    const pen = this.canvas.getContext("2d");
    const { width, height } = this.canvas;
    pen.imageSmoothingEnabled = this.image.width > 64;
    pen.globalAlpha = 1;
    pen.drawImage(values ? this.gray : this.image, 0, 0, width, height);
    pen.fillStyle = values ? "#808080" : this.mean;
    for (const each of erased) pen.fillRect(...this.box(each));
    this.bar.hidden = !values;
    if (values) this.drawHeat(pen, { values, leftOut, opacity, text, root });
    for (const each of erased) this.strike(pen, each);
    if (patch !== null) this.frame(pen, patch);
    this.patch = patch;
    this.say(caption);
  }

  drawHeat(pen, { values, leftOut, opacity, text, root }) {
    const scale = scaleOf(values, leftOut);
    const levels = levelsOf(values, scale);
    pen.imageSmoothingEnabled = false;
    pen.globalAlpha = opacity;
    pen.drawImage(heat(root ? levels.map(Math.sqrt) : levels, this.rows, this.columns), 0, 0, pen.canvas.width, pen.canvas.height);
    pen.globalAlpha = 1;
    for (const each of leftOut) this.hatch(pen, each);
    const [low, , high] = this.bar.children;
    low.textContent = `${scale.cutLow ? "≤ " : ""}${text(scale.low)}`;
    high.textContent = `${scale.cutHigh ? "≥ " : ""}${text(scale.high)}`;
  }

  // A caption is a text, or a list of texts and patches { patch, text }, which become thumbnails.
  say(caption) {
    const pieces = Array.isArray(caption) ? caption : [caption];
    const key = pieces.map((piece) => piece.text ?? piece).join("");
    if (this.caption.textContent === key) return;
    this.caption.replaceChildren(...pieces.map((piece) => (piece.text === undefined ? piece : this.chip(piece.patch, piece.text))));
  }

  // A thumbnail of a patch with its name, which only screen readers read.
  chip(patch, text) {
    const [made, canvas, name] = ["span", "canvas", "span"].map((tag) => document.createElement(tag));
    [made.className, name.className, name.textContent, made.title] = ["chip", "unseen", text, text];
    [canvas.width, canvas.height] = [32, 32];
    if (this.image) drawPatch(canvas, this.image, patch, this.rows, this.columns);
    made.append(canvas, name);
    return made;
  }

  box(patch) {
    const [high, wide] = [this.canvas.height / this.rows, this.canvas.width / this.columns];
    return [(patch % this.columns) * wide, Math.floor(patch / this.columns) * high, wide, high];
  }

  frame(pen, patch) {
    const [x, y, wide, high] = this.box(patch);
    [pen.lineWidth, pen.strokeStyle] = [5, "#000"];
    pen.strokeRect(x + 1, y + 1, wide - 2, high - 2);
    [pen.lineWidth, pen.strokeStyle] = [2.5, "#fff"];
    pen.strokeRect(x + 1, y + 1, wide - 2, high - 2);
  }

  // Marks an attention sink that has no part in the colors.
  hatch(pen, patch) {
    const [x, y, wide, high] = this.box(patch);
    pen.drawImage(this.gray, (x / pen.canvas.width) * this.gray.width, (y / pen.canvas.height) * this.gray.height,
      (wide / pen.canvas.width) * this.gray.width, (high / pen.canvas.height) * this.gray.height, x, y, wide, high);
    pen.beginPath();
    pen.arc(x + wide / 2, y + high / 2, Math.min(wide, high) / 4, 0, 2 * Math.PI);
    [pen.lineWidth, pen.strokeStyle] = [5, "#000"];
    pen.stroke();
    [pen.lineWidth, pen.strokeStyle] = [2.5, "#fff"];
    pen.stroke();
  }

  // Marks an erased patch by a line across it.
  strike(pen, patch) {
    const [x, y, wide, high] = this.box(patch);
    pen.save();
    pen.beginPath();
    pen.rect(x, y, wide, high);
    pen.clip();
    [pen.strokeStyle, pen.lineWidth] = ["rgb(255 255 255 / 0.7)", 2];
    pen.beginPath();
    pen.moveTo(x, y + high);
    pen.lineTo(x + wide, y);
    pen.stroke();
    pen.restore();
  }

  at(event) {
    const place = this.canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - place.left) / place.width) * this.columns);
    const row = Math.floor(((event.clientY - place.top) / place.height) * this.rows);
    const inside = row >= 0 && row < this.rows && column >= 0 && column < this.columns;
    return inside ? row * this.columns + column : null;
  }

  listen() {
    const { canvas, on } = this;
    canvas.addEventListener("pointerdown", (event) => {
      if (!this.erasing) return;
      canvas.setPointerCapture(event.pointerId);
      const patch = this.at(event);
      if (patch !== null) on.paint(patch, true);
    });
    canvas.addEventListener("pointermove", (event) => {
      const patch = this.at(event);
      if (this.erasing && event.buttons) {
        if (patch !== null) on.paint(patch, false);
      } else if (patch !== this.patch) on.hover(patch);
    });
    canvas.addEventListener("pointerleave", () => on.hover(null));
    canvas.addEventListener("click", (event) => { if (!this.erasing) on.hold(this.at(event)); });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const middle = Math.floor(this.rows / 2) * this.columns + Math.floor(this.columns / 2);
    const patch = this.patch ?? null;
    if (event.key in moves) {
      const [down, right] = moves[event.key];
      const row = Math.floor((patch ?? middle) / this.columns) + (patch === null ? 0 : down);
      const column = ((patch ?? middle) % this.columns) + (patch === null ? 0 : right);
      if (row >= 0 && row < this.rows && column >= 0 && column < this.columns) this.on.hover(row * this.columns + column);
    } else if (event.key === "Enter" && patch !== null) this.on.hold(patch);
    else if (event.key === "Escape") this.on.hold(null);
    else if (event.key === " " && patch !== null) this.on.paint(patch, true);
    else return;
    event.preventDefault();
  }
}

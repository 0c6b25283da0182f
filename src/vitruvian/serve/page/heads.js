// All layers and heads as small maps, a column for each layer; choosing one shows it large.

import { heat, levelsOf, scaleOf } from "./arrays.js";
import { TEXT } from "./text.js";

export class LayerGrid {
  // `choose` is called with a layer and a head, -1 for the mean of all heads.
  constructor(choose) {
    this.choose = choose;
    this.place = document.createElement("div");
    this.place.className = "heads";
    this.place.setAttribute("role", "radiogroup");
    this.place.addEventListener("keydown", (event) => this.key(event));
  }

  // maps: numbers (layers x heads x patches); `leftOut` are patches without a part in the colors, of each layer.
  setMaps({ shape: [layers, heads, patches], values }, rows, columns, leftOut) {
    [this.layers, this.heads] = [layers, heads];
    this.place.style.setProperty("--columns", layers);
    const mapOf = (layer, head) => {
      if (head >= 0) return values.subarray((layer * heads + head) * patches, (layer * heads + head + 1) * patches);
      const mean = new Float32Array(patches);
      for (let each = 0; each < heads; each += 1) mapOf(layer, each).forEach((value, i) => { mean[i] += value / heads; });
      return mean;
    };
    const cells = [label(TEXT.layerColumns), ...Array.from({ length: layers }, (_, layer) => label(String(layer)))];
    this.buttons = [];
    for (let head = -1; head < heads; head += 1) {
      cells.push(label(TEXT.headColumn(head)));
      for (let layer = 0; layer < layers; layer += 1) {
        const map = mapOf(layer, head);
        const levels = levelsOf(map, scaleOf(map, leftOut[layer])).map((level, i) => (leftOut[layer].has(i) ? 0 : Math.sqrt(level)));
        this.buttons.push(this.button(layer, head, heat(levels, rows, columns)));
      }
      cells.push(...this.buttons.slice(-layers));
    }
    this.place.replaceChildren(...cells);
  }

  button(layer, head, canvas) {
    const made = document.createElement("button");
    made.type = "button";
    made.setAttribute("role", "radio");
    made.setAttribute("aria-checked", "false");
    made.setAttribute("aria-label", TEXT.headName(layer, head));
    made.title = TEXT.headName(layer, head);
    [made.dataset.layer, made.dataset.head] = [layer, head];
    made.append(canvas);
    made.addEventListener("click", () => this.choose(layer, head));
    return made;
  }

  mark(layer, head) {
    this.buttons?.forEach((button, i) => {
      const chosen = i === (head + 1) * this.layers + layer;
      button.setAttribute("aria-checked", String(chosen));
      button.tabIndex = chosen ? 0 : -1;
    });
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.layers, ArrowUp: -this.layers }[event.key];
    const now = this.buttons?.indexOf(event.target);
    const next = step && this.buttons[now + step];
    if (!next || next.offsetParent === null) return;
    event.preventDefault();
    this.choose(Number(next.dataset.layer), Number(next.dataset.head));
    next.focus();
  }
}

function label(text) {
  const made = document.createElement("span");
  made.textContent = text;
  made.setAttribute("aria-hidden", "true");
  return made;
}

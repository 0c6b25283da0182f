// All heads of a layer as small maps; choosing one shows it large.

import { attentionOf, headMatrix, heat, softened, stretched } from "./arrays.js";

const CELL = 6;

// `token` is the one that attends, null for the mean of all patches; `prefix` the number of tokens before the patches.
export function showHeads(place, attention, { token, prefix, rows, columns, chosen, choose }) {
  const [heads, tokens] = attention.shape;
  if (place.childElementCount !== heads) {
    place.replaceChildren(...Array.from({ length: heads }, (_, head) => button(head, choose)));
  }
  for (let head = 0; head < heads; head += 1) {
    const each = place.children[head];
    each.setAttribute("aria-pressed", String(head === chosen));
    const values = attentionOf(headMatrix(attention, head), tokens, token, prefix).subarray(prefix);
    const canvas = each.firstElementChild;
    if (canvas.width !== columns * CELL) [canvas.width, canvas.height] = [columns * CELL, rows * CELL];
    const pen = canvas.getContext("2d");
    pen.imageSmoothingEnabled = false;
    pen.drawImage(heat(stretched(softened(values)), rows, columns), 0, 0, canvas.width, canvas.height);
  }
}

function button(head, choose) {
  const made = document.createElement("button");
  const [canvas, name] = [document.createElement("canvas"), document.createElement("span")];
  name.textContent = `head ${head}`;
  made.type = "button";
  made.append(canvas, name);
  made.addEventListener("click", () => choose(head));
  return made;
}

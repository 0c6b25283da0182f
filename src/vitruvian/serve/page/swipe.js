// Two models as a swipe over one picture: the map of the first left of the boundary, that of the second right of it.

import { percent } from "./predictions.js";
import { TEXT } from "./text.js";

export function listenForSwipe(panelsNow) {
  document.getElementById("swipe-at").addEventListener("input", () => showSwipe(panelsNow()));
}

export function showSwipe(panels) {
  const figure = document.getElementById("swipe");
  const [canvas, slider, caption] = figure.children;
  const both = panels.filter((panel) => panel.grid && panel.left.image);
  figure.hidden = both.length < 2;
  if (figure.hidden) return;
  const [first, second] = both.map((panel) => panel.left.canvas);
  [canvas.width, canvas.height] = [first.width, first.height];
  const pen = canvas.getContext("2d");
  const at = (canvas.width * slider.value) / 100;
  pen.drawImage(first, 0, 0);
  pen.save();
  pen.beginPath();
  pen.rect(at, 0, canvas.width, canvas.height);
  pen.clip();
  pen.drawImage(second, 0, 0, canvas.width, canvas.height);
  pen.restore();
  [pen.lineWidth, pen.strokeStyle] = [6, "#000"];
  for (const style of ["#000", "#fff"]) {
    [pen.lineWidth, pen.strokeStyle] = [style === "#000" ? 6 : 3, style];
    pen.beginPath();
    pen.moveTo(at, 0);
    pen.lineTo(at, canvas.height);
    pen.stroke();
  }
  const says = ({ facts, now, before }) => [facts.name, (now || before)?.[0]].map((each) => each?.label ?? each ?? "").filter(Boolean).join(": ");
  caption.textContent = `${says(both[0])} | ${says(both[1])}`;
  canvas.setAttribute("aria-label", TEXT.swipe);
  slider.setAttribute("aria-valuetext", percent(slider.value / 100));
}

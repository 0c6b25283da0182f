// A canvas for a digit, brought to the form of the training images: 8 x 8 pixels, filled by the ink, 16 levels.

import { afterPause } from "./api.js";
import { TEXT } from "./text.js";

const SIDE = 8;
const FINE = 32;
const PAUSE_MS = 120;

export function listenForDrawing(use) {
  const paper = document.getElementById("paper");
  const pen = paper.getContext("2d", { willReadFrequently: true });
  let last = null;
  const finish = afterPause(PAUSE_MS, async () => {
    const text = levels(paper);
    if (text) await use(text);
  });

  function wipe() {
    pen.fillStyle = "#000";
    pen.fillRect(0, 0, paper.width, paper.height);
  }

  function place(event) {
    const box = paper.getBoundingClientRect();
    return [((event.clientX - box.left) / box.width) * paper.width, ((event.clientY - box.top) / box.height) * paper.height];
  }

  function stroke(event) {
    const next = place(event);
    [pen.strokeStyle, pen.lineWidth, pen.lineCap, pen.lineJoin] = ["#fff", paper.width / 11, "round", "round"];
    pen.beginPath();
    pen.moveTo(...(last || next));
    pen.lineTo(...next);
    pen.stroke();
    last = next;
    finish();
  }

  paper.addEventListener("pointerdown", (event) => { paper.setPointerCapture(event.pointerId); last = null; stroke(event); });
  paper.addEventListener("pointermove", (event) => { if (event.buttons) stroke(event); });
  paper.addEventListener("pointerup", () => { last = null; });
  document.getElementById("wipe").addEventListener("click", wipe);
  wipe();
}

// The ink's box stretched over 32 x 32 pixels, its 4 x 4 blocks averaged: 64 hexadecimal digits, or "" without ink.
function levels(paper) {
  const { data, width, height } = paper.getContext("2d").getImageData(0, 0, paper.width, paper.height);
  let [left, top, right, bottom] = [width, height, -1, -1];
  for (let y = 0; y < height; y += 1) {
    for (let x = 0; x < width; x += 1) {
      if (data[4 * (y * width + x)] > 64) {
        [left, right] = [Math.min(left, x), Math.max(right, x)];
        [top, bottom] = [Math.min(top, y), Math.max(bottom, y)];
      }
    }
  }
  if (right < 0) return "";
  const longest = Math.max(right - left, bottom - top) + 1;
  const [wide, high] = [((right - left + 1) / longest) * FINE, ((bottom - top + 1) / longest) * FINE];
  const fine = document.createElement("canvas");
  [fine.width, fine.height] = [FINE, FINE];
  const pen = fine.getContext("2d", { willReadFrequently: true });
  pen.fillRect(0, 0, FINE, FINE);
  pen.imageSmoothingQuality = "high";
  pen.drawImage(paper, left, top, right - left + 1, bottom - top + 1, (FINE - wide) / 2, (FINE - high) / 2, wide, high);
  const pixels = pen.getImageData(0, 0, FINE, FINE).data;
  const sums = new Float32Array(SIDE * SIDE);
  const block = FINE / SIDE;
  for (let i = 0; i < FINE * FINE; i += 1) {
    const [x, y] = [i % FINE, Math.floor(i / FINE)];
    sums[Math.floor(y / block) * SIDE + Math.floor(x / block)] += pixels[4 * i] / 255;
  }
  return [...sums].map((sum) => Math.min(15, Math.round((sum / block ** 2) * 16)).toString(16)).join("");
}

// An image of 64 hexadecimal digits.
export async function digitImage(text) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [SIDE, SIDE];
  const pen = canvas.getContext("2d");
  const pixels = pen.createImageData(SIDE, SIDE);
  [...text].slice(0, SIDE * SIDE).forEach((letter, i) => {
    const level = 17 * (Number.parseInt(letter, 16) || 0);
    pixels.data.set([level, level, level, 255], 4 * i);
  });
  pen.putImageData(pixels, 0, 0);
  return { blob: await new Promise((done) => canvas.toBlob(done, "image/png")), name: TEXT.digitName, digit: text };
}

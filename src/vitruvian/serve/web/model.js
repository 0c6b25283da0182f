// The model of this folder: from an image file to its predictions, without a server.

import { Problem } from "./api.js";
import { TEXT } from "./text.js";

const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
const waiting = new Map();
let count = 0;

worker.onmessage = ({ data: { id, result, error } }) => {
  const { done, failed } = waiting.get(id);
  waiting.delete(id);
  if (error === undefined) done(result);
  else failed(new Problem(TEXT.webFailed(error)));
};
worker.onerror = (event) => {
  for (const { failed } of waiting.values()) failed(new Problem(TEXT.webFailed(event.message || TEXT.webNoWorker)));
  waiting.clear();
};

const ask = (task, values = {}, moved = []) => new Promise((done, failed) => {
  count += 1;
  waiting.set(count, { done, failed });
  worker.postMessage({ id: count, task, ...values }, moved);
});

// What model.json says: labels, preprocessing, grid of patches.
export const facts = ask("facts");

// Upright RGBA levels of an image file, transparent parts white; no conversion of colors, as in Python.
async function decode({ blob, name }) {
  try {
    const bitmap = await createImageBitmap(blob, { colorSpaceConversion: "none" });
    const canvas = document.createElement("canvas");
    const { width, height } = bitmap;
    [canvas.width, canvas.height] = [width, height];
    const pen = canvas.getContext("2d", { willReadFrequently: true });
    pen.fillStyle = "#fff";
    pen.fillRect(0, 0, width, height);
    pen.drawImage(bitmap, 0, 0);
    return { data: pen.getImageData(0, 0, width, height).data, width, height };
  } catch {
    throw new Problem(TEXT.webUnreadable(name));
  }
}

// The model's input of an image { blob, name }.
export async function prepare(image) {
  const decoded = await decode(image);
  return { ...await ask("prepare", { image: decoded }, [decoded.data.buffer]), size: [decoded.height, decoded.width] };
}

function probabilitiesOf(logits, { temperature, score_function: score }) {
  const scaled = Array.from(logits, (logit) => logit / temperature);
  if (score === "sigmoid") return scaled.map((logit) => 1 / (1 + Math.exp(-logit)));
  const most = Math.max(...scaled);
  const powers = scaled.map((logit) => Math.exp(logit - most));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((power) => power / sum);
}

function isRejected(logits, probabilities, { threshold, threshold_on: on }) {
  const most = Math.max(...logits);
  const energy = () => most + Math.log(logits.reduce((sum, logit) => sum + Math.exp(logit - most), 0));
  return (on === "energy" ? energy() : Math.max(...probabilities)) < threshold;
}

// The probabilities of all classes, and the `top` predictions for an input, with these patches erased.
export async function predict(input, { erased = [], top = 5 } = {}) {
  const about = await facts;
  const begun = performance.now();
  const logits = await ask("logits", { input, erased });
  if (!logits.every(Number.isFinite)) throw new Problem(TEXT.webNotFinite);
  const probabilities = probabilitiesOf(logits, about);
  const order = [...probabilities.keys()].sort((a, b) => probabilities[b] - probabilities[a] || a - b);
  const several = about.target?.kind === "multi"; // labels, of which each is predicted from its threshold on
  const reaches = (index) => probabilities[index] >= (about.target.thresholds?.[index] ?? 0.5);
  const predictions = order.filter((index, rank) => rank < top || (several && reaches(index))).map((index) => ({
    index, label: about.labels?.[index] ?? String(index), probability: probabilities[index], ...(several ? { predicted: reaches(index) } : {}),
  }));
  if (isRejected(logits, probabilities, about)) predictions[0].rejected = true;
  return { probabilities, predictions, milliseconds: performance.now() - begun };
}

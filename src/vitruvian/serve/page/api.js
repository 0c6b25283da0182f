// Requests to the service, or the results recorded in a saved page, with a message while a request takes long.

import { TEXT } from "./text.js";

const SAY_AFTER_MS = 100;
const running = new Map();

export class Problem extends Error {}

export function saved() {
  const recorded = document.getElementById("saved");
  return recorded ? JSON.parse(recorded.textContent) : null;
}

// Runs a task and counts it in the page's data-pending attribute, which is 0 while nothing is under way.
export async function pending(task) {
  const { dataset } = document.documentElement;
  dataset.pending = Number(dataset.pending || 0) + 1;
  try {
    return await task();
  } finally {
    dataset.pending -= 1;
  }
}

// The task as a function that counts as pending while it runs.
export const counted = (task) => (...values) => pending(() => task(...values));

// The task as a function that waits for a pause without another call, pending from the first one on.
export function afterPause(milliseconds, task) {
  let newest = 0;
  return counted(async (...values) => {
    newest += 1;
    const call = newest;
    await new Promise((done) => { setTimeout(done, milliseconds); });
    if (call === newest) await task(...values);
  });
}

// Runs a task and shows its text while it takes longer than a moment.
export async function busy(text, task) {
  const token = Symbol(text);
  const timer = setTimeout(() => { running.set(token, text); showBusy(); }, SAY_AFTER_MS);
  try {
    return await pending(task);
  } finally {
    clearTimeout(timer);
    running.delete(token);
    showBusy();
  }
}

function showBusy() {
  document.getElementById("busy").textContent = [...new Set(running.values())].join(" · ");
}

export function showProblem(text) {
  const place = document.getElementById("problem");
  place.textContent = text;
  place.hidden = !text;
}

async function ask(path, options = {}) {
  const key = sessionStorage.getItem("key");
  const headers = key ? { "X-API-Key": key } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(TEXT.unreachable);
  }
  const content = await response.json().catch(() => ({}));
  if (response.status === 401) document.getElementById("key").hidden = false;
  if (!response.ok) throw new Problem(content.detail || TEXT.status(response.status));
  return content;
}

function form(image, fields) {
  const body = new FormData();
  body.append("image", image.blob, image.name);
  for (const [name, value] of Object.entries(fields)) if (value !== "" && value !== null) body.append(name, value);
  return { method: "POST", body };
}

const live = {
  models: async () => (await ask("models")).models,
  async predict(model, image, { erased = [], labels = "", signal } = {}) {
    const begun = performance.now();
    const options = { ...form(image, { model, top: 5, erased: erased.join(","), labels }), signal };
    const [{ predictions, rejected }] = (await ask("predict", options)).results;
    predictions.milliseconds = performance.now() - begun;
    if (rejected) predictions[0].rejected = true;
    return predictions;
  },
  // The best prediction of each of several images, or null.
  async labels(model, images, labels) {
    const { body, method } = form(images[0], { model, top: 1, labels });
    for (const image of images.slice(1)) body.append("image", image.blob, image.name);
    return (await ask("predict", { method, body })).results.map(({ predictions }) => predictions?.[0] ?? null);
  },
  inspect: (model, image, { erased = [], ...fields }) => ask("inspect", form(image, { model, erased: erased.join(","), ...fields })),
};

function recorded(content) {
  const panelOf = (model) => content.panels.find((panel) => panel.facts.name === model);
  return {
    models: async () => content.panels.map((panel) => panel.facts),
    async predict(model, image, { erased = [] } = {}) {
      const panel = panelOf(model);
      return erased.length ? panel.predictionsErased : panel.predictions;
    },
    // Parts that depend on a layer or on a class are recorded once for each.
    async inspect(model, image, { parts, layer, target, token }) {
      const { inside } = panelOf(model);
      const result = { ...inside };
      for (const part of parts.split(",")) {
        const choice = { attention: layer, similarity: layer, gradient: target, trace: token }[part];
        result[part] = ["attention", "similarity", "gradient", "trace"].includes(part) ? inside[part][choice] : inside[part];
        if (!result[part]) throw new Problem(part === "trace" ? TEXT.savedTrace : TEXT.savedClass);
      }
      return result;
    },
  };
}

const record = saved();
export const api = record ? recorded(record) : live;

// Runs one call at a time; of the calls that wait meanwhile, only the newest runs. Dropped calls resolve to undefined.
export function latest(task) {
  let waiting = null;
  let active = false;
  return async function run(...values) {
    waiting = values;
    if (active) return;
    active = true;
    try {
      while (waiting) {
        const next = waiting;
        waiting = null;
        await pending(() => task(...next));
      }
    } finally {
      active = false;
    }
  };
}

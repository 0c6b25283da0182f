// Requests to the service, or the results recorded in a saved page, with a message while a request takes long.

const SAY_AFTER_MS = 100;
const running = new Map();

export class Problem extends Error {}

export function saved() {
  const recorded = document.getElementById("saved");
  return recorded ? JSON.parse(recorded.textContent) : null;
}

// Runs a task and shows its text while it takes longer than a moment.
export async function busy(text, task) {
  const token = Symbol(text);
  const timer = setTimeout(() => { running.set(token, text); showBusy(); }, SAY_AFTER_MS);
  try {
    return await task();
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
    throw new Problem("The service cannot be reached. Is `vit serve` still running?");
  }
  const content = await response.json().catch(() => ({}));
  if (response.status === 401) document.getElementById("key").hidden = false;
  if (!response.ok) throw new Problem(content.detail || `The service returned status ${response.status}.`);
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
    const options = { ...form(image, { model, top: 5, erased: erased.join(","), labels }), signal };
    const [{ predictions, rejected }] = (await ask("predict", options)).results;
    if (rejected) predictions[0].rejected = true;
    return predictions;
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
    async inspect(model, image, { parts, layer, target }) {
      const { inside } = panelOf(model);
      const result = { grid: inside.grid };
      for (const part of parts.split(",")) {
        const choice = { attention: layer, similarity: layer, gradient: target }[part];
        result[part] = choice === undefined ? inside[part] : inside[part][choice];
        if (!result[part]) throw new Problem("This is a saved page: the map of this class needs the running service.");
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
        await task(...next);
      }
    } finally {
      active = false;
    }
  };
}

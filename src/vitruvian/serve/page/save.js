// Saves the page with its results as one HTML file that works offline.

import { api, busy } from "./api.js";
import { stateText } from "./state.js";
import { TEXT } from "./text.js";

const MODULES = ["text", "state", "api", "arrays", "predictions", "input", "draw", "grid", "heads", "guide", "scene", "steps", "panel", "swipe", "save", "main"];
const POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:";

// All results that a panel can show: attention and similarity of all layers, and the maps of all listed classes.
async function gathered(panel) {
  const { facts, image, before, now } = panel;
  const record = { facts, photo: panel.photoUrl, predictions: before, predictionsErased: now, inside: null };
  if (!facts.vit) return record;
  const erased = [...panel.erased];
  const request = (parts, fields = {}) => api.inspect(facts.name, image, { parts, erased, ...fields });
  const inside = await request(facts.num_classes ? "layers,rollout,heads" : "rollout,heads");
  Object.assign(inside, { scores: panel.scores, trace: {}, gradient: {} }, await request("input", { erased: [] }));
  for (const token of panel.steps.tokens) inside.trace[token] = (await request("trace", { token })).trace;
  for (const target of facts.num_classes ? new Set([panel.target, ...[...before, ...(now || [])].map(({ index }) => index)]) : []) {
    inside.gradient[target] = (await request("gradient", { target })).gradient;
  }
  [inside.attention, inside.similarity] = [[], []];
  for (let layer = 0; layer < facts.vit.depth; layer += 1) {
    const result = await request("attention,similarity", { layer });
    inside.attention.push(result.attention);
    inside.similarity.push(result.similarity);
  }
  record.inside = inside;
  return record;
}

const text = async (path) => (await fetch(path)).text();

// The modules one after another: their names are all different, so that imports can be left out.
async function script() {
  const sources = await Promise.all(MODULES.map((name) => text(`page/${name}.js`)));
  return sources.map((source) => source.replace(/^import .*\n/gm, "").replace(/^export /gm, "")).join("\n");
}

export async function savedPage(panels) {
  const records = [];
  for (const panel of panels) {
    records.push(await busy(TEXT.saving(panel.facts.name), () => gathered(panel)));
  }
  const content = { name: panels[0].image.name, state: stateText(), saved: new Date().toISOString().slice(0, 10), panels: records };
  const [html, code, ...styles] = await Promise.all([text("./"), script(), text("page/base.css"), text("page/style.css")]);
  const data = JSON.stringify(content).replaceAll("<", "\\u003c");
  const inline = `<meta http-equiv="Content-Security-Policy" content="${POLICY}">\n<style>${styles.join("")}</style>`;
  return html
    .replace(/<link rel="icon".*>\n/, "")
    .replace(/(<link rel="stylesheet".*>\n)+/, () => `${inline}\n`)
    .replace(/<script type="module".*<\/script>\n/, "")
    .replace("</body>", () => `<script id="saved" type="application/json">${data}</script>\n<script type="module">${code.replaceAll("</script", "<\\/script")}</script>\n</body>`);
}

export function download(html, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([html], { type: "text/html" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

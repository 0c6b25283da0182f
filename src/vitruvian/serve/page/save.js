// Saves the page with its results as one HTML file that works offline.

import { api, busy } from "./api.js";
import { state, stateText } from "./state.js";

const MODULES = ["state", "api", "arrays", "input", "draw", "predictions", "grid", "heads", "panel", "save", "main"];
const POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:";

// All results that a panel can show, with attention and similarity of all layers.
async function gathered(panel, erased) {
  const { facts, image, before } = panel;
  const record = { facts, predictions: before, erased, predictionsErased: panel.now, inside: null };
  if (!facts.vit) return record;
  const ask = (parts, fields = {}) => api.inspect(facts.name, image, { parts, ...fields });
  const target = state.class >= 0 ? { target: state.class } : {};
  const inside = await ask(facts.num_classes ? "input,layers,rollout,gradient" : "input,rollout", target);
  [inside.attention, inside.similarity] = [[], []];
  for (let layer = 0; layer < facts.vit.depth; layer += 1) {
    const result = await ask("attention,similarity", { layer });
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
    const erased = panel.grid ? [...panel.erased] : [];
    records.push(await busy(`saving: ${panel.facts.name}`, () => gathered(panel, erased)));
  }
  const content = { state: stateText(), saved: new Date().toISOString().slice(0, 10), panels: records };
  const [html, style, code] = await Promise.all([text("./"), text("page/style.css"), script()]);
  const data = JSON.stringify(content).replaceAll("<", "\\u003c");
  const inline = `<meta http-equiv="Content-Security-Policy" content="${POLICY}">\n<style>${style}</style>`;
  return html
    .replace(/<link rel="icon".*>\n/, "")
    .replace(/<link rel="stylesheet".*>/, () => inline)
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

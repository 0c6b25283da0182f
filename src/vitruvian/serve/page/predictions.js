// The predictions as bars, and the predictions after each layer as a chart.

import { TEXT } from "./text.js";

const COLORS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5"];
const DASHES = ["", "7 5", "2 5", "9 4 2 4", "12 5", "4 3"];
const HEIGHT = 170;
const EDGE = { top: 12, bottom: 12 };

export function percent(share) {
  if (share === undefined) return "";
  if (share > 0 && share < 0.0005) return "<0.1%";
  return `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)}%`;
}

// A number with its interval.
function numberText({ value, interval }) {
  const [text, ...ends] = [value, ...(interval || [])].map((number) => Number(number.toPrecision(4)));
  return ends.length ? `${text}${TEXT.interval(...ends)}` : `${text}`;
}

// Bars of the predictions; with `before`, a mark at the probability before patches were erased. `choose` is null where
// there is nothing to choose.
export function showPredictions(place, predictions, { before = null, chosen = -1, choose = null }) {
  const marks = new Map((before || []).map((prediction) => [prediction.index, prediction.probability]));
  place.replaceChildren(...predictions.map((prediction) => {
    const entry = document.createElement(choose ? "button" : "div");
    entry.className = "prediction";
    if (choose) {
      entry.type = "button";
      entry.setAttribute("aria-pressed", String(prediction.index === chosen));
      entry.title = TEXT.chooseClass;
      entry.addEventListener("click", () => choose(prediction.index));
    }
    const [label, number, track, fill] = ["span", "span", "span", "span"].map((kind) => document.createElement(kind));
    label.textContent = prediction.label;
    [number.className, track.className, fill.className] = ["number", "track", "fill"];
    const was = marks.get(prediction.index);
    number.textContent = before ? `${percent(was ?? 0)} → ${percent(prediction.probability)}` : percent(prediction.probability);
    if (before && was === undefined) number.textContent = `${TEXT.isNew} → ${percent(prediction.probability)}`;
    if (prediction.value !== undefined) number.textContent = numberText(prediction);
    fill.style.width = `${100 * (prediction.probability ?? 0)}%`;
    if (prediction.predicted === false) {
      entry.classList.add("unlikely");
      number.textContent += ", below its threshold";
    }
    track.append(fill);
    if (was !== undefined) {
      const mark = document.createElement("span");
      mark.className = "before";
      mark.style.left = `${100 * was}%`;
      track.append(mark);
    }
    entry.append(label, number, ...(prediction.value === undefined ? [track] : []));
    return entry;
  }));
  if (predictions[0].rejected) {
    const line = document.createElement("p");
    line.className = "rejected";
    line.textContent = TEXT.rejected;
    place.prepend(line);
  }
}

// The best prediction in a few words, for screen readers and small screens.
export function headline(predictions) {
  const [{ label, probability, rejected, predicted, value }] = predictions;
  if (value !== undefined) return predictions.map((number) => `${number.label}, ${numberText(number)}`).join("; ");
  if (predicted !== undefined) return predictions.filter((one) => one.predicted).map((one) => one.label).join(", ") || TEXT.noLabel;
  return rejected ? TEXT.rejectedShort(label) : `${label}, ${percent(probability)}`;
}

function svg(kind, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function lineOf(index, points) {
  const drawn = svg("polyline", { points, "stroke-dasharray": DASHES[index] });
  drawn.style.stroke = `var(${COLORS[index]})`;
  return drawn;
}

// Probabilities of the top predictions if the head reads the tokens after each layer. `across` gives the place of a
// step from left to right, in pixels: the start, then each layer; `now` is the place of the current step.
export function showLayers(place, { classes, probabilities, best }, layer, { across, width, now, choose }) {
  const count = probabilities.length;
  const up = (share) => HEIGHT - EDGE.bottom - share * (HEIGHT - EDGE.top - EDGE.bottom);
  const shown = classes.slice(0, 5);
  const chart = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img" });
  chart.setAttribute("aria-label", summary(classes, probabilities, best));
  for (const share of [0, 0.5, 1]) {
    chart.append(svg("line", { class: "grid", x1: across(0), x2: width, y1: up(share), y2: up(share) }));
    chart.append(svg("text", { x: across(0) - 8, y: up(share) + 4, "text-anchor": "end" }, `${100 * share}%`));
  }
  chart.append(svg("line", { class: "now", x1: 0, x2: 0, y1: 0, y2: HEIGHT }));
  [...shown.keys()].reverse().forEach((i) => {
    const points = probabilities.map((row, step) => `${across(step).toFixed(1)},${up(row[i]).toFixed(1)}`).join(" ");
    chart.append(lineOf(i, points));
  });
  chart.addEventListener("click", (event) => {
    const x = event.clientX - chart.getBoundingClientRect().left;
    const steps = [...Array(count - 1).keys()];
    choose(steps.reduce((a, b) => (Math.abs(across(b + 1) - x) < Math.abs(across(a + 1) - x) ? b : a)));
  });
  const legend = document.createElement("p");
  legend.className = "legend";
  legend.append(...shown.map((prediction, i) => {
    const entry = document.createElement("span");
    const swatch = svg("svg", { viewBox: "0 0 26 12", "aria-hidden": "true" });
    swatch.append(lineOf(i, "1,6 25,6"));
    entry.append(swatch, prediction.label);
    return entry;
  }));
  const said = document.createElement("p");
  said.className = "soft";
  const step = Math.min(count - 1, layer + 1);
  said.textContent = TEXT.layersNow(layer, classes[best[step]].label, percent(probabilities[step][best[step]]));
  place.replaceChildren(chart, legend, said);
  moveCursor(place, now);
}

export function moveCursor(place, now) {
  const line = place.querySelector(".now");
  if (line) line.style.transform = `translateX(${now}px)`;
}

function summary(classes, probabilities, best) {
  const final = best.at(-1);
  const first = best.findIndex((_, step) => best.slice(step).every((each) => each === final));
  const since = first === 0 ? TEXT.fromStart : TEXT.fromLayer(first - 1);
  return TEXT.layersSummary(classes[final].label, since, percent(probabilities.at(-1)[final]));
}

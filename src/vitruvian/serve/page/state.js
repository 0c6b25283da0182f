// The state of the page, stored in the URL after '#', so that a link or a reload shows the same.

// `image` is "own" for an image that is neither a sample nor a drawn digit; `of` is the number of classes that `class` is one of.
// `show` is empty for the map with the best deletion score; `sinks` is "in" or "out" of the color scale.
const DEFAULTS = {
  model: "", with: "", sample: "", digit: "", image: "", labels: "", step: "image", show: "", layer: -1, head: -1, patch: "", class: -1, of: -1, erased: "",
  opacity: 70, sinks: "out",
};
const NUMBERS = ["layer", "head", "class", "of", "opacity"];
const listeners = [];

export const state = { ...DEFAULTS };

export function readState(text) {
  const given = new URLSearchParams(text.replace(/^#/, ""));
  for (const name of Object.keys(DEFAULTS)) {
    const value = given.get(name);
    state[name] = value === null ? DEFAULTS[name] : NUMBERS.includes(name) ? Number.parseInt(value, 10) : value;
    if (Number.isNaN(state[name])) state[name] = DEFAULTS[name];
  }
}

export function stateText() {
  const kept = Object.entries(state).filter(([name, value]) => value !== DEFAULTS[name]);
  return new URLSearchParams(kept.map(([name, value]) => [name, String(value)])).toString();
}

// Change some values and notify the listeners.
export function change(values) {
  const changed = Object.keys(values).filter((name) => state[name] !== values[name]);
  if (!changed.length) return;
  Object.assign(state, values);
  const text = stateText();
  history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
  for (const listener of listeners) listener(new Set(changed));
}

export function onChange(listener) {
  listeners.push(listener);
}

// A set of patches as hexadecimal digits, four patches each.
export function patchesToText(patches, count) {
  if (!patches.size) return "";
  let text = "";
  for (let first = 0; first < count; first += 4) {
    let digit = 0;
    for (let bit = 0; bit < 4; bit += 1) if (patches.has(first + bit)) digit |= 1 << bit;
    text += digit.toString(16);
  }
  return text.replace(/0+$/, "");
}

export function textToPatches(text, count) {
  const patches = new Set();
  [...text].forEach((letter, place) => {
    const digit = Number.parseInt(letter, 16) || 0;
    for (let bit = 0; bit < 4; bit += 1) {
      if (digit & (1 << bit) && 4 * place + bit < count) patches.add(4 * place + bit);
    }
  });
  return patches;
}

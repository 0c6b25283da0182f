// Arrays as the service packs them, and their colors: viridis, which color-blind eyes read and gray print keeps.

const ANCHORS = ["440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725"];
const palette = new Uint8ClampedArray(256 * 3);
for (let level = 0; level < 256; level += 1) {
  const place = (level / 255) * (ANCHORS.length - 1);
  const before = Math.min(ANCHORS.length - 2, Math.floor(place));
  for (let channel = 0; channel < 3; channel += 1) {
    const [low, high] = [before, before + 1].map((i) => Number.parseInt(ANCHORS[i].slice(2 * channel, 2 * channel + 2), 16));
    palette[3 * level + channel] = low + (high - low) * (place - before);
  }
}

export function unpack({ shape, bits, low, high, data }) {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  if (bits === 32) return { shape, values: new Float32Array(bytes.buffer) };
  const levels = bits === 16 ? new Uint16Array(bytes.buffer) : bytes;
  const step = (high - low) / (2 ** bits - 1);
  const values = new Float32Array(levels.length);
  for (let i = 0; i < levels.length; i += 1) values[i] = low + step * levels[i];
  return { shape, values };
}

// A robust color scale: from the 2nd to the 98th percentile of the values, without those of the left-out patches.
export function scaleOf(values, leftOut = new Set()) {
  const kept = Float32Array.from(values.filter((_, i) => !leftOut.has(i))).sort();
  const at = (share) => {
    const place = share * (kept.length - 1);
    const [below, above] = [kept[Math.floor(place)], kept[Math.ceil(place)]];
    return below + (above - below) * (place % 1);
  };
  return kept.length ? { low: at(0.02), high: at(0.98), cutLow: kept[0] < at(0.02), cutHigh: kept.at(-1) > at(0.98) } : { low: 0, high: 1 };
}

// Values as levels from 0 to 1.
export const levelsOf = (values, { low, high }) => values.map((value) => Math.min(1, Math.max(0, (value - low) / (high - low || 1))));

// Attention sinks: patches that receive far more attention than others from all tokens together, and from every image.
// Measured on ViT-Ti/16: sinks receive 25 to 600 times the median, and patches of objects less than half of a sink.
export function sinksOf(received) {
  const sorted = Float32Array.from(received).sort();
  const [median, most] = [sorted[Math.floor(sorted.length / 2)], sorted.at(-1)];
  const sinks = new Set();
  received.forEach((value, i) => { if (value > 20 * median && value > 0.45 * most) sinks.add(i); });
  return sinks;
}

// Values of 0..1 on a grid as a canvas with one pixel a patch.
export function heat(values, rows, columns) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [columns, rows];
  const pen = canvas.getContext("2d");
  const pixels = pen.createImageData(columns, rows);
  values.forEach((value, i) => {
    const level = 3 * Math.round(255 * Math.min(1, Math.max(0, value)));
    pixels.data.set([palette[level], palette[level + 1], palette[level + 2], 255], 4 * i);
  });
  pen.putImageData(pixels, 0, 0);
  return canvas;
}

export const colorOf = (level) => {
  const at = 3 * Math.round(255 * Math.min(1, Math.max(0, level)));
  return `rgb(${palette[at]} ${palette[at + 1]} ${palette[at + 2]})`;
};

export function drawColorBar(canvas) {
  const steps = Float32Array.from({ length: 64 }, (_, i) => i / 63);
  canvas.getContext("2d").drawImage(heat(steps, 1, 64), 0, 0, canvas.width, canvas.height);
}

// The row of a token in a matrix (tokens x tokens).
export const rowOf = (matrix, tokens, token) => matrix.subarray(token * tokens, (token + 1) * tokens);

// The column of a token in a matrix (tokens x tokens).
export const columnOf = (matrix, tokens, token) => Float32Array.from({ length: tokens }, (_, row) => matrix[row * tokens + token]);

// The row of a token, or for null the mean of all patches' rows, which begin after `prefix` other tokens.
export function attentionOf(matrix, tokens, token, prefix) {
  if (token !== null) return rowOf(matrix, tokens, token);
  const mean = new Float32Array(tokens);
  for (let i = prefix * tokens; i < matrix.length; i += 1) mean[i % tokens] += matrix[i] / (tokens - prefix);
  return mean;
}

// One head (tokens x tokens) of the attention of a layer, or the mean of all for -1.
export function headMatrix({ shape: [heads, tokens], values }, head) {
  const size = tokens * tokens;
  if (head >= 0) return values.subarray(head * size, (head + 1) * size);
  const mean = new Float32Array(size);
  for (let i = 0; i < values.length; i += 1) mean[i % size] += values[i] / heads;
  return mean;
}

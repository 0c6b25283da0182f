// The evaluation preprocessing of data/preprocess.py: resize, crop and normalize, to within a level or two of 255.

const PRECISION_BITS = 22; // Pillow's weights are integers of this precision

const sinc = (x) => (x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x));

// Pillow's filters: half their width, and the weight at a distance.
const FILTERS = {
  area: [0.5, (x) => (x > -0.5 && x <= 0.5 ? 1 : 0)],
  bilinear: [1, (x) => Math.max(0, 1 - Math.abs(x))],
  bicubic: [2, (signed) => {
    const x = Math.abs(signed);
    if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
    return x < 2 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0;
  }],
  lanczos: [3, (x) => (x >= -3 && x < 3 ? sinc(x) * sinc(x / 3) : 0)],
};

// Python's round: halves to even.
function round(value) {
  const floor = Math.floor(value);
  if (value - floor !== 0.5) return Math.round(value);
  return floor % 2 ? floor + 1 : floor;
}

// The smallest [rows, columns] of the same aspect ratio that cover the target.
function coverSize([height, width], [rows, columns]) {
  const toInt = rows === columns ? Math.trunc : round;
  if (rows * width >= columns * height) return [rows, toInt((rows * width) / height)];
  return [toInt((columns * height) / width), columns];
}

// The [rows, columns] that an image is resized to, and the box [left, top, right, bottom] of it that the crop keeps.
export function geometry(size, preprocess) {
  const [rows, columns] = preprocess.image_size;
  const target = preprocess.scaled_size ?? preprocess.image_size;
  const [height, width] = preprocess.fit === "squash" ? target : coverSize(size, target);
  const toInt = preprocess.floor_crop ? Math.trunc : round;
  const [top, left] = [toInt((height - rows) / 2), toInt((width - columns) / 2)];
  return { scaled: [height, width], box: [left, top, left + columns, top + rows] };
}

// For each sample from `start` to `stop` of a resized axis: its first source pixel and the weights from there on.
function weightsOf(length, scaled, start, stop, interpolation) {
  const scale = length / scaled;
  const samples = [];
  if (interpolation === "nearest") {
    let position = scale * 0.5; // summed up as in Pillow
    for (let i = 0; i < stop; i += 1, position += scale) if (i >= start) samples.push({ first: Math.floor(position), weights: [2 ** PRECISION_BITS] });
    return samples;
  }
  const [half, filter] = FILTERS[interpolation];
  const stretch = Math.max(1, scale); // the low-pass filter when an image shrinks
  for (let i = start; i < stop; i += 1) {
    const center = (i + 0.5) * scale;
    const first = Math.max(0, Math.trunc(center - half * stretch + 0.5));
    const end = Math.min(length, Math.trunc(center + half * stretch + 0.5));
    const weights = Array.from({ length: end - first }, (_, x) => filter((x + first - center + 0.5) / stretch));
    const sum = weights.reduce((a, b) => a + b, 0) || 1;
    samples.push({ first, weights: weights.map((weight) => Math.trunc((weight / sum) * 2 ** PRECISION_BITS + Math.sign(weight) * 0.5)) });
  }
  return samples;
}

// Resizes one axis of levels (count lines of `length` pixels); `along` and `across` are the steps to the next pixel and
// the next line. Returns levels in the same layout, with the samples in place of the pixels.
function resizeAxis(levels, samples, count, { along, across, channels, out, outAlong, outAcross }) {
  const result = new Uint8ClampedArray(out);
  samples.forEach(({ first, weights }, sample) => {
    for (let line = 0; line < count; line += 1) {
      for (let channel = 0; channel < channels; channel += 1) {
        let sum = 2 ** (PRECISION_BITS - 1);
        let source = line * across + first * along + channel;
        for (let i = 0; i < weights.length; i += 1, source += along) sum += levels[source] * weights[i];
        result[line * outAcross + sample * outAlong + channel] = sum >> PRECISION_BITS;
      }
    }
  });
  return result;
}

// The part `box` of the image resized as Pillow does: columns first, each pass rounded to 8 bits. From version 13 on, Pillow
// begins with the rows where that is cheaper, and then a few levels differ by rounding.
function resize({ levels, channels, width, height }, [rows, columns], [left, top, right, bottom], interpolation) {
  const across = weightsOf(width, columns, left, right, interpolation);
  const down = weightsOf(height, rows, top, bottom, interpolation);
  const begin = Math.min(...down.map(({ first }) => first));
  const end = Math.max(...down.map(({ first, weights }) => first + weights.length));
  const [wide, line] = [right - left, channels * (right - left)];
  const lines = levels.subarray(begin * width * channels, end * width * channels);
  const narrow = resizeAxis(lines, across, end - begin, {
    along: channels, across: channels * width, channels, out: (end - begin) * line, outAlong: channels, outAcross: line,
  });
  const moved = down.map(({ first, weights }) => ({ first: first - begin, weights }));
  return resizeAxis(narrow, moved, wide, {
    along: line, across: channels, channels, out: (bottom - top) * line, outAlong: line, outAcross: channels,
  });
}

// The two pixels beside each sample of an axis, and the weight of the second; without a low-pass filter.
function neighbors(length, scaled, start, stop) {
  const step = Math.fround(length / scaled);
  return Array.from({ length: stop - start }, (_, i) => {
    const position = Math.fround(Math.fround((start + i + 0.5) * step) - 0.5);
    const floor = Math.floor(position);
    const clip = (pixel) => Math.min(length - 1, Math.max(0, pixel));
    return [clip(floor), clip(floor + 1), position - floor];
  });
}

// The part `box` of the resized image as floats, like TensorFlow's resize without antialias.
function sampleBilinear({ levels, channels, width, height }, [rows, columns], [left, top, right, bottom]) {
  const across = neighbors(width, columns, left, right);
  const result = new Float32Array((bottom - top) * (right - left) * channels);
  neighbors(height, rows, top, bottom).forEach(([above, below, down], row) => across.forEach(([before, after, share], column) => {
    for (let channel = 0; channel < channels; channel += 1) {
      const at = (y, x) => levels[(y * width + x) * channels + channel];
      const upper = at(above, before) + (at(above, after) - at(above, before)) * share;
      const lower = at(below, before) + (at(below, after) - at(below, before)) * share;
      result[(row * (right - left) + column) * channels + channel] = upper + (lower - upper) * down;
    }
  }));
  return result;
}

// RGBA as the channels of the model: RGB, or gray as Pillow computes it.
function channelsOf({ data, width, height }, channels) {
  const levels = new Uint8ClampedArray(width * height * channels);
  for (let i = 0; i < width * height; i += 1) {
    const [red, green, blue] = [data[4 * i], data[4 * i + 1], data[4 * i + 2]];
    if (channels === 1) levels[i] = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16;
    else { levels[3 * i] = red; levels[3 * i + 1] = green; levels[3 * i + 2] = blue; }
  }
  return { levels, channels, width, height };
}

// An image (RGBA levels, width, height) as the model's input: normalized pixels (channels, rows, columns), the same part
// as RGBA levels to look at, and the share of the image that it is.
export function preprocess(image, settings) {
  const { mean, std, interpolation, antialias, image_size: [rows, columns] } = settings;
  const { scaled, box } = geometry([image.height, image.width], settings);
  const source = channelsOf(image, mean.length);
  const smooth = antialias || interpolation === "nearest";
  const levels = smooth ? resize(source, scaled, box, interpolation) : sampleBilinear(source, scaled, box);
  const [pixels, view] = [new Float32Array(levels.length), new Uint8ClampedArray(4 * rows * columns).fill(255)];
  for (let i = 0; i < rows * columns; i += 1) {
    for (let color = 0; color < 3; color += 1) view[4 * i + color] = levels[i * mean.length + (color % mean.length)];
    mean.forEach((value, channel) => { pixels[channel * rows * columns + i] = (levels[i * mean.length + channel] / 255 - value) / std[channel]; });
  }
  return { pixels, view, rows, columns, share: (rows * columns) / (scaled[0] * scaled[1]) };
}

// Pixels (channels, rows, columns) with these patches of the grid in the image's mean color.
export function erase(pixels, [rows, columns], patches, [down, across]) {
  const result = pixels.slice();
  const [high, wide, size] = [Math.floor(rows / down), Math.floor(columns / across), rows * columns];
  for (let start = 0; start < pixels.length; start += size) {
    const mean = pixels.subarray(start, start + size).reduce((a, b) => a + b, 0) / size;
    for (const patch of patches) {
      const [top, left] = [Math.floor(patch / across) * high, (patch % across) * wide];
      for (let row = top; row < top + high; row += 1) result.fill(mean, start + row * columns + left, start + row * columns + left + wide);
    }
  }
  return result;
}

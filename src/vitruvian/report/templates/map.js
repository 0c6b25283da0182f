"use strict";
const { keys, folder, x: xs, y: ys, columns } = JSON.parse(document.getElementById("content").textContent);
const at = (id) => document.getElementById(id);
const n = keys.length, LEVELS = 65535, SHOWN = 60;
const decode = (text) => {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Uint16Array.from({ length: bytes.length / 2 }, (_, i) => view.getUint16(2 * i, true));
};
const X = Float32Array.from(decode(xs), (v) => v / LEVELS), Y = Float32Array.from(decode(ys), (v) => v / LEVELS);
for (const column of columns) column.codes = decode(column.codes);
const VIRIDIS = ["440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725"];
const canvas = at("map"), pen = canvas.getContext("2d");
const chosen = new Uint8Array(n);
let colors = new Uint32Array(n), count = 0, column = null, lasso = null, drag = null, waiting = false;
let scale = 1, left = 0, top_ = 0; // a point (x, y) is drawn at (x * scale + left, y * scale + top_), in pixels of the canvas

// little-endian ABGR, as ImageData stores it
const pack = (r, g, b) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
const unpack = (color) => "rgb(" + (color & 255) + "," + ((color >> 8) & 255) + "," + ((color >> 16) & 255) + ")";
const fromHex = (hex) => pack(...[0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)));
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function categoryColor(index) { // the palette of the charts first, then hues that are far apart
  if (index < 6 && /^#/.test(style("--c" + index))) return fromHex(style("--c" + index).slice(1));
  const hue = (index * 137.508) % 360, channel = (k) => {
    const v = (k + hue / 30) % 12;
    return Math.round(255 * (0.52 - 0.33 * Math.max(-1, Math.min(v - 3, 9 - v, 1))));
  };
  return pack(channel(0), channel(8), channel(4));
}

function numberColor(code) {
  const place = (code / (LEVELS - 1)) * (VIRIDIS.length - 1), low = Math.min(Math.floor(place), VIRIDIS.length - 2);
  const part = (i) => [low, low + 1].map((k) => parseInt(VIRIDIS[k].slice(i, i + 2), 16));
  return pack(...[0, 2, 4].map(part).map(([a, b]) => Math.round(a + (b - a) * (place - low))));
}

function recolor() {
  column = columns[at("column").selectedIndex] || null;
  const gray = pack(128, 128, 128);
  const palette = column && (column.names ? column.names.map((name, i) => (name ? categoryColor(i) : gray)) : null);
  for (let i = 0; i < n; i++) {
    const code = column ? column.codes[i] : 0;
    colors[i] = !column ? categoryColor(0) : palette ? palette[code] : code === LEVELS ? gray : numberColor(code);
  }
  const legend = at("legend");
  legend.replaceChildren();
  const entries = !column ? [] : column.names || column.ends;
  entries.forEach((name, index) => {
    const item = document.createElement("li"), dot = document.createElement("i");
    dot.style.background = unpack(palette ? palette[index] : numberColor(index ? LEVELS - 1 : 0));
    const holder = palette ? document.createElement("button") : document.createElement("span");
    holder.append(dot, name === "" ? "(none)" : String(name));
    if (palette) {
      holder.setAttribute("aria-pressed", "false");
      holder.onclick = () => toggle(holder, index);
    }
    item.append(holder);
    legend.append(item);
  });
  draw();
}

function toggle(button, index) {
  const on = button.getAttribute("aria-pressed") === "false";
  button.setAttribute("aria-pressed", String(on));
  for (let i = 0; i < n; i++) if (column.codes[i] === index) chosen[i] = on ? 1 : 0;
  selected();
}

function selected() {
  count = chosen.reduce((sum, one) => sum + one, 0);
  at("save").disabled = !count;
  at("status").textContent = count ? count.toLocaleString("en") + " of " + n.toLocaleString("en") + " images are selected" +
    (count > SHOWN ? "; the first " + SHOWN + ":" : ":") : "No image is selected.";
  const rows = [];
  for (let i = 0; i < n && rows.length < SHOWN; i++) if (chosen[i]) {
    const row = document.createElement("li");
    row.textContent = keys[i];
    rows.push(row);
  }
  at("chosen").replaceChildren(...rows);
  draw();
}

function clearSelection() {
  chosen.fill(0);
  for (const button of at("legend").querySelectorAll("button")) button.setAttribute("aria-pressed", "false");
  selected();
}

function fit() {
  const margin = 16, side = Math.min(canvas.width, canvas.height) - 2 * margin;
  scale = side;
  let width = 0, height = 0;
  for (let i = 0; i < n; i++) { width = Math.max(width, X[i]); height = Math.max(height, Y[i]); }
  scale = Math.min((canvas.width - 2 * margin) / (width || 1), (canvas.height - 2 * margin) / (height || 1));
  left = (canvas.width - width * scale) / 2;
  top_ = (canvas.height - height * scale) / 2;
  draw();
}

function zoom(factor, x = canvas.width / 2, y = canvas.height / 2) {
  factor = Math.min(Math.max(factor * scale, 50), 1e7) / scale;
  left = x + (left - x) * factor;
  top_ = y + (top_ - y) * factor;
  scale *= factor;
  draw();
}

function draw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; paint(); });
}

// Points are written into the pixels of the image, which takes a few milliseconds for a hundred thousand.
function paint() {
  const { width, height } = canvas, image = pen.createImageData(width, height), pixels = new Uint32Array(image.data.buffer);
  const size = Math.max(1, Math.min(6, Math.round((n > 20000 ? 1 : n > 3000 ? 1.5 : 2.5) * devicePixelRatio * Math.pow(scale / Math.min(width, height), 0.25))));
  for (const pass of count ? [0, 1] : [0]) for (let i = 0; i < n; i++) {
    if (count && chosen[i] !== pass) continue;
    const px = Math.round(X[i] * scale + left), py = Math.round(Y[i] * scale + top_);
    if (px < size || py < size || px >= width - size || py >= height - size) continue;
    const color = count && !pass ? ((colors[i] & 0xffffff) | (50 << 24)) >>> 0 : colors[i];
    for (let dy = -size; dy <= size; dy++) {
      const half = size > 1 && Math.abs(dy) === size ? size - 1 : size, start = (py + dy) * width + px;
      pixels.fill(color, start - half, start + half + 1);
    }
  }
  pen.putImageData(image, 0, 0);
  if (lasso && lasso.length > 1) {
    pen.strokeStyle = style("--text");
    pen.lineWidth = 2 * devicePixelRatio;
    pen.beginPath();
    lasso.forEach(([x, y]) => pen.lineTo(x, y));
    pen.closePath();
    pen.stroke();
  }
}

function isInside(x, y, polygon) {
  let inside = false;
  for (let i = 0, j = polygon.length - 1; i < polygon.length; j = i++) {
    const [ax, ay] = polygon[i], [bx, by] = polygon[j];
    if (ay > y !== by > y && x < ((bx - ax) * (y - ay)) / (by - ay) + ax) inside = !inside;
  }
  return inside;
}

function place(event) {
  const box = canvas.getBoundingClientRect();
  return [(event.clientX - box.left) * devicePixelRatio, (event.clientY - box.top) * devicePixelRatio];
}

canvas.onpointerdown = (event) => {
  canvas.setPointerCapture(event.pointerId);
  if (event.shiftKey || at("lasso").getAttribute("aria-pressed") === "true") lasso = [place(event)];
  else drag = place(event);
};
canvas.onpointermove = (event) => {
  const here = place(event);
  if (lasso) lasso.push(here);
  else if (drag) {
    left += here[0] - drag[0];
    top_ += here[1] - drag[1];
    drag = here;
  } else return hover(event, here);
  at("tip").hidden = true;
  draw();
};
canvas.onpointerup = () => {
  if (lasso && lasso.length > 2) {
    for (let i = 0; i < n; i++) if (isInside(X[i] * scale + left, Y[i] * scale + top_, lasso)) chosen[i] = 1;
    lasso = null;
    selected();
  }
  lasso = drag = null;
  draw();
};
canvas.onpointerleave = () => { at("tip").hidden = true; };
canvas.onwheel = (event) => {
  event.preventDefault();
  zoom(Math.exp(-event.deltaY / 400), ...place(event));
};
canvas.onkeydown = (event) => {
  const step = 40 * devicePixelRatio;
  const moves = { ArrowLeft: [step, 0], ArrowRight: [-step, 0], ArrowUp: [0, step], ArrowDown: [0, -step] };
  if (moves[event.key]) { left += moves[event.key][0]; top_ += moves[event.key][1]; draw(); }
  else if (event.key === "+" || event.key === "=") zoom(1.4);
  else if (event.key === "-") zoom(1 / 1.4);
  else if (event.key === "0") fit();
  else return;
  event.preventDefault();
};

function hover(event, [px, py]) {
  let best = -1, least = Math.pow(12 * devicePixelRatio, 2);
  for (let i = 0; i < n; i++) {
    const dx = X[i] * scale + left - px, dy = Y[i] * scale + top_ - py, apart = dx * dx + dy * dy;
    if (apart < least) { least = apart; best = i; }
  }
  const tip = at("tip");
  tip.hidden = best < 0;
  if (best < 0) return;
  tip.textContent = [keys[best], ...columns.map((one) => one.name + ": " + valueOf(one, best))].join(" · ");
  const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  tip.style.left = Math.max(0, Math.min(x + 14, box.width - tip.offsetWidth)) + "px";
  tip.style.top = (y + 14 + tip.offsetHeight < box.height ? y + 14 : y - 14 - tip.offsetHeight) + "px";
}

function valueOf(one, index) {
  const code = one.codes[index];
  if (one.names) return one.names[code] || "none";
  return code === LEVELS ? "none" : (one.ends[0] + (code / (LEVELS - 1)) * (one.ends[1] - one.ends[0])).toPrecision(3);
}

function manifest() {
  const quote = (text) => (/[",\n\r]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text);
  const shown = columns.filter((one) => one.names);
  const lines = [["path", ...shown.map((one) => one.name)].map(quote).join(",")];
  for (let i = 0; i < n; i++) if (chosen[i])
    lines.push([folder ? folder + "/" + keys[i] : keys[i], ...shown.map((one) => one.names[one.codes[i]])].map(quote).join(","));
  return lines.join("\n") + "\n";
}

at("save").onclick = () => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([manifest()], { type: "text/csv" }));
  link.download = "selection.csv";
  link.click();
};
at("closer").onclick = () => zoom(1.4);
at("farther").onclick = () => zoom(1 / 1.4);
at("all").onclick = fit;
at("clear").onclick = clearSelection;
at("lasso").onclick = () => {
  const on = at("lasso").getAttribute("aria-pressed") === "false";
  at("lasso").setAttribute("aria-pressed", String(on));
  canvas.classList.toggle("lasso", on);
};
at("column").onchange = () => { clearSelection(); recolor(); };

function resize() {
  const box = canvas.getBoundingClientRect();
  canvas.width = Math.max(1, Math.round(box.width * devicePixelRatio));
  canvas.height = Math.max(1, Math.round(box.height * devicePixelRatio));
  fit();
}
for (const one of columns) at("column").add(new Option(one.name));
at("column").disabled = columns.length < 2;
matchMedia("(prefers-color-scheme: dark)").onchange = recolor;
new ResizeObserver(resize).observe(canvas);
recolor();
selected();

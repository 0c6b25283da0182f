"use strict";
const { data, classes, items } = JSON.parse(document.getElementById("content").textContent);
const at = (id) => document.getElementById(id);
const memory = "vitruvian review " + data + " " + items.map((item) => item.split + item.index).join(" ");
let place = 0;
let decisions = {}; // label by index of the item; null excludes the image
try { decisions = JSON.parse(localStorage.getItem(memory)) || {}; } catch (error) { decisions = {}; }

for (const name of classes) at("other").add(new Option(name));

// Two copies of an image suggest each other's label: once one of them is decided, the other must agree with it.
function suggestion(number) {
  const { copy, suggested, was } = items[number];
  return copy === null || !(copy in decisions) ? suggested : decisions[copy] ?? was;
}

function showSuggestion() {
  const { copy, was } = items[place];
  const label = suggestion(place);
  const doubt = at("item" + place).querySelector(".doubted");
  if (label === was) doubt.textContent = decisions[copy] === null ? "; its copy is excluded" : "; its copy now has this label, too";
  else {
    const name = document.createElement("b");
    name.className = "warning";
    name.textContent = label;
    doubt.replaceChildren(", perhaps ", name);
  }
}

function show() {
  items.forEach((_, number) => { at("item" + number).hidden = number !== place; });
  const decided = Object.keys(decisions).length;
  const changed = items.filter((item, number) => number in decisions && decisions[number] !== item.was).length;
  const now = place in decisions ? (decisions[place] === null ? ": excluded" : ": " + decisions[place]) : "";
  at("place").textContent = (place + 1) + " of " + items.length + now;
  at("decided").textContent = decided + " decided, " + changed + " of them changed";
  at("other").value = place in decisions && decisions[place] !== null ? decisions[place] : items[place].was;
  showSuggestion();
}

function go(step) {
  place = Math.min(Math.max(place + step, 0), items.length - 1);
  show();
}

function decide(label) {
  decisions[place] = label;
  remember();
  go(1);
}

function remember() {
  try { localStorage.setItem(memory, JSON.stringify(decisions)); } catch (error) { /* only in this page, then */ }
}

function undo() {
  delete decisions[place];
  remember();
  show();
}

function save() {
  const corrections = items.flatMap((item, number) => number in decisions
    ? [{ split: item.split, index: item.index, key: item.key, was: item.was, label: decisions[number] }] : []);
  const text = JSON.stringify({ format: 1, data, corrections }, null, 2) + "\n";
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = "corrections.json";
  link.click();
}

const actions = {
  keep: () => decide(items[place].was), take: () => decide(suggestion(place)), drop: () => decide(null),
  assign: () => decide(at("other").value), undo, back: () => go(-1), next: () => go(1), save,
};
const keys = {
  Enter: "keep", s: "take", x: "drop", u: "undo", ArrowLeft: "back", ArrowRight: "next", d: "save",
};
for (const [id, action] of Object.entries(actions)) {
  at(id).addEventListener("click", (event) => {
    action();
    if (event.detail) at(id).blur(); // after a click of the mouse, the keys act on the page again
  });
}
// Arrows and letters only move through the list of classes: Enter decides, Escape leaves it.
at("other").addEventListener("keydown", (event) => {
  if (event.key === "Enter") actions.assign();
  else if (event.key === "Escape") show();
  else return;
  event.preventDefault();
  at("other").blur();
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.id === "other") return;
  if (event.target.closest("button") && ["Enter", " "].includes(event.key)) return; // presses the button
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if (key === "c") at("other").focus();
  else if (keys[key]) actions[keys[key]]();
  else return;
  event.preventDefault();
});
show();

// What guides a new visitor: terms with a tooltip, a glossary, a tour and examples with a story.

import { counted } from "./api.js";
import { sampleFile } from "./input.js";
import { change } from "./state.js";
import { TEXT } from "./text.js";

const found = (id) => document.getElementById(id);

// Fill elements with their texts: data-t the content, data-label the accessible name.
export function fillTexts() {
  document.title = TEXT.title;
  for (const place of document.querySelectorAll("[data-t]")) place.textContent = TEXT[place.dataset.t];
  for (const place of document.querySelectorAll("[data-label]")) place.setAttribute("aria-label", TEXT[place.dataset.label]);
}

// A text as nodes; [word|term] becomes a term with its explanation.
export function richText(text) {
  return text.split(/(\[[^\]|]+\|\w+\])/).filter(Boolean).map((piece) => {
    const [, word, term] = piece.match(/^\[([^\]|]+)\|(\w+)\]$/) || [];
    if (!word) return piece;
    const made = document.createElement("a");
    [made.className, made.textContent, made.href] = ["term", word, "#"];
    made.setAttribute("role", "button");
    made.dataset.tip = TEXT.terms[term][1];
    made.addEventListener("click", (event) => { event.preventDefault(); openGlossary(term); });
    return made;
  });
}

function openGlossary(term) {
  const dialog = found("glossary");
  if (!dialog.open) dialog.showModal();
  const entry = term && dialog.querySelector(`[data-term=${term}]`);
  for (const each of dialog.querySelectorAll("dt")) each.classList.toggle("here", each === entry);
  if (entry) entry.scrollIntoView({ block: "center" });
}

function makeGlossary() {
  found("glossary").querySelector("dl").replaceChildren(...Object.entries(TEXT.terms).flatMap(([key, [name, text]]) => {
    const [term, meaning] = [document.createElement("dt"), document.createElement("dd")];
    [term.textContent, term.dataset.term, meaning.textContent] = [name, key, text];
    return [term, meaning];
  }));
  found("glossary-open").addEventListener("click", () => openGlossary(""));
  found("glossary-close").addEventListener("click", () => found("glossary").close());
}

// Whether the visitor has seen or refused the tour; browsers may refuse to remember it.
function remembered(value) {
  try {
    if (value) localStorage.setItem("tour", value);
    return localStorage.getItem("tour");
  } catch {
    return "unknown";
  }
}

function makeTour() {
  let stop = -1;
  const end = () => {
    stop = -1;
    found("tour").hidden = true;
    for (const each of document.querySelectorAll(".toured")) each.classList.remove("toured");
    found("tour-start").focus();
  };
  const show = (next) => {
    if (next >= TEXT.tour.length) return end();
    stop = Math.max(0, next);
    const { at, title, text, step, layer } = TEXT.tour[stop];
    if (step) change(layer === undefined ? { step } : { step, layer });
    for (const each of document.querySelectorAll(".toured")) each.classList.remove("toured");
    const place = document.querySelector(at);
    place.classList.add("toured");
    place.scrollIntoView({ block: "start" });
    found("tour").hidden = false;
    found("tour-number").textContent = TEXT.tourOf(stop + 1, TEXT.tour.length);
    found("tour-title").textContent = title;
    found("tour-text").textContent = text;
    found("tour-back").disabled = stop === 0;
    found("tour-next").textContent = stop === TEXT.tour.length - 1 ? TEXT.tourEnd : TEXT.tourNext;
    return found("tour-next").focus();
  };
  const begin = () => {
    remembered("seen");
    found("welcome").hidden = true;
    show(0);
  };
  found("tour-start").addEventListener("click", begin);
  found("welcome-start").addEventListener("click", begin);
  found("welcome-close").addEventListener("click", () => { remembered("refused"); found("welcome").hidden = true; });
  found("tour-next").addEventListener("click", () => show(stop + 1));
  found("tour-back").addEventListener("click", () => show(stop - 1));
  found("tour-close").addEventListener("click", end);
  found("tour").addEventListener("keydown", (event) => { if (event.key === "Escape") end(); });
}

export function makeGuide(offline) {
  makeGlossary();
  makeTour();
  found("welcome").hidden = offline || Boolean(remembered());
}

// Four examples; `tell` is called with the chosen one.
export function showStories(kind, tell) {
  found("stories").replaceChildren(...TEXT.storyList[kind].map((story) => {
    const [button, image, title, text] = ["button", "img", "strong", "span"].map((tag) => document.createElement(tag));
    image.src = sampleFile(story.sample);
    image.alt = "";
    [button.type, title.textContent, text.textContent] = ["button", story.title, story.short];
    const words = document.createElement("span");
    words.append(title, text);
    button.append(image, words);
    button.addEventListener("click", counted(() => tell(story)));
    return button;
  }));
}

// The patches of a grid whose centers lie in a box: left, top, right, bottom as parts of the image.
export function patchesIn([left, top, right, bottom], [rows, columns]) {
  const inside = (patch) => {
    const [x, y] = [((patch % columns) + 0.5) / columns, (Math.floor(patch / columns) + 0.5) / rows];
    return x >= left && x <= right && y >= top && y <= bottom;
  };
  return new Set([...Array(rows * columns).keys()].filter(inside));
}

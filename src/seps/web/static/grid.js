// The grid of results: cards, their pictures, and the arrow keys that walk through them.

import { pictureBlob } from "./api.js";

const grid = document.getElementById("results");
let leaving = new AbortController();
let addresses = [];

function reset() {
  leaving.abort();
  leaving = new AbortController();
  addresses.forEach((address) => URL.revokeObjectURL(address));
  addresses = [];
  grid.replaceChildren();
}

export function showWaiting(count) {
  reset();
  grid.setAttribute("aria-busy", "true");
  for (let place = 0; place < count; place += 1) {
    const item = document.createElement("li");
    item.className = "skeleton";
    item.setAttribute("aria-hidden", "true");
    grid.append(item);
  }
}

export function showPictures(pictures, open) {
  reset();
  grid.setAttribute("aria-busy", "false");
  const scores = pictures.map((picture) => picture.score).filter((score) => score !== undefined);
  const best = Math.max(...scores);
  const worst = Math.min(...scores, 0);
  const { signal } = leaving;
  pictures.forEach((picture, place) => {
    const share = best > worst ? (picture.score - worst) / (best - worst) : 1;
    const item = document.createElement("li");
    item.append(card(picture, share, () => open(place), signal));
    grid.append(item);
  });
}

function card(picture, share, open, signal) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "card";
  const name = picture.name || "picture";
  const image = document.createElement("img");
  image.alt = "";
  image.className = "missing";
  const caption = document.createElement("span");
  caption.className = "caption";
  const label = document.createElement("span");
  label.className = "name";
  label.textContent = name;
  caption.append(label);
  button.append(image);
  if (picture.score !== undefined) {
    const mark = document.createElement("span");
    mark.className = "mark";
    mark.textContent = picture.score.toFixed(3);
    const bar = document.createElement("span");
    const filled = document.createElement("i");
    bar.className = "bar";
    filled.style.transform = `scaleX(${share})`;
    bar.append(filled);
    caption.append(mark);
    button.append(bar);
    button.setAttribute("aria-label", `${name}, score ${picture.score.toFixed(3)}`);
  } else {
    button.setAttribute("aria-label", name);
  }
  button.append(caption);
  button.title = picture.description || name;
  button.addEventListener("click", open);
  pictureBlob(`/images/${picture.id}?thumbnail`, signal).then(
    (blob) => {
      if (signal.aborted) return;
      const address = URL.createObjectURL(blob);
      addresses.push(address);
      image.src = address;
      image.classList.remove("missing");
    },
    () => undefined, // the card stays, without its picture
  );
  return button;
}

export function focusCard(place) {
  grid.querySelectorAll(".card")[place]?.focus();
}

export function first() {
  return grid.querySelector(".card");
}

function columns() {
  return getComputedStyle(grid).gridTemplateColumns.split(" ").length;
}

export function onTop(leave) {
  grid.addEventListener("keydown", (event) => {
    const cards = [...grid.querySelectorAll(".card")];
    const here = cards.indexOf(document.activeElement);
    if (here < 0) return;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns(), ArrowDown: columns() };
    const ends = { Home: 0, End: cards.length - 1 };
    let there = ends[event.key] ?? (event.key in steps ? here + steps[event.key] : NaN);
    if (Number.isNaN(there)) return;
    event.preventDefault();
    if (there < 0 && event.key === "ArrowUp") return leave();
    there = Math.max(0, Math.min(cards.length - 1, there));
    cards[there].focus();
  });
}

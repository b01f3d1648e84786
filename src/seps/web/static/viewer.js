// The opened picture: its patches, the words that look at them, and what adds up to the score.

import { askJson, pictureBlob, sentence } from "./api.js";
import { clear, drawKept, drawWord } from "./overlay.js";

const $ = (id) => document.getElementById(id);
const dialog = $("viewer");
const canvas = $("viewer-layer");
const image = $("viewer-picture");
const slider = $("kept");

let pictures = [];
let place = 0;
let text = "";
let layer = null;
let branch = "";
let lit = null;
let leaving = new AbortController();
let shown = null; // the bytes of the picture and their address
let left = () => undefined;

export function open(list, index, query) {
  pictures = list;
  text = query;
  $("ask-text").value = query;
  if (!dialog.open) dialog.showModal();
  show(index);
}

export function isOpen() {
  return dialog.open;
}

// A closed dialog gives focus back to the card it was opened from, and says that it is closed only later.
// Focus belongs to the card of the picture shown last, and at once: a key pressed next must find it there.
export function close() {
  dialog.close();
  finish();
}

function finish() {
  leaving.abort();
  left(place);
}

export function onSimilar(find) {
  $("similar").addEventListener("click", () => {
    const { blob } = shown;
    close();
    find(new File([blob], pictures[place].name || "picture.jpg", { type: blob.type }));
  });
}

export function onClose(then) {
  left = then;
}

function facts(picture) {
  const day = new Date(picture.taken).toLocaleDateString(undefined, { dateStyle: "medium" });
  const parts = [`${picture.width} × ${picture.height}`, day, ...picture.tags];
  return parts.join(" · ");
}

async function show(index) {
  place = index;
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const picture = pictures[index];
  $("viewer-name").textContent = picture.name || "Picture";
  $("viewer-facts").textContent = facts(picture);
  $("viewer-text").textContent = picture.description || "";
  $("previous").disabled = index === 0;
  $("next").disabled = index === pictures.length - 1;
  $("viewer-notice").textContent = "Loading the picture …";
  $("similar").disabled = true;
  layer = null;
  $("why").hidden = true;
  clear(canvas);
  image.removeAttribute("src");
  reserve(picture);
  const explained = explain(signal);
  try {
    const blob = await pictureBlob(`/images/${picture.id}`, signal);
    if (signal.aborted) return;
    if (shown) URL.revokeObjectURL(shown.address);
    shown = { blob, address: URL.createObjectURL(blob) };
    image.src = shown.address;
    image.alt = picture.description || picture.name || "The opened picture";
    await image.decode();
    $("similar").disabled = false;
    if ($("viewer-notice").textContent.startsWith("Loading")) $("viewer-notice").textContent = "";
  } catch (error) {
    if (!signal.aborted) $("viewer-notice").textContent = sentence(error);
  }
  await explained;
  redraw();
}

// The picture takes its place before it is there: nothing jumps, and small ones are enlarged.
function reserve(picture) {
  const stage = dialog.querySelector(".stage");
  const style = getComputedStyle(stage);
  const wide = stage.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  const narrow = matchMedia("(max-width: 860px)").matches;
  const high = narrow
    ? window.innerHeight * 0.46
    : stage.clientHeight - parseFloat(style.paddingTop) - parseFloat(style.paddingBottom);
  const scale = Math.min(wide / picture.width, high / picture.height);
  image.style.width = `${Math.max(1, Math.floor(picture.width * scale))}px`;
  image.style.height = `${Math.max(1, Math.floor(picture.height * scale))}px`;
}

async function explain(signal) {
  if (!text) {
    $("viewer-notice").textContent = "";
    return;
  }
  const asked = new URLSearchParams({ id: pictures[place].id, text });
  try {
    const found = await askJson(`/explain?${asked}`, { signal });
    if (signal.aborted) return;
    layer = found;
    present();
  } catch (error) {
    if (!signal.aborted) $("viewer-notice").textContent = sentence(error);
  }
}

function present() {
  const names = Object.keys(layer.branches);
  if (!names.includes(branch)) branch = names[0];
  lit = null;
  $("score").textContent = layer.score.toFixed(3);
  presentWords();
  presentBranches(names);
  slider.max = layer.grid[0] * layer.grid[1];
  slider.value = layer.branches[branch].kept;
  presentSum();
  $("met").textContent = "";
  $("why").hidden = false;
  redraw();
}

function presentWords() {
  const largest = Math.max(...layer.words.map((word) => Math.abs(word.share)), 1e-9);
  $("words").replaceChildren(
    ...layer.words.map((word, number) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = word.text;
      button.setAttribute("aria-pressed", "false");
      button.setAttribute("aria-label", `${word.text}, adds ${word.share.toFixed(3)}`);
      const bar = document.createElement("i");
      bar.style.transform = `scaleX(${Math.max(0, word.share) / largest})`;
      button.append(bar);
      button.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && light(number));
      button.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && light(null));
      button.addEventListener("focus", () => button.matches(":focus-visible") && light(number));
      button.addEventListener("blur", () => light(null));
      button.addEventListener("click", () => light(number));
      return button;
    }),
  );
}

function presentBranches(names) {
  $("branches").hidden = names.length < 2;
  const titles = { sparse: "guided by your words", dense: "guided by the description" };
  $("branches").replaceChildren(
    ...names.map((name) => {
      const label = document.createElement("label");
      const radio = document.createElement("input");
      radio.type = "radio";
      radio.name = "branch";
      radio.checked = name === branch;
      radio.addEventListener("change", () => {
        branch = name;
        slider.value = layer.branches[name].kept;
        redraw();
      });
      label.append(radio, titles[name] || name);
      return label;
    }),
  );
}

function presentSum() {
  const rows = [
    ...layer.words.map((word) => [word.text, word.share]),
    ...Object.entries(layer.terms),
  ];
  const list = $("sum").querySelector("dl");
  list.replaceChildren();
  for (const [name, value] of [...rows, ["score", layer.score]]) {
    const term = document.createElement("dt");
    const number = document.createElement("dd");
    term.textContent = name;
    number.textContent = `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`;
    if (list.children.length === 2 * rows.length) {
      term.className = number.className = "total";
    }
    list.append(term, number);
  }
}

function light(number) {
  if (!layer) return;
  lit = number;
  [...$("words").children].forEach((button, index) =>
    button.setAttribute("aria-pressed", String(index === number)),
  );
  const word = number === null ? null : layer.words[number];
  const met = word?.description ? `, in the description “${word.description.word}”` : "";
  const token = word?.token.name === "rest" ? "the rest of the picture" : `token ${word?.token.name}`;
  $("met").textContent = word ? `“${word.text}” met ${token} (${word.token.affinity.toFixed(2)})${met}.` : "";
  redraw();
}

function redraw() {
  if (!layer || !dialog.open) return;
  const kept = Number(slider.value);
  $("kept-count").textContent = `${kept} of ${slider.max}`;
  slider.setAttribute("aria-valuetext", `${kept} of ${slider.max} patches`);
  if (lit === null) {
    drawKept(canvas, layer, branch, kept);
  } else {
    const strongest = Math.max(...layer.words.flatMap((word) => word.map), 1e-9);
    drawWord(canvas, layer, lit, Math.max(Math.max(...layer.words[lit].map), strongest / 3));
  }
}

slider.addEventListener("input", () => {
  lit = null;
  redraw();
});
$("close").addEventListener("click", close);
$("previous").addEventListener("click", () => show(place - 1));
$("next").addEventListener("click", () => show(place + 1));
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  text = $("ask-text").value.trim();
  $("viewer-notice").textContent = text ? "" : "Type a few words first.";
  if (text) explain(leaving.signal);
});
dialog.addEventListener("click", (event) => event.target === dialog && close());
dialog.addEventListener("cancel", (event) => {
  event.preventDefault();
  close();
});
// A browser may end a dialog without asking first.
dialog.addEventListener("close", () => dialog.open || leaving.signal.aborted || finish());
dialog.addEventListener("keydown", (event) => {
  if (event.target.matches("input")) return;
  if (event.key === "ArrowLeft" && place > 0) show(place - 1);
  if (event.key === "ArrowRight" && place < pictures.length - 1) show(place + 1);
});
window.addEventListener("resize", () => {
  if (!dialog.open) return;
  reserve(pictures[place]);
  redraw();
});

// The page: search by words or by a picture, show what was found, say what went wrong.

import { askJson, form, onClosed, sentence } from "./api.js";
import * as grid from "./grid.js";
import * as viewer from "./viewer.js";

const $ = (id) => document.getElementById(id);
const query = $("query");
const status = $("status");
const notice = $("notice");

let about = null;
let sample = null; // the picture that is searched by
let latest = new AbortController();
let again = start;

onClosed(async (wrong) => {
  const door = $("door");
  $("door-notice").textContent = wrong ? "This is not the token." : "";
  // Several requests may meet the closed door at once; it is opened once.
  if (!door.open) {
    $("token").value = "";
    door.showModal();
  }
  await new Promise((done) => door.addEventListener("close", done, { once: true }));
  return $("token").value.trim();
});
$("door").addEventListener("cancel", (event) => event.preventDefault());

function tell(title, text, { calm = false, retry = false } = {}) {
  notice.hidden = false;
  notice.classList.toggle("calm", calm);
  notice.querySelector("strong").textContent = title;
  notice.querySelector("p").textContent = text;
  notice.querySelector("button").hidden = !retry;
}

async function attempt(action) {
  latest.abort();
  latest = new AbortController();
  const { signal } = latest;
  notice.hidden = true;
  status.textContent = "Searching …";
  grid.showWaiting(12);
  try {
    await action(signal);
  } catch (error) {
    if (signal.aborted) return;
    status.textContent = "";
    grid.showPictures([], () => undefined);
    tell("That did not work", sentence(error), { retry: true });
  }
}

const pictures = (count) => `${count.toLocaleString()} picture${count === 1 ? "" : "s"}`;

function start() {
  again = start;
  return attempt(async (signal) => {
    about = await askJson("/gallery", { signal });
    $("size").textContent = pictures(about.pictures);
    $("add").hidden = !about.additions;
    query.maxLength = about.characters;
    if (!about.pictures) {
      status.textContent = "";
      grid.showPictures([], () => undefined);
      tell("No pictures yet", "Add some here, or index a folder: seps index PHOTOS GALLERY", { calm: true });
      return;
    }
    const found = await askJson("/images?count=24", { signal });
    if (signal.aborted) return;
    status.textContent = `A look at ${found.pictures.length} of ${pictures(about.pictures)}`;
    grid.showPictures(found.pictures, (place) => viewer.open(found.pictures, place, ""));
  });
}

async function present(asked, what, text, signal) {
  const found = await askJson("/search", { ...asked, signal });
  if (signal.aborted) return;
  const { results } = found;
  grid.showPictures(results, (place) => viewer.open(results, place, text));
  const time = found.milliseconds < 1000 ? `${Math.round(found.milliseconds)} ms` : `${(found.milliseconds / 1000).toFixed(1)} s`;
  status.textContent = results.length ? `${pictures(results.length)} for ${what}, in ${time}` : "";
  if (!results.length) tell("Nothing found", `There is no picture for ${what}.`, { calm: true });
}

function searchText(text) {
  again = () => searchText(text);
  document.title = `${text} – seps`;
  return attempt((signal) => {
    const asked = {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ text, k: 24 }),
    };
    return present(asked, `“${text}”`, text, signal);
  });
}

function searchPicture(file) {
  again = () => searchPicture(file);
  setSample(file);
  query.value = "";
  return attempt(async (signal) => {
    if (about && file.size > about.upload_bytes) {
      throw new Error(`This file is larger than the ${Math.round(about.upload_bytes / 2 ** 20)} MB allowed.`);
    }
    await present(form({ picture: file, k: 24 }), "your picture", "", signal);
  });
}

function setSample(file) {
  const image = $("sample").querySelector("img");
  if (sample) URL.revokeObjectURL(sample);
  sample = file ? URL.createObjectURL(file) : null;
  if (sample) image.src = sample;
  $("sample").hidden = !sample;
  query.placeholder = sample ? "Similar pictures" : "Describe a picture, or drop one here";
}

function go(text, remember) {
  setSample(null);
  query.value = text;
  query.setCustomValidity("");
  if (remember) history.pushState(null, "", text ? `/?q=${encodeURIComponent(text)}` : "/");
  if (text) return searchText(text);
  document.title = "seps: search pictures";
  return start();
}

async function add(files) {
  let done = 0;
  const wrong = [];
  for (const file of files) {
    status.textContent = `Adding ${done + wrong.length + 1} of ${files.length} …`;
    try {
      await askJson("/images", form({ picture: file }));
      done += 1;
    } catch (error) {
      wrong.push(`${file.name}: ${sentence(error)}`);
    }
  }
  await start();
  status.textContent = `${pictures(done)} added`;
  if (wrong.length) tell(`${pictures(wrong.length)} not added`, wrong.slice(0, 3).join(" "));
}

const firstPicture = (list) => [...(list || [])].find((file) => file.type.startsWith("image/"));

$("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = query.value.trim();
  if (text) return go(text, true);
  if (sample) return;
  query.setCustomValidity("Type a few words first, or drop a picture.");
  query.reportValidity();
});
query.addEventListener("input", () => query.setCustomValidity(""));
$("sample").querySelector("button").addEventListener("click", () => {
  go("", true);
  query.focus();
});
$("by-picture").addEventListener("click", () => $("picture").click());
$("picture").addEventListener("change", (event) => {
  const [file] = event.target.files;
  event.target.value = "";
  if (file) searchPicture(file);
});
$("add").addEventListener("click", () => $("addition").click());
$("addition").addEventListener("change", async (event) => {
  const files = [...event.target.files];
  event.target.value = "";
  if (files.length) await add(files);
});
notice.querySelector("button").addEventListener("click", () => again());
$("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
});

document.addEventListener("keydown", (event) => {
  if (viewer.isOpen() || $("door").open || event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.matches?.("input, textarea");
  if (event.key === "/" && !typing) {
    event.preventDefault();
    query.focus();
    query.select();
  } else if (event.key === "ArrowDown" && (event.target === query || event.target === document.body)) {
    event.preventDefault();
    grid.first()?.focus();
  } else if (event.key === "Escape" && event.target === query) {
    if (query.value) query.value = "";
    else query.blur();
  } else if (event.key === "Escape" && event.target.closest?.("#results")) {
    query.focus();
  }
});
grid.onTop(() => query.focus());
viewer.onClose((place) => grid.focusCard(place));
viewer.onSimilar(searchPicture);

let inside = 0; // dragenter and dragleave come for every element that is crossed
const carriesFiles = (event) => [...(event.dataTransfer?.types || [])].includes("Files");
document.addEventListener("dragenter", (event) => {
  if (!carriesFiles(event)) return;
  inside += 1;
  $("drop").classList.add("open");
});
document.addEventListener("dragleave", (event) => {
  if (!carriesFiles(event)) return;
  inside = Math.max(0, inside - 1);
  if (!inside) $("drop").classList.remove("open");
});
document.addEventListener("dragover", (event) => carriesFiles(event) && event.preventDefault());
document.addEventListener("drop", (event) => {
  if (!carriesFiles(event)) return;
  event.preventDefault();
  inside = 0;
  $("drop").classList.remove("open");
  const file = firstPicture(event.dataTransfer.files);
  if (!file) return tell("That is no picture", "Drop a JPEG, PNG, WebP or another picture file.");
  if (viewer.isOpen()) viewer.close();
  searchPicture(file);
});
document.addEventListener("paste", (event) => {
  const file = firstPicture(event.clipboardData?.files);
  if (!file) return;
  event.preventDefault();
  if (viewer.isOpen()) viewer.close();
  searchPicture(file);
});
window.addEventListener("popstate", () => go(new URLSearchParams(location.search).get("q") || "", false));

async function begin() {
  const text = (new URLSearchParams(location.search).get("q") || "").trim();
  if (!text) return start();
  query.value = text;
  await searchText(text);
  about = await askJson("/gallery").catch(() => null);
  if (!about) return undefined;
  $("size").textContent = pictures(about.pictures);
  $("add").hidden = !about.additions;
  return undefined;
}

begin();

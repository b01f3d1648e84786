"""The photographic part of the demonstration: the default model finds pictures and shows why."""

from __future__ import annotations

import ast
import time
from importlib.util import find_spec
from pathlib import Path

from seps.data.records import written_beside
from seps.demo.saying import say, title
from seps.explanation import draw, explain_stored
from seps.gallery import Gallery, Hit
from seps.gallery.descriptions import Said
from seps.gallery.rows import identify
from seps.model import DEFAULT, load

PHOTOGRAPHS = (
    *("astronaut.png", "brick.png", "camera.png", "cell.png", "chelsea.png", "clock_motion.png"),
    *("coffee.png", "coins.png", "grass.png", "gravel.png", "horse.png", "hubble_deep_field.jpg"),
    *("ihc.png", "microaneurysms.png", "retina.jpg", "rocket.jpg", "text.png"),
)
"""Pictures inside the package scikit-image whose documentation says CC0, public domain or no restrictions."""
QUESTIONS = {
    "a cat": "chelsea.png",
    "a cup of coffee": "coffee.png",
    "an astronaut": "astronaut.png",
    "a rocket": "rocket.jpg",
}
"""What is asked, and the picture that shows it."""


def find_photographs() -> list[Path]:
    """The files of the photographs; scikit-image itself is not imported, and fetches nothing."""
    found = find_spec("skimage")
    places = found.submodule_search_locations if found is not None else None
    if not places:
        raise ValueError(
            "photographs: expected the package scikit-image, found none (pip install 'seps[demo]')"
        )
    folder = Path(places[0]) / "data"
    paths = [folder / name for name in PHOTOGRAPHS if (folder / name).is_file()]
    missing = set(QUESTIONS.values()) - {path.name for path in paths}
    if missing:
        raise ValueError(f"{folder}: expected {min(missing)}, found none: another scikit-image?")
    return paths


def read_descriptions(folder: Path) -> dict[str, str]:
    """What scikit-image's documentation says is to be seen, by file name."""
    source = (folder / "_fetchers.py").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        said = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        if not said:
            continue
        # The title, and the paragraph below it unless a section of parameters or notes begins there.
        paragraphs = [" ".join(each.split()) for each in said.split("\n\n")[:2]]
        described = " ".join(each for each in paragraphs if "---" not in each)
        names = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
        found |= {
            Path(name).name: described for name in names if isinstance(name, str) and name.startswith("data/")
        }
    return found


def make_gallery(folder: Path) -> Gallery:
    """The gallery of the photographs, made or found; a name of its own for every model."""
    model, processor = load(DEFAULT)
    place = folder / f"gallery-{identify(model, processor)[:8]}"
    if place.exists():
        gallery = Gallery.open(place, model, processor)
    else:
        gallery = Gallery.create(place, model, processor, model_source=DEFAULT)
    paths, start = find_photographs(), time.perf_counter()
    described = read_descriptions(paths[0].parent)
    report = gallery.add(paths, said=lambda picture: Said(described.get(Path(picture.label).name)))
    say(f"{len(paths)} photographs, {report}, in {time.perf_counter() - start:.1f} s: {place}")
    return gallery


def lines_of(query: str, hits: list[Hit], right: str, seconds: float) -> str:
    """A question and its answers as text."""
    lines = [f'\n"{query}"  ({1000 * seconds:.0f} ms)']
    for place, hit in enumerate(hits, 1):
        sign = "  <- shows it" if hit.entry.name == right else ""
        lines.append(f"  {place}.  {hit.score:7.3f}  {hit.entry.name}{sign}")
    return "\n".join(lines)


def draw_why(gallery: Gallery, hit: Hit, query: str, folder: Path) -> Path:
    """The explanation of a result as a picture. -> its file"""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{query.replace(' ', '-')}.png"
    figure = draw(explain_stored(gallery, hit.id, query), gallery.picture(hit.id))
    with written_beside(path, "wb") as file:
        figure.save(file, "PNG")
    return path


def show_photographs(folder: Path, shown: int = 3) -> Gallery:
    """Index, ask every question, draw why; -> the gallery."""
    title("Real photographs: search by words, and see why")
    say(f"The default model, {DEFAULT}, and pictures that come with scikit-image; nothing is downloaded.")
    say("What its documentation says of a picture serves as the picture's description.")
    gallery = make_gallery(folder)
    for query, right in QUESTIONS.items():
        start = time.perf_counter()
        hits = gallery.search(query, shown)
        say(lines_of(query, hits, right, time.perf_counter() - start))
        say(f"  why: {draw_why(gallery, hits[0], query, folder / 'why')}")
    return gallery

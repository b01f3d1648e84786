"""Draws mini_failures.png: sentences that the default model answers wrongly on the demonstration's pictures.

Pixels alone, no descriptions. Each row is a sentence with the three pictures that come first; needs the
extras mini, demo, gallery and plots.
"""

import tempfile
from pathlib import Path

from matplotlib.figure import Figure

from seps.demo.photographs import find_photographs
from seps.gallery import Gallery
from seps.gallery.descriptions import Said
from seps.model import DEFAULT, load

QUERIES = {
    "an astronaut": "astronaut.png",
    "a rocket": "rocket.jpg",
    "cells under a microscope": "cell.png",
    "a woman in an orange suit": "astronaut.png",
}
"""What is asked, and the picture that shows it."""
TARGET = Path(__file__).parent / "mini_failures.png"


def draw(gallery: Gallery) -> Figure:
    """A row a sentence: the first three pictures, the right one named where it is not among them."""
    figure = Figure(figsize=(7.5, 2.3 * len(QUERIES)), layout="constrained")
    rows = figure.subplots(len(QUERIES), 3)
    for axes, (query, right) in zip(rows, QUERIES.items(), strict=True):
        hits = gallery.search(query, k=1000, exact=True)
        rank = 1 + [hit.entry.name for hit in hits].index(right)
        for place, (axis, hit) in enumerate(zip(axes, hits, strict=False)):
            asked = f'"{query}": {right} is number {rank}\n' if place == 0 else "\n"
            axis.imshow(gallery.picture(hit.id))
            axis.set_axis_off()
            axis.set_title(f"{asked}{hit.entry.name}  {hit.score:.2f}", fontsize=8, loc="left")
    return figure


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        gallery = Gallery.create(f"{folder}/gallery", *load(DEFAULT))
        gallery.add(find_photographs(), said=lambda _: Said())
        draw(gallery).savefig(TARGET, dpi=80)
    print(TARGET)


if __name__ == "__main__":
    main()

"""Rank lists as pictures: a query, what was found, and which patches of each modality were kept."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from seps.data.images import to_image
from seps.data.records import Problems, written_beside
from seps.distributed import choose_device
from seps.reid.data import NO_SCENE, Sighting, opening
from seps.reid.loading import Examples, batches, in_order
from seps.reid.measure import describe_all, distances_of, removed
from seps.reid.model import KINDS, ReIdModel, load
from seps.reid.report import open_split
from seps.reid.sources import SightingOptions

logger = logging.getLogger(__name__)

RIGHT, WRONG, ASKED, EMPTY = (46, 160, 67), (207, 54, 54), (60, 60, 60), (232, 232, 232)
FRAME, GAP, LINE = 4, 6, 13
DIMMED = 0.25
"""How much of a dropped patch's colour is left."""


@dataclass(frozen=True)
class RankOptions:
    """Draw rank lists with the kept patches: `seps reid rank runs/reid/best ranks --data.folder RGBNT201`.

    Without a folder, of the built-in people. Writes a PNG a query: the query, then its nearest answers with
    their distance, identity and camera, framed green if right and red if wrong; a row a modality, dropped
    patches darkened.
    """

    model: str
    """The model's folder: best/ of its run."""
    output: str
    """The folder for the pictures."""
    data: SightingOptions = field(default_factory=SightingOptions)
    """The data."""
    split: Literal["test", "dev"] = "test"
    """The test set, or the identities that training held out (with its dev_share and dev_seed)."""
    protocol: Literal["auto", "camera", "scene"] = "auto"
    """What is removed before ranking beside a query's own identity; auto is the dataset's own."""
    queries: int = 8
    """How many queries, spread over all of them."""
    names: tuple[str, ...] = ()
    """The queries by name instead, such as '[000258_cam1_0_01.jpg]'."""
    depth: int = 8
    """How many answers are shown."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""

    def __post_init__(self) -> None:
        if self.queries < 1 or self.depth < 1:
            raise ValueError(
                f"queries, depth: expected at least 1 of both, found {self.queries} and {self.depth}"
            )


@dataclass(frozen=True)
class Shown:
    """A sighting as the model saw it: pictures of every modality there, dropped patches dimmed."""

    sighting: Sighting
    pictures: Mapping[str, Image.Image]


def run(options: RankOptions) -> int:
    """`seps reid rank`."""
    model = load(options.model).to(choose_device(options.device))
    dataset, protocol = open_split(options.data, options.split, options.protocol)
    chosen = choose(dataset.query, options.names, options.queries)
    problems = opening(dataset, options.data.broken)
    gallery = describe_all(
        model, dataset.gallery, workers=options.data.workers, problems=problems, title="gallery"
    )
    own = model.config.features
    place = Path(options.output)
    place.mkdir(parents=True, exist_ok=True)
    for query in chosen:
        vector = describe_all(model, [query], problems=problems, title=query.name)[own, ()]
        distances = distances_of(vector, gallery[own, ()])[0]
        distances[removed(query, dataset.gallery, protocol)] = torch.inf
        nearest = distances.argsort()[: options.depth].tolist()
        found = [dataset.gallery[i] for i in nearest if torch.isfinite(distances[i])]
        picture = draw_rank_list(show(model, [query, *found], problems), distances[nearest])
        with written_beside(place / f"{Path(query.name).stem}.png", "wb") as file:
            picture.save(file, "png")
    logger.info("%d rank lists: %s", len(chosen), place)
    if problems:
        logger.info("%d left out, named above", len(problems))
    return 0


def choose(query: Sequence[Sighting], names: Sequence[str], count: int) -> list[Sighting]:
    """The queries of some names, or so many of them, evenly spread."""
    if not names:
        places = np.unique(np.linspace(0, len(query) - 1, min(count, len(query))).round().astype(int))
        return [query[i] for i in places.tolist()]
    known = {sighting.name: sighting for sighting in query}
    for name in names:
        if name not in known:
            raise ValueError(f"names: expected queries such as {query[0].name}, found {name!r}")
    return [known[name] for name in names]


@torch.no_grad()
def show(model: ReIdModel, sightings: Sequence[Sighting], problems: Problems | None = None) -> list[Shown]:
    """The pictures of sightings; dropped patches are dimmed where slimmed features are compared."""
    examples = Examples(sightings, model.config.modalities, model.view)
    batch = next(batches(examples, in_order(len(sightings), len(sightings)), problems=problems))
    device = next(model.eval().parameters()).device
    encoded = model.encode(
        {name: pixels.to(device) for name, pixels in batch.pixels.items()}, batch.cameras.to(device)
    )
    present = {name: here.to(device) for name, here in batch.present.items()}
    slim = model.describe(encoded, present).slim
    slimmed = "slimmed" in KINDS[model.config.features]

    def picture(name: str, row: int) -> Image.Image:
        seen = to_image(batch.pixels[name][row], model.view)
        return dim(seen, slim[name].kept[row], model) if slimmed else seen

    return [
        Shown(
            sighting,
            {name: picture(name, row) for name in model.config.modalities if bool(batch.present[name][row])},
        )
        for row, sighting in enumerate(sightings)
    ]


def dim(picture: Image.Image, kept: Tensor, model: ReIdModel) -> Image.Image:
    """The picture with its dropped patches darkened. kept (N,)"""
    grid = kept.cpu().view(model.encoder.grid).numpy().astype(np.float32)
    light = Image.fromarray(DIMMED + (1 - DIMMED) * grid).resize(picture.size, Image.Resampling.NEAREST)
    values = np.asarray(picture, dtype=np.float32) * np.asarray(light)[..., None]
    return Image.fromarray(values.round().astype(np.uint8))


def caption(sighting: Sighting, place: int, distances: Tensor) -> tuple[str, str]:
    """What stands over a sighting of a rank list: place and distance; identity, camera and scene."""
    first = "query" if place == 0 else f"{place}: {float(distances[place - 1]):.2f}"
    scene = "" if sighting.scene == NO_SCENE else f" s{sighting.scene}"
    return first, f"{sighting.identity} c{sighting.camera}{scene}"


def draw_rank_list(shown: Sequence[Shown], distances: Tensor) -> Image.Image:
    """The query first, then the answers, nearest first, framed by right and wrong; a row a modality."""
    modalities = list(dict.fromkeys(name for each in shown for name in each.pictures))
    width, height = next(picture.size for each in shown for picture in each.pictures.values())
    font = ImageFont.load_default()
    margin = GAP + max(round(font.getlength(name)) for name in modalities)
    captions = [caption(each.sighting, place, distances) for place, each in enumerate(shown)]
    widest = max(round(font.getlength(line)) for lines in captions for line in lines)
    column = max(width + 2 * FRAME, widest) + GAP
    row, head = height + 2 * FRAME + GAP, 2 * LINE + GAP
    size = (margin + GAP + len(shown) * column, head + len(modalities) * row)
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for line, name in enumerate(modalities):
        pen.text((GAP, head + line * row + FRAME), name, fill=ASKED, font=font)
    for place, each in enumerate(shown):
        left = margin + GAP + place * column
        right = each.sighting.identity == shown[0].sighting.identity
        colour = ASKED if place == 0 else RIGHT if right else WRONG
        for line, text in enumerate(captions[place]):
            pen.text((left, 2 + line * LINE), text, fill=colour, font=font)
        for line, name in enumerate(modalities):
            top = head + line * row
            box = (left, top, left + width + 2 * FRAME - 1, top + height + 2 * FRAME - 1)
            pen.rectangle(box, fill=EMPTY, outline=colour, width=FRAME)
            if name in each.pictures:
                sheet.paste(each.pictures[name], (left + FRAME, top + FRAME))
            else:
                pen.text((left + 2 * FRAME, top + 2 * FRAME), "absent", fill=ASKED, font=font)
    return sheet

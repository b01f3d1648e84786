"""The built-in data: drawn scenes with captions, dense texts, near-twins, and the truth of what is where."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from seps.data import drawing, wording
from seps.data.layouts import json_object, read_jsonl
from seps.data.records import Problems, Record, written_beside
from seps.data.things import Change, Scene, Twin, compose, twin
from seps.data.wording import Mention, Sentence

SMALLEST = 16
"""Pixels a side of the smallest scene."""
FIRST_INDEX = {"train": 0, "dev": 1_000_000, "test": 2_000_000}
"""Every split draws from its own stretch of a seed's scenes: none shares a scene with another."""


@dataclass(frozen=True)
class Truth:
    """What is where in a scene, and which words name it."""

    scene: Scene
    captions: tuple[Sentence, ...]
    dense: Sentence

    def coverage(self, rows: int, cols: int) -> np.ndarray:
        """Which share of every patch shows each thing -> (things, rows, cols)."""
        return drawing.coverage(self.scene, rows, cols)

    def cells(self, rows: int, cols: int, least: float = 0.2) -> np.ndarray:
        """Which patches show each thing on so much of their area or more -> (things, rows, cols)."""
        return self.coverage(rows, cols) >= least


def truth_of(scene: Scene) -> Truth:
    """The truth of a scene, from the scene itself."""
    return Truth(scene, wording.captions(scene), wording.dense_text(scene))


@dataclass(frozen=True)
class Scenes:
    """Scenes of a seed as a source of records: drawn when opened, no file needed."""

    count: int
    seed: int = 0
    split: str = "train"
    size: int = 128
    least: int = 3
    most: int = 6

    def __post_init__(self) -> None:
        if self.split not in FIRST_INDEX:
            raise ValueError(f"scenes have the splits {', '.join(FIRST_INDEX)}, not {self.split!r}")
        if not 1 <= self.count <= FIRST_INDEX["dev"]:
            raise ValueError(f"count must lie in 1 to {FIRST_INDEX['dev']}, not {self.count}")
        if self.size < SMALLEST:
            raise ValueError(f"a scene needs at least {SMALLEST} pixels a side, not {self.size}")
        compose(self.seed, 0, self.least, self.most)

    def __len__(self) -> int:
        return self.count

    def scene(self, index: int) -> Scene:
        """What scene `index` of the split consists of."""
        if not 0 <= index < self.count:
            raise IndexError(f"scene {index} of {self.count}")
        return _composed(self.seed, FIRST_INDEX[self.split] + index, self.least, self.most)

    def __getitem__(self, index: int, /) -> Record:
        truth = truth_of(self.scene(index))
        return Record(
            image=Path(image_name(self.split, index)),
            captions=tuple(sentence.text for sentence in truth.captions),
            dense=truth.dense.text,
            split=self.split,
            image_id=f"{self.split}-{index}",
            source=f"scenes of seed {self.seed}:{index + 1}",
        )

    def open(self, index: int) -> Image.Image:
        """The picture of a scene."""
        return drawing.draw(self.scene(index), self.size)

    def truth(self, index: int) -> Truth:
        """What is where in a scene, and which words name it."""
        return truth_of(self.scene(index))

    def twin(self, index: int, caption: int, change: Change | None = None) -> Twin:
        """The near-twin of a scene of which one caption is untrue: always the same one."""
        generator = np.random.default_rng([self.seed, FIRST_INDEX[self.split] + index, 1 + caption])
        return twin(self.scene(index), caption, generator, change)


@lru_cache(maxsize=4096)
def _composed(seed: int, index: int, least: int, most: int) -> Scene:
    return compose(seed, index, least, most)


def image_name(split: str, index: int) -> str:
    """Where `write` puts a scene's picture."""
    return f"images/{split}-{index:06d}.png"


def write(
    folder: str | PathLike[str],
    counts: Mapping[str, int],
    seed: int = 0,
    size: int = 128,
    advance: Callable[[], None] = lambda: None,
) -> None:
    """Writes scenes as a plain data folder: images/, captions.jsonl, and truth.jsonl beside it.

    Pictures that are there already are kept, so a broken run goes on where it stopped and a larger count only
    adds; captions.jsonl comes last, so a half-written folder is not taken for data. `advance` is called once
    a scene.
    """
    if not counts:
        raise ValueError("scenes need a count for at least one split, found none")
    parts = [Scenes(count, seed, split, size) for split, count in counts.items()]
    place = Path(folder)
    _claim(place, {"seed": seed, "size": size})
    (place / "images").mkdir(exist_ok=True)
    for part in parts:
        for index in range(len(part)):
            image = place / image_name(part.split, index)
            if not image.is_file():
                with written_beside(image, "wb") as file:
                    part.open(index).save(file, "png", compress_level=4)
            advance()
    with written_beside(place / "truth.jsonl") as file:
        for part in parts:
            for index in range(len(part)):
                file.write(json.dumps(_truth_line(part, index)) + "\n")
    with written_beside(place / "captions.jsonl") as file:
        for part in parts:
            for index in range(len(part)):
                record = part[index]
                line = {"image": record.image.as_posix(), "captions": record.captions}
                file.write(json.dumps({**line, "dense": record.dense, "split": record.split}) + "\n")


def read_truth(folder: str | PathLike[str]) -> dict[str, Truth]:
    """The truth that `write` put beside its captions, by the image name of captions.jsonl."""
    file = Path(folder) / "truth.jsonl"
    if not file.is_file():
        raise ValueError(f"{file}: missing, so nothing is known of what is where in these pictures")
    truths = {}
    for number, entry in read_jsonl(file, Problems("refuse"), json_object):
        line = entry or {}
        try:
            truths[line["image"]] = Truth(
                Scene.from_dict(line["scene"]),
                tuple(_sentence(sentence) for sentence in line["captions"]),
                _sentence(line["dense"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file}:{number}: not the truth of a scene ({error})") from None
    return truths


def _truth_line(part: Scenes, index: int) -> dict[str, Any]:
    truth = part.truth(index)

    def plain(sentence: Sentence) -> dict[str, Any]:
        mentions = [[mention.start, mention.end, mention.thing] for mention in sentence.mentions]
        return {"text": sentence.text, "mentions": mentions}

    return {
        "image": image_name(part.split, index),
        "scene": truth.scene.to_dict(),
        "captions": [plain(sentence) for sentence in truth.captions],
        "dense": plain(truth.dense),
    }


def _sentence(values: Mapping[str, Any]) -> Sentence:
    return Sentence(values["text"], tuple(Mention(*mention) for mention in values["mentions"]))


def _claim(place: Path, settings: dict[str, int]) -> None:
    """Notes what a folder's scenes are drawn from, and refuses to mix two kinds in one folder."""
    file = place / "scenes.json"
    if file.is_file():
        try:
            known = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file}: not valid JSON ({error})") from None
        if known != settings:
            raise ValueError(f"{place}: holds scenes of {known}, not of {settings}; choose another folder")
        return
    if (place / "captions.jsonl").exists():
        raise ValueError(f"{place}: holds captions.jsonl of other data; choose another folder")
    place.mkdir(parents=True, exist_ok=True)
    with written_beside(file) as out:
        json.dump(settings, out)

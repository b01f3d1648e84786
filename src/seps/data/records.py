"""What a reader hands on: records of images with their texts, and the account of what was broken."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal, Protocol

import numpy as np
from PIL import Image

from seps.data.images import open_image

logger = logging.getLogger(__name__)

Broken = Literal["refuse", "skip"]
OS_ERROR = re.compile(r"\(os error (\d+)\)")
SHOWN = 5
"""Skipped items that a summary names."""


@dataclass(frozen=True)
class Record:
    """One image with its sparse captions and, where there is one, its dense text; `source` is file:line."""

    image: Path
    captions: tuple[str, ...]
    dense: str | None
    split: str
    image_id: str
    source: str


@dataclass(frozen=True)
class Problem:
    """One broken item: where it stands and what is wrong with it."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass
class Problems:
    """Refuses a broken item with one sentence, or notes it once and lets the caller go on without it."""

    broken: Broken = "refuse"
    items: list[Problem] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.broken not in ("refuse", "skip"):
            raise ValueError(f"broken must be 'refuse' or 'skip', not {self.broken!r}")

    def meet(self, where: str, what: str) -> None:
        """Raises ValueError when broken items are refused; otherwise notes this one."""
        problem = Problem(where, what)
        if self.broken == "refuse":
            raise ValueError(str(problem))
        if problem not in self.items:
            self.items.append(problem)
            logger.warning("skipped: %s", problem)

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Problem]:
        return iter(self.items)

    def __bool__(self) -> bool:
        return bool(self.items)

    def summary(self) -> str:
        """One line for the end of a run: how many items were skipped, and the first of them."""
        if not self.items:
            return "nothing was skipped"
        first = "; ".join(str(item) for item in self.items[:SHOWN])
        more = len(self.items) - SHOWN
        return f"{len(self.items)} skipped: {first}" + (f"; and {more} more" if more > 0 else "")


class Source(Protocol):
    """Anything that holds records and can open their images: a Collection of files, or Scenes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Record: ...

    def open(self, index: int) -> Image.Image:
        """The image of a record as RGB."""
        ...


@dataclass(frozen=True)
class Collection:
    """The records of one split, in the order of their files, with the account of what was skipped."""

    records: tuple[Record, ...]
    layout: str = "records"
    problems: Problems = field(default_factory=Problems, compare=False)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int, /) -> Record:
        return self.records[index]

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def open(self, index: int) -> Image.Image:
        """The image of a record as RGB; ValueError names the file that cannot be read."""
        return open_image(self.records[index].image)

    @property
    def described(self) -> int:
        """How many records carry a dense text."""
        return sum(record.dense is not None for record in self.records)


def divide(collection: Collection, shares: Mapping[str, float], seed: int = 0) -> dict[str, Collection]:
    """Splits records by a hash of their image id: an image keeps its split when others come or go."""
    if not shares or any(share <= 0 for share in shares.values()) or abs(sum(shares.values()) - 1) > 1e-6:
        raise ValueError(f"shares must be positive and add up to 1, not {dict(shares)}")
    parts: dict[str, list[Record]] = {name: [] for name in shares}
    for record in collection:
        digest = hashlib.blake2b(f"{seed}:{record.image_id}".encode(), digest_size=8).digest()
        place = int.from_bytes(digest) / 2**64
        bounds = np.cumsum(list(shares.values()))
        name = list(shares)[min(int(np.searchsorted(bounds, place, side="right")), len(shares) - 1)]
        parts[name].append(replace(record, split=name))
    layout, problems = collection.layout, collection.problems
    return {name: Collection(tuple(part), layout, problems) for name, part in parts.items()}


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """What the system refuses while something is written becomes an OSError that names the place.

    A write tells no place of its own, and libraries in Rust tell the system's number in words alone.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(place)
        raise
    except Exception as error:
        told = OS_ERROR.search(str(error))
        if told is None:
            raise
        number = int(told.group(1))
        raise OSError(number, os.strerror(number), str(place)) from error


@contextmanager
def written_beside(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """A file to write that takes the place of `path` only once it is complete."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with writing(path), beside.open(mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def folder_beside(place: Path) -> Iterator[Path]:
    """A folder to fill that takes the place of an empty or missing one only once it is complete."""
    place = place.absolute()
    beside = place.with_name(f".{place.name}.{os.getpid()}.part")
    beside.mkdir(parents=True)
    try:
        with writing(place):
            yield beside
        beside.replace(place)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def require_vacant(option: str, place: Path) -> None:
    """Refuse to write a folder over what is already there."""
    if place.exists() and any(place.iterdir() if place.is_dir() else [place]):
        raise ValueError(f"{option}: expected a folder that is empty or not there yet, found {place}")

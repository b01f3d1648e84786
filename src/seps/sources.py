"""Where images and texts come from, as options: a folder of any known layout, or the built-in scenes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from seps.data.layouts import SAME_SPLIT, read
from seps.data.loader import Held
from seps.data.records import Broken, Record, Source
from seps.data.scenes import SMALLEST, Scenes, Truth, read_truth

SCENES = "scenes"
"""The name of the built-in data where a folder is expected."""


@dataclass(frozen=True)
class SceneOptions:
    """The built-in scenes."""

    train: int = 2000
    """How many to train on."""
    dev: int = 200
    """How many to choose the best epoch on."""
    test: int = 500
    """How many to measure on."""
    seed: int = 0
    """What they are drawn from."""
    size: int = 128
    """Side in pixels."""

    def __post_init__(self) -> None:
        for name, least in (("train", 1), ("dev", 1), ("test", 1), ("seed", 0), ("size", SMALLEST)):
            if getattr(self, name) < least:
                raise ValueError(f"scenes.{name}: expected at least {least}, found {getattr(self, name)}")


@dataclass(frozen=True)
class ReadOptions:
    """How data is read."""

    dense: str | None = None
    """A JSONL of descriptions, where the folder has none of its own."""
    images: str | None = None
    """The folder of the pictures, where they are not beside their captions."""
    captions_per_image: int | None = None
    """Captions of an image that count, the first ones; COCO's protocol counts 5."""
    limit: int | None = None
    """Images of a split that count, the first ones."""
    broken: Broken = "refuse"
    """Stop at a broken line or image, or skip and count it."""
    scenes: SceneOptions = field(default_factory=SceneOptions)
    """What "scenes" draws."""

    def __post_init__(self) -> None:
        for name in ("limit", "captions_per_image"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")


def open_source(folder: str, options: ReadOptions, split: str, limit: int | None = None) -> Source:
    """The records of a split of a data folder in any known layout, or of the built-in "scenes"."""
    most = options.limit if limit is None else limit
    if folder == SCENES:
        for name in ("dense", "images", "captions_per_image"):
            if getattr(options, name) is not None:
                raise ValueError(
                    f"{name}: expected none, since scenes are drawn with their texts, "
                    f"found {getattr(options, name)!r}"
                )
        split = SAME_SPLIT.get(split, split)
        counts = {"train": options.scenes.train, "dev": options.scenes.dev, "test": options.scenes.test}
        if split not in counts:
            raise ValueError(f"split: expected one of {', '.join(counts)} of the scenes, found {split!r}")
        count = min(counts[split], most or counts[split])
        return Held(Scenes(count, options.scenes.seed, split, options.scenes.size))
    return read(
        folder,
        split,
        most,
        options.broken,
        options.captions_per_image,
        options.dense,
        options.images,
    )


@dataclass(frozen=True)
class Joined:
    """Several sources, one behind the other."""

    sources: tuple[Source, ...]

    def __len__(self) -> int:
        return sum(len(source) for source in self.sources)

    def __getitem__(self, index: int, /) -> Record:
        source, place = self._find(index)
        return source[place]

    def open(self, index: int) -> Image.Image:
        """The image of a record as RGB."""
        source, place = self._find(index)
        return source.open(place)

    def _find(self, index: int) -> tuple[Source, int]:
        place = index
        for source in self.sources:
            if 0 <= place < len(source):
                return source, place
            place -= len(source)
        raise IndexError(f"index: expected 0 to {len(self) - 1}, found {index}")


def open_joined(folders: Sequence[str], options: ReadOptions, split: str) -> Source:
    """The records of a split of every folder, one folder behind the other."""
    sources = tuple(open_source(folder, options, split) for folder in folders)
    return sources[0] if len(sources) == 1 else Joined(sources)


def count_described(source: Source) -> int:
    """How many records carry a dense text."""
    return sum(source[index].dense is not None for index in range(len(source)))


def truths_of(source: Source, indices: Sequence[int], folder: str) -> list[Truth] | None:
    """What is where in the pictures of some records, None where nobody knows."""
    inner = source.source if isinstance(source, Held) else source
    if isinstance(inner, Scenes):
        return [inner.truth(index) for index in indices]
    place = Path(folder)
    if not (place.is_dir() and (place / "truth.jsonl").is_file()):
        return None
    known = read_truth(place)
    names = [_name_in(place, source[index]) for index in indices]
    return [known[name] for name in names] if all(name in known for name in names) else None


def _name_in(place: Path, record: Record) -> str:
    try:
        return record.image.relative_to(place).as_posix()
    except ValueError:
        return record.image.name


def refuse_shared(train: Source, dev: Source) -> None:
    """The best epoch is not chosen on what was trained on."""
    trained = {train[index].image for index in range(len(train))}
    shared = next((dev[i].image for i in range(len(dev)) if dev[i].image in trained), None)
    if shared is not None:
        raise ValueError(f"dev: expected images that training does not see, found {shared} in both")

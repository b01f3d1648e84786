"""Who was seen where: sightings in aligned modalities, and the readers of three public datasets."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from PIL import Image

from seps.data.images import UNREADABLE, open_image
from seps.data.records import Problem, Problems
from seps.modalities import RGB_NIR_TIR

Protocols = Literal["camera", "scene"]
Broken = Literal["refuse", "skip", "absent"]
BROKEN = ("refuse", "skip", "absent")
Split = Literal["train", "query", "gallery"]
SPLITS: tuple[Split, ...] = ("train", "query", "gallery")
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp")
REMEDY = 'broken "skip" goes on without such sightings, "absent" only without a modality that is missing'
ABSENT = "that modality counts as absent"
NO_SCENE = -1
"""The scene of a dataset that knows none."""


class Picture(Protocol):
    """One modality of a sighting."""

    def open(self) -> Image.Image:
        """The picture as RGB."""
        ...


@dataclass(frozen=True)
class FilePicture:
    """A picture in a file, or one of the tiles that stand side by side in it."""

    path: Path
    tile: int | None = None
    tiles: int = 1

    def open(self) -> Image.Image:
        """The picture as RGB; ValueError names the file that cannot be read."""
        image = open_image(self.path)
        if self.tile is None:
            return image
        width = image.width // self.tiles
        return image.crop((self.tile * width, 0, (self.tile + 1) * width, image.height))


@dataclass(frozen=True)
class Sighting:
    """One identity seen once by one camera; a modality without an entry in pictures is absent."""

    identity: int
    camera: int
    scene: int
    name: str
    pictures: Mapping[str, Picture]


@dataclass(frozen=True)
class Dataset:
    """Sightings to train on, queries and the gallery; what the protocol removes before ranking.

    size is (height, width) of a picture as published; problems tells what was left out.
    """

    name: str
    train: tuple[Sighting, ...]
    query: tuple[Sighting, ...]
    gallery: tuple[Sighting, ...]
    protocol: Protocols
    size: tuple[int, int]
    modalities: tuple[str, ...] = RGB_NIR_TIR
    problems: Problems = field(default_factory=Problems, compare=False)


@dataclass(frozen=True)
class Account:
    """What was broken, and what to do about it: refuse, skip the sighting, or take the modality as absent."""

    broken: Broken
    items: list[Problem] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.broken not in BROKEN:
            raise ValueError(f"broken: expected one of {', '.join(BROKEN)}, found {self.broken!r}")

    def meet(self, where: object, what: str) -> None:
        """Note a broken item."""
        self.items.append(Problem(str(where), what))

    def settle(self) -> Problems:
        """What is left out; ValueError names the first and counts the others when they are refused."""
        if self.items and self.broken == "refuse":
            others = f", and {len(self.items) - 1} more" if len(self.items) > 1 else ""
            raise ValueError(f"{self.items[0]}{others}; {REMEDY}")
        problems = Problems("skip")
        for item in self.items:
            problems.meet(item.where, item.what)
        return problems


def read(
    folder: Path | str, layout: str = "auto", broken: Broken = "refuse", splits: Sequence[Split] = SPLITS
) -> Dataset:
    """A dataset of one of the known layouts, recognised by its folders unless it is named.

    broken: a modality file missing, a picture of the wrong size, a name that does not fit, an identity seen
    once only: "refuse" it, "skip" the sighting, or, for a missing file, take that modality as "absent".
    splits: what is read; the others stay empty, and may be missing from the folder.
    """
    place = Path(folder)
    if not place.is_dir():
        raise ValueError(f"{place}: there is no such folder")
    if layout == "auto":
        found = [name for name, each in LAYOUTS.items() if (place / each.marker).is_dir()]
        if len(found) != 1:
            markers = ", ".join(f"{each.marker}/ ({name})" for name, each in LAYOUTS.items())
            raise ValueError(f"{place}: expected one of the folders {markers}, found {len(found)} of them")
        layout = found[0]
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected auto or one of {', '.join(LAYOUTS)}, found {layout!r}")
    known, account = LAYOUTS[layout], Account(broken)
    folders = {split: place / known.folders[split] for split in splits}
    every = {path: known.read(path, account) for path in dict.fromkeys(folders.values())}
    train, query, gallery = (every[folders[split]] if split in folders else () for split in SPLITS)
    train = refuse_lone(train, account)
    problems = account.settle()
    for path, sightings in every.items():
        if not sightings:
            raise ValueError(f"{path}: expected pictures in the layout of {layout}, found none")
    return Dataset(layout, train, query, gallery, known.protocol, known.size, problems=problems)


def opening(dataset: Dataset, broken: Broken) -> Problems:
    """The dataset's account while its pictures are opened: an unreadable one is refused, or noted there."""
    return Problems("refuse" if broken == "refuse" else "skip", dataset.problems.items)


def _read_rgbnt201(base: Path, account: Account) -> tuple[Sighting, ...]:
    """RGB, NI and TI side by side; 000205_cam2_0_02.jpg: identity, camera."""
    folders = {"rgb": "RGB", "nir": "NI", "tir": "TI"}
    sightings = []
    for file in _names(base / part for part in folders.values()):
        fields = file.split("_")
        if not (re.match(r"\d{6}", file) and len(fields) > 1 and fields[1][3:4].isdigit()):
            account.meet(base / file, "expected a name such as 000205_cam2_0_02.jpg")
            continue
        paths = {modality: base / part / file for modality, part in folders.items()}
        sighting = _sighting(int(file[:6]), int(fields[1][3]), NO_SCENE, base / file, paths, account)
        sightings += [sighting] if sighting else []
    return tuple(sightings)


def _read_rgbnt100(base: Path, account: Account) -> tuple[Sighting, ...]:
    """One jpg of three tiles side by side, 768 x 128 in all; 0539_c0001_009.jpg: identity, camera."""
    size = (768, 128)
    sightings = []
    for path in _pictures(base):
        fields = re.match(r"(-?\d+)_c(\d+)", path.name)
        if fields is None:
            account.meet(path, "expected a name such as 0539_c0001_009.jpg")
            continue
        identity = int(fields[1])
        if identity < 0:  # distractors that the dataset itself marks as junk
            continue
        found = picture_size(path)
        if found != size:
            what = found if isinstance(found, str) else f"found {found[0]}x{found[1]}"
            account.meet(path, f"expected three tiles of 256x128 side by side, {size[0]}x{size[1]}, {what}")
            continue
        tiles = {name: FilePicture(path, i, 3) for i, name in enumerate(RGB_NIR_TIR)}
        sightings.append(Sighting(identity, int(fields[2]), NO_SCENE, path.name, tiles))
    return tuple(sightings)


def _read_msvr310(base: Path, account: Account) -> tuple[Sighting, ...]:
    """A folder an identity with vis, ni and th; 0268_s000_v0_000.jpg: identity, scene, view."""
    folders = {"rgb": "vis", "nir": "ni", "tir": "th"}
    sightings = []
    for place in sorted(path for path in base.glob("*") if path.is_dir()):
        for file in _names(place / part for part in folders.values()):
            fields = re.match(r"(\d{4})_s(\d{3})_v(\d)", file)
            if fields is None:
                account.meet(place / file, "expected a name such as 0268_s000_v0_000.jpg")
                continue
            identity, scene, view = (int(each) for each in fields.groups())
            paths = {modality: place / part / file for modality, part in folders.items()}
            sighting = _sighting(identity, view, scene, place / file, paths, account)
            sightings += [sighting] if sighting else []
    return tuple(sightings)


@dataclass(frozen=True)
class Layout:
    """How a dataset lies: the folder that tells it, those of its splits, and the reader of one of them."""

    marker: str
    folders: Mapping[Split, str]
    protocol: Protocols
    size: tuple[int, int]
    read: Callable[[Path, Account], tuple[Sighting, ...]]


LAYOUTS: dict[str, Layout] = {
    "RGBNT201": Layout(
        "train_171",
        {"train": "train_171", "query": "test", "gallery": "test"},  # the test set queries itself
        "camera",
        (256, 128),
        _read_rgbnt201,
    ),
    "RGBNT100": Layout(
        "rgbir",
        {
            "train": "rgbir/bounding_box_train",
            "query": "rgbir/query",
            "gallery": "rgbir/bounding_box_test",
        },
        "camera",
        (128, 256),
        _read_rgbnt100,
    ),
    "MSVR310": Layout(
        "query3",
        {"train": "bounding_box_train", "query": "query3", "gallery": "bounding_box_test"},
        "scene",
        (128, 256),
        _read_msvr310,
    ),
}


def _pictures(folder: Path) -> list[Path]:
    """The pictures of a folder, in order."""
    return sorted(
        path for path in folder.glob("*") if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
    )


def _names(folders: Iterable[Path]) -> list[str]:
    """Names of the pictures that stand in any of some folders, in order."""
    return sorted({path.name for folder in folders for path in _pictures(folder)})


def _sighting(
    identity: int, camera: int, scene: int, where: Path, paths: Mapping[str, Path], account: Account
) -> Sighting | None:
    """A sighting whose modalities stand in files of their own; None if it is to be skipped."""
    missing = [modality for modality, path in paths.items() if not path.is_file()]
    outcome = f"; {ABSENT}" if account.broken == "absent" else ""
    for modality in missing:
        what = f"expected its {modality} picture {paths[modality]}, found no such file{outcome}"
        account.meet(where, what)
    if missing and account.broken != "absent":
        return None
    pictures: dict[str, Picture] = {
        modality: FilePicture(path) for modality, path in paths.items() if modality not in missing
    }
    return Sighting(identity, camera, scene, where.name, pictures)


def picture_size(path: Path) -> tuple[int, int] | str:
    """Width and height from a file's header, or what is wrong with it."""
    try:
        with Image.open(path) as image:
            return image.size
    except UNREADABLE as error:
        return f"found a file that is no readable image ({error})"


def refuse_lone(sightings: Sequence[Sighting], account: Account) -> tuple[Sighting, ...]:
    """The sightings without identities seen once only: nothing can be learned from a single picture."""
    counts = Counter(sighting.identity for sighting in sightings)
    for sighting in sightings:
        if counts[sighting.identity] == 1:
            account.meet(
                sighting.name, f"expected at least two pictures of identity {sighting.identity}, found one"
            )
    return tuple(sighting for sighting in sightings if counts[sighting.identity] > 1)


def hold_out(dataset: Dataset, share: float, seed: int = 0) -> Dataset:
    """The dataset with part of its training identities as query and gallery, the test set out of reach.

    For choosing epochs and settings; which identities are held out depends on the seed and on the rest not
    at all. Queries without a match are left out. A share of 0 holds out nothing.
    """
    if not 0 <= share < 1:
        raise ValueError(f"share: expected 0 to below 1, found {share}")
    if share == 0:
        return replace(dataset, query=(), gallery=())
    identities = sorted({sighting.identity for sighting in dataset.train})
    count = max(2, round(share * len(identities)))
    if len(identities) < count + 2:
        raise ValueError(
            f"train: expected at least {count + 2} identities to divide, found {len(identities)}"
        )

    def place(identity: int) -> bytes:
        return hashlib.blake2b(f"{seed}:{identity}".encode(), digest_size=8).digest()

    held = set(sorted(identities, key=place)[:count])
    rest = tuple(sighting for sighting in dataset.train if sighting.identity not in held)
    gallery = tuple(sighting for sighting in dataset.train if sighting.identity in held)
    lost = set(without_match(gallery, gallery, dataset.protocol))
    query = tuple(sighting for i, sighting in enumerate(gallery) if i not in lost)
    if not query:
        raise ValueError(
            f"train: expected identities with pictures of two {dataset.protocol}s to hold out, found none"
        )
    return replace(dataset, train=rest, query=query, gallery=gallery)


def groups_of(sightings: Sequence[Sighting], protocol: Protocols) -> list[int]:
    """What the protocol compares beside the identity: the camera or the scene of each sighting."""
    if protocol not in ("camera", "scene"):
        raise ValueError(f"protocol: expected camera or scene, found {protocol!r}")
    groups = [getattr(sighting, protocol) for sighting in sightings]
    if protocol == "scene" and NO_SCENE in groups:
        name = sightings[groups.index(NO_SCENE)].name
        raise ValueError(f"protocol: expected scenes in the data, found none of {name}; use camera")
    return groups


def without_match(query: Sequence[Sighting], gallery: Sequence[Sighting], protocol: Protocols) -> list[int]:
    """Positions of the queries whose every right answer is missing or removed by the protocol."""
    seen: dict[int, set[int]] = defaultdict(set)
    for sighting, group in zip(gallery, groups_of(gallery, protocol), strict=True):
        seen[sighting.identity].add(group)
    groups = groups_of(query, protocol)
    return [i for i, sighting in enumerate(query) if not seen[sighting.identity] - {groups[i]}]

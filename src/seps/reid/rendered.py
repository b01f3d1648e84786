"""The built-in data: drawn people seen by several cameras in visible light, near infrared and thermal.

Some people look alike in visible light: what tells them apart is a mark that only near infrared shows, and a
warm spot that only the thermal camera shows. One camera works by night, where visible light shows little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from seps.modalities import RGB_NIR_TIR
from seps.reid.data import Dataset, Picture, Sighting

CLOTH = (
    (200, 50, 48),
    (230, 150, 40),
    (220, 210, 70),
    (60, 150, 70),
    (50, 100, 200),
    (130, 70, 170),
    (60, 60, 66),
    (215, 215, 215),
)
MARKS = ("disc", "ring", "bar", "cross", "wedge")
PLACES = ((-0.45, -0.55), (0.45, -0.55), (-0.45, 0.0), (0.45, 0.0), (0.0, 0.55))
"""Where on the trunk a mark or a warm spot may be, in half widths and half heights from its middle."""
CAMERAS = 4
NIGHT = 3
"""The camera that works by night."""
TWINS = 3
"""So many people of a group look alike in visible light."""
FINE = 2
"""Pictures are drawn so many times larger and reduced."""
SPLITS = {"train": 0, "test": 1}


@dataclass(frozen=True)
class Person:
    """What tells an identity: clothes and build in visible light, a mark in near infrared, a warm spot."""

    shirt: int
    trousers: int
    build: float
    mark: str
    mark_place: int
    mark_bright: bool
    warmth: str
    warm_place: int


@dataclass(frozen=True)
class Visit:
    """How a person stands before a camera: shift, size, stride, an obstacle, and the seed of the rest."""

    camera: int
    shift: float
    scale: float
    stride: float
    obstacle: float | None
    seed: int


@dataclass(frozen=True)
class DrawnPicture:
    """One modality of a visit, drawn when opened."""

    person: Person
    visit: Visit
    modality: str
    size: tuple[int, int]

    def open(self) -> Image.Image:
        """The picture as RGB."""
        return _draw(self.person, self.visit, self.modality, self.size)


def render_dataset(
    people: int = 96,
    test_people: int = 48,
    visits: int = 3,
    seed: int = 0,
    size: tuple[int, int] = (128, 64),
) -> Dataset:
    """Drawn people to train on and others to test on, each seen `visits` times by every camera.

    The first visits are the queries, the others the gallery; a visit is a scene. size is (height, width).
    """
    if people < 4 or test_people < 2 or visits < 2:
        raise ValueError(
            "people, test_people, visits: expected at least 4, 2 and 2, "
            f"found {people}, {test_people} and {visits}"
        )
    if min(size) < 32:
        raise ValueError(f"size: expected at least 32 pixels a side, found {size[0]}x{size[1]}")
    train = _sightings("train", people, visits, seed, size)
    test = _sightings("test", test_people, visits, seed, size)
    return Dataset(
        name=f"rendered, seed {seed}",
        train=train,
        query=tuple(sighting for sighting in test if sighting.scene == 0),
        gallery=tuple(sighting for sighting in test if sighting.scene > 0),
        protocol="camera",
        size=size,
    )


def _sightings(
    split: str, people: int, visits: int, seed: int, size: tuple[int, int]
) -> tuple[Sighting, ...]:
    first = SPLITS[split] * 100_000
    sightings = []
    for number in range(people):
        person = compose_person(seed, first, number)
        for camera in range(CAMERAS):
            for scene in range(visits):
                visit = compose_visit(seed, first + number, camera, scene)
                pictures: dict[str, Picture] = {
                    modality: DrawnPicture(person, visit, modality, size) for modality in RGB_NIR_TIR
                }
                name = f"{split}-{number:04d}-c{camera}-s{scene}"
                sightings.append(Sighting(first + number, camera, scene, name, pictures))
    return tuple(sightings)


def compose_person(seed: int, first: int, number: int) -> Person:
    """Person `number` of a split; every second group of three looks alike in visible light."""
    group = number // TWINS
    alike = group % 2 == 0
    look = np.random.default_rng([seed, first, 0, group] if alike else [seed, first, 1, number])
    own = np.random.default_rng([seed, first, 2, group])
    # People of a group never share mark and place, so that what tells them apart is there to be seen.
    marks = own.permutation(len(MARKS) * len(PLACES))
    warms = own.permutation(len(MARKS) * len(PLACES))
    mark, warm = int(marks[number % TWINS]), int(warms[number % TWINS])
    return Person(
        shirt=int(look.integers(len(CLOTH))),
        trousers=int(look.integers(len(CLOTH))),
        build=round(float(look.uniform(0.82, 1.2)), 3),
        mark=MARKS[mark % len(MARKS)],
        mark_place=mark // len(MARKS),
        mark_bright=bool(number % 2),
        warmth=MARKS[warm % len(MARKS)],
        warm_place=warm // len(MARKS),
    )


def compose_visit(seed: int, identity: int, camera: int, scene: int) -> Visit:
    """How an identity stands before a camera the scene-th time."""
    chance = np.random.default_rng([seed, 3, identity, camera, scene])
    blocked = chance.random() < 0.25
    return Visit(
        camera=camera,
        shift=round(float(chance.uniform(-0.13, 0.13)), 3),
        scale=round(float(chance.uniform(0.82, 1.02)), 3),
        stride=round(float(chance.uniform(-1, 1)), 3),
        obstacle=round(float(chance.uniform(0.05, 0.95)), 3) if blocked else None,
        seed=int(chance.integers(2**31)),
    )


@lru_cache(maxsize=16384)
def _draw(person: Person, visit: Visit, modality: str, size: tuple[int, int]) -> Image.Image:
    height, width = size[0] * FINE, size[1] * FINE
    canvas = _backdrop(visit, modality, height, width)
    pen = ImageDraw.Draw(canvas)
    colours = _colours(person, modality)
    frame = _frame(person, visit, height, width)
    _draw_body(pen, frame, visit.stride, colours)
    spot = _spot(frame, person.mark_place if modality == "nir" else person.warm_place)
    if modality == "nir":
        _draw_mark(pen, person.mark, spot, (238,) * 3 if person.mark_bright else (16,) * 3)
    if modality == "tir":
        _draw_mark(pen, person.warmth, spot, (250,) * 3)
        canvas = canvas.filter(ImageFilter.GaussianBlur(FINE * 0.9))
    if visit.obstacle is not None:
        left = visit.obstacle * width
        shade = {"rgb": (96, 92, 84), "nir": (104,) * 3, "tir": (52,) * 3}[modality]
        ImageDraw.Draw(canvas).rectangle((left, height * 0.3, left + width * 0.14, height), fill=shade)
    return _exposed(canvas.reduce(FINE), visit, modality)


@dataclass(frozen=True)
class _Frame:
    """A body on the canvas: the middle of the trunk, its half width and half height."""

    x: float
    y: float
    half_width: float
    half_height: float


def _frame(person: Person, visit: Visit, height: int, width: int) -> _Frame:
    scale = visit.scale
    return _Frame(
        x=width * (0.5 + visit.shift),
        y=height * 0.40,
        half_width=0.215 * width * scale * person.build,
        half_height=0.175 * height * scale,
    )


def _colours(person: Person, modality: str) -> Mapping[str, tuple[int, ...]]:
    if modality == "rgb":
        return {
            "skin": (208, 164, 136),
            "hair": (70, 50, 40),
            "shirt": CLOTH[person.shirt],
            "trousers": CLOTH[person.trousers],
        }
    if modality == "nir":  # cloth of any colour reflects about the same
        return {"skin": (196,) * 3, "hair": (120,) * 3, "shirt": (124,) * 3, "trousers": (138,) * 3}
    return {"skin": (214,) * 3, "hair": (176,) * 3, "shirt": (138,) * 3, "trousers": (126,) * 3}


def _draw_body(
    pen: ImageDraw.ImageDraw, frame: _Frame, stride: float, colours: Mapping[str, tuple[int, ...]]
) -> None:
    x, y, half, tall = frame.x, frame.y, frame.half_width, frame.half_height
    thick = max(2, round(half * 0.42))
    feet = y + tall * 3.05
    for side in (-1, 1):
        hip = (x + side * half * 0.45, y + tall * 0.85)
        foot = (x + side * half * (0.5 + 0.45 * stride * side), feet)
        pen.line((*hip, *foot), fill=colours["trousers"], width=round(thick * 1.5))
        hand = (x + side * half * (1.28 - 0.25 * stride), y + tall * 0.9)
        pen.line((x + side * half * 0.95, y - tall * 0.8, *hand), fill=colours["shirt"], width=thick)
        palm = thick * 0.6
        pen.ellipse((hand[0] - palm, hand[1] - palm, hand[0] + palm, hand[1] + palm), fill=colours["skin"])
    pen.rounded_rectangle(
        (x - half, y - tall, x + half, y + tall), radius=round(half * 0.4), fill=colours["shirt"]
    )
    head = tall * 0.42
    middle = y - tall - head * 1.05
    pen.ellipse((x - head, middle - head * 1.15, x + head, middle + head * 1.15), fill=colours["skin"])
    pen.chord(
        (x - head, middle - head * 1.2, x + head, middle + head), start=180, end=360, fill=colours["hair"]
    )


def _spot(frame: _Frame, place: int) -> tuple[float, float, float]:
    """Middle and radius of a mark on the trunk."""
    across, down = PLACES[place]
    reach = 0.36 * min(frame.half_width, frame.half_height)
    return frame.x + across * frame.half_width, frame.y + down * frame.half_height, reach


def _draw_mark(
    pen: ImageDraw.ImageDraw, mark: str, spot: tuple[float, float, float], colour: tuple[int, ...]
) -> None:
    x, y, reach = spot
    box = (x - reach, y - reach, x + reach, y + reach)
    thin = max(1, round(reach * 0.55))
    if mark == "disc":
        pen.ellipse(box, fill=colour)
    elif mark == "ring":
        pen.ellipse(box, outline=colour, width=thin)
    elif mark == "bar":
        pen.rectangle((x - reach * 1.3, y - reach * 0.4, x + reach * 1.3, y + reach * 0.4), fill=colour)
    elif mark == "cross":
        pen.line((x - reach, y, x + reach, y), fill=colour, width=thin)
        pen.line((x, y - reach, x, y + reach), fill=colour, width=thin)
    else:
        pen.polygon([(x, y - reach), (x + reach, y + reach), (x - reach, y + reach)], fill=colour)


def _backdrop(visit: Visit, modality: str, height: int, width: int) -> Image.Image:
    """What a camera sees behind people: the same walls and ground, other clutter at every visit."""
    place = np.random.default_rng([17, visit.camera])
    tone = {"rgb": place.integers(70, 190, size=3), "nir": [105] * 3, "tir": [64] * 3}[modality]
    chance = np.random.default_rng([visit.seed, 0])
    coarse = chance.normal(0, 16, size=(7, 4, 1)) + chance.normal(0, 6, size=(7, 4, 3)) * (modality == "rgb")
    small = np.clip(np.asarray(tone) + coarse, 0, 255).astype(np.uint8)
    canvas = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(canvas)
    for x, y, w, h, shade, kind in chance.random((7, 6)).tolist():
        x, y, w, h = x * width, y * height, (0.06 + 0.2 * w) * width, (0.03 + 0.1 * h) * height
        value = np.asarray(tone) + (shade - 0.5) * (170 if modality == "rgb" else 120)
        if modality == "rgb":
            value = value + chance.normal(0, 30, size=3)
        fill = tuple(int(each) for each in np.clip(value, 0, 255))
        if kind < 0.5:
            pen.rectangle((x, y, x + w, y + h), fill=fill)
        else:
            pen.ellipse((x, y, x + w, y + w), fill=fill)
    return canvas


def _exposed(image: Image.Image, visit: Visit, modality: str) -> Image.Image:
    """Light, colour cast and noise of a camera at a visit."""
    place, chance = np.random.default_rng([18, visit.camera]), np.random.default_rng([visit.seed, 1])
    values: np.ndarray = np.asarray(image, dtype=np.float64)
    if modality == "rgb":
        light = 0.1 if visit.camera == NIGHT else float(chance.uniform(0.7, 1.15))
        values = values * light * place.uniform(0.85, 1.15, size=3)
        values = values + chance.normal(0, 7, size=values.shape)
    else:
        values = values * float(chance.uniform(0.85, 1.1)) + float(place.uniform(-12, 12))
        values = values + chance.normal(0, 8, size=(*values.shape[:2], 1))
    return Image.fromarray(np.clip(np.rint(values), 0, 255).astype(np.uint8))

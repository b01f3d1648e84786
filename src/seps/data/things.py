"""What a built-in scene consists of: things and their places, chosen from a seed; and near-twins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

import numpy as np

SHAPES = ("circle", "square", "triangle", "star", "heart", "diamond", "cross", "ring", "hexagon", "moon")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown")
TEXTURES = ("plain", "striped", "dotted", "checked")
SIZES = ("small", "large")
BACKDROPS = ("speckle", "waves", "bricks", "hatching", "cloud", "weave")
VALUES: Mapping[str, tuple[str, ...]] = {
    "shape": SHAPES,
    "colour": COLOURS,
    "texture": TEXTURES,
    "size": SIZES,
}
RADII = {"small": 0.085, "large": 0.14}
ROOM = 0.155
"""Every thing keeps the room of a large one, so that any two may trade places or change size."""

CAPTIONS = 5
STYLES = 6

Change = Literal["shape", "colour", "texture", "size", "relation"]


@dataclass(frozen=True)
class Thing:
    """One object: attributes, centre and radius in shares of the picture's side, turn in radians."""

    shape: str
    colour: str
    texture: str
    size: str
    x: float
    y: float
    radius: float
    turn: float

    def fits(self, attributes: Mapping[str, str]) -> bool:
        """Whether the thing has all of some attributes."""
        return all(getattr(self, name) == value for name, value in attributes.items())


@dataclass(frozen=True)
class Phrase:
    """The plan of a caption: two things, the attributes it says of each beside the shape, its style."""

    first: int
    second: int
    first_attributes: tuple[str, ...]
    second_attributes: tuple[str, ...]
    style: int


@dataclass(frozen=True)
class Backdrop:
    """The background: a muted hue and lightness, a pattern, and the seed of its clutter."""

    pattern: str
    hue: float
    lightness: float
    seed: int


@dataclass(frozen=True)
class Scene:
    """Things, their order from back to front, the pair that overlaps, the plans of captions, the ground."""

    things: tuple[Thing, ...]
    order: tuple[int, ...]
    overlap: tuple[int, int] | None
    phrases: tuple[Phrase, ...]
    backdrop: Backdrop

    def in_front(self, first: int, second: int) -> bool:
        """Whether the first thing is drawn after the second."""
        return self.order.index(first) > self.order.index(second)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Scene:
        """The scene behind `to_dict`."""
        try:
            return cls(
                things=tuple(Thing(**thing) for thing in values["things"]),
                order=tuple(values["order"]),
                overlap=None if values["overlap"] is None else (values["overlap"][0], values["overlap"][1]),
                phrases=tuple(
                    Phrase(
                        phrase["first"],
                        phrase["second"],
                        tuple(phrase["first_attributes"]),
                        tuple(phrase["second_attributes"]),
                        phrase["style"],
                    )
                    for phrase in values["phrases"]
                ),
                backdrop=Backdrop(**values["backdrop"]),
            )
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"not the values of a scene: {type(error).__name__} {error}") from None


def compose(seed: int, index: int, least: int = 3, most: int = 6) -> Scene:
    """Scene `index` of a seed: the same whatever else is drawn from that seed."""
    if seed < 0 or index < 0:
        raise ValueError(f"seed and index of a scene must not be negative, found {seed} and {index}")
    if not 2 <= least <= most <= 6:
        raise ValueError(f"a scene holds 2 to 6 things, not {least} to {most}")
    generator = np.random.default_rng([seed, index])
    count = int(generator.integers(least, most + 1))
    sizes = [SIZES[i] for i in generator.integers(len(SIZES), size=count)]
    overlaps = bool(generator.random() < 0.35)
    radii = [RADII[size] * float(generator.uniform(0.94, 1.06)) for size in sizes]
    centres = _place(count, 0.7 * (radii[0] + radii[1]) if overlaps else None, generator)
    looks = generator.choice(len(SHAPES) * len(COLOURS), size=count, replace=False)
    textures = generator.integers(len(TEXTURES), size=count)
    turns = generator.uniform(-0.25, 0.25, size=count)
    things = tuple(
        Thing(
            shape=SHAPES[int(look) % len(SHAPES)],
            colour=COLOURS[int(look) // len(SHAPES)],
            texture=TEXTURES[int(texture)],
            size=size,
            x=round(x, 4),
            y=round(y, 4),
            radius=round(radius, 4),
            turn=round(float(turn), 4),
        )
        for look, texture, size, (x, y), radius, turn in zip(
            looks, textures, sizes, centres, radii, turns, strict=True
        )
    )
    backdrop = Backdrop(
        BACKDROPS[int(generator.integers(len(BACKDROPS)))],
        round(float(generator.random()), 4),
        round(float(generator.uniform(0.55, 0.9)), 4),
        int(generator.integers(2**31)),
    )
    order = tuple(int(i) for i in generator.permutation(count))
    overlap = (0, 1) if overlaps else None
    return Scene(things, order, overlap, _phrases(things, generator), backdrop)


def _place(count: int, near: float | None, generator: np.random.Generator) -> list[tuple[float, float]]:
    """Centres at least two rooms apart; with `near`, the second stands so far from the first."""
    while True:
        centres: list[tuple[float, float]] = []
        for x, y in generator.uniform(ROOM, 1 - ROOM, size=(40, 2)).tolist():
            if near is not None and len(centres) == 1:
                turn = 2 * math.pi * x
                x, y = centres[0][0] + near * math.cos(turn), centres[0][1] + near * math.sin(turn)
                inside = min(x, y, 1 - x, 1 - y) >= ROOM
                apart = True
            else:
                inside = True
                apart = all(math.hypot(x - other_x, y - other_y) >= 2 * ROOM for other_x, other_y in centres)
            if inside and apart:
                centres.append((x, y))
            if len(centres) == count:
                return centres


def _phrases(things: Sequence[Thing], generator: np.random.Generator) -> tuple[Phrase, ...]:
    """Plans of five captions: ordered pairs that differ as long as there are enough of them."""
    pairs = [(i, j) for i in range(len(things)) for j in range(len(things)) if i != j]
    picked = [pairs[int(i)] for i in generator.permutation(len(pairs))]
    picked = [picked[i % len(picked)] for i in range(CAPTIONS)]
    styles = generator.permutation(STYLES)
    return tuple(
        Phrase(i, j, _naming(things, i, generator), _naming(things, j, generator), int(styles[k]))
        for k, (i, j) in enumerate(picked)
    )


NAMINGS = (
    ("colour",),
    ("colour",),
    ("size", "colour"),
    ("texture", "colour"),
    ("size", "texture", "colour"),
    ("size",),
    ("texture",),
)


def _naming(things: Sequence[Thing], index: int, generator: np.random.Generator) -> tuple[str, ...]:
    """Attributes that tell a thing from all others, beside its shape; a plain texture is not spoken of."""
    thing = things[index]
    telling = []
    for names in NAMINGS:
        if thing.texture == "plain" and "texture" in names:
            continue
        said = {name: getattr(thing, name) for name in ("shape", *names)}
        if sum(other.fits(said) for other in things) == 1:
            telling.append(names)
    return telling[int(generator.integers(len(telling)))]


@dataclass(frozen=True)
class Twin:
    """A scene that differs from another in one attribute or relation of what one caption says."""

    scene: Scene
    change: Change
    thing: int
    caption: int


def twin(scene: Scene, caption: int, generator: np.random.Generator, change: Change | None = None) -> Twin:
    """A hard negative: changes one thing that caption says, so that the caption is untrue of the twin.

    The change is one of the attributes the caption names, or the relation (the two things trade places, or
    the one in front goes behind); `change` asks for a kind, ValueError if the caption says nothing of it.
    """
    if not 0 <= caption < len(scene.phrases):
        raise ValueError(f"caption must lie in 0 to {len(scene.phrases) - 1}, not {caption}")
    phrase = scene.phrases[caption]
    choices: list[tuple[Change, int]] = [("relation", phrase.first)]
    for thing, said in ((phrase.first, phrase.first_attributes), (phrase.second, phrase.second_attributes)):
        choices.extend((cast(Change, name), thing) for name in ("shape", *said))
    choices = [choice for choice in choices if change in (None, choice[0])]
    if not choices:
        raise ValueError(f"caption {caption} says nothing of the {change} of its things")
    kind, thing = choices[int(generator.integers(len(choices)))]
    if kind == "relation":
        return Twin(_traded(scene, phrase.first, phrase.second), kind, thing, caption)
    return Twin(_altered(scene, thing, kind, generator), kind, thing, caption)


def _traded(scene: Scene, first: int, second: int) -> Scene:
    trade = {first: second, second: first}
    if scene.overlap is not None and set(scene.overlap) == {first, second}:
        return replace(scene, order=tuple(trade.get(i, i) for i in scene.order))
    things = list(scene.things)
    one, other = things[first], things[second]
    things[first], things[second] = replace(one, x=other.x, y=other.y), replace(other, x=one.x, y=one.y)
    overlap = scene.overlap
    if overlap is not None:
        overlap = (trade.get(overlap[0], overlap[0]), trade.get(overlap[1], overlap[1]))
    return replace(scene, things=tuple(things), overlap=overlap)


def _altered(scene: Scene, index: int, name: str, generator: np.random.Generator) -> Scene:
    """Another value of one attribute; no two things come to share shape and colour."""
    thing = scene.things[index]
    others = {(other.shape, other.colour) for i, other in enumerate(scene.things) if i != index}
    values = []
    for value in VALUES[name]:
        other_value: dict[str, Any] = {name: value}
        changed = replace(thing, **other_value)
        spoken = not (name == "texture" and value == "plain")
        if changed != thing and spoken and (changed.shape, changed.colour) not in others:
            values.append(changed)
    changed = values[int(generator.integers(len(values)))]
    if name == "size":
        grown = RADII[changed.size] * thing.radius / RADII[thing.size]
        changed = replace(changed, radius=round(grown, 4))
    return replace(scene, things=(*scene.things[:index], changed, *scene.things[index + 1 :]))

"""Draws a built-in scene, and tells exactly which part of every patch shows which thing."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from seps.data.things import Backdrop, Scene, Thing

SAMPLES = 4
"""Samples a pixel along each axis: the edges of things are smooth and their areas nearly exact."""

Array = np.ndarray
Inside = Callable[[Array, Array], Array]

INKS: dict[str, tuple[int, int, int]] = {
    "red": (214, 40, 48),
    "orange": (246, 130, 22),
    "yellow": (250, 210, 44),
    "green": (46, 158, 76),
    "blue": (38, 98, 214),
    "purple": (128, 56, 176),
    "pink": (246, 122, 182),
    "brown": (124, 74, 38),
}


def _fold(corners: int, inner: float) -> Inside:
    """A star of so many corners, one pointing up, the dents between them at the radius `inner`."""
    half = math.pi / corners
    dent_x, dent_y = inner * math.cos(half), inner * math.sin(half)

    def inside(x: Array, y: Array) -> Array:
        angle = np.arctan2(x, -y)
        angle = np.abs(angle - 2 * half * np.rint(angle / (2 * half)))
        radius = np.hypot(x, y)
        across, up = radius * np.cos(angle), radius * np.sin(angle)
        # Left of the edge from the corner (1, 0) to the dent: the cross product is not negative.
        return (dent_x - 1) * up - dent_y * (across - 1) >= 0

    return inside


def _square(x: Array, y: Array) -> Array:
    return np.maximum(np.abs(x), np.abs(y)) <= 0.8


def _cross(x: Array, y: Array) -> Array:
    x, y = np.abs(x), np.abs(y)
    return (np.minimum(x, y) <= 0.32) & (np.maximum(x, y) <= 0.95)


def _ring(x: Array, y: Array) -> Array:
    square = x * x + y * y
    return (square <= 0.9) & (square >= 0.24)


def _moon(x: Array, y: Array) -> Array:
    return (x * x + y * y <= 0.95) & ((x - 0.5) ** 2 + (y + 0.12) ** 2 >= 0.62)


def _heart(x: Array, y: Array) -> Array:
    x, y = 1.2 * x, 0.12 - 1.2 * y
    bulge = x * x + y * y - 1
    return bulge * bulge * bulge - x * x * y * y * y <= 0


FORMS: dict[str, Inside] = {
    "circle": lambda x, y: x * x + y * y <= 0.88,
    "square": _square,
    "triangle": _fold(3, 0.5),
    "star": _fold(5, 0.46),
    "heart": _heart,
    "diamond": lambda x, y: np.abs(x) * 1.25 + np.abs(y) <= 1,
    "cross": _cross,
    "ring": _ring,
    "hexagon": _fold(6, math.cos(math.pi / 6)),
    "moon": _moon,
}


def _saw(values: Array) -> Array:
    return values - np.floor(values)


PATTERNS: dict[str, Inside] = {
    "striped": lambda x, y: _saw((x + y) * 2.0) < 0.42,
    "dotted": lambda x, y: (_saw(x * 2.2) - 0.5) ** 2 + (_saw(y * 2.2) - 0.5) ** 2 < 0.085,
    "checked": lambda x, y: (_saw(x * 1.2) < 0.5) == (_saw(y * 1.2) < 0.5),
}


def draw(scene: Scene, size: int = 128) -> Image.Image:
    """The scene as an RGB picture of size x size."""
    canvas = _backdrop(scene.backdrop, size)
    for index in scene.order:
        thing = scene.things[index]
        left, top, right, bottom = frame = _frame(thing, size)
        x, y = _axes(thing, size, frame)
        alpha = _mean(FORMS[thing.shape](x, y))
        shadow = _shadow(alpha, thing.radius * size)
        shaded = canvas[top : top + shadow.shape[0], left : left + shadow.shape[1]]
        shaded *= 1 - 0.42 * shadow[: shaded.shape[0], : shaded.shape[1], None]
        part = canvas[top:bottom, left:right]
        part += alpha[..., None] * (_ink(thing, x, y) - part)
    return Image.fromarray(np.clip(np.rint(canvas), 0, 255).astype(np.uint8))


def visible(scene: Scene, size: int = 128) -> Array:
    """How much of every pixel shows each thing, what stands in front taken away -> (things, size, size)."""
    shown = np.zeros((len(scene.things), size, size), dtype=np.float32)
    for index in scene.order:
        thing = scene.things[index]
        left, top, right, bottom = frame = _frame(thing, size)
        alpha = _mean(FORMS[thing.shape](*_axes(thing, size, frame)))
        shown[:, top:bottom, left:right] *= 1 - alpha
        shown[index, top:bottom, left:right] = alpha
    return shown


def coverage(scene: Scene, rows: int, cols: int, size: int = 128) -> Array:
    """Which share of every cell of a patch grid shows each thing -> (things, rows, cols)."""
    if rows < 1 or cols < 1:
        raise ValueError(f"a patch grid needs at least one row and one column, not {rows}x{cols}")
    return pool(visible(scene, size), rows, cols)


def pool(shown: Array, rows: int, cols: int) -> Array:
    """Exact mean over the cells of a grid, wherever they end: (...,H,W) -> (...,rows,cols)."""
    return _overlaps(rows, shown.shape[-2]) @ shown @ _overlaps(cols, shown.shape[-1]).T


def _overlaps(cells: int, pixels: int) -> Array:
    """The share of each cell's length that lies in each pixel -> (cells, pixels); rows add up to one."""
    edges = np.arange(cells + 1) * (pixels / cells)
    starts, ends = edges[:-1, None], edges[1:, None]
    left = np.arange(pixels)[None]
    lengths = np.minimum(ends, left + 1) - np.maximum(starts, left)
    return (np.clip(lengths, 0, None) * (cells / pixels)).astype(np.float32)


def _frame(thing: Thing, size: int) -> tuple[int, int, int, int]:
    """The pixels (left, top, right, bottom) that hold a thing."""
    reach = thing.radius * 1.15
    left, top = (max(0, math.floor((place - reach) * size)) for place in (thing.x, thing.y))
    right, bottom = (min(size, math.ceil((place + reach) * size)) for place in (thing.x, thing.y))
    return left, top, right, bottom


def _axes(thing: Thing, size: int, frame: tuple[int, int, int, int]) -> tuple[Array, Array]:
    """Where every sample of a frame lies on the thing's own two axes, in radii."""
    left, top, right, bottom = frame
    across = (np.arange(left * SAMPLES, right * SAMPLES, dtype=np.float32) + 0.5) / (SAMPLES * size) - thing.x
    down = (np.arange(top * SAMPLES, bottom * SAMPLES, dtype=np.float32) + 0.5) / (SAMPLES * size) - thing.y
    cosine, sine = math.cos(thing.turn) / thing.radius, math.sin(thing.turn) / thing.radius
    return across[None] * cosine + down[:, None] * sine, down[:, None] * cosine - across[None] * sine


def _mean(samples: Array) -> Array:
    """(H·SAMPLES, W·SAMPLES) booleans -> their share in every pixel (H, W)."""
    # 240 is a multiple of SAMPLES squared, so that the reduced bytes are exact shares.
    image = Image.fromarray(samples.view(np.uint8) * np.uint8(240)).reduce(SAMPLES)
    return np.asarray(image, dtype=np.float32) / 240


def _ink(thing: Thing, x: Array, y: Array) -> Array:
    """Colour of a thing over its frame (H, W, 3): its ink, its pattern, light from the upper left."""
    colour = ink = np.array(INKS[thing.colour], dtype=np.float32)
    if thing.texture != "plain":
        other = ink + 0.66 * (255 - ink) if thing.colour not in ("yellow", "pink") else ink * 0.6
        colour = ink + _mean(PATTERNS[thing.texture](x, y))[..., None] * (other - ink)
    middle = slice(SAMPLES // 2, None, SAMPLES)
    x, y = x[middle, middle], y[middle, middle]
    light = 1 - 0.13 * (x + y)
    shine = 46 * np.exp(-3.2 * ((x + 0.38) ** 2 + (y + 0.42) ** 2))
    return colour * light[..., None] + shine[..., None]


def _shadow(alpha: Array, radius: float) -> Array:
    """The soft shadow a thing throws down and to the right, beyond its own frame."""
    shift, margin = max(1, round(0.16 * radius)), round(0.5 * radius) + 2
    moved = np.zeros((alpha.shape[0] + margin, alpha.shape[1] + margin), dtype=np.float32)
    moved[shift : shift + alpha.shape[0], shift : shift + alpha.shape[1]] = alpha
    soft = ImageFilter.BoxBlur(max(1.0, 0.14 * radius))
    return np.asarray(Image.fromarray((moved * 255).astype(np.uint8)).filter(soft), dtype=np.float32) / 255


def _backdrop(backdrop: Backdrop, size: int) -> Array:
    """A muted ground with a pattern and clutter that no text speaks of -> (size, size, 3) in 0 to 255."""
    generator = np.random.default_rng(backdrop.seed)
    tone = 255 * np.array(colorsys.hls_to_rgb(backdrop.hue, backdrop.lightness, 0.16), dtype=np.float32)
    axis = np.linspace(0, 1, size, endpoint=False, dtype=np.float32)
    x, y = axis[None], axis[:, None]
    slope = generator.uniform(-16, 16, size=2)
    relief = slope[0] * (x - 0.5) + slope[1] * (y - 0.5)
    relief = relief + generator.uniform(7, 15) * _relief(backdrop.pattern, x, y, generator)
    relief = relief + _clutter(size, generator)
    return tone + np.broadcast_to(relief, (size, size))[..., None].astype(np.float32)


def _relief(pattern: str, x: Array, y: Array, generator: np.random.Generator) -> Array:
    """The pattern of a ground, about -1 to 1."""
    rate = generator.uniform(5, 11)
    shift = generator.uniform(0, 2 * math.pi)
    turn = generator.uniform(0, math.pi)
    along = x * math.cos(turn) + y * math.sin(turn)
    if pattern == "waves":
        return np.sin(2 * math.pi * rate * (y + 0.03 * np.sin(6 * math.pi * x + shift)))
    if pattern == "hatching":
        return np.sign(np.sin(4 * math.pi * rate * along)) * 0.7
    if pattern == "bricks":
        row = np.floor(y * rate)
        joint = ((y * rate) % 1 < 0.13) | ((x * rate / 2 + row / 2) % 1 < 0.07)
        return np.where(joint, -1.2, 0.35)
    if pattern == "weave":
        return np.sin(3 * math.pi * rate * x) * np.sin(3 * math.pi * rate * y)
    coarse = 6 if pattern == "cloud" else max(2, x.shape[1] // 3)
    grain = generator.standard_normal((coarse, coarse)).astype(np.float32)
    size = (x.shape[1], y.shape[0])
    return np.asarray(Image.fromarray(grain).resize(size, Image.Resampling.BICUBIC)) * 0.8


def _clutter(size: int, generator: np.random.Generator) -> Array:
    """Strokes, pebbles and angles in the ground's own tone, lighter or darker -> (size, size)."""
    image = Image.new("L", (2 * size, 2 * size), 128)
    pen = ImageDraw.Draw(image)
    for x, y, reach, turn, shade, kind in generator.random((int(generator.integers(6, 16)), 6)).tolist():
        fill = int(128 + (1 if shade > 0.5 else -1) * (18 + 50 * abs(shade - 0.5)))
        x, y, reach = 2 * size * x, 2 * size * y, 2 * size * (0.02 + 0.07 * reach)
        across, down = reach * math.cos(6.28 * turn), reach * math.sin(6.28 * turn)
        width = max(1, size // 40)
        if kind < 0.4:
            pen.line((x - across, y - down, x + across, y + down), fill=fill, width=width)
        elif kind < 0.7:
            pen.ellipse((x - reach / 2, y - reach / 3, x + reach / 2, y + reach / 3), fill=fill)
        else:
            pen.line(
                (x + across, y + down, x, y, x - down, y + across), fill=fill, width=width, joint="curve"
            )
    return np.asarray(image.reduce(2), dtype=np.float32) - 128

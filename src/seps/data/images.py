"""From an image file to a normalised tensor: safe opening, training augmentation, evaluation view."""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import IO, Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

MOST_PIXELS = 89_478_485
"""Images beyond so many pixels are refused unless the caller says otherwise (Pillow's own bound)."""

SIDES = re.compile(r"\b(left|right|leftmost|rightmost|clockwise|counterclockwise)\b", re.IGNORECASE)

# What a damaged file makes Pillow's decoders raise, beside its own OSError family.
UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    EOFError,
    IndexError,
    KeyError,
    struct.error,
    OverflowError,
    MemoryError,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)


@dataclass(frozen=True)
class View:
    """How an image becomes a tensor: its size, its normalisation, and what may vary in training."""

    height: int = 224
    width: int = 224
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    fit: Literal["squash", "crop"] = "squash"
    crop_share: float = 1.0
    scale: tuple[float, float] = (0.6, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: Literal["never", "unsided", "always"] = "unsided"

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1:
            raise ValueError(f"a view needs a positive size, not {self.height}x{self.width}")
        if min(self.std) <= 0:
            raise ValueError(f"std must be positive, not {self.std}")
        if not 0 < self.crop_share <= 1:
            raise ValueError(f"crop_share must lie in (0, 1], not {self.crop_share}")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale must be 0 < low <= high <= 1, not {self.scale}")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"ratio must be 0 < low <= high, not {self.ratio}")
        if self.fit not in ("squash", "crop"):
            raise ValueError(f"fit must be 'squash' or 'crop', not {self.fit!r}")
        if self.flip not in ("never", "unsided", "always"):
            raise ValueError(f"flip must be 'never', 'unsided' or 'always', not {self.flip!r}")


def open_image(
    source: str | PathLike[str] | IO[bytes],
    most_pixels: int = MOST_PIXELS,
    name: str | None = None,
    enough: int | None = None,
) -> Image.Image:
    """Any image file as upright RGB: first frame, alpha over white; ValueError names what cannot be read.

    enough: no side has to be longer, so that a JPEG may be decoded at a half, a quarter or an eighth.
    """
    if name is None:
        name = str(getattr(source, "name", "image")) if hasattr(source, "read") else str(source)
    if isinstance(source, (str, PathLike)) and not Path(source).is_file():
        raise ValueError(f"{name}: there is no such image file")
    try:
        with Image.open(source) as image:
            width, height = image.size
            if width * height <= most_pixels:
                if enough is not None:
                    image.draft(None, (enough, enough))
                image.load()
                return to_rgb(ImageOps.exif_transpose(image))
    except UNREADABLE as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{name}: not a readable image ({reason})") from error
    raise ValueError(f"{name}: {width}x{height} is more than the {most_pixels} pixels allowed")


def to_rgb(image: Image.Image) -> Image.Image:
    """RGB of any mode: deep greys scaled to eight bits, transparency laid over white."""
    if image.mode.startswith(("I", "F")):
        image = Image.fromarray(_eight_bits(image))
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    rgb = image.convert("RGB")
    return rgb if rgb is not image else image.copy()


def _eight_bits(image: Image.Image) -> np.ndarray:
    values = np.nan_to_num(np.asarray(image).astype(np.float64))
    if image.mode.startswith("I;16"):
        top = 65535.0
    else:  # 32 bits say nothing of the range in use: the smallest usual range that holds the values
        top = next((top for top in (1.0, 255.0, 65535.0) if values.max() <= top), float(values.max()))
        top = 255.0 if image.mode == "I" and top == 1.0 else top
    return np.rint(np.clip(values / top, 0, 1) * 255).astype(np.uint8)


def to_tensor(image: Image.Image, view: View) -> Tensor:
    """(value - mean) / std of an RGB image whose values lie in [0, 1]; -> (3, height, width)."""
    values = torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1).div_(255)
    mean, std = (torch.tensor(triple).view(3, 1, 1) for triple in (view.mean, view.std))
    return values.sub_(mean).div_(std).contiguous()


def to_image(pixels: Tensor, view: View) -> Image.Image:
    """The picture behind a normalised tensor (3, height, width): the inverse of `to_tensor`."""
    mean, std = (torch.tensor(triple).view(3, 1, 1) for triple in (view.mean, view.std))
    values = (pixels.detach().cpu().float() * std + mean).clamp(0, 1).mul(255).round().byte()
    return Image.fromarray(values.permute(1, 2, 0).contiguous().numpy())


def evaluation_box(width: int, height: int, view: View) -> tuple[float, float, float, float]:
    """The part of an image that evaluation looks at: all of it, or the largest centred crop in proportion."""
    if view.fit == "squash":
        return 0.0, 0.0, float(width), float(height)
    scale = min(width / view.width, height / view.height) * view.crop_share
    part_width, part_height = scale * view.width, scale * view.height
    left, top = (width - part_width) / 2, (height - part_height) / 2
    return left, top, left + part_width, top + part_height


def random_box(
    width: int, height: int, view: View, generator: np.random.Generator
) -> tuple[float, float, float, float]:
    """A random part of an image: its share of the area uniform in scale, its shape log-uniform in ratio."""
    share = generator.uniform(*view.scale)
    low, high = math.log(view.ratio[0]), math.log(view.ratio[1])
    shape = math.exp(generator.uniform(low, high)) * view.width / view.height
    area = share * width * height
    part_width = min(math.sqrt(area * shape), float(width))
    part_height = min(area / part_width, float(height))
    part_width = min(area / part_height, float(width))
    left = generator.uniform(0, width - part_width) if part_width < width else 0.0
    top = generator.uniform(0, height - part_height) if part_height < height else 0.0
    return left, top, min(left + part_width, float(width)), min(top + part_height, float(height))


def evaluate_image(image: Image.Image, view: View) -> Tensor:
    """The deterministic view of an RGB image -> (3, height, width)."""
    return to_tensor(_cut(image, evaluation_box(*image.size, view), view), view)


def augment_image(
    image: Image.Image, view: View, generator: np.random.Generator, texts: tuple[str, ...] = ()
) -> Tensor:
    """A random part of an RGB image, mirrored half the time unless its texts name a side -> (3, h, w)."""
    box = random_box(*image.size, view, generator)
    mirrored = bool(generator.random() < 0.5)
    cut = _cut(image, box, view)
    sided = view.flip == "unsided" and any(names_side(text) for text in texts)
    if mirrored and view.flip != "never" and not sided:
        cut = ImageOps.mirror(cut)
    return to_tensor(cut, view)


def names_side(text: str) -> bool:
    """Whether a text speaks of left or right, so that a mirrored image would make it untrue."""
    return SIDES.search(text) is not None


def _cut(image: Image.Image, box: tuple[float, float, float, float], view: View) -> Image.Image:
    return image.resize((view.width, view.height), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)

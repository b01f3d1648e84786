"""From the aligned pictures of a sighting to tensors: what varies in training varies alike in all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torch import Tensor
from torch.nn import functional

from seps.data.images import View, evaluate_image

ERASED_SHARE = (0.02, 0.33)
ERASED_SHAPE = (0.3, 3.3)


@dataclass(frozen=True)
class Variation:
    """What may vary in training: mirroring, a crop of the padded picture, a rectangle erased."""

    flip: float = 0.5
    padding: int = 10
    erase: float = 0.5

    def __post_init__(self) -> None:
        for name in ("flip", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected a share of 0 to 1, found {getattr(self, name)}")
        if self.padding < 0:
            raise ValueError(f"padding: expected at least 0 pixels, found {self.padding}")


def to_tensors(pictures: Mapping[str, Image.Image], view: View) -> dict[str, Tensor]:
    """Every modality squashed to the view's size. -> (3,H,W) each"""
    return {name: evaluate_image(picture, view) for name, picture in pictures.items()}


def vary(
    tensors: Mapping[str, Tensor], variation: Variation, generator: np.random.Generator
) -> dict[str, Tensor]:
    """Aligned pictures mirrored, moved and erased alike, what is uncovered or erased filled with the mean.

    tensors (3,H,W) each; what is drawn does not depend on which modalities are there.
    """
    mirrored = generator.random() < variation.flip
    down, right = generator.integers(2 * variation.padding + 1, size=2).tolist()
    erased = generator.random() < variation.erase
    chances = generator.random(4).tolist()
    result = {}
    for name, picture in tensors.items():
        height, width = picture.shape[1:]
        picture = picture.flip(2) if mirrored else picture
        picture = functional.pad(picture, [variation.padding] * 4)
        picture = picture[:, down : down + height, right : right + width].clone()
        if erased:
            top, left, bottom, end = rectangle(height, width, chances)
            picture[:, top:bottom, left:end] = 0
        result[name] = picture
    return result


def rectangle(height: int, width: int, chances: list[float]) -> tuple[int, int, int, int]:
    """A rectangle (top, left, bottom, right) of a random share and shape from four numbers in [0, 1)."""
    low, high = ERASED_SHARE
    area = (low + (high - low) * chances[0]) * height * width
    thin, flat = np.log(ERASED_SHAPE)
    shape = float(np.exp(thin + (flat - thin) * chances[1]))
    rows = min(height, max(1, round((area * shape) ** 0.5)))
    columns = min(width, max(1, round((area / shape) ** 0.5)))
    top, left = int(chances[2] * (height - rows + 1)), int(chances[3] * (width - columns + 1))
    return top, left, top + rows, left + columns

"""The built-in pair: small encoders that learn from scratch, within minutes on a CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from seps.data.images import View
from seps.encoders.layers import Stack
from seps.tokens import Tokens


class LightVision(nn.Module):
    """A strided convolution stem, a learned position for every cell, a few transformer layers; no CLS.

    size is the side of the square image in pixels, or (height, width), multiples of 16: a cell is 16 x 16
    pixels.
    """

    scratch = True
    has_cls = False
    STRIDE = 16

    def __init__(
        self,
        size: int | Sequence[int] = 128,
        width: int = 128,
        layers: int = 2,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        sides = (size, size) if isinstance(size, int) else tuple(size)
        if len(sides) != 2 or any(side < self.STRIDE or side % self.STRIDE for side in sides):
            raise ValueError(f"size: expected a multiple of {self.STRIDE}, or two of them, found {size}")
        if width < 16 or width % 16:
            raise ValueError(f"width: expected a multiple of 16, found {width}")
        self.spec = {
            "size": size if isinstance(size, int) else list(sides),
            "width": width,
            "layers": layers,
            "heads": heads,
            "dropout": dropout,
        }
        self.view = View(*sides, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
        self.grid = (sides[0] // self.STRIDE, sides[1] // self.STRIDE)
        self.channels = width
        self.stem = nn.Sequential(
            nn.Conv2d(3, width // 4, kernel_size=6, stride=4, padding=1),
            nn.GroupNorm(4, width // 4),
            nn.GELU(),
            nn.Conv2d(width // 4, width // 2, kernel_size=3, stride=2, padding=1),
            nn.GroupNorm(4, width // 2),
            nn.GELU(),
            nn.Conv2d(width // 2, width, kernel_size=3, stride=2, padding=1),
        )
        self.positions = nn.Parameter(torch.empty(1, self.grid[0] * self.grid[1], width))
        nn.init.normal_(self.positions, std=0.02)
        self.stack = Stack(width, layers, heads, dropout)

    def forward(self, pixels: Tensor) -> Tokens:
        """(B,3,H,W) -> (B,N,C)"""
        cells = self.stem(pixels).flatten(2).transpose(1, 2)
        return Tokens(self.stack(cells + self.positions))


class LightText(nn.Module):
    """A vector for every word of its own vocabulary, sinusoidal positions, a few transformer layers.

    vocabulary is the number of words; special are the ids that are no words (padding, start and end).
    """

    scratch = True
    limit = None

    def __init__(
        self,
        vocabulary: int = 1000,
        width: int = 128,
        layers: int = 1,
        heads: int = 4,
        dropout: float = 0.1,
        special: Sequence[int] = (0, 3, 4),
    ) -> None:
        super().__init__()
        if vocabulary < 1:
            raise ValueError(f"vocabulary: expected at least 1 word, found {vocabulary}")
        if width < 2 or width % 2:
            raise ValueError(f"width: expected an even number, found {width}")
        self.spec = {
            "vocabulary": vocabulary,
            "width": width,
            "layers": layers,
            "heads": heads,
            "dropout": dropout,
            "special": list(special),
        }
        self.special = tuple(special)
        self.vocabulary = vocabulary
        self.channels = width
        self.words = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.words.weight, std=0.5)
        self.stack = Stack(width, layers, heads, dropout)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """ids, mask (T,L) -> (T,L,C)"""
        embedded = self.words(ids)
        positions = sinusoids(ids.shape[1], self.channels, ids.device)
        return self.stack(embedded + 0.1 * positions.to(embedded.dtype), mask)


def sinusoids(length: int, channels: int, device: torch.device) -> Tensor:
    """Sines and cosines of the position at geometric frequencies: no longest text. -> (L,C)"""
    frequencies = torch.arange(0, channels, 2, device=device) * (-math.log(10000.0) / channels)
    angles = torch.arange(length, device=device).unsqueeze(1) * frequencies.exp()
    return torch.cat([angles.sin(), angles.cos()], 1)

"""Tokens: the one thing that flows through the package.

Axis legend, used in code and docs alike: ``B`` images, ``T`` texts, ``N`` patches, ``K`` kept patches,
``J`` aggregated tokens, ``M`` words, ``D`` dense words, ``C`` channels. Score matrices are always
(images, texts); masks are boolean and True means real.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """A batch of token sets: patches of images or words of texts.

    features (B,N,C); mask (B,N) boolean, True = real, or None when every token is; cls (B,C) or None.
    """

    features: Tensor
    mask: Tensor | None = None
    cls: Tensor | None = None

    def __post_init__(self) -> None:
        for name, given in (("features", self.features), ("mask", self.mask), ("cls", self.cls)):
            if not isinstance(given, Tensor) and (given is not None or name == "features"):
                raise ValueError(f"{name}: expected a tensor, found {type(given).__name__}")
        shape = tuple(self.features.shape)
        if self.features.dim() != 3:
            raise ValueError(f"features: expected (batch, tokens, channels), found shape {shape}")
        if not self.features.is_floating_point():
            raise ValueError(f"features: expected floating-point numbers, found {self.features.dtype}")
        if 0 in shape:
            raise ValueError(f"features: expected at least one item, token and channel, found shape {shape}")
        if self.mask is not None:
            if self.mask.dtype != torch.bool:
                raise ValueError(f"mask: expected booleans (True = real), found {self.mask.dtype}")
            if self.mask.shape != self.features.shape[:2]:
                raise ValueError(f"mask: expected shape {shape[:2]}, found {tuple(self.mask.shape)}")
        if self.cls is not None:
            if self.cls.shape != (shape[0], shape[2]):
                raise ValueError(f"cls: expected shape {(shape[0], shape[2])}, found {tuple(self.cls.shape)}")
            if not self.cls.is_floating_point():
                raise ValueError(f"cls: expected floating-point numbers, found {self.cls.dtype}")

    @classmethod
    def padded(cls, features: Tensor, lengths: Tensor | Sequence[int]) -> Tokens:
        """Tokens of padded rows: the first lengths[i] tokens of row i are real. features (B,N,C)."""
        if not isinstance(features, Tensor) or features.dim() != 3:
            raise ValueError(f"features: expected (batch, tokens, channels), found {describe(features)}")
        rows, limit = features.shape[:2]
        counts = read_lengths("lengths", lengths, rows, limit).to(features.device)
        return cls(features, torch.arange(limit, device=features.device) < counts.unsqueeze(1))

    @classmethod
    def ragged(cls, rows: Sequence[Tensor]) -> Tokens:
        """Tokens of rows of different lengths, padded with zeros. Each row (length,C), length 0 allowed."""
        if not rows:
            raise ValueError("rows: expected at least one, found none")
        for number, row in enumerate(rows):
            if not isinstance(row, Tensor) or row.dim() != 2 or row.shape[1] != rows[0].shape[1]:
                channels = rows[0].shape[1] if number else "channels"
                raise ValueError(
                    f"rows: expected (length, {channels}) each, found {describe(row)} in row {number}"
                )
        padded = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
        if padded.shape[1] == 0:
            padded = padded.new_zeros(len(rows), 1, padded.shape[2])
        return cls.padded(padded, [len(row) for row in rows])

    def __len__(self) -> int:
        return self.features.shape[0]

    def __getitem__(self, rows: slice | Tensor | list[int]) -> Tokens:
        """The same tokens for some items of the batch."""
        return Tokens(
            self.features[rows],
            None if self.mask is None else self.mask[rows],
            None if self.cls is None else self.cls[rows],
        )

    @property
    def channels(self) -> int:
        """C."""
        return self.features.shape[2]

    @property
    def lengths(self) -> Tensor:
        """Real tokens of each item. -> (B,)"""
        if self.mask is None:
            return torch.full((len(self),), self.features.shape[1], device=self.features.device)
        return self.mask.sum(1)

    @property
    def present(self) -> Tensor:
        """Which items have any token at all. -> (B,) boolean"""
        return self.lengths > 0

    def mean(self) -> Tensor:
        """Mean of the real tokens, zero where there is none. -> (B,C)"""
        if self.mask is None:
            return self.features.mean(1)
        return self.cleaned().features.sum(1) / self.lengths.clamp(min=1).unsqueeze(1)

    def to(self, target: torch.dtype | torch.device | str) -> Tokens:
        """The same tokens in another dtype or on another device; the mask stays boolean."""
        to_device = not isinstance(target, torch.dtype)
        return Tokens(
            self.features.to(target),
            self.mask.to(target) if self.mask is not None and to_device else self.mask,
            None if self.cls is None else self.cls.to(target),
        )

    def detach(self) -> Tokens:
        """The same tokens without gradient."""
        return Tokens(self.features.detach(), self.mask, None if self.cls is None else self.cls.detach())

    def cleaned(self) -> Tokens:
        """The same tokens with the padding zeroed, so that nothing in it can spread."""
        if self.mask is None:
            return self
        return Tokens(self.features.masked_fill(~self.mask.unsqueeze(-1), 0), self.mask, self.cls)

    def without(self, rows: Tensor) -> Tokens:
        """The same batch in which the items of rows (B,), boolean, have no token."""
        everything = torch.ones(self.features.shape[:2], dtype=torch.bool, device=rows.device)
        real = everything if self.mask is None else self.mask
        return Tokens(self.features, real & ~rows.unsqueeze(1), self.cls)

    def require_finite(self, name: str) -> None:
        """Refuse NaN and infinity among the real tokens; padding may hold anything."""
        # A finite sum has finite terms, and costs a fraction of a look at each of them.
        wide = torch.promote_types(self.features.dtype, torch.float32)
        sums = [each.detach().sum(dtype=wide) for each in (self.features, self.cls) if each is not None]
        if all(math.isfinite(each) for each in sums):
            return
        finite = torch.isfinite(self.features).all(-1)
        if self.mask is not None:
            finite = finite | ~self.mask
        rows = finite.all(1) if self.cls is None else finite.all(1) & torch.isfinite(self.cls).all(1)
        if not bool(rows.all()):
            first = int((~rows).nonzero()[0])
            raise ValueError(f"{name}: expected finite features, found NaN or infinity in item {first}")


def read_lengths(name: str, lengths: Tensor | Sequence[int], rows: int, limit: int, least: int = 0) -> Tensor:
    """How many of at most limit tokens are real in each row, checked under the caller's name. -> (rows,)"""
    try:
        counts = torch.as_tensor(lengths).reshape(-1)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name}: expected a whole number for each row, found {lengths!r}") from None
    if len(counts) != rows:
        raise ValueError(f"{name}: expected one for each of {rows} rows, found {len(counts)}")
    whole = counts.long()
    if counts.dtype == torch.bool or not torch.equal(whole.to(counts.dtype), counts):
        raise ValueError(f"{name}: expected whole numbers, found {describe(counts)}")
    if rows and (whole.min() < least or whole.max() > limit):
        raise ValueError(
            f"{name}: expected {least} to {limit}, found {int(whole.min())} to {int(whole.max())}"
        )
    return whole


def describe(value: object) -> str:
    """What a value is, in a few words for a sentence: a tensor's shape, a vector's numbers, else its type."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return str(value.tolist()) if value.dim() == 1 and len(value) <= 8 else f"shape {tuple(value.shape)}"

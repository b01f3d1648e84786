"""What the ancestors' names refuse, each under the name its caller knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seps.recipe import Recipe
from seps.tokens import Tokens, read_lengths

# The ancestors' settings under a recipe's names.
_SETTINGS = {
    "sparse_ratio": "keep_ratio",
    "aggr_ratio": "aggregate_ratio",
    "beta": "mixing",
    "gumbel_tau": "temperature",
    "top_k": "top_k",
}


def own_settings(**given: Any) -> dict[str, Any]:
    """The ancestors' settings under a recipe's names; what a recipe refuses is refused under theirs."""
    for name, value in given.items():
        try:
            Recipe(**{_SETTINGS[name]: value})
        except ValueError as error:
            raise ValueError(str(error).replace(_SETTINGS[name], name)) from None
    return {_SETTINGS[name]: value for name, value in given.items()}


def expect_size(name: str, value: int, least: int = 1) -> None:
    """Refuse anything but a whole number of at least least."""
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: expected at least {least}, found {value!r}")


def expect_shape(name: str, values: Tensor, expected: Sequence[int]) -> None:
    """Refuse anything but a tensor of a shape."""
    if not isinstance(values, Tensor) or values.shape != tuple(expected):
        raise ValueError(f"{name}: expected shape {tuple(expected)}, found {shape_of(values)}")


def expect_patches(name: str, tokens: Tensor, channels: int) -> None:
    """Refuse anything but non-empty, floating-point (batch, tokens, channels)."""
    if (
        not isinstance(tokens, Tensor)
        or tokens.dim() != 3
        or 0 in tokens.shape
        or tokens.shape[-1] != channels
    ):
        raise ValueError(f"{name}: expected shape (batch, tokens, {channels}), found {shape_of(tokens)}")
    if not tokens.is_floating_point():
        raise ValueError(f"{name}: expected floating-point numbers, found {tokens.dtype}")


def expect_finite(name: str, values: Tensor) -> None:
    """Refuse NaN and infinity. values (B,N) or (B,N,C)"""
    if torch.compiler.is_compiling():
        return
    Tokens(values if values.dim() == 3 else values.unsqueeze(-1)).require_finite(name)


def shape_of(values: object) -> str:
    """A tensor's shape, or what stands in its place."""
    return str(tuple(values.shape)) if isinstance(values, Tensor) else type(values).__name__


def admit_words(
    name: str,
    words: Tensor,
    lengths_name: str,
    lengths: Tensor | Sequence[int],
    channels: int,
    least: int = 1,
) -> Tokens:
    """Words of texts under the caller's names, checked. words (T,M,C), lengths (T,)"""
    expect_patches(name, words, channels)
    rows, limit = words.shape[:2]
    texts = Tokens.padded(words, read_lengths(lengths_name, lengths, rows, limit, least))
    texts.require_finite(name)
    return texts

"""Noise that belongs to a pair: the same numbers however a batch is split into chunks."""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def _scramble(words: Tensor) -> Tensor:
    """A bijection of 32-bit words that leaves no visible trace of its input's order."""
    words = ((words ^ (words >> 16)) * 0x7FEB352D) & _WORD
    words = ((words ^ (words >> 15)) * 0x846CA68B) & _WORD
    return words ^ (words >> 16)


def between_zero_and_one(words: Tensor) -> Tensor:
    """32-bit words as numbers above 0 and below 1; with 23 bits and a half, none is rounded to 1."""
    return ((words >> 9).to(torch.float32) + 0.5) / (1 << 23)


def pair_uniform(seed: int, images: Tensor, texts: Tensor, patches: int) -> Tensor:
    """Uniform numbers in (0,1) that depend on (seed, image, text, patch) alone.

    images (B,), texts (T,) hold the indices of the items in their batch -> (B,T,N)
    """
    start = _scramble(torch.tensor(seed & _WORD, device=images.device))
    first = _scramble((images.long() + start) & _WORD)
    second = _scramble((first.unsqueeze(1) + 0x9E3779B9 * (texts.long() + 1)) & _WORD)
    steps = torch.arange(1, patches + 1, device=images.device) * 0x85EBCA77
    third = _scramble(_scramble((second.unsqueeze(2) + steps) & _WORD))
    return between_zero_and_one(third)


def gumbel(uniform: Tensor) -> Tensor:
    """Standard Gumbel noise from uniform numbers in (0,1)."""
    return -torch.log(-torch.log(uniform))


def logistic(uniform: Tensor) -> Tensor:
    """Standard logistic noise, the difference of two Gumbel ones, from uniform numbers in (0,1)."""
    return torch.logit(uniform)

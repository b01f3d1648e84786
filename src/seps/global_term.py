"""One vector an image and a text: for the coarse stage of search, and as a term of the score."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from seps.encoders.layers import something
from seps.slimming import unit
from seps.tokens import Tokens


class GlobalPool(nn.Module):
    """One unit vector of a token set: attention over it, at the start its mean, then a projection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention = nn.Linear(channels, 1, bias=False)
        self.projection = nn.Linear(channels, channels)
        nn.init.zeros_(self.attention.weight)
        nn.init.eye_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)

    def forward(self, tokens: Tokens) -> Tensor:
        """(B,N,C) -> (B,C)"""
        features, mask = tokens.cleaned().features, tokens.mask
        if tokens.cls is not None:
            features = torch.cat([tokens.cls.unsqueeze(1), features], 1)
            mask = None if mask is None else functional.pad(mask, (1, 0), value=True)
        logits = self.attention(features).squeeze(-1)
        if mask is not None:
            logits = logits.masked_fill(~something(mask), -math.inf)
        return unit(self.projection((logits.softmax(-1).unsqueeze(1) @ features).squeeze(1)))


class GlobalTerm(nn.Module):
    """Cosine of an image's and a text's one vector, weighed by a learned weight where it is scored.

    Its loss has a temperature of its own: cosines stay cosines, whatever a score adds up to.
    """

    def __init__(self, channels: int, weight: float, scored: bool, temperature: float) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature)))
        self.images = GlobalPool(channels)
        self.texts = GlobalPool(channels)
        self.raw_weight = nn.Parameter(torch.tensor(float(weight)).expm1().log()) if scored else None

    @property
    def weight(self) -> Tensor | None:
        """The learned weight, above zero; None where the term is not scored."""
        return None if self.raw_weight is None else functional.softplus(self.raw_weight)

    @property
    def temperature(self) -> Tensor:
        """Of the InfoNCE between the vectors alone."""
        return temperature_of(self.log_temperature)


def temperature_of(logarithm: Tensor) -> Tensor:
    """A learned temperature, never below a hundredth."""
    return logarithm.exp().clamp(min=0.01)

"""What the trained parts of every encoder are made of: a pre-norm transformer stack and the neck."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from seps.tokens import Tokens

ENDS = 2
"""Tokens that stand around the words of a text: its start and its end."""


class Layer(nn.Module):
    """One pre-norm transformer layer; padding is not attended to."""

    def __init__(
        self, channels: int, heads: int, dropout: float = 0.0, expansion: int = 2, depth: int = 1
    ) -> None:
        super().__init__()
        if heads < 1 or channels % heads:
            raise ValueError(f"heads: expected a divisor of the {channels} channels, found {heads}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout: expected 0 to below 1, found {dropout}")
        self.heads = heads
        self.dropout = dropout
        self.norms = nn.ModuleList([nn.LayerNorm(channels), nn.LayerNorm(channels)])
        self.query_key_value = nn.Linear(channels, 3 * channels)
        self.output = nn.Linear(channels, channels)
        self.expand = nn.Linear(channels, expansion * channels)
        self.contract = nn.Linear(expansion * channels, channels)
        for linear in (self.query_key_value, self.output, self.expand, self.contract):
            nn.init.zeros_(linear.bias)
        for linear in (self.output, self.contract):  # the deeper the stack, the less each layer adds
            nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * depth))

    def forward(self, x: Tensor, attend: Tensor | None) -> Tensor:
        """x (B,N,C), attend (B,1,1,N) boolean -> (B,N,C)"""
        x = x + self._drop(self._attention(self.norms[0](x), attend))
        return x + self._drop(self.contract(functional.gelu(self.expand(self.norms[1](x)))))

    def _attention(self, x: Tensor, attend: Tensor | None) -> Tensor:
        batch, length, channels = x.shape
        split = self.query_key_value(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind(0)
        met = functional.scaled_dot_product_attention(query, key, value, attn_mask=attend)
        return self.output(met.transpose(1, 2).reshape(batch, length, channels))

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class Stack(nn.Module):
    """Transformer layers and a last norm; none at all is the identity. Recomputes them if told so."""

    def __init__(self, channels: int, layers: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if layers < 0:
            raise ValueError(f"layers: expected at least 0, found {layers}")
        self.layers = nn.ModuleList([Layer(channels, heads, dropout, depth=layers) for _ in range(layers)])
        self.norm = nn.LayerNorm(channels) if layers else nn.Identity()
        # These two names are what `gradient_checkpointing_enable` of transformers looks for and sets.
        self.gradient_checkpointing = False
        self._gradient_checkpointing_func: Callable[..., Any] = partial(checkpoint, use_reentrant=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B,N,C), mask (B,N) boolean -> (B,N,C)"""
        attend = None if mask is None else something(mask)[:, None, None]
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                x = self._gradient_checkpointing_func(layer, x, attend)
            else:
                x = layer(x, attend)
        return self.norm(x)


def something(mask: Tensor) -> Tensor:
    """The mask, with the first token of rows that have none: a softmax over nothing is NaN. (B,N)"""
    first = torch.zeros_like(mask)
    first[:, 0] = True
    return mask | (first & ~mask.any(1, keepdim=True))


@dataclass(frozen=True)
class NeckOptions:
    """The trained part above a backbone: context layers after the projection, and dropout.

    channel_dropout: share of the backbone's channels that training hides from all tokens of an item at once.
    """

    layers: int = 0
    heads: int = 4
    dropout: float = 0.0
    channel_dropout: float = 0.0


class Neck(nn.Module):
    """Raw features to C channels: projection, dropout, context layers over the tokens with their CLS."""

    def __init__(self, width: int, channels: int, options: NeckOptions) -> None:
        super().__init__()
        self.width = width
        if not 0 <= options.channel_dropout < 1:
            raise ValueError(f"channel_dropout: expected 0 to below 1, found {options.channel_dropout}")
        self.channel_dropout = options.channel_dropout
        self.projection = nn.Linear(width, channels)
        self.dropout = nn.Dropout(options.dropout)
        self.context = Stack(channels, options.layers, options.heads, options.dropout)
        nn.init.xavier_uniform_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)

    def forward(self, raw: Tokens) -> Tokens:
        """(B,N,Cin) -> (B,N,C)"""
        if raw.channels != self.width:
            raise ValueError(
                f"features: expected {self.width} channels of the backbone, found {raw.channels}"
            )
        features, mask = raw.features, raw.mask
        if raw.cls is not None:
            features = torch.cat([raw.cls.unsqueeze(1), features], 1)
            mask = None if mask is None else functional.pad(mask, (1, 0), value=True)
        if self.training and self.channel_dropout:
            features = self.hide(features, mask)
        features = self.context(self.dropout(self.projection(features)), mask)
        if raw.cls is None:
            return Tokens(features, raw.mask)
        return Tokens(features[:, 1:], raw.mask, features[:, 0])

    def hide(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Features without some channels, the same for all tokens of an item. (B,N,Cin) -> (B,N,Cin)

        Hidden is the distance from the mean token: zero says much of a feature that is never negative.
        """
        stays = torch.rand(len(features), 1, self.width, device=features.device) >= self.channel_dropout
        real = features.flatten(0, 1) if mask is None or not mask.any() else features[mask]
        mean = real.detach().mean(0)
        return mean + (features - mean) * stays.to(features.dtype) / (1 - self.channel_dropout)

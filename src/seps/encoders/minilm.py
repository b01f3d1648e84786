"""MiniLM-L6, a BERT of six layers, that can be cut between any two of them.

The published weights come in under names of our own: query, key and value as one matrix, the embedding of
the only segment folded into the positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from seps.encoders.layers import something

LAYERS, CHANNELS, HEADS, EXPANSION = 6, 384, 12, 4
VOCABULARY, LONGEST = 30522, 512
EPSILON = 1e-12
DROPOUT = 0.1
"""What the weights were published with; it acts in training alone."""


class Layer(nn.Module):
    """One post-norm transformer layer; padding is not attended to."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.output = nn.Linear(CHANNELS, CHANNELS)
        self.met = nn.LayerNorm(CHANNELS, EPSILON)
        self.expand = nn.Linear(CHANNELS, EXPANSION * CHANNELS)
        self.contract = nn.Linear(EXPANSION * CHANNELS, CHANNELS)
        self.said = nn.LayerNorm(CHANNELS, EPSILON)

    def forward(self, x: Tensor, attend: Tensor | None) -> Tensor:
        """x (T,M,C), attend (T,1,1,M) boolean -> (T,M,C)"""
        x = self.met(x + self._drop(self.output(self._attention(x, attend))))
        return self.said(x + self._drop(self.contract(functional.gelu(self.expand(x)))))

    def _attention(self, x: Tensor, attend: Tensor | None) -> Tensor:
        query, key, value = self.query_key_value(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        dropout = DROPOUT if self.training else 0.0
        met = functional.scaled_dot_product_attention(query, key, value, attn_mask=attend, dropout_p=dropout)
        return met.transpose(1, 2).flatten(2)

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, DROPOUT, self.training)


class Embeddings(nn.Module):
    """What a token is and where it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, CHANNELS)
        self.places = nn.Embedding(LONGEST, CHANNELS)
        self.norm = nn.LayerNorm(CHANNELS, EPSILON)

    def forward(self, ids: Tensor) -> Tensor:
        """(T,M) -> (T,M,C)"""
        x = self.norm(self.words(ids) + self.places.weight[: ids.shape[1]])
        return functional.dropout(x, DROPOUT, self.training)


class Layers(nn.Module):
    """Consecutive layers, with or without the embeddings. Names are the same wherever it is cut."""

    def __init__(self, first: int, last: int, embeds: bool) -> None:
        super().__init__()
        self.embeddings = Embeddings() if embeds else None
        self.layers = nn.ModuleDict({str(number): Layer() for number in range(first, last)})

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """ids (T,M), or without embeddings features (T,M,C); mask (T,M) -> (T,M,C)"""
        attend = None if mask is None else something(mask)[:, None, None]
        if self.embeddings is not None:
            x = self.embeddings(x)
        for layer in self.layers.values():
            x = layer(x, attend)
        return x


def folded(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights as they are published, under our names."""
    ours = {
        "embeddings.words.weight": found["embeddings.word_embeddings.weight"],
        "embeddings.places.weight": found["embeddings.position_embeddings.weight"]
        + found["embeddings.token_type_embeddings.weight"][0],
    }
    parts = {"embeddings.LayerNorm": "embeddings.norm"}
    for number in range(LAYERS):
        theirs, name = f"encoder.layer.{number}", f"layers.{number}"
        for kind in ("weight", "bias"):
            own = [found[f"{theirs}.attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
            ours[f"{name}.query_key_value.{kind}"] = torch.cat(own)
        parts |= {
            f"{theirs}.attention.output.dense": f"{name}.output",
            f"{theirs}.attention.output.LayerNorm": f"{name}.met",
            f"{theirs}.intermediate.dense": f"{name}.expand",
            f"{theirs}.output.dense": f"{name}.contract",
            f"{theirs}.output.LayerNorm": f"{name}.said",
        }
    for theirs, name in parts.items():
        for kind in ("weight", "bias"):
            ours[f"{name}.{kind}"] = found[f"{theirs}.{kind}"]
    return ours

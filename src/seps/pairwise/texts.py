"""The text side of a score: words packed without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from seps.slimming import unit
from seps.tokens import Tokens


@dataclass(frozen=True)
class Words:
    """The real words of some texts in one row: features (L,C) of unit length, lengths of the texts."""

    features: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def pack(cls, texts: Tokens) -> Words:
        """Words of texts without their padding."""
        features = unit(texts.features)
        packed = features.flatten(0, 1) if texts.mask is None else features[texts.mask]
        return cls(packed, tuple(texts.lengths.tolist()))

    def __len__(self) -> int:
        return len(self.lengths)

    def split(self, size: int) -> list[Words]:
        """Consecutive blocks of size texts."""
        lengths = [self.lengths[start : start + size] for start in range(0, len(self), size)]
        blocks = self.features.split([sum(block) for block in lengths])
        return [Words(features, block) for features, block in zip(blocks, lengths, strict=True)]

    @cached_property
    def mask(self) -> Tensor:
        """Which places of the padded words are real. -> (T,M) boolean"""
        lengths = torch.tensor(self.lengths, device=self.features.device)
        return torch.arange(max(*self.lengths, 1), device=lengths.device) < lengths.unsqueeze(1)

    def pad(self, packed: Tensor) -> Tensor:
        """Values of packed words in their padded places, zero elsewhere. (...,L) -> (...,T,M)"""
        places = (self.mask.flatten().cumsum(0) - 1).clamp(min=0)
        spread = packed[..., places].unflatten(-1, self.mask.shape)
        return spread.masked_fill(~self.mask, 0)


@dataclass(frozen=True)
class TextSide:
    """What the engine needs of texts, whatever the images.

    words the query's; guide (T,C) its unit mean; index (T,) the texts' places in the whole batch; dense
    words, dense guide and described (T,) where dense text hangs on the texts.
    """

    words: Words
    guide: Tensor
    index: Tensor
    dense_words: Words | None = None
    dense_guide: Tensor | None = None
    described: Tensor | None = None

    @classmethod
    def of(cls, texts: Tokens, dense: Tokens | None = None) -> TextSide:
        """The text side in order of length, so that neighbours pad little."""
        index = texts.lengths.argsort(stable=True)
        texts = texts[index]
        plain = cls(Words.pack(texts), unit(texts.mean().detach()), index)
        if dense is None:
            return plain
        dense = dense[index]
        return cls(
            plain.words,
            plain.guide,
            index,
            Words.pack(dense),
            unit(dense.mean().detach()),
            None if dense.mask is None else dense.present,
        )

    def __len__(self) -> int:
        return len(self.words)

    def split(self, size: int) -> list[TextSide]:
        """Consecutive blocks of size texts."""
        count = -(-len(self) // size)

        def blocks(tensor: Tensor | None) -> Sequence[Tensor | None]:
            return [None] * count if tensor is None else tensor.split(size)

        dense_words = [None] * count if self.dense_words is None else self.dense_words.split(size)
        return [
            TextSide(*parts)
            for parts in zip(
                self.words.split(size),
                self.guide.split(size),
                self.index.split(size),
                dense_words,
                blocks(self.dense_guide),
                blocks(self.described),
                strict=True,
            )
        ]

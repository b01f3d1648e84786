"""The text side of a score: words packed without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from seps.slimming import inverse_length, unit
from seps.tokens import Tokens


@dataclass(frozen=True)
class Words:
    """The real words of some texts in one row: features (L,C) of unit length, lengths of the texts."""

    features: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def pack(cls, texts: Tokens, order: Tensor | None = None) -> Words:
        """Words of texts without their padding; order (T,) holds the texts' places, as they stand if None."""
        count, longest = texts.features.shape[:2]
        device = texts.features.device
        order = torch.arange(count, device=device) if order is None else order
        places = order.unsqueeze(1) * longest + torch.arange(longest, device=device)
        if texts.mask is not None:
            places = places[texts.mask[order]]
        packed = texts.features.flatten(0, 1).index_select(0, places.flatten())
        return cls(unit(packed), tuple(texts.lengths[order].tolist()))

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
        if not packed.shape[-1]:
            return packed.new_zeros(*packed.shape[:-1], *self.mask.shape)
        places = (self.mask.flatten().cumsum(0) - 1).clamp(min=0)
        spread = packed[..., places].unflatten(-1, self.mask.shape)
        return spread.masked_fill(~self.mask, 0)

    def meet(self, tokens: Tensor) -> Tensor:
        """Cosines of every word with the token that each image has for the word's text. (B,T,C) -> (L,B)"""
        columns = (tokens * inverse_length(tokens)).permute(1, 2, 0)
        met: list[Tensor] = []
        text = word = 0
        for length, run in groupby(self.lengths):
            texts = len(list(run))
            words = self.features[word : word + texts * length].unflatten(0, (texts, length))
            met.append((words @ columns[text : text + texts]).flatten(0, 1))
            text, word = text + texts, word + texts * length
        return torch.cat(met)


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
        plain = cls(Words.pack(texts, index), unit(texts.detach().mean()[index]), index)
        if dense is None:
            return plain
        return replace(
            plain,
            dense_words=Words.pack(dense, index),
            dense_guide=unit(dense.detach().mean()[index]),
            described=None if dense.mask is None else dense.present[index],
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

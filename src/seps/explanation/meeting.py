"""One alignment of eq. 5 taken apart: who met whom, and what each meeting adds to the score."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seps.alignment import Aligner, activate, largest
from seps.slimming import apply


@dataclass(frozen=True)
class Meeting:
    """Words and the tokens they met, weighed by how much the meeting counts.

    name: "patches", "dense" or "description"; words (M) and tokens (J) as texts; affinity (M,J) as the
    recipe reads it; word_shares (M,) and token_shares (J,) of the two means; relevance of the largest
    maxima of the words and of the tokens; maps (J,N), each token's weights over the patches of which it is
    made, over its length, so that ``maps @ (V w)`` are cosines, None for a description's words.
    """

    name: str
    words: tuple[str, ...]
    tokens: tuple[str, ...]
    affinity: Tensor
    word_shares: Tensor
    token_shares: Tensor
    relevance: tuple[float, float]
    maps: Tensor | None = None

    @property
    def score(self) -> float:
        """What the meeting adds to the score."""
        return float(self.word_shares.sum() + self.token_shares.sum()) + sum(self.relevance)

    @property
    def best_tokens(self) -> Tensor:
        """The token each word met. -> (M,)"""
        return self.affinity.argmax(1)

    @property
    def best_words(self) -> Tensor:
        """The word each token met. -> (J,)"""
        return self.affinity.argmax(0)

    @property
    def shares(self) -> Tensor:
        """What each word adds: by itself and through the tokens whose best word it is. -> (M,)"""
        return self.word_shares.index_add(0, self.best_words, self.token_shares)


def meet(
    name: str,
    words: tuple[str, ...],
    tokens: tuple[str, ...],
    cosines: Tensor,
    aligner: Aligner,
    weight: float = 1.0,
    maps: Tensor | None = None,
) -> Meeting:
    """The two means and the two relevances of eq. 5, each shared out. cosines (M,J)"""
    recipe = aligner.recipe
    affinity = activate(cosines, recipe.affinity)
    shares: list[Tensor] = []
    relevance: list[float] = []
    for direction, dim in (("word_to_patch", 1), ("patch_to_word", 0)):
        maxima = affinity.amax(dim)
        counts = recipe.directions in ("both", direction)
        averaged = counts and recipe.pooling != "top"
        shares.append(maxima * (weight / len(maxima)) if averaged else torch.zeros_like(maxima))
        relevant = aligner.relevance if counts and recipe.pooling != "mean" else None
        top = largest(maxima, None, recipe.top_k)
        relevance.append(0.0 if relevant is None else weight * float(apply(relevant, top).squeeze(-1)))
    return Meeting(name, words, tokens, affinity, shares[0], shares[1], (relevance[0], relevance[1]), maps)

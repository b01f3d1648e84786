"""Equation 5: words meet tokens in both directions. Pure functions, and `Aligner` which holds the weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from seps.recipe import Affinity, Directions, Pooling, Recipe, expect_one_of
from seps.slimming import apply, unit


def affinities(words: Tensor, tokens: Tensor, kind: Affinity = "cosine") -> Tensor:
    """Cosine of every word with every token, through a leaky relu for "leaky_relu".

    words (...,M,C), tokens (...,J,C) -> (...,M,J)
    """
    if words.shape[-1] != tokens.shape[-1]:
        raise ValueError(f"tokens: expected {words.shape[-1]} channels as words, found {tokens.shape[-1]}")
    return activate(unit(words) @ unit(tokens).transpose(-1, -2), kind)


def activate(cosines: Tensor, kind: Affinity) -> Tensor:
    """Cosines as the recipe reads them."""
    expect_one_of("kind", kind, Affinity)
    return functional.leaky_relu(cosines, 0.1) if kind == "leaky_relu" else cosines


def masked_max(values: Tensor, mask: Tensor | None, dim: int) -> Tensor:
    """Maximum over the real entries along dim, zero where there is none. mask broadcasts to values."""
    if mask is None:
        return values.amax(dim)
    best = values.masked_fill(~mask, -math.inf).amax(dim)
    return best.masked_fill(~mask.any(dim).expand_as(best), 0)


def pool(
    maxima: Tensor, mask: Tensor | None, pooling: Pooling, relevance: nn.Module | None, top_k: int
) -> Tensor:
    """One side of eq. 5: the mean of the maxima, the relevance of the largest top_k of them, or both.

    maxima (...,L), mask broadcasts to it; fewer than top_k maxima are padded with zeros -> (...)
    """
    total = maxima.new_zeros(())
    if pooling != "top":
        if mask is None:
            total = total + maxima.mean(-1)
        else:
            total = total + maxima.masked_fill(~mask, 0).sum(-1) / mask.sum(-1).clamp(min=1)
    if pooling != "mean":
        if relevance is None:
            raise ValueError(f"relevance: expected a network for pooling {pooling!r}, found none")
        total = total + apply(relevance, largest(maxima, mask, top_k)).squeeze(-1)
    return total


def largest(maxima: Tensor, mask: Tensor | None, top_k: int) -> Tensor:
    """The top_k largest real maxima in descending order, then zeros. (...,L) -> (...,top_k)"""
    if mask is not None:
        maxima = maxima.masked_fill(~mask, -math.inf)
    top = maxima.topk(min(top_k, maxima.shape[-1]), dim=-1).values
    top = torch.where(top.isinf(), torch.zeros_like(top), top)
    return functional.pad(top, (0, top_k - top.shape[-1]))


def align(
    affinity: Tensor,
    word_mask: Tensor | None = None,
    token_mask: Tensor | None = None,
    pooling: Pooling = "mean",
    directions: Directions = "both",
    relevance: nn.Module | None = None,
    top_k: int = 5,
) -> Tensor:
    """The score of eq. 5 from the affinities of words and tokens.

    affinity (...,M,J), word_mask broadcasts to (...,M), token_mask to (...,J) -> (...)
    """
    expect_one_of("pooling", pooling, Pooling)
    expect_one_of("directions", directions, Directions)
    score = affinity.new_zeros(())
    if directions != "patch_to_word":
        met = masked_max(affinity, None if token_mask is None else token_mask.unsqueeze(-2), -1)
        score = score + pool(met, word_mask, pooling, relevance, top_k)
    if directions != "word_to_patch":
        met = masked_max(affinity, None if word_mask is None else word_mask.unsqueeze(-1), -2)
        score = score + pool(met, token_mask, pooling, relevance, top_k)
    return score


def relevance_network(top_k: int) -> nn.Sequential:
    """The relevance of the largest maxima, shared by both directions. (...,top_k) -> (...,1)"""
    return nn.Sequential(nn.Linear(top_k, 2 * top_k), nn.GELU(), nn.Linear(2 * top_k, 1))


class Aligner(nn.Module):
    """Eq. 5 under a recipe, with the relevance network where the recipe has one."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.relevance = relevance_network(recipe.top_k) if recipe.pooling != "mean" else None

    def score(self, affinity: Tensor, word_mask: Tensor | None, token_mask: Tensor | None = None) -> Tensor:
        """Eq. 5 from affinities at hand. affinity (...,M,J) -> (...)"""
        recipe = self.recipe
        return align(
            affinity, word_mask, token_mask, recipe.pooling, recipe.directions, self.relevance, recipe.top_k
        )

    def forward(
        self, words: Tensor, tokens: Tensor, word_mask: Tensor | None, token_mask: Tensor | None = None
    ) -> Tensor:
        """Eq. 5 from features. words (...,M,C), tokens (...,J,C) -> (...)"""
        return self.score(affinities(words, tokens, self.recipe.affinity), word_mask, token_mask)

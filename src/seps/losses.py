"""Equations 6 and 7, and InfoNCE: pure functions of score matrices and decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from seps.recipe import RatioForm, Recipe

Negatives = Literal["all", "hardest"]


def same_image(scores: Tensor, image_ids: Tensor | Sequence[int] | None) -> Tensor:
    """Pairs that are no negatives: those of the same image. scores (B,B), image_ids (B,) -> (B,B) boolean"""
    if scores.dim() != 2 or scores.shape[0] != scores.shape[1] or scores.shape[0] == 0:
        raise ValueError(f"scores: expected a square batch (B, B), found {tuple(scores.shape)}")
    if image_ids is None:
        return torch.eye(len(scores), dtype=torch.bool, device=scores.device)
    image_ids = torch.as_tensor(image_ids, device=scores.device)
    if image_ids.shape != scores.shape[:1]:
        raise ValueError(f"image_ids: expected {len(scores)} of them, found shape {tuple(image_ids.shape)}")
    return image_ids.unsqueeze(0) == image_ids.unsqueeze(1)


def hinge(
    scores: Tensor,
    image_ids: Tensor | Sequence[int] | None = None,
    negatives: Negatives = "hardest",
    margin: float = 0.2,
) -> Tensor:
    """Bidirectional hinge over a square batch, summed over it (eq. 6). scores (B,B), image_ids (B,)"""
    positive = same_image(scores, image_ids)
    own = scores.diagonal()
    texts = (margin + scores - own.unsqueeze(1)).clamp(min=0).masked_fill(positive, 0)
    images = (margin + scores - own.unsqueeze(0)).clamp(min=0).masked_fill(positive, 0)
    if negatives == "all":
        return texts.sum() + images.sum()
    if negatives == "hardest":
        return texts.max(1).values.sum() + images.max(0).values.sum()
    raise ValueError(f"negatives: expected one of all, hardest, found {negatives!r}")


def info_nce(
    scores: Tensor, image_ids: Tensor | Sequence[int] | None = None, temperature: Tensor | float = 0.07
) -> Tensor:
    """Cross-entropy of the own pair against the batch, both ways, averaged. scores (B,B), image_ids (B,)"""
    others = same_image(scores, image_ids) & ~same_image(scores, None)
    logits = (scores / temperature).masked_fill(others, -torch.inf)
    own = logits.diagonal()
    return ((logits.logsumexp(1) - own).mean() + (logits.logsumexp(0) - own).mean()) / 2


def ratio(
    decisions: Sequence[Tensor],
    keep_ratio: float,
    form: RatioForm = "per_branch",
    sparse_weight: float = 1.0,
    dense_weight: float = 1.0,
) -> Tensor:
    """Distance of the kept share from keep_ratio (eq. 7). decisions: of the sparse branch, then the dense."""
    if not 1 <= len(decisions) <= 2:
        raise ValueError(f"decisions: expected those of one or two branches, found {len(decisions)}")
    shares = [decision.mean() for decision in decisions]
    weights = (sparse_weight, dense_weight)[: len(shares)]
    weighed = list(zip(weights, shares, strict=True))
    if form == "joint":
        return (keep_ratio - torch.stack([weight * share for weight, share in weighed]).sum()) ** 2
    if form == "summed":
        return (torch.stack(shares).sum() - keep_ratio) ** 2
    if form == "per_branch":
        return torch.stack([weight * (share - keep_ratio) ** 2 for weight, share in weighed]).sum()
    raise ValueError(f"form: expected one of joint, per_branch, summed, found {form!r}")


def ratio_of(recipe: Recipe, decisions: Sequence[Tensor]) -> Tensor:
    """The ratio loss as a recipe wants it, weight included."""
    return recipe.ratio_weight * ratio(
        decisions, recipe.keep_ratio, recipe.ratio_form, recipe.sparse_weight, recipe.dense_weight
    )


def batch_hard_triplet(features: Tensor, identities: Tensor, margin: float | None = 0.3) -> Tensor:
    """Every item is nearer to its farthest like than to its nearest unlike, averaged over the batch.

    Items without a like or an unlike in the batch are left out; without a margin its smooth form, the
    softplus, takes the hinge's place. features (B,C), identities (B,)
    """
    if features.dim() != 2 or identities.shape != features.shape[:1]:
        raise ValueError(
            f"features, identities: expected (B, C) and (B,), found {tuple(features.shape)} and "
            f"{tuple(identities.shape)}"
        )
    squares = features.square().sum(1)
    squared = squares.unsqueeze(1) + squares - 2 * features @ features.T
    distances = squared.clamp(min=1e-12).sqrt()
    same = identities.unsqueeze(0) == identities.unsqueeze(1)
    itself = torch.eye(len(features), dtype=torch.bool, device=features.device)
    likes, unlikes = same & ~itself, ~same
    anchors = likes.any(1) & unlikes.any(1)
    if not bool(anchors.any()):
        return features.sum() * 0
    farthest = distances.masked_fill(~likes, -torch.inf).amax(1)[anchors]
    nearest = distances.masked_fill(~unlikes, torch.inf).amin(1)[anchors]
    gap = farthest - nearest
    return (functional.softplus(gap) if margin is None else (gap + margin).clamp(min=0)).mean()

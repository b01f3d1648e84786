"""k-reciprocal re-ranking: two sightings are near if they have the same neighbours (arXiv 1701.08398)."""

from __future__ import annotations

import torch
from torch import Tensor


def rerank(
    query_gallery: Tensor,
    query_query: Tensor,
    gallery_gallery: Tensor,
    near: int = 20,
    nearest: int = 6,
    weight: float = 0.3,
) -> Tensor:
    """Jaccard distances of k-reciprocal neighbourhoods, mixed with the distances themselves.

    near is k1, the size of a neighbourhood; nearest is k2, over how many neighbours a neighbourhood is
    averaged; weight is that of the original distance. (Q,G), (Q,Q), (G,G) -> (Q,G)
    """
    queries, gallery = query_gallery.shape
    if query_query.shape != (queries, queries) or gallery_gallery.shape != (gallery, gallery):
        raise ValueError(
            f"distances: expected shapes ({queries}, {queries}) and ({gallery}, {gallery}), found "
            f"{tuple(query_query.shape)} and {tuple(gallery_gallery.shape)}"
        )
    if min(near, nearest) < 1 or not 0 <= weight <= 1:
        raise ValueError(
            "near, nearest, weight: expected at least 1, at least 1 and 0 to 1, "
            f"found {near}, {nearest} and {weight}"
        )
    distances = torch.cat(
        [torch.cat([query_query, query_gallery], 1), torch.cat([query_gallery.T, gallery_gallery], 1)]
    ).float()
    # Each row by its own farthest, so that one lonely sighting does not set the scale for all.
    scaled = distances / distances.amax(1, keepdim=True).clamp(min=1e-12)
    order = scaled.argsort(dim=1, stable=True)[:, : max(near + 1, nearest)].clone()
    members = neighbourhoods(order, near)
    weights = (-scaled).exp() * members
    weights = weights / weights.sum(1, keepdim=True)
    if nearest > 1:
        weights = torch.stack([weights[row[:nearest]].mean(0) for row in order])
    return (1 - weight) * jaccard(weights[:queries], weights[queries:]) + weight * scaled[:queries, queries:]


def neighbourhoods(order: Tensor, near: int) -> Tensor:
    """Who is a k-reciprocal neighbour of whom, with those of half the size that overlap by two thirds.

    order (S,n): the n > near nearest of everyone, oneself first -> (S,S) boolean
    """
    whole, half = reciprocal(order, near), reciprocal(order, max(1, round(near / 2)))
    sizes = half.sum(1)
    overlaps = whole.float() @ half.T.float()
    joining = whole & (overlaps > 2 / 3 * sizes)
    return whole | (joining.float() @ half.float() > 0)


def reciprocal(order: Tensor, near: int) -> Tensor:
    """Who is among whose `near` nearest and the other way round, oneself included. -> (S,S) boolean"""
    among = torch.zeros(len(order), len(order), dtype=torch.bool, device=order.device)
    among.scatter_(1, order[:, : near + 1], True)
    return among & among.T


def jaccard(first: Tensor, second: Tensor) -> Tensor:
    """One minus the share that two rows of weights, of sum one, have in common. (Q,S), (G,S) -> (Q,G)"""
    columns = second.T.contiguous()
    common = torch.stack([in_common(row, columns) for row in first])
    return 1 - common / (2 - common)


def in_common(row: Tensor, columns: Tensor) -> Tensor:
    """Sum of the minimum of a row and each other; only where the row is not zero is there any. (S,), (S,G)"""
    members = row.nonzero().squeeze(1)
    return torch.minimum(row[members, None], columns[members]).sum(0)

"""How good a ranking is: recall, median and mean rank, rSum; mAP and CMC. In percent; ranks start at 1.

Ties are read against the ranking: a wrong candidate whose score equals the right one's is placed before it,
so a constant score matrix has a recall near zero and not of a hundred. Without ties this is the sorted order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

# Elements compared at once: bounds the temporary memory, whatever the size of the matrix.
CHUNK_ELEMENTS = 2**24


@dataclass(frozen=True)
class Recall:
    """One direction of retrieval; recall in percent of the queries that have a right answer."""

    r1: float
    r5: float
    r10: float
    median_rank: float
    mean_rank: float
    queries: int
    unmatched: int
    """Queries without any right answer in the gallery: left out of the figures, never out of sight."""


@dataclass(frozen=True)
class Retrieval:
    """Both directions of image-text retrieval."""

    image_to_text: Recall
    text_to_image: Recall

    @property
    def rsum(self) -> float:
        """Sum of R@1, R@5 and R@10 of both directions: 600 at best."""
        return sum(side.r1 + side.r5 + side.r10 for side in (self.image_to_text, self.text_to_image))


@dataclass(frozen=True)
class Ranking:
    """Re-identification; mAP and CMC in percent of the queries that have a right answer."""

    mean_average_precision: float
    cmc: tuple[float, ...]
    """`cmc[k - 1]`: queries with a right answer among their first k."""
    queries: int
    unmatched: int
    """Queries whose every right answer is missing or removed: left out of the figures, never out of sight."""

    def at(self, rank: int) -> float:
        """CMC at a rank that starts at 1."""
        if not 1 <= rank <= len(self.cmc):
            raise ValueError(f"rank: expected 1 to {len(self.cmc)}, found {rank}")
        return self.cmc[rank - 1]


def measure_retrieval(scores: Tensor, text_images: Tensor | Sequence[int]) -> Retrieval:
    """Recall, median and mean rank both ways. scores (B,T), text_images (T): the row of each text's image."""
    image_ranks, text_ranks = rank_queries(scores, text_images)
    return Retrieval(_summarise_ranks(image_ranks), _summarise_ranks(text_ranks))


def measure_folds(scores: Tensor, text_images: Tensor | Sequence[int], folds: int = 5) -> Retrieval:
    """Mean over consecutive folds of the images, each with its own texts only: COCO 1K of a 5K matrix."""
    owners = _check_scores(scores, text_images)
    images = scores.shape[0]
    if folds < 1 or images % folds:
        raise ValueError(f"folds: expected a divisor of the {images} images, found {folds}")
    size = images // folds
    parts = []
    for start in range(0, images, size):
        texts = ((owners >= start) & (owners < start + size)).nonzero().squeeze(1)
        if not len(texts):
            raise ValueError(
                f"text_images: expected texts in every fold, found none of rows {start} to {start + size - 1}"
            )
        parts.append(measure_retrieval(scores[start : start + size, texts], owners[texts] - start))
    return Retrieval(
        _average([part.image_to_text for part in parts]), _average([part.text_to_image for part in parts])
    )


def rank_queries(scores: Tensor, text_images: Tensor | Sequence[int]) -> tuple[Tensor, Tensor]:
    """Rank of each query's best right answer: images among texts (B), then texts among images (T).

    Ranks start at 1; an image that no text belongs to has rank 0.
    """
    owners = _check_scores(scores, text_images)
    images, texts = scores.shape
    right = scores.detach()[owners, torch.arange(texts, device=scores.device)].to(
        torch.promote_types(scores.dtype, torch.float32)
    )
    best = right.new_full((images,), -torch.inf).scatter_reduce(0, owners, right, "amax")
    best_texts = owners.new_zeros(images).index_add(0, owners, (right == best[owners]).long())
    image_ranks = owners.new_zeros(images)
    text_ranks = owners.new_zeros(texts)
    for rows in _row_chunks(images, texts):
        chunk = scores[rows]
        image_ranks[rows] = (chunk >= best[rows, None]).sum(1) - best_texts[rows] + 1
        text_ranks += (chunk >= right).sum(0)  # the right image itself makes the count a rank
    return image_ranks.where(best_texts > 0, 0), text_ranks


def measure_ranking(
    distances: Tensor,
    query_ids: Tensor | Sequence[int],
    gallery_ids: Tensor | Sequence[int],
    query_groups: Tensor | Sequence[int],
    gallery_groups: Tensor | Sequence[int],
    depth: int = 50,
) -> Ranking:
    """mAP and CMC of distances (Q,G); what shares a query's identity and its group is removed before ranking.

    A group is the camera in the camera protocol and the scene in the scene protocol.
    """
    queries, gallery = _check_matrix("distances", distances, "(queries, gallery)")
    if not bool(distances.isfinite().all()):
        raise ValueError("distances: expected finite numbers, found infinity")
    if depth < 1:
        raise ValueError(f"depth: expected at least 1, found {depth}")
    device = distances.device
    query_ids = _check_labels("query_ids", query_ids, queries, device)
    gallery_ids = _check_labels("gallery_ids", gallery_ids, gallery, device)
    query_groups = _check_labels("query_groups", query_groups, queries, device)
    gallery_groups = _check_labels("gallery_groups", gallery_groups, gallery, device)
    precisions, first_ranks = [], []
    for rows in _row_chunks(queries, gallery):
        same_id = query_ids[rows, None] == gallery_ids
        removed = same_id & (query_groups[rows, None] == gallery_groups)
        hits = _sort_hits(distances[rows], same_id & ~removed, removed)
        precisions.append(_average_precision(hits))
        first_ranks.append(hits.long().argmax(1) + 1)
    precision, first_rank = torch.cat(precisions), torch.cat(first_ranks)
    matched = ~precision.isnan()
    if not bool(matched.any()):
        raise ValueError(
            f"gallery_ids: expected a right answer for at least one of the {queries} queries, found none "
            "once what shares identity and group was removed"
        )
    within = first_rank[matched, None] <= torch.arange(1, depth + 1, device=device)
    return Ranking(
        mean_average_precision=100 * float(precision[matched].mean()),
        cmc=tuple((100 * within.double().mean(0)).tolist()),
        queries=queries,
        unmatched=queries - int(matched.sum()),
    )


def _sort_hits(distances: Tensor, right: Tensor, removed: Tensor) -> Tensor:
    """Which places of each ranking hold a right answer; at equal distance wrong goes first, removed last."""
    wrong_first = right.to(torch.uint8).argsort(dim=1, stable=True)
    nearest = distances.masked_fill(removed, torch.inf).gather(1, wrong_first).argsort(dim=1, stable=True)
    return right.gather(1, wrong_first.gather(1, nearest))


def _average_precision(hits: Tensor) -> Tensor:
    """Mean of the precision at each right answer's place; NaN where there is none. hits (Q,G) -> (Q)."""
    found = hits.double().cumsum(1)
    places = torch.arange(1, hits.shape[1] + 1, device=hits.device)
    return (found / places).mul(hits).sum(1) / found[:, -1]


def _summarise_ranks(ranks: Tensor) -> Recall:
    """Recall of ranks that start at 1; rank 0 is unmatched. The median of an even count is rounded down."""
    matched = ranks[ranks > 0].sort().values
    middle = (len(matched) - 1) // 2, len(matched) // 2
    r1, r5, r10 = (100 * float((matched <= k).double().mean()) for k in (1, 5, 10))
    return Recall(
        r1=r1,
        r5=r5,
        r10=r10,
        median_rank=float(sum(int(matched[place]) for place in middle) // 2),
        mean_rank=float(matched.double().mean()),
        queries=len(ranks),
        unmatched=len(ranks) - len(matched),
    )


def _average(parts: Sequence[Recall]) -> Recall:
    """Mean of the figures, sum of the counts."""
    return Recall(
        r1=fmean(part.r1 for part in parts),
        r5=fmean(part.r5 for part in parts),
        r10=fmean(part.r10 for part in parts),
        median_rank=fmean(part.median_rank for part in parts),
        mean_rank=fmean(part.mean_rank for part in parts),
        queries=sum(part.queries for part in parts),
        unmatched=sum(part.unmatched for part in parts),
    )


def _row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Slices of the rows, each of at most CHUNK_ELEMENTS elements but at least one row."""
    step = max(1, CHUNK_ELEMENTS // columns)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _check_matrix(name: str, matrix: Tensor, axes: str) -> tuple[int, int]:
    """Refuses anything but a filled floating matrix without NaN; returns its shape."""
    if not isinstance(matrix, Tensor):
        raise ValueError(f"{name}: expected a tensor {axes}, found {type(matrix).__name__}")
    if matrix.ndim != 2 or not matrix.numel():
        raise ValueError(f"{name}: expected a non-empty matrix {axes}, found shape {tuple(matrix.shape)}")
    if not matrix.is_floating_point():
        raise ValueError(f"{name}: expected floating point numbers, found {matrix.dtype}")
    if bool(matrix.amax().isnan()):
        raise ValueError(f"{name}: expected numbers, found NaN")
    return matrix.shape[0], matrix.shape[1]


def _check_labels(name: str, labels: Tensor | Sequence[int], count: int, device: torch.device) -> Tensor:
    """One whole number for each of `count` rows or columns, as a tensor on the matrix's device."""
    try:
        values = torch.as_tensor(labels, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name}: expected {count} whole numbers, found {type(labels).__name__}: {error}"
        ) from None
    if values.shape != (count,):
        raise ValueError(f"{name}: expected {count} values, found shape {tuple(values.shape)}")
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise ValueError(f"{name}: expected whole numbers, found {values.dtype}")
    return values.long()


def _check_scores(scores: Tensor, text_images: Tensor | Sequence[int]) -> Tensor:
    """The row of each text's image, once scores and rows are known to fit each other."""
    images, texts = _check_matrix("scores", scores, "(images, texts)")
    owners = _check_labels("text_images", text_images, texts, scores.device)
    low, high = int(owners.min()), int(owners.max())
    if low < 0 or high >= images:
        raise ValueError(f"text_images: expected rows 0 to {images - 1}, found {low if low < 0 else high}")
    return owners

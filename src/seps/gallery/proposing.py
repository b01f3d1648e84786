"""The first stage of a search: cheap sources propose, rough scores rank what they proposed."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from seps.gallery.rows import mean_word
from seps.gallery.sketching import patch_scores, word_scores
from seps.gallery.store import ROW, Store
from seps.model import SepsModel
from seps.tokens import Tokens

# benchmarks/gallery.py measures what these find and what they cost.
# So many are scored exactly for each result that is wanted, of ten at least: few where descriptions speak,
# for these the rough score is nearly the exact one.
DESCRIBED_A_RESULT = 4
SKETCHED_A_RESULT = 16
LEAST_RESULTS = 10
# So many pictures meet a query for their descriptions, one in fifty from the least to the most.
LEAST_DESCRIBED = 400
MOST_DESCRIBED = 1600
ROWS_A_PROPOSAL = 50
# Each source names so many times as many, for what only the fusion of all finds.
LISTED = 2
# Pictures that only their patches speak for all meet it; of more than so many, those whose pixel vectors
# are nearest.
SCANNED = 200_000
NEAREST = 5000
# The constant of reciprocal rank fusion: large, since sources agree in the long run rather than at the top.
_RANK_DAMPING = 300
# The text index gets the first words of a query: more add time, not candidates.
_MATCHED_WORDS = 32
_ROWS_AT_ONCE = 4096

Scored = dict[int, float]
"""Rough scores of pictures, by the numbers of their rows."""


@torch.inference_mode()
def propose(
    store: Store, model: SepsModel, texts: Sequence[str], words: Tokens, k: int, where: str | None
) -> list[list[int]]:
    """Candidates of each text: the rows with the best rough scores, best first. words (T,M,C)"""
    wanted = max(k, LEAST_RESULTS)
    limit = SKETCHED_A_RESULT * wanted
    if model.recipe.dense != "matched":
        return [best(scored, limit) for scored in by_sketches(store, model, words, limit, where)]
    spoken, silent = (
        kind if where is None else f"({where}\n) AND {kind}" for kind in ("described", "NOT described")
    )
    sketched = by_sketches(store, model, words, limit, silent)
    if not store.count(spoken):
        return [best(each, limit) for each in sketched]
    if not any(sketched):
        limit = DESCRIBED_A_RESULT * wanted
    most = max(limit, proposals(store.count(where)))
    known = [
        by_descriptions(store, model, text, words[[place]], most, where) for place, text in enumerate(texts)
    ]
    return [best(each | others, limit) for each, others in zip(known, sketched, strict=True)]


def best(scored: Scored, limit: int) -> list[int]:
    """The rows with the largest scores, best first, equal ones in their order."""
    return heapq.nsmallest(limit, scored, key=lambda row: (-scored[row], row))


def by_descriptions(
    store: Store, model: SepsModel, text: str, words: Tokens, most: int, where: str | None
) -> Scored:
    """Pictures whose descriptions, or whose pixels, are near a text. words (1,M,C)"""
    vectors = {"description_vector": mean_word(words), "pixel_vector": model.global_texts(words)}
    rankings = [
        store.nearest(column, vector[0].tolist(), LISTED * most, where) for column, vector in vectors.items()
    ]
    shared = " ".join(dict.fromkeys(text.split()[:_MATCHED_WORDS]))
    rankings.append(store.matching(shared, LISTED * most, where))
    rows = store.take(fuse([named(each) for each in rankings], most), [*rough_columns(model), "words"])
    return scored_roughly(model, rows.to_batches(), words)[0]


def proposals(rows: int) -> int:
    """How many pictures the descriptions propose among so many."""
    return min(max(LEAST_DESCRIBED, rows // ROWS_A_PROPOSAL), MOST_DESCRIBED)


def by_sketches(store: Store, model: SepsModel, words: Tokens, limit: int, where: str | None) -> list[Scored]:
    """The best by their sketches of the pictures of a condition, for each text. words (T,M,C)"""
    count = store.count(where)
    if not count:
        return [{} for _ in range(len(words))]
    columns = rough_columns(model)
    if count <= SCANNED:
        batches = store.scan([ROW, *columns], where, _ROWS_AT_ONCE)
        return scored_roughly(model, batches, words, limit)
    found: list[Scored] = []
    for place, vector in enumerate(model.global_texts(words).tolist()):
        near = named(store.nearest("pixel_vector", vector, NEAREST, where))
        batches = store.take(near, columns).to_batches(max_chunksize=_ROWS_AT_ONCE)
        found += scored_roughly(model, batches, words[[place]], limit)
    return found


@torch.inference_mode()
def scored_roughly(
    model: SepsModel, batches: Iterable[pa.RecordBatch], words: Tokens, limit: int | None = None
) -> list[Scored]:
    """The rough scores of rows, for each text; of the best alone where there is a limit. words (T,M,C)"""
    rows: list[int] = []
    blocks: list[Tensor] = []
    for batch in batches:
        if batch.num_rows:
            rows += batch.column(ROW).to_pylist()
            blocks.append(rough_scores(model, batch, words))
    if not rows:
        return [{} for _ in range(len(words))]
    scores, places = torch.cat(blocks).T.topk(min(limit or len(rows), len(rows)))
    return [
        {rows[place]: score for place, score in zip(*each, strict=True)}
        for each in zip(places.tolist(), scores.tolist(), strict=True)
    ]


def rough_scores(model: SepsModel, rows: pa.RecordBatch, words: Tokens) -> Tensor:
    """About what the exact scores of some rows are. words (T,M,C) -> (rows,T)"""
    described = rows.column("words") if "words" in rows.schema.names else None
    patches = patch_scores(model, rows.column("sketch"), words)
    scores = patches + word_scores(model, described, words, patches)
    weight = None if model.global_term is None else model.global_term.weight
    if weight is not None:
        halves = np.array(rows.column("pixel_vector").flatten()).reshape(rows.num_rows, -1)
        images = torch.from_numpy(halves).to(scores.device).float()
        scores = scores + weight * (images @ model.global_texts(words).T)
    return scores.float().cpu()


def rough_columns(model: SepsModel) -> list[str]:
    """The columns that `rough_scores` reads of a picture without a description."""
    scored = model.global_term is not None and model.global_term.weight is not None
    return ["sketch", "pixel_vector"] if scored else ["sketch"]


def fuse(rankings: Sequence[Sequence[int]], limit: int) -> list[int]:
    """Reciprocal rank fusion: the rows that several rankings put high come first."""
    points: dict[int, float] = {}
    for ranking in rankings:
        for rank, row in enumerate(ranking):
            points[row] = points.get(row, 0.0) + 1 / (_RANK_DAMPING + rank)
    return sorted(points, key=lambda row: (-points[row], row))[:limit]


def named(ranking: Sequence[tuple[int, float]]) -> list[int]:
    """The rows of a ranking."""
    return [row for row, _ in ranking]

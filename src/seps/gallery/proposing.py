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
from seps.gallery.store import Store
from seps.model import SepsModel
from seps.tokens import Tokens

# So many pictures meet a query for their descriptions, one in sixty from the least to the most, and so many
# more for their pixels' one vector. benchmarks/gallery.py measures what they find and what they cost.
LEAST_DESCRIBED = 800
MOST_DESCRIBED = 1600
ROWS_A_PROPOSAL = 60
BY_PIXELS = 200
# Pictures that only their patches speak for all meet it; of more than so many, those whose pixel vectors
# are nearest.
SCANNED = 200_000
NEAREST = 5000
# The constant of reciprocal rank fusion.
_RANK_DAMPING = 60
# The text index gets the first words of a query: more add time, not candidates.
_MATCHED_WORDS = 32
_ROWS_AT_ONCE = 1024

Scored = dict[str, float]
"""Rough scores of pictures."""


@torch.inference_mode()
def propose(
    store: Store, model: SepsModel, texts: Sequence[str], words: Tokens, limit: int, where: str | None
) -> list[list[str]]:
    """Candidates of each text: the pictures with the best rough scores, best first. words (T,M,C)"""
    if model.recipe.dense != "matched":
        return [best(scored, limit) for scored in by_sketches(store, model, words, limit, where)]
    known = [by_descriptions(store, model, text, words[[place]], where) for place, text in enumerate(texts)]
    silent = "NOT described" if where is None else f"({where}\n) AND NOT described"
    sketched = by_sketches(store, model, words, limit, silent)
    return [best(each | others, limit) for each, others in zip(known, sketched, strict=True)]


def best(scored: Scored, limit: int) -> list[str]:
    """The items with the largest scores, best first, equal ones in the order of their ids."""
    return heapq.nsmallest(limit, scored, key=lambda item: (-scored[item], item))


def by_descriptions(store: Store, model: SepsModel, text: str, words: Tokens, where: str | None) -> Scored:
    """Pictures whose descriptions, or whose pixels, are near a text. words (1,M,C)"""
    shared = " ".join(dict.fromkeys(text.split()[:_MATCHED_WORDS]))
    pixels = model.global_texts(words)[0].tolist()
    most = proposals(store.count(where))
    rankings = [
        named(store.nearest("description_vector", mean_word(words)[0].tolist(), most, where)),
        named(store.matching(shared, most, where)),
    ]
    near = named(store.nearest("pixel_vector", pixels, BY_PIXELS, where))
    rows = store.fetch(sorted({*fuse(rankings, most), *near}), [*rough_columns(model), "words"])
    return scored_roughly(model, rows.to_batches(max_chunksize=_ROWS_AT_ONCE), words)[0]


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
        batches = store.scan(["id", *columns], where, _ROWS_AT_ONCE)
        return scored_roughly(model, batches, words, limit)
    found: list[Scored] = []
    for place, vector in enumerate(model.global_texts(words).tolist()):
        near = named(store.nearest("pixel_vector", vector, NEAREST, where))
        batches = store.fetch(sorted(near), columns).to_batches(max_chunksize=_ROWS_AT_ONCE)
        found += scored_roughly(model, batches, words[[place]], limit)
    return found


@torch.inference_mode()
def scored_roughly(
    model: SepsModel, batches: Iterable[pa.RecordBatch], words: Tokens, limit: int | None = None
) -> list[Scored]:
    """The rough scores of rows, for each text; of the best alone where there is a limit. words (T,M,C)"""
    ids: list[str] = []
    blocks: list[Tensor] = []
    for batch in batches:
        if batch.num_rows:
            ids += batch.column("id").to_pylist()
            blocks.append(rough_scores(model, batch, words))
    if not ids:
        return [{} for _ in range(len(words))]
    scores, places = torch.cat(blocks).T.topk(min(limit or len(ids), len(ids)))
    return [
        {ids[place]: score for place, score in zip(*each, strict=True)}
        for each in zip(places.tolist(), scores.tolist(), strict=True)
    ]


def rough_scores(model: SepsModel, rows: pa.RecordBatch, words: Tokens) -> Tensor:
    """About what the exact scores of some rows are. words (T,M,C) -> (rows,T)"""
    described = rows.column("words").to_pylist() if "words" in rows.schema.names else []
    patches = patch_scores(model, rows.column("sketch"), words)
    scores = patches + word_scores(model, described, words, patches)
    weight = None if model.global_term is None else model.global_term.weight
    if weight is not None:
        vectors = rows.column("pixel_vector").flatten().to_numpy(zero_copy_only=False)
        images = torch.from_numpy(vectors.reshape(rows.num_rows, -1).astype(np.float32))
        scores = scores + weight * (images.to(scores.device) @ model.global_texts(words).T)
    return scores.float().cpu()


def rough_columns(model: SepsModel) -> list[str]:
    """The columns that `rough_scores` reads of a picture without a description."""
    scored = model.global_term is not None and model.global_term.weight is not None
    return ["sketch", "pixel_vector"] if scored else ["sketch"]


def fuse(rankings: Sequence[Sequence[str]], limit: int) -> list[str]:
    """Reciprocal rank fusion: the items that several rankings put high come first."""
    points: dict[str, float] = {}
    for ranking in rankings:
        for rank, item in enumerate(ranking):
            points[item] = points.get(item, 0.0) + 1 / (_RANK_DAMPING + rank)
    return sorted(points, key=lambda item: (-points[item], item))[:limit]


def named(ranking: Sequence[tuple[str, float]]) -> list[str]:
    """The items of a ranking."""
    return [item for item, _ in ranking]

"""Search: cheap sources propose candidates, the exact score decides among them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
import torch
from torch import Tensor

from seps.data.text import MOST_WORDS
from seps.gallery.packing import unpack
from seps.gallery.proposing import named, propose
from seps.gallery.rows import device_of, uses_descriptions
from seps.gallery.store import Store
from seps.model import SepsModel
from seps.tokens import Tokens

# A picture finds its descriptions by one vector alone: so many are scored exactly, or so many a result.
TEXT_CANDIDATES = 200
TEXT_CANDIDATES_A_RESULT = 8
MOST_RESULTS = 1000
# Queries of a batch that share one block of candidates, so that memory stays bounded.
_QUERIES_AT_ONCE = 8
_SCAN_ROWS = 256
ENTRY_COLUMNS = (
    "path",
    "folder",
    "name",
    "size",
    "width",
    "height",
    "taken",
    "modified",
    "indexed",
    "tags",
    "description",
)


@dataclass(frozen=True)
class Entry:
    """What the gallery knows of a picture; path is None for one that came as bytes."""

    id: str
    path: str | None
    folder: str | None
    name: str
    size: int
    width: int
    height: int
    taken: datetime
    modified: datetime
    indexed: datetime
    tags: tuple[str, ...]
    description: str | None


@dataclass(frozen=True)
class Hit:
    """A picture found: its score and what the gallery knows of it."""

    score: float
    entry: Entry

    @property
    def id(self) -> str:
        """The picture's."""
        return self.entry.id


@dataclass(frozen=True)
class TextHit:
    """A text found: its score, and the picture it describes where it is a stored description."""

    score: float
    text: str
    id: str | None = None


def check_text(text: str) -> str:
    """A query without space around it; ValueError where it says nothing or too much."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("query: expected valid Unicode, found half of a surrogate pair") from None
    words = text.split()
    if not words:
        raise ValueError("query: expected a text, found an empty one")
    if len(words) > MOST_WORDS:
        raise ValueError(f"query: expected at most {MOST_WORDS} words, found {len(words)}")
    return " ".join(words)


def check_count(k: int) -> int:
    """How many results are wanted."""
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MOST_RESULTS:
        raise ValueError(f"k: expected 1 to {MOST_RESULTS} results, found {k!r}")
    return k


def tokens_of(model: SepsModel, rows: pa.Table | pa.RecordBatch) -> tuple[Tokens, Tokens | None]:
    """Patches (B,N,C) and, where they count, description words (B,D,C) of some rows."""
    channels, device = model.config.channels, device_of(model)
    images = unpack(rows.column("patches").to_pylist(), channels).to(device)
    if not uses_descriptions(model):
        return images, None
    packed = rows.column("words").to_pylist()
    return images, None if not any(packed) else unpack(packed, channels).to(device)


@torch.inference_mode()
def score_rows(model: SepsModel, rows: pa.Table | pa.RecordBatch, texts: Tokens) -> Tensor:
    """The exact score of every row with every text. -> (rows,T)"""
    images, dense = tokens_of(model, rows)
    return model.score(images, texts, dense).float().cpu()


def token_columns(model: SepsModel) -> list[str]:
    """The columns that `tokens_of` reads."""
    return ["patches", "words"] if uses_descriptions(model) else ["patches"]


@torch.inference_mode()
def search_candidates(
    store: Store, model: SepsModel, texts: Sequence[str], words: Tokens, k: int, where: str | None
) -> list[list[Hit]]:
    """Two stages: propose, then score exactly. words (T,M,C) of the texts"""
    columns = ["id", *ENTRY_COLUMNS, *token_columns(model)]
    found: list[list[Hit]] = []
    for start in range(0, len(texts), _QUERIES_AT_ONCE):
        stop = min(start + _QUERIES_AT_ONCE, len(texts))
        proposed = propose(store, model, texts[start:stop], words[start:stop], k, where)
        wanted = sorted({row for rows in proposed for row in rows})
        places = {row: place for place, row in enumerate(wanted)}
        rows = store.take(wanted, columns)
        for query, own in enumerate(proposed, start=start):
            if not own:
                found.append([])
                continue
            chosen = rows.take([places[row] for row in own])
            scores = score_rows(model, chosen, words[[query]])[:, 0]
            best = best_rows(scores.tolist(), chosen.column("id").to_pylist(), k)
            found.append(hits(chosen.take(best), [scores[place].item() for place in best]))
    return found


def best_rows(scores: Sequence[float], ids: Sequence[str], k: int) -> list[int]:
    """Places of the k largest scores, equal ones in the order of their ids."""
    return sorted(range(len(scores)), key=lambda place: (-scores[place], ids[place]))[:k]


def hits(rows: pa.Table, scores: Sequence[float]) -> list[Hit]:
    """Rows and their scores as results."""
    entries = entries_of(rows)
    return [Hit(score, entry) for score, entry in zip(scores, entries, strict=True)]


def entries_of(rows: pa.Table) -> list[Entry]:
    """Rows as entries."""
    return [
        Entry(**{**row, "tags": tuple(row["tags"] or ()), "name": row["name"] or ""})
        for row in rows.select(["id", *ENTRY_COLUMNS]).to_pylist()
    ]


def search_everything(
    store: Store, model: SepsModel, words: Tokens, k: int, where: str | None
) -> list[list[Hit]]:
    """The exact score of every row, in blocks of bounded size. words (T,M,C)"""
    best: list[list[tuple[float, str]]] = [[] for _ in range(len(words))]
    for batch in store.scan(["id", *token_columns(model)], where, _SCAN_ROWS):
        ids = batch.column("id").to_pylist()
        scores = score_rows(model, batch, words)
        top = scores.topk(min(k, len(ids)), dim=0).indices.T.tolist()
        for kept, column, places in zip(best, scores.T.tolist(), top, strict=True):
            kept.extend((-column[place], ids[place]) for place in places)
            kept[:] = heapq.nsmallest(k, kept)
    wanted = sorted({item for kept in best for _, item in kept})
    rows = store.fetch(wanted, list(ENTRY_COLUMNS))
    known = {entry.id: entry for entry in entries_of(rows)}
    return [[Hit(-score, known[item]) for score, item in kept if item in known] for kept in best]


def search_alike(
    store: Store, vectors: Tensor, k: int, where: str | None, exact: bool
) -> Iterator[list[Hit]]:
    """The pictures whose vector has the largest cosine with a picture's. vectors (Q,C)"""
    for vector in vectors.float().cpu():
        ranked = store.nearest("pixel_vector", vector.tolist(), k, where, exact)
        yield hits(store.take(named(ranked), ["id", *ENTRY_COLUMNS]), [cosine for _, cosine in ranked])


def search_descriptions(
    store: Store, model: SepsModel, image: Tokens, k: int, where: str | None
) -> list[TextHit]:
    """The stored descriptions that fit a picture best. image (1,N,C)"""
    vector = model.global_images(image)[0].float().cpu().tolist()
    limit = max(TEXT_CANDIDATES, TEXT_CANDIDATES_A_RESULT * k)
    proposed = named(store.nearest("text_vector", vector, limit, where))
    rows = store.take(proposed, ["id", "description", "words"])
    if not rows.num_rows:
        return []
    words = unpack(rows.column("words").to_pylist(), model.config.channels).to(device_of(model))
    with torch.inference_mode():
        scores = model.score(image, words)[0].float().cpu().tolist()
    ids, texts = rows.column("id").to_pylist(), rows.column("description").to_pylist()
    found: dict[str, TextHit] = {}
    for place in best_rows(scores, ids, len(ids)):
        found.setdefault(texts[place], TextHit(scores[place], texts[place], ids[place]))
    return list(found.values())[:k]

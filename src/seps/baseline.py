"""`seps baseline`: what frozen features reach without any training by gradient; a model has to beat it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seps.alignment import affinities, align
from seps.cca import RIDGE, correlate
from seps.data.records import Problems, Source, written_beside
from seps.data.text import MOST_WORDS
from seps.evaluation import COLUMN_NAMES, COLUMNS, figures_of
from seps.features import Features
from seps.metrics import measure_retrieval
from seps.model import SepsConfig, create
from seps.recipe import Recipe
from seps.slimming import unit
from seps.sources import ReadOptions, count_described, open_joined, open_source
from seps.tokens import Tokens

logger = logging.getLogger(__name__)

PAIRS = 2**24
"""Cosines of words that are held at once."""


@dataclass(frozen=True)
class BaselineOptions:
    """Measure linear CCA of mean-pooled features, and captions against descriptions without pixels.

    A model has to beat these: `seps baseline photos --cache runs/features`.
    """

    data: str
    """A data folder of any known layout."""
    cache: str = "runs/features"
    """Folder of kept features, as `seps cache` fills it; what is missing is computed."""
    split: str = "dev"
    """The split to measure on."""
    train: str = "train"
    """The split whose features the maps are computed from."""
    limit: int | None = None
    """Images of the measured split that count."""
    directions: int = 256
    """Directions that CCA keeps."""
    ridge: float = RIDGE
    """What CCA adds to the variances, as a share of their mean."""
    also: tuple[str, ...] = ()
    """Further data folders whose train split the maps are computed from."""
    image_encoder: dict[str, Any] = field(default_factory=lambda: {"kind": "mini", "tuning": "frozen"})
    """kind and its arguments."""
    text_encoder: dict[str, Any] = field(default_factory=lambda: {"kind": "mini", "tuning": "frozen"})
    """kind and its arguments."""
    out: str = "runs/baseline"
    """Folder of table.md and table.json."""
    read: ReadOptions = field(default_factory=ReadOptions)
    """How the data is read."""


def run(options: BaselineOptions) -> int:
    """`seps baseline`."""
    measured = open_source(options.data, options.read, options.split, options.limit)
    train = open_joined((options.data, *options.also), options.read, options.train)
    config = SepsConfig("laps", 16, options.image_encoder, options.text_encoder)
    features = Features.open(options.cache, *create(config))
    problems = Problems(options.read.broken)
    measured, train = (features.readable(each, problems) for each in (measured, train))
    found = measure(features, measured, train, options.directions, options.ridge)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    with written_beside(out / "table.json") as file:
        json.dump({"options": asdict(options), "figures": found}, file, indent=1)
    text = table(found, options, len(measured))
    with written_beside(out / "table.md") as file:
        file.write(text)
    logger.info("%s", text)
    return 0


def measure(
    features: Features, measured: Source, train: Source, directions: int, ridge: float
) -> dict[str, dict[str, float]]:
    """Figures of every baseline by name."""
    described = count_described(measured) == len(measured)
    for source in (measured, train):
        features.fill(source, None, False, MOST_WORDS)
    maps = correlate(*features.pooled(train, MOST_WORDS), directions, ridge)
    images, texts, owners = features.pooled(measured, MOST_WORDS)
    pixels = maps.scores(images, texts).float()
    scores = {"linear CCA of mean-pooled features": pixels}
    if described:
        means, words = match_descriptions(features, measured, texts)
        scores |= {
            "captions against descriptions, cosine of the means": means,
            "captions against descriptions, eq. 5 on raw words": words,
            "both, added": means + words,
            "both and linear CCA, added": means + words + pixels,
        }
    return {name: figures_of(measure_retrieval(each, owners)) for name, each in scores.items()}


def match_descriptions(features: Features, source: Source, texts: Tensor) -> tuple[Tensor, Tensor]:
    """Captions against the images' descriptions: cosine of the means, and eq. 5's means. -> (B,T) twice"""
    records = [source[index] for index in range(len(source))]
    descriptions = [record.dense for record in records]
    length = Recipe.description_length
    features.fill_texts([each for each in descriptions if each is not None], length)
    captions = [caption for record in records for caption in record.captions]
    dense = features.text_tokens(descriptions, length)
    words = features.text_tokens(captions, MOST_WORDS)
    return unit(dense.mean()) @ unit(texts).T, meet_words(words, dense)


def meet_words(words: Tokens, dense: Tokens) -> Tensor:
    """Eq. 5 without a network between every text's words and every description's. -> (B,T)"""
    mask = None if words.mask is None else words.mask.unsqueeze(0)
    size = max(1, PAIRS // (words.features[..., 0].numel() * dense.features.shape[1]))
    rows = []
    for start in range(0, len(dense), size):
        part = dense[start : start + size]
        affinity = affinities(words.features.unsqueeze(0), part.features.unsqueeze(1))
        own = None if part.mask is None else part.mask.unsqueeze(1)
        rows.append(align(affinity, mask, own))
    return torch.cat(rows)


def table(found: Mapping[str, Mapping[str, float]], options: BaselineOptions, images: int) -> str:
    """The figures as Markdown."""
    lines = [
        f"Split {options.split!r} of {options.data}, {images:,} images; no training by gradient.",
        "",
        f"| | {COLUMN_NAMES} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, figures in found.items():
        lines.append(f"| {name} | {' | '.join(f'{figures[column]:.1f}' for column in COLUMNS)} |")
    return "\n".join(lines) + "\n"

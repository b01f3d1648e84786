"""Encode once, score all pairs, measure: retrieval both ways; on scenes, whether the right patches spoke."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from seps.data.loader import evaluation_batches
from seps.data.records import Problems, Record, Source
from seps.data.scenes import Truth
from seps.features import Features, batches
from seps.metrics import Retrieval, measure_retrieval
from seps.model import SepsModel, SepsProcessor
from seps.objective import Scored, concatenate
from seps.progress import progress_bar
from seps.recipe import Side
from seps.slimming import unit
from seps.tokens import Tokens

IMAGE_BLOCK, TEXT_BLOCK = 64, 1024
"""Images and texts that are scored at once; the engine divides further by its memory budget."""

COLUMNS = ("i2t_r1", "i2t_r5", "i2t_r10", "t2i_r1", "t2i_r5", "t2i_r10", "rsum")
COLUMN_NAMES = "i2t R@1 | R@5 | R@10 | t2i R@1 | R@5 | R@10 | rSum"
"""The figures that tables show, and their heading."""


@dataclass(frozen=True)
class Corpus:
    """Everything encoded: images, their texts, and the dense text of each image, None where there is none.

    records are those of the images that could be read; owners (T,) is the row of each text's image; word
    (T,M) numbers the word that each token of a text belongs to, -1 for none.
    """

    images: Tokens
    texts: Tokens
    dense: Tokens | None
    owners: Tensor
    records: tuple[Record, ...]
    indices: tuple[int, ...]
    captions: tuple[str, ...]
    problems: Problems


@torch.no_grad()
def encode(
    model: SepsModel,
    processor: SepsProcessor,
    source: Source,
    features: Features | None = None,
    batch_size: int = 64,
    workers: int = 0,
    words: int = 90,
    problems: Problems | None = None,
) -> Corpus:
    """The tokens of every image and text of a source; from kept features where there are some."""
    model.eval()
    problems = Problems() if problems is None else problems
    if features is not None and features.images is not None:
        part = features.readable(source, problems)
        images, indices = _kept_images(model, part, features, batch_size), list(part.indices)
    else:
        images, indices = _seen_images(model, processor, source, batch_size, workers, problems)
    records = tuple(source[index] for index in indices)
    captions = tuple(caption for record in records for caption in record.captions)
    owners = torch.tensor([row for row, record in enumerate(records) for _ in record.captions])
    texts = encode_texts(model, processor, captions, words, features)
    dense = None
    if model.recipe.dense != "none" and any(record.dense is not None for record in records):
        described = [record.dense for record in records]
        dense = encode_texts(model, processor, described, model.recipe.description_length, features)
    return Corpus(images, texts, dense, owners, records, tuple(indices), captions, problems)


def _kept_images(model: SepsModel, source: Source, features: Features, batch_size: int) -> Tokens:
    device = next(model.parameters()).device
    features.fill_images(source)
    parts = []
    with progress_bar("images", len(source)) as advance:
        for part in batches(range(len(source)), batch_size):
            raw = features.image_tokens([source[index] for index in part])
            parts.append(model.project_images(raw.to(device)).to(torch.float32))
            advance(len(part))
    return concatenate(parts)


def _seen_images(
    model: SepsModel,
    processor: SepsProcessor,
    source: Source,
    batch_size: int,
    workers: int,
    problems: Problems,
) -> tuple[Tokens, list[int]]:
    device = next(model.parameters()).device
    parts, indices = [], []
    with progress_bar("images", len(source)) as advance:
        for batch in evaluation_batches(source, processor.view, batch_size, workers, problems):
            parts.append(model.encode_images(batch.pixels.to(device)).to(torch.float32))
            indices.extend(batch.indices.tolist())
            advance(len(batch.pixels))
    if not parts:
        raise ValueError(f"data: expected at least one readable image, {problems.summary()}")
    return concatenate(parts), indices


@torch.no_grad()
def encode_texts(
    model: SepsModel,
    processor: SepsProcessor,
    texts: Sequence[str | None],
    words: int,
    features: Features | None = None,
    batch_size: int = 256,
) -> Tokens:
    """Word features of texts, None being an absent one, padded to the longest of all. -> (T,M,C)"""
    device = next(model.parameters()).device
    kept = features is not None and features.texts is not None
    if kept and features is not None:
        features.fill_texts([text for text in texts if text is not None], words)
    parts: list[Tokens] = []
    with progress_bar("texts", len(texts)) as advance:
        for part in batches(texts, batch_size):
            if kept and features is not None:
                tokens = model.project_texts(features.text_tokens(part, words).to(device))
            else:
                read = processor.texts(part, words)
                tokens = model.encode_texts(read["ids"].to(device), read["mask"].to(device))
            parts.append(tokens.to(torch.float32))
            advance(len(part))
    return concatenate(_equally_long(parts))


def _equally_long(parts: Sequence[Tokens]) -> list[Tokens]:
    """The same token sets, padded to the longest of all, each with a mask."""
    longest = max(part.features.shape[1] for part in parts)
    result = []
    for part in parts:
        mask = part.mask
        if mask is None:
            mask = torch.ones(part.features.shape[:2], dtype=torch.bool, device=part.features.device)
        missing = longest - part.features.shape[1]
        features = torch.nn.functional.pad(part.features, (0, 0, 0, missing))
        result.append(Tokens(features, torch.nn.functional.pad(mask, (0, missing)), part.cls))
    return result


@torch.no_grad()
def score_all(model: SepsModel, corpus: Corpus) -> Tensor:
    """The score of every image with every text, dense text on the recipe's side. -> (B,T) on the CPU"""
    model.eval()
    count, total = len(corpus.images), len(corpus.texts)
    scores = torch.empty(count, total)
    hung_on_text = model.recipe.dense_side == "text"
    with progress_bar("scores", count * total) as advance:
        for row in range(0, count, IMAGE_BLOCK):
            rows = slice(row, row + IMAGE_BLOCK)
            for column in range(0, total, TEXT_BLOCK):
                columns = slice(column, column + TEXT_BLOCK)
                dense = corpus.dense
                if dense is not None:
                    dense = (
                        dense[corpus.owners[columns].to(dense.features.device)]
                        if hung_on_text
                        else dense[rows]
                    )
                block = model.score(corpus.images[rows], corpus.texts[columns], dense)
                scores[rows, columns] = block.float().cpu()
                advance(block.numel())
    return scores


@torch.no_grad()
def score_globally(model: SepsModel, corpus: Corpus) -> Tensor:
    """Cosines of the global vectors of every image with every text: the coarse stage of search. -> (B,T)"""
    model.eval()
    return model.global_scores(corpus.images, corpus.texts).float().cpu()


@dataclass(frozen=True)
class Grounding:
    """Whether the right patches spoke, as shares of one, each beside its chance.

    kept: kept patches that show any thing, against all patches that do; named: kept patches that show a
    thing the caption names; pointing: words of a thing whose closest patch shows it, against the share of
    patches that do.
    """

    kept: float
    kept_chance: float
    named: float
    named_chance: float
    pointing: float
    pointing_chance: float

    def figures(self) -> dict[str, float]:
        """In percent."""
        return {name: 100 * value for name, value in vars(self).items()}


@torch.no_grad()
def measure_grounding(
    model: SepsModel, processor: SepsProcessor, corpus: Corpus, truths: Sequence[Truth], words: int = 90
) -> Grounding:
    """Selection and alignment against the truth of scenes, each image with its own captions.

    truths: of every image of the corpus, in order
    """
    model.eval()
    rows, columns = model.image_encoder.grid
    tallies = []
    with progress_bar("grounding", len(truths)) as advance:
        for image, truth in enumerate(truths):
            cells = truth.cells(rows, columns).reshape(len(truth.scene.things), rows * columns)
            tallies.extend(_ground_image(model, processor, corpus, image, truth, cells, words))
            advance()
    kept, named, pointing = (np.concatenate([each[place] for each in tallies]) for place in range(3))
    if not len(pointing):
        raise ValueError("truth: expected captions with words that name things, found none")
    return Grounding(*kept.mean(0), *named.mean(0), *pointing.mean(0))


def _ground_image(
    model: SepsModel,
    processor: SepsProcessor,
    corpus: Corpus,
    image: int,
    truth: Truth,
    cells: np.ndarray,
    words: int,
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(hit, chance) rows of kept, named and pointing for every caption of an image. cells (things,N)"""
    own = (corpus.owners == image).nonzero().squeeze(1)
    texts = corpus.texts[own]
    dense = None
    if corpus.dense is not None:
        hung_on_text = model.recipe.dense_side == "text"
        dense = corpus.dense[[image] * len(own) if hung_on_text else [image]]
    tokens = corpus.images[[image]]
    found = model.head.inspect(tokens, texts, dense)
    decisions = found.branches["sparse"].kept[0].expand(len(own), -1).cpu().numpy()
    closest = (unit(texts.features) @ unit(tokens.features[0]).T).argmax(-1).cpu().numpy()
    numbers = processor.texts([corpus.captions[text] for text in own.tolist()], words)["words"].numpy()
    real = (
        np.ones(closest.shape, dtype=bool)
        if texts.mask is None
        else texts.mask.cpu().numpy()[:, : closest.shape[1]]
    )
    anything = np.asarray(cells.any(0))
    result = []
    for place, sentence in enumerate(truth.captions):
        naming = sentence.words()
        chosen = decisions[place]
        shown = np.asarray(cells[list(naming)].any(0)) if naming else np.zeros_like(anything)
        points = [
            (float(cells[thing, closest[place, token]]), float(cells[thing].mean()))
            for thing, mentioned in naming.items()
            for token in range(numbers.shape[1])
            if numbers[place, token] in mentioned and real[place, token]
        ]
        result.append(
            (
                np.array([[anything[chosen].mean(), anything.mean()]]),
                np.array([[shown[chosen].mean(), shown.mean()]]),
                np.array(points).reshape(-1, 2),
            )
        )
    return result


def figures_of(retrieval: Retrieval) -> dict[str, float]:
    """The figures of a measurement under short names, in percent; rsum is out of 600."""
    found: dict[str, float] = {}
    for name, side in (("i2t", retrieval.image_to_text), ("t2i", retrieval.text_to_image)):
        found |= {f"{name}_r1": side.r1, f"{name}_r5": side.r5, f"{name}_r10": side.r10}
        found[f"{name}_median_rank"] = side.median_rank
    return found | {"rsum": retrieval.rsum}


def chance_rsum(images: int, texts: int) -> float:
    """The rSum that blind guessing reaches on average when every image has equally many texts."""
    own = texts / images
    total = 0.0
    for k in (1, 5, 10):
        missed = 1.0
        for place in range(min(k, texts)):
            missed *= max(0.0, (texts - own - place) / (texts - place))
        total += 100 * (1 - missed) + 100 * min(1.0, k / images)
    return total


def on_side(model: SepsModel, side: Side) -> SepsModel:
    """The same weights with dense text on another side; the recipe refuses a side it cannot have."""
    if model.recipe.dense_side == side:
        return model
    config = copy.deepcopy(model.config)
    config.recipe = asdict(replace(model.recipe, dense_side=side))
    turned = SepsModel(config)
    turned.load_state_dict(model.state_dict())
    torch.nn.Module.to(turned, next(model.parameters()).device)
    return turned.eval()


def evaluate(
    model: SepsModel,
    processor: SepsProcessor,
    source: Source,
    features: Features | None = None,
    batch_size: int = 64,
    workers: int = 0,
    problems: Problems | None = None,
    scored: Scored = "alignment",
) -> Mapping[str, float]:
    """Figures of a model on a source, and the corpus thrown away: what training asks for after an epoch."""
    corpus = encode(model, processor, source, features, batch_size, workers, problems=problems)
    scores = score_all(model, corpus) if scored == "alignment" else score_globally(model, corpus)
    return figures_of(measure_retrieval(scores, corpus.owners))

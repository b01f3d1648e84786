"""Training for image-text retrieval: data, model and objective as a task of the loop; `seps train`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from seps.data.loader import (
    Batch,
    EpochSampler,
    caption_counts,
    generator_for,
    readable,
    training_batches,
)
from seps.data.records import Problems, Source
from seps.data.text import MOST_WORDS, Encoded, WordNoise, augment_encoded
from seps.distributed import World, joined, wait
from seps.evaluation import evaluate
from seps.features import Features, Pooled, may_mirror, pool, start_projections
from seps.model import SepsConfig, SepsModel, SepsProcessor, create, load, save
from seps.objective import encode_in_parts, retrieval_loss
from seps.options import TrainOptions, recipe_from
from seps.sources import count_described, open_joined, open_source, refuse_shared
from seps.tokens import Tokens
from seps.training import Outcome, brief, draw_from, fit

logger = logging.getLogger(__name__)

FEATURE_NOISE = 8
"""The purpose under which noise on kept features is drawn, beside those of the loader."""


@dataclass(frozen=True)
class Drawn:
    """A batch as the encoders take it: pixels or kept raw features, ids or kept raw features.

    ids (B,) tell images apart; names are what the pictures are called.
    """

    images: Tensor | Tokens
    texts: Encoded | Tokens
    dense: Encoded | Tokens | None
    ids: Tensor
    names: tuple[str, ...]


class RetrievalTask:
    """A model, the data it learns from, and the dev split it is chosen on."""

    def __init__(
        self,
        model: SepsModel,
        processor: SepsProcessor,
        train: Source,
        dev: Source,
        options: TrainOptions,
        world: World | None = None,
    ) -> None:
        self.model, self.processor, self.options = model, processor, options
        self.train, self.dev = train, dev
        self.world = world or World()
        self.problems = Problems(options.data.broken)
        self._require_batches()
        aligned = options.objective.scored == "alignment"
        self.describes = aligned and model.recipe.dense != "none" and count_described(train) > 0
        self.features = self._open_features()
        self.sampler = EpochSampler(
            caption_counts(self.train),
            options.data.batch_size // self.world.size,
            options.run.seed,
            rank=self.world.rank,
            world_size=self.world.size,
            draws=options.data.draws,
            groups=self._groups(),
        )
        if options.model.start is None and options.model.projections == "cca":
            start_projections(model, self._pooled(), options.model.ridge)

    def _require_batches(self) -> None:
        """Refuse a batch that the processes cannot share or the pictures cannot fill."""
        data = self.options.data
        if data.batch_size % self.world.size:
            raise ValueError(
                f"data.batch_size: expected a multiple of the {self.world.size} processes, "
                f"found {data.batch_size}"
            )
        if data.batch_size > len(self.train):
            raise ValueError(
                f"data.batch_size: expected at most the {len(self.train)} images of split {data.train!r} "
                f"of {', '.join((data.folder, *data.also))}, found {data.batch_size}"
            )

    def _groups(self) -> list[int] | None:
        """Which records have a description, where those are kept apart."""
        data = self.options.data
        if not data.apart:
            return None
        groups = [int(self.train[index].dense is not None) for index in range(len(self.train))]
        for group, which in enumerate(("without", "with")):
            if 0 < groups.count(group) < data.batch_size:
                raise ValueError(
                    f"data.apart: expected at least a batch of {data.batch_size} images {which} a "
                    f"description, found {groups.count(group)}"
                )
        return groups

    def _open_features(self) -> Features | None:
        """Kept features, completed by the first process; pictures without any are left out of the data."""
        cache = self.options.data.cache
        if cache is None:
            return None
        nn.Module.to(self.model, self.world.device)
        if self.world.main:
            features = self._open_readable(cache)
            length = self.model.recipe.description_length if self.describes else None
            features.fill(self.train, length, self.options.data.flip != "never", MOST_WORDS)
            features.fill(self.dev, length, False, MOST_WORDS)
        wait(self.world)
        return features if self.world.main else self._open_readable(cache)

    def _open_readable(self, cache: str) -> Features:
        features = Features.open(cache, self.model, self.processor)
        self.train, self.dev = (features.readable(each, self.problems) for each in (self.train, self.dev))
        return features

    def _pooled(self) -> Pooled:
        """Mean patches and words of the training split, kept or computed."""
        features = self.features
        if features is not None and features.images is not None and features.texts is not None:
            return features.pooled(self.train, MOST_WORDS)
        return pool(self.model, self.processor, readable(self.train, self.problems), MOST_WORDS)

    @cached_property
    def ordinary(self) -> np.ndarray:
        """The token ids that a random replacement is drawn from."""
        return np.asarray(list(self.processor.tokenizer.ordinary))

    def backbones(self) -> list[nn.Module]:
        """The backbones that did not start from nothing."""
        return self.model.backbones()

    def steps(self) -> int:
        """Batches of an epoch."""
        return self.sampler.steps

    def loader(self, epoch: int, start: int) -> Iterator[Drawn]:
        """The batches of an epoch from number `start` on."""
        sampler = self.sampler.at(epoch, start)
        if self.features is not None and self.features.images is not None:
            for number, draws in enumerate(sampler, start):
                yield self._draw_kept(self.features, draws, epoch, number)
            return
        data = self.options.data
        view = replace(self.processor.view, flip=data.flip, scale=(data.least_crop, 1.0))
        for batch in training_batches(self.train, sampler, view, data.workers, self.problems):
            yield self._draw(batch)

    def _draw(self, batch: Batch) -> Drawn:
        """A batch of decoded images."""
        generators = batch.word_generators(self.options.run.seed)
        texts = self._read_captions(batch.captions, generators)
        dense = self._read_dense(batch.dense) if self.describes else None
        return Drawn(batch.pixels, texts, dense, batch.indices, batch.image_ids)

    def _draw_kept(self, features: Features, draws: Any, epoch: int, number: int) -> Drawn:
        """A batch of kept image features, and of kept text features where the text backbone is frozen."""
        data, seed = self.options.data, self.options.run.seed
        records = [self.train[draw.record] for draw in draws]
        generator = generator_for(seed, epoch, FEATURE_NOISE, number * self.world.size + self.world.rank)
        mirrored = [
            bool(generator.random() < 0.5) and data.flip != "never" and may_mirror(record)
            for record in records
        ]
        images = disturb(
            features.image_tokens(records, mirrored), data.feature_noise, data.patch_dropout, generator
        )
        captions = [record.captions[draw.caption] for record, draw in zip(records, draws, strict=True)]
        described = [record.dense for record in records]
        texts: Encoded | Tokens
        dense: Encoded | Tokens | None = None
        if features.texts is not None:
            raw = features.text_tokens(captions, MOST_WORDS)
            spared = self.model.text_encoder.context
            texts = disturb(raw, data.feature_noise, data.word_noise, generator, spared)
            if self.describes:
                dense = features.text_tokens(described, self.model.recipe.description_length)
        else:
            places = [generator_for(seed, epoch, FEATURE_NOISE + 1, draw.record) for draw in draws]
            texts = self._read_captions(captions, places)
            dense = self._read_dense(described) if self.describes else None
        ids = torch.tensor([draw.record for draw in draws])
        return Drawn(images, texts, dense, ids, tuple(record.image_id for record in records))

    def _read_captions(self, captions: Any, generators: list[np.random.Generator]) -> Encoded:
        """Captions as ids, some of their words disturbed."""
        tokenizer = self.processor.tokenizer
        encoded = tokenizer(captions, MOST_WORDS)
        noise = WordNoise(self.options.data.word_noise)
        if noise.rate == 0:
            return encoded
        return augment_encoded(encoded, noise, tokenizer.mask_id, tokenizer.pad_id, self.ordinary, generators)

    def _read_dense(self, texts: Any) -> Encoded:
        """Descriptions as ids; None is an absent one."""
        read = self.processor.texts(list(texts), self.model.recipe.description_length)
        return Encoded(read["ids"], read["mask"], read["words"])

    def names(self, batch: Drawn) -> str:
        """The images of a batch."""
        return ", ".join(batch.names)

    def loss(self, batch: Drawn, epoch: int) -> Mapping[str, Tensor]:
        """The losses of the joint batch."""
        images = self._encode_images(batch.images)
        texts = self._encode_texts(batch.texts)
        dense = None if batch.dense is None else self._encode_texts(batch.dense)
        ids = batch.ids.to(self.world.device)
        return retrieval_loss(self.model, images, texts, dense, ids, self.options.objective, epoch)

    def _encode_images(self, images: Tensor | Tokens) -> Tokens:
        if isinstance(images, Tokens):
            return self.model.project_images(images.to(self.world.device))
        pixels = images.to(self.world.device)
        return encode_in_parts(self.model.encode_images, (pixels,), self.options.data.micro_batch)

    def _encode_texts(self, texts: Encoded | Tokens) -> Tokens:
        if isinstance(texts, Tokens):
            return self.model.project_texts(texts.to(self.world.device))
        ids, mask = texts.ids.to(self.world.device), texts.mask.to(self.world.device)
        return encode_in_parts(self.model.encode_texts, (ids, mask), self.options.data.micro_batch)

    def evaluate(self) -> Mapping[str, float]:
        """Recall on dev; the score is rSum."""
        data = self.options.data
        found = evaluate(
            self.model,
            self.processor,
            self.dev,
            self.features,
            data.batch_size,
            data.workers,
            self.problems,
            self.options.objective.scored,
        )
        return {**found, "score": found["rsum"]}

    def save(self, folder: Path) -> None:
        """The model and its processor as a folder that travels."""
        save(self.model, self.processor, folder)


def disturb(
    tokens: Tokens, noise: float, dropout: float, generator: np.random.Generator, spared: int = 0
) -> Tokens:
    """Kept features with Gaussian noise, a share of their deviation, and some tokens left out of each item.

    The first tokens, spared of them, stay, and at least one of the others. (B,N,C) -> (B,N,C)
    """
    features, mask = tokens.features, tokens.mask
    if noise:
        drawn = torch.from_numpy(generator.standard_normal(features.shape, dtype=np.float32))
        features = features + noise * features.std() * drawn
    if dropout:
        stays = torch.from_numpy(generator.random(features.shape[:2]) >= dropout)
        real = torch.ones_like(stays) if mask is None else mask
        kept = real & stays
        kept[:, :spared] = real[:, :spared]
        mask = torch.where(kept[:, spared:].any(1, keepdim=True), kept, real)
    return Tokens(features, mask, tokens.cls)


def build_model(options: TrainOptions, train: Source) -> tuple[SepsModel, SepsProcessor]:
    """The model that the options describe, or the one they start from."""
    chosen = options.model
    if chosen.start is not None:
        return load(chosen.start)
    draw_from(options.run.seed, 0, 0)
    recipe = recipe_from(options.recipe)
    config = SepsConfig(
        asdict(recipe),
        chosen.channels,
        chosen.image_encoder,
        chosen.text_encoder,
        chosen.global_term,
    )
    texts: list[str] = []
    if chosen.text_encoder.get("kind") == "light":
        for index in range(len(train)):
            record = train[index]
            texts.extend(record.captions)
            if record.dense is not None and recipe.dense != "none":
                texts.append(record.dense)
    model, processor = create(config, texts or None, chosen.tokenizer)
    if chosen.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model, processor


def make_task(options: TrainOptions, world: World | None = None) -> RetrievalTask:
    """Data and model of the options as a task of the loop."""
    data = options.data
    train = open_joined((data.folder, *data.also), data, data.train)
    dev = open_source(data.folder, data, data.dev, data.dev_limit)
    refuse_shared(train, dev)
    model, processor = build_model(options, train)
    return RetrievalTask(model, processor, train, dev, options, world)


def train(options: TrainOptions, world: World | None = None) -> Outcome:
    """Train a model as the options say, or go on with it."""
    world = world or World()
    task = make_task(options, world)
    outcome = fit(task, options.run, options.optim, world, describe(options))
    if task.problems:
        logger.warning("%s", task.problems.summary())
    return outcome


def describe(options: TrainOptions) -> dict[str, Any]:
    """Options as nested plain values."""
    return asdict(options)


def run(options: TrainOptions) -> int:
    """`seps train`."""
    with joined(options.device) as world:
        outcome = train(options, world)
        if world.main:
            best = brief(outcome.best)
            logger.info("%d steps; best epoch %s on dev: %s", outcome.steps, outcome.best_epoch, best)
            logger.info("model: %s", outcome.model)
    return 0


def run_cache(options: TrainOptions) -> int:
    """`seps cache`: what `seps train` does first when data.cache is given, and nothing else."""
    if options.data.cache is None:
        raise ValueError("data.cache: expected the folder to keep features in, found none")
    with joined(options.device) as world:
        features = make_task(options, world).features
        if world.main and features is not None:
            for name, store in (("images", features.images), ("texts", features.texts)):
                if store is not None:
                    logger.info("%s: %d items, %d rows in %s", name, len(store), store.end, store.folder)
    return 0

"""From records to batches: which captions are drawn when, decoding in workers, exact resumption."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from seps.data.images import View, augment_image, evaluate_image
from seps.data.records import Broken, Problem, Problems, Record, Source

logger = logging.getLogger(__name__)

SUBSTITUTES = 8
"""So many records after a broken one are tried in its place before training stops."""

ORDER, IMAGE, CAPTION, WORDS, TURNS = range(5)


def generator_for(seed: int, epoch: int, purpose: int, index: int = 0) -> np.random.Generator:
    """Randomness that depends on these numbers alone: not on workers, batches or what was drawn before."""
    return np.random.default_rng([seed, purpose, epoch, index])


class Draw(NamedTuple):
    """What training looks at: a record, which of its captions, in which epoch."""

    record: int
    caption: int
    epoch: int


@dataclass(frozen=True)
class EpochSampler:
    """The batches of one epoch for one process; (seed, epoch, start_step) is all the state there is.

    `captions` counts the captions of every record. An epoch of `draws="image"` sees every image once with a
    random caption, of `draws="caption"` every caption once; where counts differ, every image comes as often
    as the median one, so that epochs are equally long. Over all processes no batch holds two captions of an
    image unless `repeats` allows it; what does not fill a last batch is left for another epoch. Where
    `groups` names the group of every record, a batch holds records of one group alone.
    """

    captions: Sequence[int]
    batch_size: int
    seed: int = 0
    epoch: int = 0
    start_step: int = 0
    rank: int = 0
    world_size: int = 1
    draws: Literal["image", "caption"] = "image"
    repeats: bool = False
    groups: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.world_size < 1:
            raise ValueError(
                f"batch size {self.batch_size} and world size {self.world_size} must be positive"
            )
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must lie in 0 to {self.world_size - 1}, not {self.rank}")
        if min(self.seed, self.epoch, self.start_step) < 0:
            raise ValueError("seed, epoch and start_step must not be negative")
        if self.draws not in ("image", "caption"):
            raise ValueError(f"draws must be 'image' or 'caption', not {self.draws!r}")
        if any(count < 1 for count in self.captions):
            raise ValueError("every record needs at least one caption to draw")
        whole = self.batch_size * self.world_size
        if not self.repeats and len(self.captions) < whole:
            raise ValueError(f"{len(self.captions)} images do not fill a batch of {whole} different ones")
        if self.repeats and len(self._order()) < whole:
            raise ValueError(f"{len(self._order())} draws an epoch do not fill a batch of {whole}")

    def at(self, epoch: int, start_step: int = 0) -> EpochSampler:
        """The same sampler at another epoch and step."""
        return replace(self, epoch=epoch, start_step=start_step)

    def __len__(self) -> int:
        """Steps that remain in this epoch."""
        return max(0, self.steps - self.start_step)

    @property
    def steps(self) -> int:
        """Steps of the whole epoch."""
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Draw]]:
        mine = slice(self.rank * self.batch_size, (self.rank + 1) * self.batch_size)
        for batch in self._batches[self.start_step :]:
            yield [Draw(index, caption, self.epoch) for index, caption in batch[mine]]

    def _order(self) -> list[tuple[int, int]]:
        """(record, caption) of the epoch: one random permutation of the images a round."""
        generator = generator_for(self.seed, self.epoch, ORDER)
        counts = np.asarray(self.captions)
        if self.draws == "image":
            order = generator.permutation(len(counts))
            picks = np.minimum((generator.random(len(counts)) * counts).astype(int), counts - 1)
            return list(zip(order.tolist(), picks[order].tolist(), strict=True))
        ranks = [generator.permutation(count).tolist() for count in counts.tolist()]
        return [
            (index, ranks[index][turn % len(ranks[index])])
            for turn in range(int(np.median(counts)))
            for index in generator.permutation(len(counts)).tolist()
        ]

    @cached_property
    def _batches(self) -> list[list[tuple[int, int]]]:
        order = self._order()
        if self.groups is None:
            return self._divide(order)
        apart: dict[int, list[tuple[int, int]]] = {}
        for draw in order:
            apart.setdefault(self.groups[draw[0]], []).append(draw)
        batches = [batch for group in sorted(apart) for batch in self._divide(apart[group])]
        turns = generator_for(self.seed, self.epoch, TURNS).permutation(len(batches))
        return [batches[turn] for turn in turns]

    def _divide(self, order: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """The full batches of some draws, in their order."""
        whole = self.batch_size * self.world_size
        if self.repeats:
            return [order[i : i + whole] for i in range(0, len(order) - whole + 1, whole)]
        return list(distinct_batches(order, whole))


def distinct_batches(order: Iterable[tuple[int, int]], size: int) -> Iterator[list[tuple[int, int]]]:
    """Full batches in which no record stands twice: a second caption waits for the next batch."""
    waiting: deque[tuple[int, int]] = deque()
    coming = iter(order)
    while True:
        batch: list[tuple[int, int]] = []
        inside: set[int] = set()
        for _ in range(len(waiting)):
            draw = waiting.popleft()
            if len(batch) < size and draw[0] not in inside:
                batch.append(draw)
                inside.add(draw[0])
            else:
                waiting.append(draw)
        while len(batch) < size and (next_draw := next(coming, None)) is not None:
            if next_draw[0] in inside:
                waiting.append(next_draw)
            else:
                batch.append(next_draw)
                inside.add(next_draw[0])
        if len(batch) < size:
            return
        yield batch


@dataclass(frozen=True)
class Example:
    """One decoded image (3,H,W) with the captions in play, its dense text, and where it came from."""

    pixels: Tensor
    captions: tuple[str, ...]
    dense: str | None
    image_id: str
    index: int
    epoch: int
    broken: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Batch:
    """B images with T captions: caption t belongs to image `owners[t]` of the batch.

    `indices` (B) are the positions in the source: equal ones are the same image. `broken` names images that
    could not be read and were left out (evaluation) or replaced (training).
    """

    pixels: Tensor
    captions: tuple[str, ...]
    owners: Tensor
    dense: tuple[str | None, ...]
    image_ids: tuple[str, ...]
    indices: Tensor
    epoch: int
    broken: tuple[Problem, ...]

    def word_generators(self, seed: int) -> list[np.random.Generator]:
        """One generator a caption for `augment_encoded`: the same in whatever batch or process it stands."""
        return [
            generator_for(seed, self.epoch, WORDS, int(self.indices[owner])) for owner in self.owners.tolist()
        ]


class TrainingExamples(Dataset[Example | Problem]):
    """Augmented image and one caption for a Draw; a broken image gives way to the next readable record."""

    def __init__(self, source: Source, view: View, seed: int = 0, broken: Broken = "refuse") -> None:
        self.source, self.view, self.seed, self.broken = source, view, seed, broken

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, draw: Draw) -> Example | Problem:
        problems: list[Problem] = []
        index = draw.record
        for _ in range(1 + min(SUBSTITUTES, len(self.source) - 1)):
            record = self.source[index]
            opened = _opened(self.source, index, record)
            if not isinstance(opened, Problem):
                caption = record.captions[draw.caption % len(record.captions)]
                texts = (caption, record.dense) if record.dense else (caption,)
                generator = generator_for(self.seed, draw.epoch, IMAGE, index)
                pixels = augment_image(opened, self.view, generator, texts)
                found = tuple(problems)
                return Example(pixels, (caption,), record.dense, record.image_id, index, draw.epoch, found)
            if self.broken == "refuse":
                return opened
            problems.append(opened)
            index = (index + 1) % len(self.source)
        what = f"{problems[0].what}; nor can the {len(problems) - 1} records after it be read"
        return Problem(problems[0].where, what)


class EvaluationExamples(Dataset[Example | Problem]):
    """The deterministic view of image `index` with all its captions."""

    def __init__(self, source: Source, view: View) -> None:
        self.source, self.view = source, view

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Example | Problem:
        record = self.source[index]
        opened = _opened(self.source, index, record)
        if isinstance(opened, Problem):
            return opened
        pixels = evaluate_image(opened, self.view)
        return Example(pixels, record.captions, record.dense, record.image_id, index, 0)


def _opened(source: Source, index: int, record: Record) -> Image.Image | Problem:
    """The image, or what is wrong with it: an exception would lose its sentence on the way from a worker."""
    try:
        return source.open(index)
    except ValueError as error:
        return Problem(record.source, str(error))


def collate(examples: Sequence[Example | Problem]) -> Batch | tuple[Problem, ...]:
    """Readable examples as one batch; problems alone where none is readable."""
    sound = [example for example in examples if isinstance(example, Example)]
    broken = [example for example in examples if isinstance(example, Problem)]
    broken += [problem for example in sound for problem in example.broken]
    if not sound:
        return tuple(broken)
    return Batch(
        pixels=torch.stack([example.pixels for example in sound]),
        captions=tuple(caption for example in sound for caption in example.captions),
        owners=torch.tensor([row for row, example in enumerate(sound) for _ in example.captions]),
        dense=tuple(example.dense for example in sound),
        image_ids=tuple(example.image_id for example in sound),
        indices=torch.tensor([example.index for example in sound]),
        epoch=sound[0].epoch,
        broken=tuple(broken),
    )


def training_batches(
    source: Source, sampler: EpochSampler, view: View, workers: int = 0, problems: Problems | None = None
) -> Iterator[Batch]:
    """One epoch of training batches from the sampler's step on; always full, so that processes stay in step.

    A broken image is refused with one sentence, or (`Problems("skip")`) replaced by the next readable record
    and counted in `problems`.
    """
    if len(sampler.captions) != len(source):
        raise ValueError(f"the sampler counts {len(sampler.captions)} records, the source {len(source)}")
    problems = Problems() if problems is None else problems
    examples = TrainingExamples(source, view, sampler.seed, problems.broken)
    # A generator of its own: starting a loader must not move the training's global random state.
    loader: Iterable[Any] = DataLoader(
        examples,
        batch_sampler=sampler,
        num_workers=workers,
        collate_fn=collate,
        generator=torch.Generator(),
    )
    for loaded in loader:
        lost = loaded if isinstance(loaded, tuple) else loaded.broken
        whole = not isinstance(loaded, tuple) and len(loaded.pixels) == sampler.batch_size
        for problem in lost:
            problems.meet(problem.where, problem.what)
        if not whole:
            raise ValueError(f"too many broken images in a row: {lost[0]}")
        yield loaded


def evaluation_batches(
    source: Source, view: View, batch_size: int, workers: int = 0, problems: Problems | None = None
) -> Iterator[Batch]:
    """All images in order with all their captions; broken ones are refused, or left out and counted."""
    if batch_size < 1:
        raise ValueError(f"batch size must be positive, not {batch_size}")
    problems = Problems() if problems is None else problems
    loader: Iterable[Any] = DataLoader(
        EvaluationExamples(source, view),
        batch_size,
        num_workers=workers,
        collate_fn=collate,
        generator=torch.Generator(),
    )
    for loaded in loader:
        for problem in loaded if isinstance(loaded, tuple) else loaded.broken:
            problems.meet(problem.where, problem.what)
        if not isinstance(loaded, tuple):
            yield loaded


def caption_counts(source: Source) -> list[int]:
    """How many captions every record has: what an EpochSampler draws from."""
    return [len(source[index].captions) for index in range(len(source))]


class Held:
    """A source that keeps every image it has opened in memory: for small data looked at many times."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._records: dict[int, Record] = {}
        self._images: dict[int, Image.Image] = {}

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int, /) -> Record:
        if index not in self._records:
            self._records[index] = self.source[index]
        return self._records[index]

    def open(self, index: int) -> Image.Image:
        """The image of a record as RGB, decoded or drawn at the first call only."""
        if index not in self._images:
            self._images[index] = self.source.open(index)
        return self._images[index]


@dataclass(frozen=True)
class Part:
    """Some records of a source, by their places in it."""

    source: Source
    indices: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int, /) -> Record:
        return self.source[self.indices[index]]

    def open(self, index: int) -> Image.Image:
        """The image of a record as RGB."""
        return self.source.open(self.indices[index])


def readable(source: Source, problems: Problems, known: Callable[[Record], bool] | None = None) -> Part:
    """The records whose images can be read, where broken ones are skipped; known ones are not tried."""
    if problems.broken == "refuse":
        return Part(source, tuple(range(len(source))))
    indices = []
    for index in range(len(source)):
        record = source[index]
        opened = None if known is not None and known(record) else _opened(source, index, record)
        if isinstance(opened, Problem):
            problems.meet(opened.where, opened.what)
        else:
            indices.append(index)
    if not indices:
        raise ValueError(f"data: expected at least one readable image, {problems.summary()}")
    return Part(source, tuple(indices))

"""P identities with K pictures each: the batches of an epoch, and sightings as tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from seps.data.images import View
from seps.data.loader import generator_for
from seps.data.records import Problem, Problems
from seps.reid.data import ABSENT, Sighting
from seps.reid.views import Variation, to_tensors, vary

ORDER, VIEW = 10, 11


@dataclass(frozen=True)
class IdentitySampler:
    """Batches of `people` identities with `each` pictures; (seed, epoch, start_step) is all the state.

    An identity's pictures are dealt out in groups of `each`; one with fewer repeats some. Every batch takes
    the identities that have most groups left, so an epoch has the same number of batches whatever is drawn.
    """

    identities: Sequence[int]
    people: int = 16
    each: int = 4
    seed: int = 0
    epoch: int = 0
    start_step: int = 0
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.people < 2 or self.each < 2:
            raise ValueError(
                f"people, each: expected at least 2 of both, found {self.people} and {self.each}"
            )
        found = len(set(self.identities))
        if found < self.people:
            raise ValueError(
                f"people: expected at most the {found} identities to train on, found {self.people}"
            )
        if min(self.seed, self.epoch, self.start_step) < 0 or not 0 <= self.rank < self.world_size:
            raise ValueError(
                "seed, epoch, start_step, rank: expected at least 0 and a rank below world_size, found "
                f"{self.seed}, {self.epoch}, {self.start_step}, {self.rank} of {self.world_size}"
            )

    def at(self, epoch: int, start_step: int = 0) -> IdentitySampler:
        """The same sampler at another epoch and step."""
        return replace(self, epoch=epoch, start_step=start_step)

    @property
    def steps(self) -> int:
        """Batches of the whole epoch for one process."""
        return len(self._batches) // self.world_size

    def __len__(self) -> int:
        return max(0, self.steps - self.start_step)

    def __iter__(self) -> Iterator[list[int]]:
        mine = self._batches[self.rank :: self.world_size][: self.steps]
        yield from mine[self.start_step :]

    @cached_property
    def _batches(self) -> list[list[int]]:
        generator = generator_for(self.seed, self.epoch, ORDER)
        groups = self._groups(generator)
        batches = []
        while len(groups) >= self.people:
            chance = dict(zip(groups, generator.random(len(groups)).tolist(), strict=True))
            chosen = sorted(groups, key=lambda one: (-len(groups[one]), chance[one]))[: self.people]
            batches.append([index for one in chosen for index in groups[one].pop()])
            groups = {one: left for one, left in groups.items() if left}
        # The largest first leaves the rare identities to the end: their order within the epoch is drawn too.
        return [batches[i] for i in generator.permutation(len(batches)).tolist()]

    def _groups(self, generator: np.random.Generator) -> dict[int, list[list[int]]]:
        """Every identity's pictures, shuffled and dealt out in groups of `each`."""
        places: dict[int, list[int]] = defaultdict(list)
        for index, identity in enumerate(self.identities):
            places[identity].append(index)
        groups = {}
        for identity, own in places.items():
            order = [own[i] for i in generator.permutation(len(own)).tolist()]
            while len(order) < self.each:
                order += [own[i] for i in generator.permutation(len(own)).tolist()]
            count = max(1, len(own) // self.each)
            groups[identity] = [order[i * self.each : (i + 1) * self.each] for i in range(count)]
        return groups


@dataclass(frozen=True)
class SightingBatch:
    """B sightings: pixels (B,3,H,W) and present (B,) of each modality, cameras and positions (B,)."""

    pixels: Mapping[str, Tensor]
    present: Mapping[str, Tensor]
    cameras: Tensor
    indices: Tensor
    names: tuple[str, ...]


class Examples:
    """Sightings as tensors; a modality that is not there or cannot be read is zeros and marked as absent."""

    def __init__(
        self,
        sightings: Sequence[Sighting],
        modalities: Sequence[str],
        view: View,
        variation: Variation | None = None,
        seed: int = 0,
        epoch: int = 0,
    ) -> None:
        self.sightings, self.modalities, self.view = sightings, tuple(modalities), view
        self.variation, self.seed, self.epoch = variation, seed, epoch

    def __len__(self) -> int:
        return len(self.sightings)

    def __getitem__(self, index: int) -> tuple[int, dict[str, Tensor], list[Problem]]:
        sighting = self.sightings[index]
        opened, problems = {}, []
        for name in self.modalities:
            if name in sighting.pictures:
                try:
                    opened[name] = sighting.pictures[name].open()
                except ValueError as error:
                    problems.append(Problem(sighting.name, str(error)))
        tensors = to_tensors(opened, self.view)
        if self.variation is not None:
            generator = generator_for(self.seed, self.epoch, VIEW, index)
            tensors = vary(tensors, self.variation, generator)
        return index, tensors, problems

    def collate(
        self, items: Sequence[tuple[int, dict[str, Tensor], list[Problem]]]
    ) -> tuple[SightingBatch, list[Problem]]:
        """Items as one batch, and what was wrong with their pictures."""
        indices = [index for index, _, _ in items]
        nothing = torch.zeros(3, self.view.height, self.view.width)
        batch = SightingBatch(
            pixels={
                name: torch.stack([tensors.get(name, nothing) for _, tensors, _ in items])
                for name in self.modalities
            },
            present={
                name: torch.tensor([name in tensors for _, tensors, _ in items]) for name in self.modalities
            },
            cameras=torch.tensor([self.sightings[index].camera for index in indices]),
            indices=torch.tensor(indices),
            names=tuple(self.sightings[index].name for index in indices),
        )
        return batch, [problem for _, _, problems in items for problem in problems]


def batches(
    examples: Examples,
    order: Iterable[list[int]],
    workers: int = 0,
    problems: Problems | None = None,
) -> Iterator[SightingBatch]:
    """The sightings of an order of batches; an unreadable picture is refused, or absent and counted."""
    problems = Problems() if problems is None else problems
    # A generator of its own: starting a loader must not move the training's global random state.
    loader: Iterable[Any] = DataLoader(
        examples,  # type: ignore[arg-type]
        batch_sampler=order,
        num_workers=workers,
        collate_fn=examples.collate,
        generator=torch.Generator(),
    )
    outcome = f"; {ABSENT}" if problems.broken == "skip" else ""
    for batch, lost in loader:
        for problem in lost:
            problems.meet(problem.where, problem.what + outcome)
        yield batch


def in_order(count: int, batch_size: int) -> list[list[int]]:
    """Every index once, in batches."""
    return [list(range(start, min(start + batch_size, count))) for start in range(0, count, batch_size)]

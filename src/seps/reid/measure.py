"""How well sightings are found again: every feature, with and without each modality, under a protocol."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from seps.data.records import Problems
from seps.metrics import Ranking, measure_ranking
from seps.progress import track
from seps.reid.data import Protocols, Sighting, groups_of
from seps.reid.loading import Examples, SightingBatch, batches, in_order
from seps.reid.model import Features, ReIdModel

Absence = tuple[str, ...]
"""The modalities that are taken away from every sighting."""
DEPTH = 10


@dataclass(frozen=True)
class Figure:
    """One line of a table: which feature, without which modalities, under which protocol, how well."""

    features: Features
    absent: Absence
    protocol: Protocols
    reranked: bool
    ranking: Ranking


def compared(model: ReIdModel) -> tuple[Features, ...]:
    """The features that can be compared: those that were trained, and both together if both were."""
    own = model.config.features
    return ("original", "slimmed", "both") if own == "both" else (own,)


def absences(modalities: Sequence[str]) -> list[Absence]:
    """Nothing taken away, then every choice that leaves something: (), (r,), (n,), (t,), (r, n), …"""
    return [choice for count in range(len(modalities)) for choice in combinations(modalities, count)]


def label(absent: Absence) -> str:
    """A short name: none, r, n, t, rn, rt, nt; longer where initials would not tell them apart."""
    initials = [name[0] for name in absent]
    return ("".join(initials) if len(set(initials)) == len(initials) else "+".join(absent)) or "none"


@torch.no_grad()
def describe_all(
    model: ReIdModel,
    sightings: Sequence[Sighting],
    absent: Iterable[Absence] = ((),),
    batch_size: int = 64,
    workers: int = 0,
    problems: Problems | None = None,
    title: str = "describing",
) -> dict[tuple[Features, Absence], Tensor]:
    """The vectors of all sightings for every feature and absence; the backbone runs once. -> (S,F) each"""
    if not sightings:
        raise ValueError("sightings: expected at least one, found none")
    known = model.config.modalities
    if not any(name in sighting.pictures for sighting in sightings for name in known):
        raise ValueError(f"sightings: expected pictures of {', '.join(known)}, found none")
    choices = list(absent)
    device = next(model.parameters()).device
    found: dict[tuple[Features, Absence], list[Tensor]] = {
        (kind, choice): [] for choice in choices for kind in compared(model)
    }
    was_training = model.training
    model.eval()
    try:
        for batch in _all_batches(model, sightings, batch_size, workers, problems, title):
            pixels = {name: each.to(device) for name, each in batch.pixels.items()}
            encoded = model.encode(pixels, batch.cameras.to(device))
            for choice in choices:
                present = {
                    name: (each & (name not in choice)).to(device) for name, each in batch.present.items()
                }
                description = model.describe(encoded, present)
                for kind in compared(model):
                    found[kind, choice].append(model.compare(description, kind).cpu())
    finally:
        model.train(was_training)
    return {key: torch.cat(parts) for key, parts in found.items()}


def _all_batches(
    model: ReIdModel,
    sightings: Sequence[Sighting],
    batch_size: int,
    workers: int,
    problems: Problems | None,
    title: str,
) -> Iterator[SightingBatch]:
    examples = Examples(sightings, model.config.modalities, model.view)
    order = in_order(len(sightings), batch_size)
    return track(batches(examples, order, workers, problems), title, len(order))


def distances_of(query: Tensor, gallery: Tensor) -> Tensor:
    """One minus the cosine. query (Q,F), gallery (G,F) of unit length -> (Q,G)"""
    return 1 - query @ gallery.T


def rank(
    distances: Tensor, query: Sequence[Sighting], gallery: Sequence[Sighting], protocol: Protocols
) -> Ranking:
    """mAP and CMC of distances (Q,G) under a protocol."""
    return measure_ranking(
        distances,
        [sighting.identity for sighting in query],
        [sighting.identity for sighting in gallery],
        groups_of(query, protocol),
        groups_of(gallery, protocol),
        depth=DEPTH,
    )


def removed(query: Sighting, gallery: Sequence[Sighting], protocol: Protocols) -> Tensor:
    """Which of the gallery the protocol removes for a query. -> (G,) boolean"""
    group = groups_of([query], protocol)[0]
    same = [
        each.identity == query.identity and other == group
        for each, other in zip(gallery, groups_of(gallery, protocol), strict=True)
    ]
    return torch.tensor(same)


def figures_on(
    model: ReIdModel,
    query: Sequence[Sighting],
    gallery: Sequence[Sighting],
    protocol: Protocols,
    problems: Problems | None = None,
) -> Mapping[Features, Ranking]:
    """How well each feature does with every modality there."""
    same = list(query) == list(gallery)
    found = describe_all(model, gallery, problems=problems)
    asked = found if same else describe_all(model, query, problems=problems)
    return {
        kind: rank(distances_of(asked[kind, ()], found[kind, ()]), query, gallery, protocol)
        for kind in compared(model)
    }

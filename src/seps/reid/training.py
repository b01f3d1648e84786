"""Training for re-identification: data, model and losses as a task of the loop; `seps reid train`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from seps.data.records import Problems
from seps.distributed import World, joined
from seps.losses import batch_hard_triplet, ratio_of
from seps.modalities import Slimmed, reidentification
from seps.optimisation import OptimSettings
from seps.recipe import Recipe, Selection
from seps.reid.data import Dataset, hold_out, opening
from seps.reid.loading import Examples, IdentitySampler, SightingBatch, batches
from seps.reid.measure import figures_on
from seps.reid.model import KINDS, Features, ReIdConfig, ReIdModel, class_of
from seps.reid.sources import SightingOptions, open_dataset
from seps.reid.views import Variation
from seps.slimming import unit
from seps.training import FitSettings, Outcome, draw_from, fit

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataOptions(SightingOptions):
    """Which sightings, and how a batch is drawn."""

    people: int = 16
    """P, identities of a batch."""
    each: int = 4
    """K, pictures of each of them."""
    flip: float = 0.5
    """Share of the sightings that training mirrors."""
    padding: int = 10
    """Pixels by which training moves a picture at most."""
    erase: float = 0.5
    """Share of the sightings of which training erases a rectangle."""
    modality_dropout: float = 0.0
    """Share of the sightings that lose one modality in training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.modality_dropout < 1:
            raise ValueError(f"data.modality_dropout: expected 0 to below 1, found {self.modality_dropout}")


@dataclass(frozen=True)
class ModelOptions:
    """What is trained."""

    image_encoder: dict[str, Any] | None = None
    """kind and its arguments, such as {kind: huggingface, name: google/vit-base-patch16-224-in21k}; its size
    is that of the data unless it is given. By default the light encoder, which learns from scratch."""
    channels: int = 512
    """C, what the encoder's features are projected to."""
    camera_embedding: bool = False
    """Whether every camera of the training data adds a vector of its own."""
    global_local: bool = False
    """Whether the mean patch enters the global feature."""
    features: Features = "both"
    """What is trained and compared: the original feature, the slimmed one, or both."""
    keep_ratio: float = 0.6
    """Share of the patches that stay."""
    aggregate_ratio: float = 0.4
    """Aggregated tokens as a share of the kept patches."""
    mixing: float = 0.25
    """Weight of each guide in the saliency."""
    selection: Selection = "straight_through"
    """How patches are selected in training."""
    temperature: float = 1.0
    """Temperature of the selection's noise and gradient."""

    def recipe(self) -> Recipe:
        """The recipe of the slimming."""
        return reidentification(
            keep_ratio=self.keep_ratio,
            aggregate_ratio=self.aggregate_ratio,
            mixing=self.mixing,
            selection=self.selection,
            temperature=self.temperature,
        )


@dataclass(frozen=True)
class ObjectiveOptions:
    """The losses, each on the original and on the slimmed feature."""

    identity_weight: float = 0.25
    """Weight of the cross-entropy of the identities."""
    smoothing: float = 0.1
    """Label smoothing."""
    triplet_weight: float = 1.0
    """Weight of the batch-hard triplet loss."""
    margin: float | None = 0.3
    """Margin of the triplet loss; null takes its smooth form."""

    def __post_init__(self) -> None:
        for name in ("identity_weight", "triplet_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"objective.{name}: expected at least 0, found {getattr(self, name)}")
        if self.margin is not None and self.margin < 0:
            raise ValueError(f"objective.margin: expected at least 0 or null, found {self.margin}")
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"objective.smoothing: expected 0 to below 1, found {self.smoothing}")


@dataclass(frozen=True)
class TrainOptions:
    """Train a re-identification model: `seps reid train --data.folder RGBNT201`.

    Without a folder, on the built-in people. A batch holds P identities (--data.people) with K pictures each
    (--data.each). Everything may stand in a YAML file and be overridden behind it; --print_config writes such
    a file. The same line again goes on with a run that was broken. The best model, best/ in the run's folder,
    is what `seps reid eval` and `seps reid rank` take.
    """

    run: FitSettings = field(default_factory=lambda: FitSettings(folder="runs/reid"))
    """The run."""
    data: DataOptions = field(default_factory=DataOptions)
    """The data."""
    model: ModelOptions = field(default_factory=ModelOptions)
    """The model."""
    objective: ObjectiveOptions = field(default_factory=ObjectiveOptions)
    """The losses."""
    optim: OptimSettings = field(default_factory=OptimSettings)
    """The optimiser."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""


class ReIdTask:
    """A re-identification model, its P x K batches, its losses, its mAP on held-out identities."""

    def __init__(
        self,
        model: ReIdModel,
        dataset: Dataset,
        data: DataOptions,
        objective: ObjectiveOptions,
        seed: int = 0,
        world: World | None = None,
    ) -> None:
        self.model, self.dataset, self.data, self.objective = model, dataset, data, objective
        self.world = world or World()
        classes = class_of([sighting.identity for sighting in dataset.train])
        if len(classes) != model.config.identities:
            found = model.config.identities
            raise ValueError(f"model: expected the {len(classes)} identities of the data, found {found}")
        self.classes = torch.tensor([classes[sighting.identity] for sighting in dataset.train])
        self.variation = Variation(data.flip, data.padding, data.erase)
        self.problems = opening(dataset, data.broken)
        self.seed = seed
        self.sampler = IdentitySampler(
            self.classes.tolist(),
            data.people,
            data.each,
            seed=seed,
            rank=self.world.rank,
            world_size=self.world.size,
        )

    def backbones(self) -> Iterable[nn.Module]:
        """The pre-trained part, if there is one."""
        body = self.model.encoder.body
        return [] if getattr(body, "scratch", False) else [body]

    def steps(self) -> int:
        """Batches of an epoch."""
        return self.sampler.steps

    def loader(self, epoch: int, start: int) -> Iterator[SightingBatch]:
        """The batches of an epoch from number `start` on."""
        examples = Examples(
            self.dataset.train,
            self.model.config.modalities,
            self.model.view,
            self.variation,
            self.seed,
            epoch,
        )
        return batches(examples, self.sampler.at(epoch, start), self.data.workers, self.problems)

    def loss(self, batch: SightingBatch, epoch: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Identity and triplet loss of each feature in use, the ratio loss, and their weighted sum."""
        model, objective, device = self.model, self.objective, self.world.device
        pixels = {name: each.to(device) for name, each in batch.pixels.items()}
        encoded = model.encode(pixels, batch.cameras.to(device))
        present = drop_modalities(batch.present, self.data.modality_dropout)
        description = model.describe(encoded, {name: each.to(device) for name, each in present.items()})
        classes = self.classes[batch.indices].to(device)
        identity, triplet = [], []
        for kind in KINDS[model.config.features]:
            logits = model.logits(description, kind)
            identity.append(functional.cross_entropy(logits, classes, label_smoothing=objective.smoothing))
            # Of unit length, as they are compared: the raw slimmed feature would outweigh all other losses.
            feature = unit(getattr(description, kind))
            triplet.append(batch_hard_triplet(feature, classes, objective.margin))
        parts = {
            "identity": torch.stack(identity).sum(),
            "triplet": torch.stack(triplet).sum(),
            "ratio": ratio_loss(model.config.recipe, list(description.slim.values())),
        }
        weighed = objective.identity_weight * parts["identity"] + objective.triplet_weight * parts["triplet"]
        return {"total": weighed + parts["ratio"], **parts}

    def names(self, batch: SightingBatch) -> str:
        """The sightings of a batch."""
        return ", ".join(batch.names)

    def evaluate(self) -> dict[str, float]:
        """mAP and CMC on the held-out identities, if any; the score is the mAP of the model's own feature."""
        data = self.dataset
        if not data.query:
            return {}
        found = figures_on(self.model, data.query, data.gallery, data.protocol, self.problems)
        best = found[self.model.config.features]
        figures = {"score": best.mean_average_precision, "mAP": best.mean_average_precision}
        figures |= {f"r{place}": best.at(place) for place in (1, 5, 10)}
        others = {kind: each for kind, each in found.items() if kind != self.model.config.features}
        return figures | {f"{kind}_mAP": each.mean_average_precision for kind, each in others.items()}

    def save(self, folder: Path) -> None:
        """Write the model as a folder of its own."""
        self.model.save(folder)


def drop_modalities(present: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """A share of the sightings loses one modality, never its last. present (B,) each"""
    table = torch.stack(list(present.values()), 1)
    if share > 0:
        lost = torch.rand(table.shape).masked_fill(~table, -1).argmax(1)
        chosen = (torch.rand(len(table)) < share) & (table.sum(1) > 1)
        table = table & ~(functional.one_hot(lost, table.shape[1]).bool() & chosen.unsqueeze(1))
    return dict(zip(present, table.unbind(1), strict=True))


def ratio_loss(recipe: Recipe, slim: Sequence[Slimmed]) -> Tensor:
    """The ratio loss (eq. 7), averaged over the modalities that any sighting has."""
    terms = [ratio_of(recipe, [each.decision[each.present]]) for each in slim if bool(each.present.any())]
    return torch.stack(terms).mean() if terms else slim[0].tokens.sum() * 0


def build_model(options: ModelOptions, dataset: Dataset) -> ReIdModel:
    """A fresh model for a dataset's training identities."""
    encoder = dict(options.image_encoder or {"kind": "light"})
    encoder.setdefault("size", list(dataset.size))
    cameras = sorted({sighting.camera for sighting in dataset.train}) if options.camera_embedding else []
    return ReIdModel(
        ReIdConfig(
            image_encoder=encoder,
            channels=options.channels,
            identities=len({sighting.identity for sighting in dataset.train}),
            cameras=tuple(cameras),
            modalities=dataset.modalities,
            recipe=options.recipe(),
            global_local=options.global_local,
            features=options.features,
        )
    )


def train(options: TrainOptions, world: World | None = None) -> tuple[Outcome, Problems]:
    """Train, or go on; what came out, and what of the data was left out."""
    whole = open_dataset(options.data, ("train",))
    dataset = hold_out(whole, options.data.dev_share, options.data.dev_seed)
    draw_from(options.run.seed, 0, 0)
    model = build_model(options.model, dataset)
    task = ReIdTask(model, dataset, options.data, options.objective, options.run.seed, world)
    held = "nothing held out"
    if dataset.query:
        people = len({sighting.identity for sighting in dataset.gallery})
        held = f"held out {len(dataset.gallery)} of {people}, {len(dataset.query)} of them as queries"
    trained = f"{len(dataset.train)} sightings of {model.config.identities} identities to train on"
    logger.info("%s: %s; %s", dataset.name, trained, held)
    outcome = fit(task, options.run, options.optim, world, asdict(options))
    return outcome, task.problems


def run(options: TrainOptions) -> int:
    """`seps reid train`."""
    with joined(options.device) as world:
        outcome, problems = train(options, world)
    if world.main:
        best = f"best dev mAP {outcome.best['mAP']:.1f}" if outcome.best else "the last epoch"
        logger.info("%s: %s", best, outcome.model)
        if problems:
            logger.info("%d left out, named above", len(problems))
    return 0

"""What a training is made of, as options: run, data, model, method, loss, optimiser."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, Literal, get_type_hints

from seps.cca import RIDGE
from seps.objective import ObjectiveSettings
from seps.optimisation import OptimSettings
from seps.recipe import PRESETS, Recipe
from seps.sources import SCENES, ReadOptions
from seps.training import FitSettings


def _explained(kind: type) -> dict[str, str]:
    """What a dataclass's docstring says of its fields, in entries of the form "one, two: what they are"."""
    body = re.sub(r"\s*\n\s{4,}", " ", inspect.cleandoc(kind.__doc__ or ""))
    entries = [line.strip().partition(":") for line in body.splitlines()]
    return {name.strip(): text.strip() for names, _, text in entries if text for name in names.split(",")}


def _recipe_options() -> type:
    """A dataclass with a preset and every choice of a recipe, None where the preset decides."""
    hints = get_type_hints(Recipe)
    own = make_dataclass(
        "RecipeOptions",
        [
            ("preset", Literal["paper", "released", "laps", "described"], field(default="described")),
            *((each.name, hints[each.name] | None, field(default=None)) for each in fields(Recipe)),
        ],
        frozen=True,
    )
    own.__module__ = __name__
    said = _explained(Recipe)
    lines = [f"    {name}: {said[name]}" for name in Recipe.names() if name in said]
    preset = "    preset: The choices to start from; each choice named beside it replaces the preset's."
    own.__doc__ = "\n".join(["The method.", "", "Args:", preset, *lines])
    return own


RecipeOptions = _recipe_options()


def recipe_from(options: Any) -> Recipe:
    """The preset with the choices that were made."""
    changes = {each.name: getattr(options, each.name) for each in fields(Recipe)}
    return PRESETS[options.preset](**{name: value for name, value in changes.items() if value is not None})


@dataclass(frozen=True)
class DataOptions(ReadOptions):
    """What is trained on, and how a batch is drawn."""

    folder: str = SCENES
    """A data folder (captions.jsonl, Karpathy's dataset_*.json, or ids and caps files), or "scenes"."""
    also: tuple[str, ...] = ()
    """Further folders whose split is trained on; dev is the first folder's."""
    train: str = "train"
    """The split to train on."""
    dev: str = "dev"
    """The split to choose the best epoch on; never a test split."""
    dev_limit: int | None = None
    """Images of dev that count."""
    batch_size: int = 64
    """Images of the joint batch of all processes."""
    micro_batch: int | None = None
    """Images that are encoded at once; the negatives stay those of the whole batch."""
    draws: Literal["image", "caption"] = "image"
    """An epoch sees every image once with a random caption, or every caption once."""
    apart: bool = False
    """Pictures with a description and pictures without fill batches of their own, so that descriptions are
    told from descriptions."""
    workers: int = 0
    """Processes that decode images."""
    word_noise: float = 0.2
    """Share of the words that training masks, replaces or deletes."""
    flip: Literal["never", "unsided", "always"] = "unsided"
    """Which images training mirrors, half of the time: "unsided" spares texts that name left or right."""
    least_crop: float = 0.6
    """The smallest share of an image's area that training looks at."""
    cache: str | None = None
    """Folder of kept features of frozen backbones; training then reads them instead of the images."""
    feature_noise: float = 0.0
    """Noise on kept features, as a share of their standard deviation."""
    patch_dropout: float = 0.0
    """Share of the patches of kept features that training leaves out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "test" in self.dev.lower():
            raise ValueError(f"data.dev: expected a split that is no test split, found {self.dev!r}")
        if self.dev == self.train:
            raise ValueError(f"data.dev: expected another split than data.train, found {self.dev!r} twice")
        if self.batch_size < 2:
            raise ValueError(f"data.batch_size: expected at least 2, found {self.batch_size}")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ValueError(f"data.micro_batch: expected at least 1, found {self.micro_batch}")
        if self.dev_limit is not None and self.dev_limit < 1:
            raise ValueError(f"data.dev_limit: expected at least 1, found {self.dev_limit}")
        if self.workers < 0:
            raise ValueError(f"data.workers: expected at least 0, found {self.workers}")
        if not 0 < self.least_crop <= 1:
            raise ValueError(f"data.least_crop: expected above 0 and at most 1, found {self.least_crop}")
        for name in ("patch_dropout", "word_noise"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"data.{name}: expected 0 to below 1, found {getattr(self, name)}")
        if self.feature_noise < 0:
            raise ValueError(f"data.feature_noise: expected at least 0, found {self.feature_noise}")


@dataclass(frozen=True)
class ModelOptions:
    """What is trained."""

    start: str | None = None
    """A model folder or hub name to go on from; the options below and the recipe are then its own."""
    channels: int = 512
    """C, what both encoders are projected to."""
    image_encoder: dict[str, Any] = field(default_factory=lambda: {"kind": "light"})
    """kind and its arguments, such as {kind: huggingface, name: facebook/dinov2-small, tuning: frozen}."""
    text_encoder: dict[str, Any] = field(default_factory=lambda: {"kind": "light"})
    """kind and its arguments, such as {kind: huggingface, name: bert-base-uncased}."""
    tokenizer: str | None = None
    """Hub name or folder of a tokenizer, where the text encoder brings none."""
    global_term: Literal["none", "loss", "score"] = "none"
    """One vector an image and a text: none, trained for coarse search, or also part of the score."""
    projections: Literal["random", "cca"] = "random"
    """Where the projections above pre-trained backbones start: at random, or at the linear maps under which
    the mean-pooled features of pictures and captions correlate most."""
    ridge: float = RIDGE
    """What "cca" adds to the variances, as a share of their mean."""
    gradient_checkpointing: bool = False
    """Compute the backbones' activations again in the backward pass instead of keeping them."""


@dataclass(frozen=True)
class TrainOptions:
    """Train a model: `seps train recipe.yaml --optim.lr 1e-4`.

    Everything may stand in a YAML file and be overridden behind it; --print_config writes such a file. The
    same line again goes on with a run that was broken.
    """

    run: FitSettings = field(default_factory=FitSettings)
    """The run."""
    data: DataOptions = field(default_factory=DataOptions)
    """The data."""
    model: ModelOptions = field(default_factory=ModelOptions)
    """The model."""
    recipe: RecipeOptions = field(default_factory=RecipeOptions)  # type: ignore[valid-type]
    """The method."""
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    """The loss."""
    optim: OptimSettings = field(default_factory=OptimSettings)
    """The optimiser."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""

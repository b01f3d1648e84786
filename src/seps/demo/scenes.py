"""The drawn part of the demonstration: train on built-in scenes, measure, draw what was kept."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from seps.data.records import Source
from seps.demo.saying import say, title
from seps.evaluation import (
    Corpus,
    Grounding,
    chance_rsum,
    encode,
    figures_of,
    measure_grounding,
    score_all,
    score_globally,
)
from seps.metrics import measure_retrieval
from seps.model import SepsModel, SepsProcessor, load
from seps.objective import ObjectiveSettings
from seps.optimisation import OptimSettings
from seps.options import DataOptions, ModelOptions, RecipeOptions, TrainOptions
from seps.retrieval import train
from seps.sources import SceneOptions, open_source, truths_of
from seps.training import FitSettings

LIGHT = {"kind": "light", "width": 96, "heads": 4}
SCENES = SceneOptions(train=960, dev=50, test=200, seed=1)
"""Drawn from another seed than those its choices were made on."""


@dataclass(frozen=True)
class Trained:
    """A model that was trained for the demonstration, and what it made of the test scenes."""

    model: SepsModel
    processor: SepsProcessor
    corpus: Corpus
    seconds: float


def plan(folder: Path) -> TrainOptions:
    """The training of the demonstration: light encoders, descriptions on the image side.

    A patch of these images knows of nothing but itself (layers=0), so what shows a thing is worth keeping;
    and most patches are background, as their mean is, so it has little say in what is kept (mixing).
    """
    return TrainOptions(
        run=FitSettings(folder=str(folder / "model"), epochs=24, evaluate_epochs=24),
        data=DataOptions(scenes=SCENES, batch_size=32, word_noise=0.1, least_crop=0.8),
        model=ModelOptions(
            channels=96,
            image_encoder={**LIGHT, "size": SCENES.size, "layers": 0},
            text_encoder={**LIGHT, "layers": 1},
            global_term="score",
        ),
        recipe=RecipeOptions(
            preset="described",
            selection="gates",
            mixing=0.02,
            keep_ratio=0.3,
            aggregate_ratio=0.5,
            sharpness=8,
            description_dropout=0.75,
        ),
        objective=ObjectiveSettings(loss="info_nce", global_weight=3),
        optim=OptimSettings(lr=1.5e-3, schedule="cosine", warmup_steps=20),
        device="cpu",
    )


def baseline(options: TrainOptions, folder: Path) -> TrainOptions:
    """The same encoders, data and steps, trained on the cosine of the mean patch and the mean word."""
    return replace(
        options,
        run=replace(options.run, folder=str(folder / "baseline")),
        model=replace(options.model, global_term="none"),
        recipe=RecipeOptions(preset="laps"),
        objective=replace(options.objective, scored="global"),
    )


def learn(options: TrainOptions, source: Source) -> Trained:
    """Train, or take up what a broken demonstration left, and encode the test scenes."""
    start = time.monotonic()
    outcome = train(options)
    seconds = time.monotonic() - start
    model, processor = load(outcome.model)
    return Trained(model, processor, encode(model, processor, source), seconds)


def measure(scores: Tensor, corpus: Corpus) -> dict[str, float]:
    """Recall both ways of a score matrix."""
    return figures_of(measure_retrieval(scores, corpus.owners))


def figures(seps: Trained, pooled: Trained) -> dict[str, dict[str, float]]:
    """The rows of the table: the baseline, the method on pixels alone, and with descriptions."""
    alone = replace(seps.corpus, dense=None)
    return {
        "mean-pooled baseline": measure(score_globally(pooled.model, pooled.corpus), pooled.corpus),
        "SEPS, pixels alone": measure(score_all(seps.model, alone), alone),
        "SEPS, with the images' descriptions": measure(score_all(seps.model, seps.corpus), seps.corpus),
    }


def table(rows: Mapping[str, Mapping[str, float]], chance: float) -> str:
    """Recall in percent as aligned text."""
    names = [f"{side}_r{k}" for side in ("i2t", "t2i") for k in (1, 5, 10)]
    blind = "blind guessing"
    width = max(len(name) for name in (*rows, blind))
    lines = [f"{'':<{width}}  " + " ".join(f"{name.replace('_r', '@'):>7}" for name in [*names, "rSum"])]
    for name, row in rows.items():
        cells = " ".join(f"{row[each]:7.1f}" for each in [*names, "rsum"])
        lines.append(f"{name:<{width}}  {cells}")
    lines.append(f"{blind:<{width}}  {' ' * 48}{chance:7.1f}")
    return "\n".join(lines)


def grounding_lines(found: Grounding) -> str:
    """How selection and alignment stand against the truth of the scenes."""
    values = found.figures()
    return "\n".join(
        f"{what}: {values[name]:.1f} % (by chance {values[f'{name}_chance']:.1f} %)"
        for what, name in (
            ("kept patches that show a thing", "kept"),
            ("kept patches that show a thing the caption names", "named"),
            ("words whose closest patch shows their thing", "pointing"),
        )
    )


@torch.no_grad()
def draw_kept(trained: Trained, source: Source, path: Path, shown: Sequence[int] = (0, 1, 2, 3)) -> bool:
    """Some scenes beside what stays of them for their first caption; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    figure = Figure(figsize=(3.2 * len(shown), 6.6), layout="constrained")
    axes = figure.subplots(2, len(shown))
    rows, columns = trained.model.image_encoder.grid
    for place, row in enumerate(shown):
        text = int((trained.corpus.owners == row).nonzero()[0])
        dense = None if trained.corpus.dense is None else trained.corpus.dense[[row]]
        images, texts = trained.corpus.images[[row]], trained.corpus.texts[[text]]
        kept = trained.model.head.inspect(images, texts, dense).branches["sparse"].kept[0, 0]
        picture = source.open(trained.corpus.indices[row])
        for axis in axes[:, place]:
            axis.imshow(picture, extent=(0, columns, rows, 0))
            axis.set_axis_off()
        veil = torch.ones(rows, columns, 4)
        veil[..., 3] = 0.85 * (~kept).view(rows, columns).float()
        axes[1, place].imshow(veil.numpy(), extent=(0, columns, rows, 0), interpolation="nearest")
        axes[0, place].set_title(_wrapped(trained.corpus.captions[text]), fontsize=8)
    beside = path.with_name(f".{path.name}.part")
    figure.savefig(beside, format="png", dpi=110)
    beside.replace(path)
    return True


def _wrapped(text: str, width: int = 44) -> str:
    return "\n".join(textwrap.wrap(text, width))


def show_training(folder: Path) -> None:
    """Train both models, print the tables, draw the picture."""
    options = plan(folder)
    source = open_source(options.data.folder, options.data, "test")
    title("Drawn scenes: train, and measure against the mean-pooled baseline")
    say(f"Light encoders learn from {SCENES.train} drawn scenes, twice; {folder} keeps everything.")
    pooled = learn(baseline(options, folder), source)
    seps = learn(options, source)
    rows = figures(seps, pooled)
    count, texts = len(seps.corpus.images), len(seps.corpus.texts)
    say(f"\n{count} test scenes, {texts} captions; trained {pooled.seconds:.0f} s and {seps.seconds:.0f} s,")
    say("equally many steps; recall in percent, dense text on the image side.\n")
    say(table(rows, chance_rsum(count, texts)))
    truths = truths_of(source, seps.corpus.indices, options.data.folder)
    if truths is not None:
        say("\n" + grounding_lines(measure_grounding(seps.model, seps.processor, seps.corpus, truths)))
    picture = folder / "kept.png"
    if draw_kept(seps, source, picture):
        say(f"\nWhat stays of a scene for its caption: {picture}")

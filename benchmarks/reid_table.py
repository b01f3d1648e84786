"""Re-identification on the built-in people: with and without slimming, with and without each modality.

Trains four models for every seed: on the original feature alone, on it alone with its losses at twice the
weight, on both features, and on both with no patch dropped. Chooses epochs on held-out identities, measures
once on the test set, and prints mean and standard deviation over the seeds:

    python benchmarks/reid_table.py --folder runs/reid-table --seeds 0 1 2

A run that is there already is taken up where it stopped; one that is finished is only measured.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from seps.optimisation import OptimSettings
from seps.reid.measure import label
from seps.reid.model import load
from seps.reid.report import measure, open_split
from seps.reid.training import DataOptions, ModelOptions, ObjectiveOptions, TrainOptions, train
from seps.training import FitSettings

DATA_SEED = 1
"""Other people than those on whose held-out part the settings were chosen."""
DOUBLED = {"identity_weight": 0.5, "triplet_weight": 2.0}

# what is trained -> the options of the model and of the losses that it differs in
TRAINED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "original": ({"features": "original"}, {}),
    "original-doubled": ({"features": "original"}, DOUBLED),
    "both": ({}, {}),
    # As many aggregated tokens, from all patches instead of the kept ones.
    "both-undropped": ({"keep_ratio": 1.0, "aggregate_ratio": 0.24}, {}),
}


def options(folder: Path, trained: str, seed: int, epochs: int) -> TrainOptions:
    """The training of one model."""
    model, objective = TRAINED[trained]
    return TrainOptions(
        run=FitSettings(folder=str(folder), epochs=epochs, seed=seed, evaluate_epochs=7),
        data=DataOptions(
            people=8, each=4, padding=4, erase=0.3, modality_dropout=0.3, rendered_seed=DATA_SEED
        ),
        model=ModelOptions(image_encoder={"kind": "light", "width": 96, "layers": 2}, channels=96, **model),
        objective=ObjectiveOptions(**objective),
        optim=OptimSettings(lr=1e-3, schedule="cosine", warmup_steps=30, clip=5.0),
    )


def measured(settings: TrainOptions) -> dict[tuple[str, str], tuple[float, float]]:
    """Train what is left of a run; mAP and R1 on the test set by feature and missing modalities."""
    started = time.process_time()
    outcome, _ = train(settings)
    spent = time.process_time() - started
    print(f"{settings.run.folder}: {spent:.0f} s of one core, dev mAP {outcome.best['mAP']:.1f}", flush=True)
    dataset, protocol = open_split(settings.data, "test", "auto")
    return {
        (each.features, label(each.absent)): (each.ranking.mean_average_precision, each.ranking.at(1))
        for each in measure(load(outcome.model), dataset, protocol)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/reid-table"), help="where the runs are kept"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="a run of each model for each"
    )
    parser.add_argument("--trained", choices=TRAINED, nargs="+", default=list(TRAINED), help="which models")
    parser.add_argument("--epochs", type=int, default=14, help="of every run")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    rows: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for seed in given.seeds:
        for trained in given.trained:
            settings = options(given.folder / f"{trained}-{seed}", trained, seed, given.epochs)
            for (feature, missing), figures in measured(settings).items():
                rows[trained, feature, missing].append(figures)
    print("\n| trained on | compared by | missing | mAP | each seed | R1 |\n|---|---|---|---|---|---|")
    for row, figures in rows.items():
        precision, first = ([each[place] for each in figures] for place in (0, 1))
        each_seed = ", ".join(f"{value:.1f}" for value in precision)
        print("| " + " | ".join([*row, spread(precision), each_seed, spread(first)]) + " |")


def spread(values: list[float]) -> str:
    """Mean and standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.1f} ± {deviation:.1f}"


if __name__ == "__main__":
    main()

"""Re-identification on the built-in people: with and without slimming, with and without each modality.

Trains one model on the original feature alone and one on both for every seed, chooses epochs on held-out
identities, measures once on the test set, and prints mean and standard deviation over the seeds:

    python benchmarks/reid_table.py --folder runs/reid-table --seeds 0 1 2

A run that is there already is taken up where it stopped.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections import defaultdict
from pathlib import Path

import torch

from seps.optimisation import OptimSettings
from seps.reid.measure import label
from seps.reid.model import load
from seps.reid.report import measure, open_split
from seps.reid.training import DataOptions, ModelOptions, TrainOptions, train
from seps.training import FitSettings

TRAINED = ("original", "both")
DATA_SEED = 1
"""Other people than those on whose held-out part the settings were chosen."""


def options(folder: Path, features: str, seed: int, epochs: int) -> TrainOptions:
    return TrainOptions(
        run=FitSettings(folder=str(folder), epochs=epochs, seed=seed, evaluate_epochs=7),
        data=DataOptions(
            people=8, each=4, padding=4, erase=0.3, modality_dropout=0.3, rendered_seed=DATA_SEED
        ),
        model=ModelOptions(
            image_encoder={"kind": "light", "width": 96, "layers": 2}, channels=96, features=features
        ),
        optim=OptimSettings(lr=1e-3, schedule="cosine", warmup_steps=30, clip=5.0),
    )


def measured(folder: Path, features: str, seed: int, epochs: int) -> dict[str, dict[str, float]]:
    """Figures on the test set by row of the table; kept beside the model."""
    place = folder / f"{features}-{seed}"
    kept = place / "test.json"
    if kept.is_file():
        return json.loads(kept.read_text())
    settings = options(place, features, seed, epochs)
    started = time.process_time()
    outcome, _ = train(settings)
    print(f"{place.name}: {time.process_time() - started:.0f} s of one core, dev {outcome.best['mAP']:.1f}")
    dataset, protocol = open_split(settings.data, "test", "auto")
    rows = {
        f"{features}|{each.features}|{label(each.absent)}": {
            "mAP": each.ranking.mean_average_precision,
            "R1": each.ranking.at(1),
        }
        for each in measure(load(outcome.model), dataset, protocol)
    }
    kept.write_text(json.dumps(rows, indent=1))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/reid-table"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--trained", choices=TRAINED, nargs="+", default=list(TRAINED))
    parser.add_argument("--epochs", type=int, default=14)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    rows: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for features in given.trained:
        for seed in given.seeds:
            for row, figures in measured(given.folder, features, seed, given.epochs).items():
                for name, value in figures.items():
                    rows[row][name].append(value)
    print("| trained on | compared by | missing | mAP | R1 |\n|---|---|---|---|---|")
    for row, figures in rows.items():
        cells = [f"{statistics.fmean(each):.1f} ± {spread(each):.1f}" for each in figures.values()]
        print("| " + " | ".join([*row.split("|"), *cells]) + " |")


def spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


if __name__ == "__main__":
    main()

"""Which sightings a command works on: the options, and the dataset behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from seps.reid.data import SPLITS, Broken, Dataset, Split, read
from seps.reid.rendered import render_dataset


@dataclass(frozen=True)
class SightingOptions:
    """Which sightings."""

    folder: str | None = None
    """The folder of RGBNT201, RGBNT100 or MSVR310; without one, the built-in drawn people."""
    layout: Literal["auto", "RGBNT201", "RGBNT100", "MSVR310"] = "auto"
    """The layout of the folder; auto knows it by its folders."""
    broken: Broken = "refuse"
    """What cannot be used: refuse it, skip the sighting, or take a missing modality as absent."""
    dev_share: float = 0.2
    """Share of the training identities that is held out to choose the best epoch on; never the test set. 0
    trains on all of them and keeps the last epoch."""
    dev_seed: int = 0
    """Which identities those are."""
    rendered_seed: int = 0
    """The seed of the built-in data."""
    rendered_people: int = 120
    """Identities of the built-in data to train on, those held out included."""
    rendered_test_people: int = 48
    """Identities of the built-in data to test on."""
    workers: int = 0
    """Processes that decode pictures."""

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError(f"data.workers: expected at least 0, found {self.workers}")
        if not 0 <= self.dev_share < 1:
            raise ValueError(f"data.dev_share: expected 0 to below 1, found {self.dev_share}")


def open_dataset(data: SightingOptions, splits: Sequence[Split] = SPLITS) -> Dataset:
    """The dataset of the options; of a folder only the splits that are asked for are read."""
    if data.folder is not None:
        return read(data.folder, data.layout, data.broken, splits)
    return render_dataset(data.rendered_people, data.rendered_test_people, seed=data.rendered_seed)

"""What a run writes about itself: log.jsonl, TensorBoard if wanted, and curves as a picture."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

LOG = "log.jsonl"


class Journal:
    """Appends entries to a run's log; what lies behind the step and epoch it resumes from is forgotten."""

    def __init__(self, folder: Path, step: int = 0, epoch: int = 0, tensorboard: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / LOG
        _forget_after(self.path, step, epoch)
        self._file = self.path.open("a", encoding="utf-8")
        self._board = _open_board(folder, step) if tensorboard else None

    def write(self, kind: str, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """One entry: kind "train" or "dev", steps and epochs done, and the figures."""
        entry = {"kind": kind, "step": step, "epoch": epoch, **values}
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Everything is on disk afterwards."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The entries of a log; a line that a kill cut off at the end does not count."""
    if not path.is_file():
        return []
    entries = []
    for line in path.read_bytes().split(b"\n"):
        try:
            entry = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError):
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def draw_curves(log: Path, picture: Path) -> None:
    """Loss in training and score on dev over the steps, as a PNG; without matplotlib, nothing but a hint."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError:
        logger.info("no curves drawn: install matplotlib (pip install 'seps[plots]')")
        return
    entries = read_log(log)
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    train = [entry for entry in entries if entry["kind"] == "train"]
    dev = [entry for entry in entries if entry["kind"] == "dev"]
    logged = {name for entry in train for name in entry}
    for name, line in (("total", "-"), ("alignment", "--"), ("global", ":")):
        if name in logged:
            left.plot(*_series(train, name), line, label=name)
    shown = [name for name in ("i2t_r1", "t2i_r1", "mAP") if any(name in entry for entry in dev)]
    for name in shown or ["score"]:
        right.plot(*_series(dev, name), marker="o", markersize=3, label=name)
    left.set(title="training", xlabel="step", ylabel="loss")
    right.set(title="dev", xlabel="step", ylabel="%" if shown else "score")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if axes.lines:
            axes.legend()
    beside = picture.with_name(f".{picture.name}.part")
    figure.savefig(beside, format="png", dpi=120)
    beside.replace(picture)


def _series(entries: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    found = [entry for entry in entries if name in entry]
    return [entry["step"] for entry in found], [entry[name] for entry in found]


def _forget_after(path: Path, step: int, epoch: int) -> None:
    """Keep the entries up to a step and to the epochs done: what came after will be done again.

    An epoch's measurement is of the same step as its last batch, after which a snapshot may have been taken.
    """
    if not path.exists():
        return
    kept = [each for each in read_log(path) if 0 < each["step"] <= step and each["epoch"] <= epoch]
    beside = path.with_name(f".{path.name}.part")
    beside.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")
    beside.replace(path)


def _open_board(folder: Path, resumed_at: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError:
        raise ValueError(
            "tensorboard: expected the package to be installed (pip install 'seps[tensorboard]'), found none"
        ) from None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_at + 1 if resumed_at else None)

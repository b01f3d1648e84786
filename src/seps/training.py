"""One loop for every task: steps, dev, the best model kept, and every step resumable.

All randomness of a step is drawn from (seed, step, rank), the schedule is a function of the step and the
order of the data one of (seed, epoch): so a snapshot of weights, optimiser and counters is the whole state,
and a run that was killed goes on as if it had not been.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from seps.distributed import World, average_gradients, collect, share_weights, wait
from seps.journal import LOG, Journal, draw_curves
from seps.optimisation import (
    MovingAverage,
    OptimSettings,
    learning_rate_factor,
    make_optimiser,
    set_learning_rate,
)
from seps.progress import Advance, progress_bar
from seps.snapshots import (
    alone_in,
    read_snapshot,
    recover_folder,
    replace_folder,
    require_same,
    write_snapshot,
)

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")

BEST = "best"
SNAPSHOT = "resume.safetensors"


class Task(Protocol[Batch]):
    """What is trained: a model, its batches, its loss, its measure on dev."""

    @property
    def model(self) -> nn.Module:
        """What learns."""
        ...

    def backbones(self) -> Iterable[nn.Module]:
        """The pre-trained parts of the model, which learn at a rate of their own."""
        ...

    def steps(self) -> int:
        """Batches of an epoch."""
        ...

    def loader(self, epoch: int, start: int) -> Iterable[Batch]:
        """The batches of an epoch from number `start` on: a function of these two numbers alone."""
        ...

    def loss(self, batch: Batch, epoch: int) -> Mapping[str, Tensor]:
        """The loss under the key "total", and whatever else is worth a line in the log."""
        ...

    def names(self, batch: Batch) -> str:
        """What is in a batch, for the report of one that went wrong."""
        ...

    def evaluate(self) -> Mapping[str, float]:
        """Figures on dev; the key "score" says how good the model is: without one the newest is the best."""
        ...

    def save(self, folder: Path) -> None:
        """Write the model as a folder of its own; what changes from one time to the next is one file."""
        ...


@dataclass(frozen=True)
class FitSettings:
    """How long and how to train, and what to keep."""

    folder: str = "runs/train"
    """Where the run is kept: best/, log.jsonl, curves.png and the snapshot it resumes from."""
    epochs: int = 30
    """Epochs of the run."""
    most_steps: int | None = None
    """Steps after which the run ends even in the middle of an epoch."""
    seed: int = 0
    """Of everything random."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs the encoders under autocast; selection and scores stay in fp32."""
    evaluate_epochs: int = 1
    """Epochs between two measurements on dev."""
    checkpoint_steps: int | None = None
    """Steps between two snapshots, beside the one at every epoch's end."""
    checkpoint_seconds: float = 300.0
    """Seconds between two snapshots."""
    log_steps: int = 10
    """Steps between two lines of the log."""
    tensorboard: bool = False
    """Write TensorBoard's files too."""
    resume: bool = True
    """Go on with the run that lies in the folder; otherwise it is overwritten."""

    def __post_init__(self) -> None:
        for name in ("epochs", "evaluate_epochs", "log_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")
        for name in ("most_steps", "checkpoint_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1 or none, found {value}")
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"precision: expected fp32 or bf16, found {self.precision!r}")
        if self.seed < 0 or self.checkpoint_seconds < 0:
            raise ValueError(
                f"seed, checkpoint_seconds: expected at least 0, found {self.seed}, {self.checkpoint_seconds}"
            )


@dataclass
class Counters:
    """How far a run is: whole epochs, batches of the current one, steps in all, and the best dev figures."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    best_epoch: int | None = None
    best: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """A finished run: its folder, the steps taken, and the dev figures of its best and last epoch."""

    folder: Path
    steps: int
    best_epoch: int | None
    best: Mapping[str, float]
    last: Mapping[str, float]

    @property
    def model(self) -> Path:
        """The folder of the best model."""
        return self.folder / BEST


def fit(
    task: Task[Any],
    settings: FitSettings,
    optim: OptimSettings | None = None,
    world: World | None = None,
    identity: Mapping[str, Any] | None = None,
) -> Outcome:
    """Train a task, or go on with the run in settings.folder.

    identity: what else makes the run what it is; a run of another identity or other settings in the same
    folder is refused rather than mixed with this one.
    """
    optim = optim or OptimSettings()
    every = dict(identity or {}) | {"run": asdict(settings), "optim": asdict(optim)}
    run = _Run(task, settings, optim, world or World(), every)
    with alone_in(run.folder) if run.world.main else nullcontext():
        run.restore()
        run.train()
    return Outcome(run.folder, run.at.step, run.at.best_epoch, run.at.best, run.at.last)


class _Run:
    """A task under way: optimiser, averaged weights and counters beside the model."""

    def __init__(
        self,
        task: Task[Any],
        settings: FitSettings,
        optim: OptimSettings,
        world: World,
        identity: dict[str, Any],
    ) -> None:
        self.task, self.settings, self.optim = task, settings, optim
        self.world, self.identity = world, identity
        self.folder = Path(settings.folder)
        self.model = task.model.to(world.device)
        share_weights(self.model)
        self.optimiser = make_optimiser(self.model, optim, task.backbones())
        self.average = MovingAverage(self.model, optim.average) if optim.average else None
        self.at = Counters()
        every = task.steps()
        if every < 1:
            raise ValueError("data: expected at least one full batch an epoch, found none")
        self.steps = min(settings.epochs * every, settings.most_steps or settings.epochs * every)
        self.saved_at = time.monotonic()

    def restore(self) -> None:
        """Take up the snapshot in the folder, if there is one."""
        path = self.folder / SNAPSHOT
        if self.world.main:
            recover_folder(self.folder / BEST)
            if not self.settings.resume:
                path.unlink(missing_ok=True)
        wait(self.world)
        if not path.exists():
            return
        state = read_snapshot(path, self.world.device)
        require_same(self.identity, state["identity"], self.folder)
        self.model.load_state_dict(self.model.state_dict() | state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        if self.average is not None:
            self.average.weights, self.average.updates = state["average"], state["updates"]
        self.at = Counters(**state["counters"])
        if self.world.main:
            logger.info("going on after step %d of %d in %s", self.at.step, self.steps, self.folder)

    def snapshot(self) -> None:
        """Keep everything that the next step depends on."""
        self.saved_at = time.monotonic()
        if not self.world.main:
            return
        state = {
            "identity": self.identity,
            "model": self.moving(),
            "optimiser": self.optimiser.state_dict(),
            "average": self.average.weights if self.average else None,
            "updates": self.average.updates if self.average else 0,
            "counters": asdict(self.at),
        }
        write_snapshot(state, self.folder / SNAPSHOT)

    def moving(self) -> dict[str, Tensor]:
        """The model's weights and buffers but for frozen weights, which are what they were at the start."""
        frozen = {name for name, parameter in self.model.named_parameters() if not parameter.requires_grad}
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in frozen}

    def train(self) -> None:
        """All epochs that are left."""
        journal = None
        if self.world.main:
            journal = Journal(self.folder, self.at.step, self.at.epoch, self.settings.tensorboard)
        try:
            with progress_bar("training", self.steps, self.at.step, visible=self.world.main) as advance:
                while self.at.step < self.steps:
                    self.train_epoch(journal, advance)
                    self.close_epoch(journal)
        finally:
            if journal is not None:
                journal.close()

    def train_epoch(self, journal: Journal | None, advance: Advance) -> None:
        """The batches that are left of this epoch."""
        self.model.train()
        before = self.at.step
        for batch in self.task.loader(self.at.epoch, self.at.batch):
            parts = self.take_step(batch)
            self.at.batch += 1
            self.at.step += 1
            advance(note=f"epoch {self.at.epoch} loss {parts['total']:.4g}")
            if journal is not None and self.at.step % self.settings.log_steps == 0:
                journal.write("train", self.at.step, self.at.epoch, parts)
            if self.at.step >= self.steps:
                return
            if self.due():
                self.snapshot()
        if self.at.step == before and self.at.batch == 0:
            raise ValueError(f"data: expected at least one full batch in epoch {self.at.epoch}, found none")

    def take_step(self, batch: Any) -> dict[str, float]:
        """One step of the optimiser; a loss or gradient that is no number ends the run with its cause."""
        at = self.at
        draw_from(self.settings.seed, at.step, self.world.rank)
        factor = learning_rate_factor(self.optim, at.epoch, at.step, self.steps)
        set_learning_rate(self.optimiser, factor)
        half = torch.autocast(self.world.device.type, torch.bfloat16)
        with half if self.settings.precision == "bf16" else nullcontext():
            losses = self.losses_of(batch)
        parts = {name: float(value.detach()) for name, value in losses.items()}
        self.require_number(parts["total"], "loss", batch, parts)
        self.optimiser.zero_grad(set_to_none=True)
        losses["total"].backward()
        average_gradients(self.model.parameters())
        length = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.optim.clip))
        self.require_number(length, "gradient", batch, parts)
        self.optimiser.step()
        if self.average is not None:
            self.average.update(self.model)
        return parts | {"gradient": length, "lr": self.optim.lr * factor}

    def losses_of(self, batch: Any) -> Mapping[str, Tensor]:
        """The task's losses; what it refuses is said with its place in the run."""
        try:
            return self.task.loss(batch, self.at.epoch)
        except ValueError as error:
            raise ValueError(f"{error}; at {self.place(batch)}") from error

    def place(self, batch: Any) -> str:
        """Which step this is, and what is in its batch."""
        at = self.at
        return f"step {at.step + 1} (epoch {at.epoch}, batch {at.batch}) with {self.task.names(batch)}"

    def require_number(self, value: float, what: str, batch: Any, parts: Mapping[str, float]) -> None:
        """Stop at the first number that is none, and say where it came from."""
        if math.isfinite(value):
            return
        figures = ", ".join(f"{name} {part:.4g}" for name, part in parts.items())
        raise FloatingPointError(f"the {what} is {value} ({figures}) at {self.place(batch)}")

    def due(self) -> bool:
        """Whether it is time for a snapshot."""
        every = self.settings.checkpoint_steps
        if every is not None and self.at.step % every == 0:
            return True
        return time.monotonic() - self.saved_at >= self.settings.checkpoint_seconds

    def close_epoch(self, journal: Journal | None) -> None:
        """Measure on dev, keep the model if it is the best, and snapshot the end of the epoch."""
        last = self.at.step >= self.steps
        self.at.epoch += 1
        self.at.batch = 0
        if last or self.at.epoch % self.settings.evaluate_epochs == 0:
            if journal is not None:
                self.measure(journal)
            wait(self.world)
            self.at = Counters(**collect(asdict(self.at), self.world)[0])
        self.snapshot()

    def measure(self, journal: Journal) -> None:
        """Figures on dev with the averaged weights if there are any."""
        self.model.eval()
        with self.average.lent(self.model) if self.average is not None else nullcontext():
            figures = {name: float(value) for name, value in self.task.evaluate().items()}
            score = figures.get("score", math.inf)
            if figures and not math.isfinite(score):
                raise FloatingPointError(f"dev score is {score} after epoch {self.at.epoch}")
            self.at.last = figures
            if not self.at.best or score > self.at.best["score"]:
                self.at.best, self.at.best_epoch = figures, self.at.epoch
                replace_folder(self.folder / BEST, self.task.save)
        if figures:
            journal.write("dev", self.at.step, self.at.epoch, figures)
            logger.info("epoch %d: %s", self.at.epoch, brief(figures))
        draw_curves(self.folder / LOG, self.folder / "curves.png")


def brief(figures: Mapping[str, float]) -> str:
    """Figures in one line; the score only where there is nothing else, since it is one of them."""
    shown = {name: value for name, value in figures.items() if name != "score"} or figures
    return ", ".join(f"{name} {value:.4g}" for name, value in shown.items())


def draw_from(seed: int, step: int, rank: int) -> None:
    """Set every source of random numbers to what belongs to this step of this process."""
    words = np.random.SeedSequence([seed, step, rank]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))  # noqa: NPY002 - a task may draw from it
    torch.manual_seed(int(words[2]))

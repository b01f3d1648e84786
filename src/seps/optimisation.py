"""How weights move: the schedule as a pure function of the step, AdamW groups, the moving average."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class OptimSettings:
    """AdamW and its schedule."""

    lr: float = 2e-4
    """Learning rate of everything that is no backbone."""
    backbone_factor: float = 0.1
    """Pre-trained backbones learn with so much of it."""
    weight_decay: float = 1e-4
    """AdamW's weight decay."""
    schedule: Literal["steps", "cosine"] = "steps"
    """Multiplied at the milestones, or down to zero along a cosine."""
    milestones: tuple[int, ...] = (9, 15, 20, 25)
    """Epochs, counted from 0, from which on "steps" multiplies the learning rate."""
    decay: float = 0.3
    """What "steps" multiplies it by."""
    warmup_steps: int = 0
    """Steps in which the learning rate grows from zero."""
    clip: float = 2.0
    """Longest gradient; longer ones are shortened to it."""
    average: float = 0.0
    """Decay of a moving average of the weights that is evaluated and saved in their place; 0 for none."""

    def __post_init__(self) -> None:
        for name in ("lr", "clip", "decay"):
            if not getattr(self, name) > 0:
                raise ValueError(f"optim.{name}: expected above 0, found {getattr(self, name)}")
        for name in ("backbone_factor", "weight_decay", "warmup_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"optim.{name}: expected at least 0, found {getattr(self, name)}")
        if self.schedule not in ("steps", "cosine"):
            raise ValueError(f"optim.schedule: expected steps or cosine, found {self.schedule!r}")
        if not 0 <= self.average < 1:
            raise ValueError(f"optim.average: expected 0 to below 1, found {self.average}")


def learning_rate_factor(settings: OptimSettings, epoch: int, step: int, steps: int) -> float:
    """What the learning rate is multiplied by at a step of all `steps`, in an epoch counted from 0."""
    warm = min(1.0, (step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    if settings.schedule == "cosine":
        return warm * 0.5 * (1 + math.cos(math.pi * min(step / max(steps, 1), 1.0)))
    return warm * settings.decay ** sum(epoch >= milestone for milestone in settings.milestones)


def make_optimiser(
    model: nn.Module, settings: OptimSettings, backbones: Iterable[nn.Module] = ()
) -> torch.optim.AdamW:
    """AdamW over all that learns; pre-trained backbones get a rate of their own, only matrices decay."""
    slow = {id(parameter) for module in backbones for parameter in module.parameters()}
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            # Weights of linear layers, embeddings and convolutions; no bias, norm, scale or position.
            groups.setdefault((id(parameter) in slow, parameter.dim() in (2, 4)), []).append(parameter)
    if not groups:
        raise ValueError("model: expected at least one weight that learns, found all of them frozen")
    rates = {False: settings.lr, True: settings.lr * settings.backbone_factor}
    decays = {False: 0.0, True: settings.weight_decay}
    return torch.optim.AdamW(
        [
            {
                "params": parameters,
                "lr": rates[backbone],
                "rate": rates[backbone],
                "weight_decay": decays[matrix],
            }
            for (backbone, matrix), parameters in groups.items()
        ]
    )


def set_learning_rate(optimiser: torch.optim.Optimizer, factor: float) -> None:
    """Every group's own rate times the schedule's factor."""
    for group in optimiser.param_groups:
        group["lr"] = group["rate"] * factor


class MovingAverage:
    """An exponential moving average of the weights that learn."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.weights: dict[str, Tensor] = {
            name: parameter.detach().clone()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move towards the weights; early on faster, so that the start is forgotten."""
        self.updates += 1
        share = 1 - min(self.decay, self.updates / (self.updates + 10))
        for name, parameter in model.named_parameters():
            if name in self.weights:
                self.weights[name].lerp_(parameter.detach(), share)

    @contextmanager
    def lent(self, model: nn.Module) -> Iterator[None]:
        """The model carries the averaged weights inside and its own again outside."""
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    @torch.no_grad()
    def _swap(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name in self.weights:
                own = parameter.detach().clone()
                parameter.copy_(self.weights[name])
                self.weights[name].copy_(own)

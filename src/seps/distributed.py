"""Several processes as one: who is who, gathering with gradients, one gradient for all.

Every process computes the loss of the joint batch; `gather` sums the gradients of what it gathered over the
processes, so each process's gradient is `size` times its share, and `average_gradients` makes the mean of
them the gradient of the joint batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn

from seps.tokens import Tokens

BUCKET_ELEMENTS = 2**23
"""Gradients travel together, so many numbers at a time."""


@dataclass(frozen=True)
class World:
    """This process among all: its rank, how many there are, and the device it works on."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def main(self) -> bool:
        """Whether this process writes the files and draws the bars."""
        return self.rank == 0


def choose_device(name: str = "auto", local_rank: int = 0) -> torch.device:
    """The device of a name; "auto" is the local rank's GPU where there is one, else the CPU."""
    if name == "auto":
        name = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n", maxsplit=1)[0]
        raise ValueError(f"device: expected one of this machine, found {name!r} ({reason})") from None
    return device


@contextmanager
def joined(device: str = "auto") -> Iterator[World]:
    """The world that torchrun describes in the environment, joined and left again; alone without torchrun."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    place = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if size == 1 or distributed.is_initialized():
        yield current_world(place)
        return
    backend = "nccl" if place.type == "cuda" else "gloo"
    distributed.init_process_group(backend, timeout=timedelta(hours=2))
    try:
        yield current_world(place)
    finally:
        distributed.destroy_process_group()


def current_world(device: torch.device | None = None) -> World:
    """The world this process has joined."""
    place = device or torch.device("cpu")
    if not (distributed.is_available() and distributed.is_initialized()):
        return World(device=place)
    return World(distributed.get_rank(), distributed.get_world_size(), place)


def wait(world: World) -> None:
    """Until every process has come here."""
    if world.size > 1:
        distributed.barrier()


def collect(value: Any, world: World) -> list[Any]:
    """A plain value of every process, in order of rank."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    distributed.all_gather_object(values, value)
    return values


class _Gather(torch.autograd.Function):
    """Rows of all processes; the gradient of a row is the sum of what every process found for it."""

    @staticmethod
    def forward(context: Any, rows: Tensor) -> Tensor:
        context.count = len(rows)
        parts = [torch.empty_like(rows) for _ in range(distributed.get_world_size())]
        distributed.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].contiguous()
        distributed.all_reduce(total)
        start = distributed.get_rank() * context.count
        return total[start : start + context.count]


def gather(rows: Tensor) -> Tensor:
    """Equally many rows of every process, one after the other, with gradients. (B,…) -> (size·B,…)"""
    if current_world().size == 1:
        return rows
    joint: Tensor = _Gather.apply(rows)
    return joint


def gather_tokens(tokens: Tokens) -> Tokens:
    """The token sets of every process, padded to the longest of all, with gradients."""
    world = current_world()
    if world.size == 1:
        return tokens
    facts = collect((tokens.features.shape[1], tokens.mask is not None), world)
    longest = max(length for length, _ in facts)
    ragged = len({length for length, _ in facts}) > 1 or any(masked for _, masked in facts)
    missing = longest - tokens.features.shape[1]
    features = nn.functional.pad(tokens.features, (0, 0, 0, missing))
    mask = None
    if ragged:
        own = tokens.mask
        if own is None:
            own = torch.ones(tokens.features.shape[:2], dtype=torch.bool, device=features.device)
        mask = gather(nn.functional.pad(own, (0, missing)).to(torch.uint8)).bool()
    return Tokens(gather(features), mask, None if tokens.cls is None else gather(tokens.cls))


def share_weights(model: nn.Module) -> None:
    """Give every process the weights and buffers of the first."""
    if current_world().size > 1:
        for tensor in [*model.parameters(), *model.buffers()]:
            distributed.broadcast(tensor.data, 0)


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """The mean over processes of every gradient; one that some process lacks counts as zero there."""
    world = current_world()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if world.size == 1 or not trained:
        return
    touched = torch.tensor([float(p.grad is not None) for p in trained], device=trained[0].device)
    distributed.all_reduce(touched)
    bucket: list[Tensor] = []
    for parameter, count in zip(trained, touched.tolist(), strict=True):
        if count == 0:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if bucket and (
            bucket[0].dtype != parameter.grad.dtype
            or sum(gradient.numel() for gradient in bucket) + parameter.grad.numel() > BUCKET_ELEMENTS
        ):
            _average(bucket, world.size)
            bucket = []
        bucket.append(parameter.grad)
    if bucket:
        _average(bucket, world.size)


def _average(gradients: list[Tensor], size: int) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    distributed.all_reduce(flat)
    flat /= size
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))

"""Weights in eight bits: every large matrix as whole numbers with one scale a row, the rest as it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SCALE = ".scale"
SMALLEST = 4096
"""Weights with fewer entries stay as they are."""


def shrink(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices as int8 beside a row's scale, everything else untouched."""
    shrunk: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if tensor.dim() != 2 or tensor.numel() < SMALLEST or not tensor.is_floating_point():
            shrunk[name] = tensor.detach().contiguous()
            continue
        scale = tensor.detach().float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        shrunk[name] = (tensor.detach() / scale).round().to(torch.int8)
        shrunk[name + SCALE] = scale
    return shrunk


def grow(shrunk: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `shrink` was given, each entry to within half a step of its row."""
    return {
        name: tensor * shrunk[name + SCALE] if name + SCALE in shrunk else tensor
        for name, tensor in shrunk.items()
        if not name.endswith(SCALE) or name.removesuffix(SCALE) not in shrunk
    }


def write_shrunk(state: Mapping[str, Tensor], file: Path) -> None:
    """Shrunk weights as a safetensors file, written beside and renamed."""
    beside = file.with_name(f".{file.name}.part")
    save_file(shrink(state), beside)
    beside.replace(file)


def fill_shrunk(model: nn.Module, file: Path, elsewhere: Collection[str] = ()) -> None:
    """Read what `write_shrunk` wrote into a model; names that are elsewhere may be missing, no others."""
    expected = f"{file}: expected the weights that config.json describes"
    try:
        misfits = model.load_state_dict(grow(load_file(file)), strict=False)
    except (RuntimeError, SafetensorError, OSError) as error:
        raise ValueError(f"{expected} ({' '.join(str(error).split())})") from error
    missing = sorted(set(misfits.missing_keys) - set(elsewhere))
    for word, names in (("lacks", missing), ("has no place for", sorted(misfits.unexpected_keys))):
        if names:
            raise ValueError(f"{expected}, found that it {word} {names[0]} ({len(names)} in all)")

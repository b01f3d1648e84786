"""The state of a run on disk: one file that is whole or not there, folders that are, whose run they hold.

A safetensors file, not a pickle: the tensors under the path by which they hang in the state, and the rest of
it as JSON in the file's metadata.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_TENSOR = "tensor:"
# What may change between the parts of one run: it moves no weight.
FREE_TO_CHANGE = frozenset(
    {
        "folder",
        "checkpoint_steps",
        "checkpoint_seconds",
        "log_steps",
        "tensorboard",
        "resume",
        "device",
        "data.workers",
    }
)


def write_snapshot(state: Any, path: Path) -> None:
    """Nested dicts and lists of tensors and plain values; written beside, synced, then renamed."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    plain = _flatten(state, "", tensors)
    beside = path.with_name(f".{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, beside, metadata={"state": json.dumps(plain)})
    _sync(beside)
    beside.replace(path)
    _sync(path.parent)


def read_snapshot(path: Path, device: torch.device | str = "cpu") -> Any:
    """What `write_snapshot` wrote."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such snapshot")
    try:
        with safe_open(path, "pt", device=str(device)) as file:
            plain = json.loads(file.metadata()["state"])
            return _unflatten(plain, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a snapshot of a run ({error})") from None


def replace_folder(place: Path, save: Callable[[Path], None]) -> None:
    """Let something be saved into a folder beside and swap it in: at every moment one whole folder exists."""
    beside, before = place.with_name(f".{place.name}.part"), place.with_name(f".{place.name}.before")
    for leftover in (beside, before):
        shutil.rmtree(leftover, ignore_errors=True)
    beside.mkdir(parents=True)
    save(beside)
    if place.exists():
        place.rename(before)
    beside.rename(place)
    shutil.rmtree(before, ignore_errors=True)


def require_same(identity: Mapping[str, Any], found: Mapping[str, Any], folder: Path) -> None:
    """Refuse to go on with a run of other settings, and name what differs."""
    ours, theirs = _flat(identity), _flat(found)
    for name in sorted(ours.keys() | theirs.keys()):
        if name.removeprefix("run.") in FREE_TO_CHANGE or ours.get(name) == theirs.get(name):
            continue
        raise ValueError(
            f"{folder}: holds a run with {name} {theirs.get(name)!r}, this one has {ours.get(name)!r}: "
            "choose another folder, or overwrite it with resume false"
        )


def _flatten(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The value with every tensor replaced by its path, under which `tensors` receives it.

    A dict becomes its list of pairs, because the state of an optimiser has whole numbers as keys.
    """
    if isinstance(value, Tensor):
        # Tied weights share memory, which the format refuses: each name gets its own copy.
        tensors[path] = value.detach().clone(memory_format=torch.contiguous_format)
        return _TENSOR + path
    if isinstance(value, dict):
        return {"pairs": [[key, _flatten(each, f"{path}/{key}", tensors)] for key, each in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_flatten(each, f"{path}/{place}", tensors) for place, each in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{path or 'state'}: expected tensors and plain values, found {type(value).__name__}")


def _unflatten(plain: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(plain, str) and plain.startswith(_TENSOR):
        return tensors[plain.removeprefix(_TENSOR)]
    if isinstance(plain, dict):
        return {key: _unflatten(each, tensors) for key, each in plain["pairs"]}
    if isinstance(plain, list):
        return [_unflatten(each, tensors) for each in plain]
    return plain


def _sync(path: Path) -> None:
    """Until the disk has it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted names; sequences as lists, as they come back from a file."""
    if isinstance(values, Mapping) and values:
        flat: dict[str, Any] = {}
        for name, value in values.items():
            flat |= _flat(value, f"{prefix}.{name}" if prefix else str(name))
        return flat
    return {prefix: list(values) if isinstance(values, tuple) else values}

"""The state of a run on disk: one file that is whole or not there, folders that are, whose run they hold.

A safetensors file, not a pickle: the tensors under the path by which they hang in the state, and the rest of
it as JSON in the file's metadata.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seps.data.records import writing

logger = logging.getLogger(__name__)

LOCK = ".lock"
_TENSOR = "tensor:"
BLOCK = 2**20
"""Bytes of a file that are compared at once."""
# What may change between the parts of one run: it moves no weight, nor does "broken" where none was met.
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
        "data.broken",
    }
)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Refuse a folder in which another process is at work; a killed one's lock falls with it.

    The lock is the process's own: workers that outlive it for some seconds do not hold it.
    """
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise ValueError(
                    f"{folder}: expected a run that is not under way, found another process at work on it"
                ) from None
            logger.debug("%s: no lock where it lies (%s)", folder, error)
        yield


def write_snapshot(state: Any, path: Path) -> None:
    """Nested dicts and lists of tensors and plain values; written beside, synced, then renamed."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    plain = _flatten(state, "", tensors)
    beside = path.with_name(f".{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside.unlink(missing_ok=True)
    try:
        with writing(path):
            beside.touch()
            mode = beside.stat().st_mode
            save_file(tensors, beside, metadata={"state": json.dumps(plain)})
            beside.chmod(mode)  # what the user lets others do, where the format's writer lets them do nothing
            _sync(beside)
        beside.replace(path)
        _sync(path.parent)
    finally:
        beside.unlink(missing_ok=True)


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
    """Let something be saved into a folder beside, and put it in the place of the folder there.

    Where one file alone differs, as it does between two models of a run, that file's rename decides, and a
    whole folder stands in its place at every moment. Otherwise two renames do it: `recover_folder` finishes
    what a kill broke off between them.
    """
    recover_folder(place)
    beside, before = _names_beside(place)
    beside.mkdir(parents=True)
    try:
        with writing(place):
            save(beside)
            for path in (*beside.rglob("*"), beside):
                _sync(path)
        changed = _changed(beside, place)
        if changed is not None and len(changed) <= 1:
            for name in changed:
                (beside / name).replace(place / name)
                _sync((place / name).parent)
        else:
            if place.exists():
                place.rename(before)
            beside.rename(place)
            _sync(place.parent)
    finally:
        recover_folder(place)


def recover_folder(place: Path) -> None:
    """Finish or undo what a kill broke off in `replace_folder`."""
    beside, before = _names_beside(place)
    if before.exists() and not place.exists():
        before.rename(place)
    for leftover in (before, beside):
        shutil.rmtree(leftover, ignore_errors=True)


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


def _names_beside(place: Path) -> tuple[Path, Path]:
    """Where a folder is written, and where the one it replaces waits."""
    return place.with_name(f".{place.name}.part"), place.with_name(f".{place.name}.before")


def _changed(new: Path, old: Path) -> list[str] | None:
    """The files in which two folders differ; None where they do not hold the same names."""
    names, theirs = ({str(path.relative_to(each)) for path in each.rglob("*")} for each in (new, old))
    if not old.is_dir() or names != theirs:
        return None
    files = [name for name in sorted(names) if (new / name).is_file()]
    return [name for name in files if not _alike(new / name, old / name)]


def _alike(first: Path, second: Path) -> bool:
    """Whether two files hold the same bytes."""
    with first.open("rb") as one, second.open("rb") as other:
        while (block := one.read(BLOCK)) == other.read(BLOCK):
            if not block:
                return True
    return False


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

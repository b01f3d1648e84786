"""Where a gallery meets disk and engine: places, literals of filters, one sentence for each failure."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

TABLE = "images"

FILTERS = (
    "id",
    "path",
    "folder",
    "name",
    "tags",
    "taken",
    "modified",
    "indexed",
    "size",
    "width",
    "height",
    "description",
    "described",
)
"""The columns a filter may speak of."""

_DISK_TROUBLE = {
    errno.ENOSPC: ("No space left on device", "StorageFull", "os error 28"),
    errno.EROFS: ("Read-only file system", "os error 30"),
    errno.EACCES: ("Permission denied", "os error 13"),
}


def local(location: str | Path) -> Path | None:
    """The folder of a location on this machine, None for one in a bucket."""
    text = str(location)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    return None if "://" in text else Path(text)


def require_vacant(folder: Path) -> None:
    """Refuse to make a gallery where something else stands."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder to make a gallery in, found a file")
    if (folder / f"{TABLE}.lance" / "_versions").is_dir():
        raise ValueError(f"{folder}: expected no gallery to be there yet, found one")
    others = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    others = sorted(name for name in others if name not in (".lock", f"{TABLE}.lance"))
    if others:
        raise ValueError(f"{folder}: expected an empty folder for a new gallery, found {others[0]} in it")


def among(ids: Sequence[str], column: str = "id") -> str:
    """The condition that a column's value is one of some texts."""
    return f"{column} IN ({', '.join(quoted(value) for value in ids)})"


def quoted(text: str) -> str:
    """A text as a literal of a filter."""
    return "'" + text.replace("'", "''") + "'"


def whole(where: str) -> str:
    """A condition in brackets: what goes on after it ends is then an error, which the engine would pass over.

    The line break ends a comment.
    """
    return f"({where}\n)"


def sentence(error: BaseException) -> str:
    """The first sentence of an engine's message, without where in its source it arose."""
    text = " ".join(str(error).split())
    text = re.split(r", /\S*\.rs:|\. Detail:|, location:|\. Valid fields", text)[0]
    for prefix in ("lance error: ", "Invalid input, ", "Schema error: ", "Invalid user input: "):
        text = text.removeprefix(prefix)
    return text or type(error).__name__


@contextmanager
def explain_filters(where: str | None) -> Iterator[None]:
    """Turn the engine's complaint about a filter into one sentence."""
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:
        if where is None:
            raise
        raise ValueError(
            f"filter: expected a condition over {', '.join(FILTERS)}, found {where!r} ({sentence(error)})"
        ) from error


@contextmanager
def explain_failures(location: str | Path) -> Iterator[None]:
    """Turn a full or forbidden disk into one sentence."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        text = str(error)
        for code, marks in _DISK_TROUBLE.items():
            if getattr(error, "errno", None) == code or any(mark in text for mark in marks):
                raise OSError(
                    code, f"{location}: nothing was written, {os.strerror(code).lower()}"
                ) from error
        raise

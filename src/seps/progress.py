"""Progress bars of long work, on standard error and only where someone looks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

Advance = Callable[..., None]
"""Called with a number of steps done and, if there is news, a note for the end of the bar."""


@contextmanager
def progress_bar(title: str, total: int, done: int = 0, visible: bool = True) -> Iterator[Advance]:
    """A bar with steps, time spent and time left; `done` steps were done before."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, disable=not (visible and console.is_terminal)) as bar:
        task = bar.add_task(title, total=total, completed=done, note="")

        def advance(steps: int = 1, note: str | None = None) -> None:
            bar.advance(task, steps)
            if note is not None:
                bar.update(task, note=note)

        yield advance


def track(items: Iterable[T], title: str, total: int, visible: bool = True) -> Iterator[T]:
    """The same items, with a bar that counts them."""
    with progress_bar(title, total, visible=visible) as advance:
        for item in items:
            yield item
            advance()

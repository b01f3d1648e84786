"""Indexing: read, recognise what is unchanged, decode beside the encoder, commit block by block."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
from PIL import Image

from seps.data.images import MOST_PIXELS, open_image
from seps.data.records import Problems
from seps.gallery.borders import among, quoted
from seps.gallery.descriptions import Said
from seps.gallery.pictures import Picture, open_picture
from seps.gallery.rows import Ready, make_rows
from seps.gallery.sketching import typical_texts
from seps.gallery.store import Store
from seps.model import SepsModel, SepsProcessor

T = TypeVar("T")

Describe = Callable[[list[Image.Image]], Sequence[str]]
"""Writes a description of each picture."""


@dataclass(frozen=True)
class Pace:
    """How a run of additions goes: pictures encoded at once, rows a commit, threads that decode."""

    batch: int = 32
    commit: int = 512
    threads: int = 4
    most_pixels: int = MOST_PIXELS

    def __post_init__(self) -> None:
        for name in ("batch", "commit", "threads", "most_pixels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")


@dataclass
class Added:
    """What a run of additions did; skipped are the pictures that cannot be read, each with its reason."""

    added: int = 0
    replaced: int = 0
    unchanged: int = 0
    removed: int = 0
    skipped: Problems = field(default_factory=Problems)

    def __str__(self) -> str:
        parts = [
            f"{count} {name}"
            for name, count in (
                ("added", self.added),
                ("replaced", self.replaced),
                ("unchanged", self.unchanged),
                ("removed", self.removed),
                ("skipped", len(self.skipped)),
            )
            if count
        ]
        return ", ".join(parts) or "nothing to do"


@dataclass(frozen=True)
class Known:
    """What the gallery holds of a picture already."""

    digest: str
    description: str | None
    tags: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """A picture that is new or changed, and the description that goes before what its file says."""

    picture: Picture
    digest: str
    said: Said
    known: Known | None


class Indexer:
    """Adds pictures to a store with a model."""

    def __init__(
        self,
        store: Store,
        model: SepsModel,
        processor: SepsProcessor,
        pace: Pace,
        describe: Describe | None = None,
    ) -> None:
        self.store = store
        self.model = model
        self.processor = processor
        self.pace = pace
        self.describe = describe
        self.typical = typical_texts(model, processor)

    def run(
        self,
        pictures: Iterable[Picture],
        said: Callable[[Picture], Said],
        report: Added,
        advance: Callable[[int], None],
    ) -> Added:
        """Add every picture that is new or changed; what is committed stays, whatever comes after."""
        batch = min(self.pace.batch, self.pace.commit)
        with ThreadPoolExecutor(self.pace.threads, thread_name_prefix="seps-decode") as pool:
            tasks = self._changed(pool, pictures, said, report, advance)
            opened = self._opened(pool, tasks, report, advance)
            encoded = (self._encoded(each) for each in blocks(opened, batch))
            for tables in blocks(encoded, self.pace.commit // batch):
                self._commit(tables, report, advance)
        self.store.tend()
        return report

    def _changed(
        self,
        pool: ThreadPoolExecutor,
        pictures: Iterable[Picture],
        said: Callable[[Picture], Said],
        report: Added,
        advance: Callable[[int], None],
    ) -> Iterator[Task]:
        for block in blocks(pictures, self.pace.commit):
            known = self._known([picture.id for picture in block])
            seen: set[str] = set()

            def look(picture: Picture, known: Mapping[str, Known] = known) -> Task:
                return Task(picture, picture.digest(), own(picture) | said(picture), known.get(picture.id))

            looks = pool.map(lambda picture, look=look: attempt(lambda: look(picture)), block)
            for picture, task in zip(block, looks, strict=True):
                if isinstance(task, Exception):
                    self._skip(report, advance, picture, task)
                    continue
                if picture.id in seen or self._unchanged(task):
                    report.unchanged += 1
                    advance(1)
                else:
                    seen.add(picture.id)
                    yield task

    def _known(self, ids: Sequence[str]) -> dict[str, Known]:
        rows = self.store.fetch(list(dict.fromkeys(ids)), ["hash", "description", "tags"]).to_pylist()
        return {row["id"]: Known(row["hash"], row["description"], tuple(row["tags"] or ())) for row in rows}

    def _unchanged(self, task: Task) -> bool:
        """Whether the gallery holds this content and all that is said of it now."""
        known = task.known
        if known is None or known.digest != task.digest:
            return False
        if self.describe is not None and not (known.description or task.said.description):
            return False
        same = task.said.description in (None, known.description)
        return same and set(task.said.tags) <= set(known.tags)

    def _opened(
        self,
        pool: ThreadPoolExecutor,
        tasks: Iterator[Task],
        report: Added,
        advance: Callable[[int], None],
    ) -> Iterator[tuple[Task, Ready]]:
        """Decode the next batch while one is encoded, and no further, so that memory stays bounded."""
        waiting: deque[tuple[Task, Future[Ready | Exception]]] = deque()
        ahead = self.pace.threads + self.pace.batch
        for task in tasks:
            waiting.append((task, pool.submit(attempt, lambda task=task: self._open(task))))
            if len(waiting) > ahead:
                yield from self._next(waiting, report, advance)
        while waiting:
            yield from self._next(waiting, report, advance)

    def _next(
        self,
        waiting: deque[tuple[Task, Future[Ready | Exception]]],
        report: Added,
        advance: Callable[[int], None],
    ) -> Iterator[tuple[Task, Ready]]:
        task, future = waiting.popleft()
        ready = future.result()
        if isinstance(ready, Exception):
            self._skip(report, advance, task.picture, ready)
        else:
            yield task, ready

    def _open(self, task: Task) -> Ready:
        view = self.processor.view
        opened = open_picture(task.picture, self.pace.most_pixels, max(view.height, view.width))
        kept = Said() if task.known is None else Said(task.known.description)
        return Ready(
            task.picture,
            task.digest,
            self.processor.images([opened.image])[0],
            opened.thumbnail(),
            opened.size,
            opened.width,
            opened.height,
            opened.taken,
            opened.modified,
            task.said | opened.said | kept,
        )

    def _encoded(self, batch: Sequence[tuple[Task, Ready]]) -> tuple[pa.Table, int]:
        """The rows of a batch, and how many of them replace others."""
        ready = self._described([each for _, each in batch])
        rows = make_rows(self.model, self.processor, ready, self.typical, self.store.about.precision)
        return rows, sum(task.known is not None for task, _ in batch)

    def _commit(
        self, encoded: Sequence[tuple[pa.Table, int]], report: Added, advance: Callable[[int], None]
    ) -> None:
        rows = pa.concat_tables([table for table, _ in encoded])
        self.store.write(rows)
        replaced = sum(count for _, count in encoded)
        report.replaced += replaced
        report.added += rows.num_rows - replaced
        advance(rows.num_rows)

    def _described(self, ready: list[Ready]) -> list[Ready]:
        """The same, with a description written for those that have none."""
        silent = [place for place, each in enumerate(ready) if not each.said.description]
        if self.describe is None or not silent:
            return ready
        pictures = [
            open_image(source_of(ready[place].picture), name=ready[place].picture.label) for place in silent
        ]
        for place, text in zip(silent, self.describe(pictures), strict=True):
            ready[place] = replace(ready[place], said=Said(text or None) | ready[place].said)
        return ready

    def _skip(
        self, report: Added, advance: Callable[[int], None], picture: Picture, error: Exception
    ) -> None:
        what = str(error).removeprefix(f"{picture.label}: ").replace(f" '{picture.label}'", "")
        report.skipped.meet(picture.label, what)
        advance(1)


def unwatched(count: int) -> None:
    """Progress that nobody looks at."""
    del count


def own(picture: Picture) -> Said:
    """What was given together with the picture."""
    return Said(picture.description, picture.tags)


def source_of(picture: Picture) -> Path | io.BytesIO:
    """What `open_image` opens."""
    return io.BytesIO(picture.source) if isinstance(picture.source, bytes) else picture.source


def attempt(action: Callable[[], T]) -> T | Exception:
    """The result, or the mistake a file can cause."""
    try:
        return action()
    except (ValueError, OSError) as error:
        return error


def blocks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Consecutive lists of at most size items."""
    iterator = iter(items)
    while block := list(islice(iterator, size)):
        yield block


def vanished(store: Store, folder: Path) -> Iterator[str]:
    """Rows of a folder whose file is no longer there."""
    prefix = folder.as_posix().rstrip("/") + "/"
    for batch in store.scan(["id", "path"], f"starts_with(path, {quoted(prefix)})", 4096):
        for item, path in zip(batch.column("id").to_pylist(), batch.column("path").to_pylist(), strict=True):
            if not Path(path).is_file():
                yield item


def prune(store: Store, folder: Path) -> int:
    """Remove the rows of a folder whose file is no longer there. -> how many"""
    return sum(store.delete(among(block)) for block in blocks(list(vanished(store, folder)), 1000))

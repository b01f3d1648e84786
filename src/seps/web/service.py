"""Service: a gallery that many clients ask at once, its long work off the event loop."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from itertools import islice
from typing import Any

from PIL import Image

from seps.explanation import draw, explain_stored
from seps.gallery import Entry, Gallery, Hit, MissingPictureError, Pace, Picture
from seps.gallery.borders import quoted
from seps.gallery.searching import ENTRY_COLUMNS, check_text, entries_of
from seps.web.batching import Batcher
from seps.web.limits import Gate, Limits, Refusal
from seps.web.metrics import Gauge, Metrics
from seps.web.pictures import read_picture, to_jpeg

# Thumbnails are small and asked for by the page: one read of the table serves many.
_THUMBNAILS_AT_ONCE = 64
_THUMBNAIL_QUEUE = 4096


@dataclass(frozen=True)
class Question:
    """A query of one client; the condition is the service's own, never a client's text."""

    query: str | Image.Image
    k: int
    where: str | None


@dataclass(frozen=True)
class File:
    """What a picture's address serves, and a mark that changes with it."""

    data: bytes
    mark: str


class Service:
    """What the routes call."""

    def __init__(self, gallery: Gallery, limits: Limits, metrics: Metrics) -> None:
        self.gallery = gallery
        self.limits = limits
        self.metrics = metrics
        self.work = Gate("work", limits.workers, limits.waiting, limits.patience)
        self.uploads = Gate("uploads", limits.uploads, 0, limits.patience)
        self.searches: Batcher[Question, list[Hit]] = Batcher(
            "searches",
            self._search,
            limits.batch,
            limits.collect_seconds,
            limits.queue,
            limits.patience,
            metrics.batches.observe,
        )
        self.thumbnails: Batcher[str, File | None] = Batcher(
            "thumbnails", self._thumbnails, _THUMBNAILS_AT_ONCE, 0.001, _THUMBNAIL_QUEUE, limits.patience
        )
        metrics.gauges += [
            Gauge("seps_search_queue", "Queries that wait for a batch.", lambda: self.searches.waiting),
            Gauge("seps_work_waiting", "Requests that wait for a worker.", lambda: self.work.waiting),
            Gauge("seps_work_running", "Workers at work.", lambda: self.work.running),
            Gauge("seps_uploads_running", "Pictures being received.", lambda: self.uploads.running),
        ]

    def start(self) -> None:
        """Begin to answer."""
        self.searches.start()
        self.thumbnails.start()

    async def stop(self) -> None:
        """Finish what is at hand."""
        await self.searches.stop()
        await self.thumbnails.stop()
        self.work.close()
        self.uploads.close()

    async def find_by_text(self, text: str, k: int, where: str | None) -> list[Hit]:
        """The pictures that fit a text best."""
        return await self._ask(Question(self.check_text(text), self.check_count(k), where))

    async def find_by_picture(self, data: bytes, k: int, where: str | None) -> list[Hit]:
        """The pictures most like an uploaded one."""
        k = self.check_count(k)
        # Held until the answer is there, so that few decoded pictures are in memory at once.
        async with self.work.enter():
            picture = await self.work.work(read_picture, data, self.limits.pixels)
            return await self._ask(Question(picture, k, where))

    async def some(self, count: int) -> list[Entry]:
        """Some pictures of the gallery."""
        return await self.work.run(self._some, count)

    async def count(self) -> int:
        """How many pictures there are."""
        return await self.work.run(len, self.gallery)

    async def thumbnail(self, id: str) -> File:  # noqa: A002 - as in the gallery
        """A picture in small."""
        found = await self.thumbnails.ask(id)
        if found is None:
            raise absent(id)
        return found

    async def picture(self, id: str) -> File:  # noqa: A002
        """A picture in full."""
        return await self.work.run(self._picture, id)

    async def explain(self, id: str, text: str) -> dict[str, Any]:  # noqa: A002
        """The layer that shows why a picture has its score for a text."""
        text = self.check_text(text)
        return await self.work.run(self._explain, id, text)

    async def explain_as_figure(self, id: str, text: str) -> bytes:  # noqa: A002
        """The same as a PNG."""
        text = self.check_text(text)
        return await self.work.run(self._draw, id, text)

    async def add(
        self, data: bytes, name: str, description: str | None, tags: Sequence[str]
    ) -> tuple[str, bool]:
        """Add a picture. -> its id, and whether the gallery had it already"""
        return await self.work.run(self._add, data, name, description, tuple(tags))

    def check_text(self, text: str) -> str:
        """A query that can be asked; Refusal where it cannot."""
        if len(text) > self.limits.characters:
            raise Refusal(
                422, f"text: expected at most {self.limits.characters} characters, found {len(text)}"
            )
        try:
            return check_text(text)
        except ValueError as error:
            raise Refusal(422, self.public(error)) from None

    def check_count(self, k: int) -> int:
        """A number of results that is served."""
        if k > self.limits.results:
            raise Refusal(422, f"k: expected at most {self.limits.results} results, found {k}")
        return k

    def public(self, error: Exception) -> str:
        """A sentence as the world may read it: without where the gallery stands."""
        return " ".join(str(error).split()).replace(self.gallery.location, "the gallery")

    async def _ask(self, question: Question) -> list[Hit]:
        try:
            return await self.searches.ask(question)
        except ValueError as error:
            raise Refusal(422, self.public(error)) from None

    def _search(self, questions: list[Question]) -> list[list[Hit]]:
        """Answers in the order of the questions; those that ask among the same pictures go together."""
        groups: dict[tuple[int, str | None], list[int]] = {}
        for place, question in enumerate(questions):
            groups.setdefault((question.k, question.where), []).append(place)
        answers: list[list[Hit]] = [[] for _ in questions]
        for (k, where), places in groups.items():
            found = self.gallery.search([questions[place].query for place in places], k, where)
            for place, hits in zip(places, found, strict=True):
                answers[place] = hits
        return answers

    def _some(self, count: int) -> list[Entry]:
        batches = self.gallery.store.scan(["id", *ENTRY_COLUMNS], None, count)
        return list(islice((entry for batch in batches for entry in entries_of(batch)), count))

    def _thumbnails(self, ids: list[str]) -> list[File | None]:
        rows = self.gallery.store.fetch(list(dict.fromkeys(ids)), ["thumbnail", "indexed"]).to_pylist()
        files = {row["id"]: File(row["thumbnail"], mark(row["id"], row["indexed"])) for row in rows}
        return [files.get(id) for id in ids]  # noqa: A001

    def _picture(self, id: str) -> File:  # noqa: A002
        try:
            entry = self.gallery.entry(id)
            return File(to_jpeg(self.gallery.picture(id)), mark(id, entry.indexed))
        except MissingPictureError:
            raise absent(id) from None

    def _explain(self, id: str, text: str) -> dict[str, Any]:  # noqa: A002
        try:
            return explain_stored(self.gallery, id, text).overlay()
        except MissingPictureError:
            raise absent(id) from None
        except ValueError as error:
            raise Refusal(422, self.public(error)) from None

    def _draw(self, id: str, text: str) -> bytes:  # noqa: A002
        try:
            figure = draw(explain_stored(self.gallery, id, text), self.gallery.picture(id))
        except MissingPictureError:
            raise absent(id) from None
        except ValueError as error:
            raise Refusal(422, self.public(error)) from None
        file = io.BytesIO()
        figure.save(file, "PNG")
        return file.getvalue()

    def _add(
        self, data: bytes, name: str, description: str | None, tags: tuple[str, ...]
    ) -> tuple[str, bool]:
        read_picture(data, self.limits.pixels)
        picture = Picture(data, name, description, tags)
        pace = Pace(batch=1, commit=1, threads=1, most_pixels=self.limits.pixels)
        try:
            added = self.gallery.add([picture], pace)
        except ValueError as error:
            raise Refusal(422, self.public(error)) from None
        return picture.id, not added.added


def absent(id: str) -> Refusal:  # noqa: A002
    """There is no such picture."""
    return Refusal(404, f"id: expected one of a picture in the gallery, found {id!r}")


def mark(id: str, indexed: datetime) -> str:  # noqa: A002
    """A picture's ETag: it changes when the picture is indexed anew."""
    return f'"{id}-{int(indexed.timestamp())}"'


def condition(tags: Sequence[str], since: date | None, until: date | None) -> str | None:
    """The gallery's condition for what a client may filter by; values are quoted, columns are ours."""
    parts = [f"array_has(tags, {quoted(tag)})" for tag in tags]
    if since is not None:
        parts.append(f"taken >= {moment(since)}")
    if until is not None:
        parts.append(
            f"taken < {moment(until + timedelta(days=1))}" if until < date.max else "taken IS NOT NULL"
        )
    return " AND ".join(parts) or None


def moment(day: date) -> str:
    """The beginning of a day as a literal of a filter."""
    return f"timestamp '{datetime.combine(day, time()).isoformat(sep=' ')}'"

"""Gallery: pictures that can be searched with words."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
from PIL import Image

from seps.data.images import open_image
from seps.data.records import Problems
from seps.gallery.borders import among
from seps.gallery.descriptions import Said, beside
from seps.gallery.indexing import Added, Describe, Indexer, Pace, prune, unwatched
from seps.gallery.packing import Precision
from seps.gallery.pictures import Picture, absolute
from seps.gallery.rows import device_of, encode_texts, identify
from seps.gallery.searching import (
    ENTRY_COLUMNS,
    Entry,
    Hit,
    TextHit,
    best_rows,
    check_count,
    check_text,
    entries_of,
    search_alike,
    search_candidates,
    search_descriptions,
    search_everything,
    tokens_of,
)
from seps.gallery.store import About, Store
from seps.model import SepsModel, SepsProcessor
from seps.tokens import Tokens

Query = str | Image.Image


class MissingPictureError(ValueError):
    """There is no picture of that id in the gallery."""


@dataclass(frozen=True)
class Stored:
    """A picture's tokens as the gallery keeps them: patches (1,N,C), description words (1,D,C) or None."""

    images: Tokens
    dense: Tokens | None
    entry: Entry


class Gallery:
    """An index of pictures on disk or in a bucket, bound to the model that made it.

    Several processes may write and read at once. Reading always sees the newest commit.
    """

    def __init__(
        self, store: Store, model: SepsModel | None = None, processor: SepsProcessor | None = None
    ) -> None:
        self.store = store
        self._model = model
        self._processor = processor

    @classmethod
    def create(
        cls,
        location: str | os.PathLike[str],
        model: SepsModel,
        processor: SepsProcessor,
        precision: Precision = "int8",
        model_source: str | os.PathLike[str] = "",
    ) -> Gallery:
        """A new, empty gallery; model_source is where the model can be loaded from again."""
        grid = model.image_encoder.grid
        about = About(
            model=identify(model, processor),
            model_source=os.fspath(model_source),
            channels=model.config.channels,
            grid=(int(grid[0]), int(grid[1])),
            precision=precision,
        )
        return cls(Store.create(os.fspath(location), about), model.eval(), processor)

    @classmethod
    def open(
        cls,
        location: str | os.PathLike[str],
        model: SepsModel | None = None,
        processor: SepsProcessor | None = None,
    ) -> Gallery:
        """The gallery that stands there; without a model it can be read and removed from, not searched."""
        store = Store.open(os.fspath(location))
        if (model is None) != (processor is None):
            raise ValueError("model, processor: expected both or neither, found one of them")
        if model is not None and processor is not None:
            found = identify(model.eval(), processor)
            if found != store.about.model:
                raise ValueError(
                    f"{location}: expected the model it was indexed with ({store.about.model[:12]}, from "
                    f"{store.about.model_source or 'memory'}), found another ({found[:12]}); "
                    "open it with that model or index the pictures again"
                )
        return cls(store, model, processor)

    @property
    def location(self) -> str:
        """Where the gallery stands."""
        return self.store.location

    @property
    def model(self) -> SepsModel:
        """The model; ValueError where the gallery was opened without one."""
        if self._model is None:
            raise ValueError(
                f"{self.location}: expected a model for this, but the gallery was opened without one"
            )
        return self._model

    @property
    def processor(self) -> SepsProcessor:
        """The processor; ValueError where the gallery was opened without one."""
        if self._processor is None:
            raise ValueError(f"{self.location}: expected a processor for this, but there is none")
        return self._processor

    def __len__(self) -> int:
        return self.store.count()

    def add(
        self,
        pictures: Iterable[Picture | str | os.PathLike[str]],
        pace: Pace = Pace(),  # noqa: B008 - frozen
        said: Callable[[Picture], Said] | None = None,
        describe: Describe | None = None,
        broken: Problems | None = None,
        advance: Callable[[int], None] = unwatched,
    ) -> Added:
        """Add pictures, or replace those that changed; unchanged ones are left alone.

        said: what else is known of a picture, by default the files beside it; describe: writes what nobody
        said; broken: whether a picture that cannot be read is refused (default) or skipped.
        """
        self.store.sweep()
        given = (p if isinstance(p, Picture) else Picture(absolute(p)) for p in pictures)
        indexer = Indexer(self.store, self.model, self.processor, pace, describe)
        return indexer.run(
            given, said or said_beside, Added(skipped=Problems() if broken is None else broken), advance
        )

    def remove(self, ids: Iterable[str] = (), where: str | None = None) -> int:
        """Remove pictures by id, or all that meet a condition; -> how many there were."""
        ids = list(ids)
        if bool(ids) == (where is not None):
            raise ValueError("remove: expected ids or a condition, found " + ("both" if ids else "neither"))
        return self.store.delete(among(ids) if where is None else where)

    def prune(self, folder: str | os.PathLike[str]) -> int:
        """Remove the pictures of a folder whose file is no longer there; -> how many there were."""
        if not Path(folder).is_dir():
            raise ValueError(f"{folder}: expected a folder, found none; nothing was removed")
        return prune(self.store, absolute(folder))

    @overload
    def search(  # type: ignore[overload-overlap]
        self, query: Query, k: int = 10, where: str | None = None, exact: bool = False
    ) -> list[Hit]: ...

    @overload
    def search(
        self, query: Sequence[Query], k: int = 10, where: str | None = None, exact: bool = False
    ) -> list[list[Hit]]: ...

    def search(
        self, query: Query | Sequence[Query], k: int = 10, where: str | None = None, exact: bool = False
    ) -> list[Hit] | list[list[Hit]]:
        """The k best pictures for a text or a picture; for several queries, a list for each.

        where: a condition over the columns, such as ``folder LIKE '%2024%' AND array_has(tags, 'sea')``;
        exact: score every picture instead of the candidates. A text is answered with the model's scores, a
        picture with the cosine of the pictures' vectors.
        """
        if isinstance(query, (str, Image.Image)):
            return self._search([query], check_count(k), where, exact)[0]
        return self._search(list(query), check_count(k), where, exact)

    def _search(self, queries: list[Query], k: int, where: str | None, exact: bool) -> list[list[Hit]]:
        for place, query in enumerate(queries):
            if not isinstance(query, (str, Image.Image)):
                raise ValueError(
                    f"query: expected a text or a picture, found {type(query).__name__} at {place}"
                )
        texts = [place for place, query in enumerate(queries) if isinstance(query, str)]
        pictures = [place for place, query in enumerate(queries) if not isinstance(query, str)]
        results: list[list[Hit]] = [[] for _ in queries]
        store = self.store.still()
        if texts:
            asked = [check_text(str(queries[place])) for place in texts]
            words = self.encode_texts(asked)
            found = (
                search_everything(store, self.model, words, k, where)
                if exact
                else search_candidates(store, self.model, asked, words, k, where)
            )
            for place, hits in zip(texts, found, strict=True):
                results[place] = hits
        if pictures:
            images = self.encode_images([queries[place] for place in pictures])  # type: ignore[misc]
            vectors = self.model.global_images(images)
            for place, hits in zip(pictures, search_alike(store, vectors, k, where, exact), strict=True):
                results[place] = hits
        return results

    def search_texts(
        self,
        image: Image.Image,
        texts: Sequence[str] | None = None,
        k: int = 10,
        where: str | None = None,
    ) -> list[TextHit]:
        """The k texts that fit a picture best, among the given ones or the stored descriptions."""
        check_count(k)
        tokens = self.encode_images([image])
        if texts is None:
            return search_descriptions(self.store.still(), self.model, tokens, k, where)
        asked = [check_text(text) for text in texts]
        if not asked:
            raise ValueError("texts: expected at least one, found none")
        with torch.inference_mode():
            scores = self.model.score(tokens, self.encode_texts(asked))[0].float().cpu().tolist()
        best = best_rows(scores, [str(place).zfill(9) for place in range(len(asked))], k)
        return [TextHit(scores[place], texts[place]) for place in best]

    @torch.inference_mode()
    def encode_images(self, images: Sequence[Image.Image]) -> Tokens:
        """Patches of pictures. -> (B,N,C)"""
        return self.model.encode_images(self.processor.images(list(images)).to(device_of(self.model)))

    def encode_texts(self, texts: Sequence[str]) -> Tokens:
        """Words of texts. -> (T,M,C)"""
        return encode_texts(self.model, self.processor, texts)

    def entry(self, id: str) -> Entry:  # noqa: A002 - it is the column's name
        """What the gallery knows of a picture."""
        return entries_of(self._row(id, ENTRY_COLUMNS))[0]

    def thumbnail(self, id: str) -> bytes:  # noqa: A002
        """A small JPEG of a picture."""
        return self._row(id, ["thumbnail"]).column("thumbnail")[0].as_py()

    def picture(self, id: str) -> Image.Image:  # noqa: A002
        """A picture in full, from its file or its bytes; its thumbnail where the file is gone."""
        row = self._row(id, ["path", "original", "thumbnail"]).to_pylist()[0]
        if row["original"] is not None:
            return open_image(io.BytesIO(row["original"]), name=id)
        try:
            return open_image(row["path"])
        except ValueError:
            return open_image(io.BytesIO(row["thumbnail"]), name=id)

    def stored(self, id: str) -> Stored:  # noqa: A002
        """A picture's tokens as they are scored."""
        row = self._row(id, [*ENTRY_COLUMNS, "patches", "words"])
        return Stored(*tokens_of(self.model, row), entries_of(row)[0])

    def stats(self) -> dict[str, Any]:
        """Pictures, descriptions, bytes on disk, versions, indexes, and the model."""
        about = self.store.about
        return {
            "location": self.location,
            **self.store.stats(),
            "model": about.model,
            "model_source": about.model_source,
            "channels": about.channels,
            "precision": about.precision,
        }

    def compact(self) -> None:
        """Merge small pieces, bring the indexes up to date, sweep old versions and strays."""
        self.store.compact()

    def _row(self, id: str, columns: Sequence[str]) -> Any:  # noqa: A002
        rows = self.store.fetch([id], list(columns))
        if not rows.num_rows:
            raise MissingPictureError(f"id: expected one of a picture in {self.location}, found {id!r}")
        return rows


def load_gallery(location: str | os.PathLike[str], model: str | os.PathLike[str] = "") -> Gallery:
    """A gallery with its model, read from where it was when indexing, or from another place."""
    from seps.model import load

    source = os.fspath(model) or Store.open(os.fspath(location)).about.model_source
    if not source:
        raise ValueError(f"{location}: expected a model, found none named when it was indexed")
    return Gallery.open(location, *load(source))


def said_beside(picture: Picture) -> Said:
    """What the files beside a picture say of it."""
    return beside(picture.source) if isinstance(picture.source, Path) else Said()

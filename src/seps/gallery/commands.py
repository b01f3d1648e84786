"""The commands `seps index`, `seps search` and `seps gallery`."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from PIL import Image

from seps.data.images import MOST_PIXELS, open_image
from seps.data.records import Problems
from seps.gallery.cluster import index_on_cluster
from seps.gallery.descriptions import Said, beside, read_descriptions
from seps.gallery.gallery import Gallery, load_gallery
from seps.gallery.indexing import Added, Describe, Pace, blocks
from seps.gallery.packing import Precision
from seps.gallery.pictures import Picture, absolute, require_pictures
from seps.gallery.searching import Hit, TextHit
from seps.gallery.store import Store
from seps.progress import progress_bar

if TYPE_CHECKING:
    from seps.captions import Describer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class IndexOptions:
    """Index a folder of pictures; what did not change since the last time is left alone."""

    photos: str
    """The folder, or one picture."""
    gallery: str
    """Where the gallery stands or is to stand, a folder or a bucket (s3://...)."""
    model: str = ""
    """The model's folder or hub name; where it is left out, the gallery's own, or seps-mini for a new one."""
    descriptions: str = ""
    """A JSONL that names an `image` and its `dense` text, and `tags`, on every line."""
    prune: bool = False
    """Remove pictures of the folder whose file is gone."""
    precision: Precision = "int8"
    """How tokens are kept, a byte a number or two."""
    batch: int = 32
    """Pictures encoded at once."""
    commit: int = 512
    """Pictures a commit; a run that is interrupted loses less than one commit."""
    threads: int = 4
    """How many pictures are decoded side by side."""
    most_pixels: int = MOST_PIXELS
    """Larger pictures are skipped."""
    captioner: str = ""
    """A model that describes the pictures nobody described; with --caption_server, the name it goes by."""
    caption_server: str = ""
    """A server that describes them, one that speaks the OpenAI chat API."""
    ray: str = ""
    """The address of a Ray cluster to index on; "local" starts one on this machine."""
    workers: int = 2
    """Actors on the cluster."""


def run_index(options: IndexOptions) -> int:
    """Index a folder. -> 0, or 1 where no picture could be read"""
    root = absolute(options.photos)
    pace = Pace(options.batch, options.commit, options.threads, options.most_pixels)
    paths = require_pictures(root)
    skipped = Problems("skip")
    folder = root if root.is_dir() else root.parent
    listed = read_descriptions(Path(options.descriptions), folder, skipped) if options.descriptions else {}
    gallery = open_or_create(options)

    def said(picture: Picture) -> Said:
        path = picture.source
        return Said() if isinstance(path, bytes) else listed.get(path, Said()) | beside(path)

    with progress_bar("index", len(paths)) as advance, describing(options) as describe:
        if options.ray:
            report = index_on_cluster(
                options.ray,
                gallery.location,
                options.model or gallery.store.about.model_source,
                paths,
                lambda path: listed.get(path, Said()),
                pace,
                options.workers,
                advance,
            )
        else:
            given = (Picture(path) for path in paths)
            report = gallery.add(given, pace, said, describe, skipped, advance)
    if options.prune and root.is_dir():
        report.removed = gallery.prune(root)
    conclude(gallery, report)
    return 1 if len(skipped) and not (report.added or report.replaced or report.unchanged) else 0


@contextmanager
def describing(options: IndexOptions) -> Iterator[Describe | None]:
    """What writes the missing descriptions, None where no model and no server is named."""
    if not options.captioner and not options.caption_server:
        yield None
        return
    if options.ray:
        raise ValueError("captioner: expected none with --ray; write a JSONL with `seps caption` first")
    from seps.captions import CaptionOptions, choose

    asked = CaptionOptions("", "", model=options.captioner or None, server=options.caption_server or None)
    with closing(choose(asked)) as describer:
        yield lambda pictures: describe_blocks(describer, pictures)


def describe_blocks(describer: Describer, pictures: Sequence[Image.Image]) -> list[str]:
    """A description of each picture, asked for side by side; empty where the model gave none."""
    from seps.chat import Unanswered

    def ask(part: list[Image.Image]) -> list[str]:
        try:
            return describer(part)
        except Unanswered as error:
            logger.warning("%d pictures stay without a description: %s", len(part), error)
            return [""] * len(part)

    with ThreadPoolExecutor(describer.workers) as pool:
        parts = pool.map(ask, blocks(pictures, describer.batch_size))
        return [text for part in parts for text in part]


def conclude(gallery: Gallery, report: Added) -> None:
    """Say what a run of additions did."""
    logger.info("%s: %s; %d pictures in all", gallery.location, report, len(gallery))


def open_or_create(options: IndexOptions) -> Gallery:
    """The gallery of the options, made where there is none."""
    from seps.model import DEFAULT, load

    if Store.exists(options.gallery):
        return load_gallery(options.gallery, options.model)
    name = options.model or DEFAULT
    model, processor = load(name)
    source = absolute(name) if Path(name).exists() else name
    return Gallery.create(options.gallery, model, processor, options.precision, source)


@dataclass(frozen=True)
class SearchOptions:
    """Search a gallery with a sentence or a picture.

    gallery: where it stands.
    query: the sentence, or with --by picture the file of one.
    by: what the query is.
    find: pictures, or the stored descriptions that fit a picture.
    k: how many results.
    where: a condition, such as "taken >= date '2024-01-01' AND array_has(tags, 'sea')".
    exact: score every picture instead of the candidates.
    model: the model's folder, if it is no longer where it was when indexing.
    format: a table to read, or a JSON object a line.
    """

    gallery: str
    query: str
    by: Literal["text", "picture"] = "text"
    find: Literal["pictures", "descriptions"] = "pictures"
    k: int = 10
    where: str = ""
    exact: bool = False
    model: str = ""
    format: Literal["table", "json"] = "table"


def run_search(options: SearchOptions) -> int:
    """Search and show what was found. -> 0, or 1 where nothing was"""
    if options.find == "descriptions" and options.by == "text":
        raise ValueError("find: descriptions are found by picture, expected --by picture with it")
    query = options.query if options.by == "text" else open_image(options.query)
    gallery = load_gallery(options.gallery, options.model)
    where = options.where or None
    found: list[dict[str, Any]]
    if options.find == "descriptions" and not isinstance(query, str):
        found = [text_fields(hit) for hit in gallery.search_texts(query, None, options.k, where)]
    else:
        found = [hit_fields(hit) for hit in gallery.search(query, options.k, where, options.exact)]
    show(found, options.format)
    return 0 if found else 1


def hit_fields(hit: Hit) -> dict[str, Any]:
    """A picture found, as plain values."""
    entry = hit.entry
    return {
        "score": round(hit.score, 4),
        "id": entry.id,
        "path": entry.path or entry.name,
        "taken": entry.taken.isoformat(),
        "tags": list(entry.tags),
        "description": entry.description,
    }


def text_fields(hit: TextHit) -> dict[str, Any]:
    """A text found, as plain values."""
    return {"score": round(hit.score, 4), "id": hit.id, "text": hit.text}


def show(found: list[dict[str, Any]], form: str) -> None:
    """Results on standard output."""
    if form == "json":
        for fields in found:
            sys.stdout.write(json.dumps(fields, ensure_ascii=False) + "\n")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    columns = ["score", "path", "description"] if found and "path" in found[0] else ["score", "text"]
    for column in columns:
        table.add_column(column, justify="right" if column == "score" else "left", overflow="ellipsis")
    for fields in found:
        words = (str(fields[column] or "") for column in columns[1:])
        table.add_row(f"{fields['score']:.3f}", *(Text(word, no_wrap=True) for word in words))
    Console().print(table if found else "nothing found")


@dataclass(frozen=True)
class GalleryOptions:
    """Which gallery.

    gallery: where it stands.
    """

    gallery: str


def run_stats(options: GalleryOptions) -> int:
    """Show what a gallery holds."""
    for name, value in Gallery.open(options.gallery).stats().items():
        sys.stdout.write(f"{name:<13} {value}\n")
    return 0


def run_compact(options: GalleryOptions) -> int:
    """Merge, index and sweep."""
    gallery = Gallery.open(options.gallery)
    before = gallery.stats()["fragments"]
    gallery.compact()
    logger.info(
        "%s: %d pieces before, %d after; files of old versions go when these are ten minutes old",
        gallery.location,
        before,
        gallery.stats()["fragments"],
    )
    return 0


@dataclass(frozen=True)
class RemoveOptions:
    """Remove pictures from a gallery; their files stay.

    gallery: where it stands.
    where: which, as a condition, such as "folder = '/photos/2019'" or "id = '0123456789abcdef'".
    """

    gallery: str
    where: str


def run_remove(options: RemoveOptions) -> int:
    """Remove what meets a condition. -> 0, or 1 where nothing did"""
    gallery = Gallery.open(options.gallery)
    count = gallery.remove(where=options.where)
    logger.info("%s: %d removed, %d left", gallery.location, count, len(gallery))
    return 0 if count else 1

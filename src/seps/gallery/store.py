"""The rows of a gallery: one Lance table, written one commit at a time, read at its newest version."""

from __future__ import annotations

import json
import logging
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import lancedb
import pyarrow as pa
from lancedb.index import FTS, BTree
from lancedb.query import MatchQuery

from seps.gallery.borders import (
    TABLE,
    among,
    explain_failures,
    explain_filters,
    local,
    require_vacant,
    sentence,
    whole,
)
from seps.gallery.packing import Precision

logger = logging.getLogger(__name__)

FORMAT = 3
ROW = "_rowid"
"""The number of a row: it holds within one version, and costs less than looking an id up."""
VECTORS = ("pixel_vector", "description_vector", "text_vector")

# Readers may still hold a version of this age; older ones are swept.
KEEP_VERSIONS = timedelta(minutes=10)
# Measured with benchmarks/gallery.py: from so many rows on an index beats the exact scan of a vector column.
INDEX_FROM = 50_000
_PROBES = 32
_REFINE = 3
# Beyond so many, a run of additions ends with a compaction.
_SMALL_FRAGMENTS = 32
_UNINDEXED_ROWS = 10_000
_MOST_KNOWN = 64
# So many tries when writers on other machines commit at the same moment.
_TRIES = 20
_PRIMARY_KEY = {b"lance-schema:unenforced-primary-key:position": b"1"}

Result = TypeVar("Result")


@dataclass(frozen=True)
class About:
    """What a gallery says of itself: the model its rows were made with, and how its tokens are packed."""

    model: str
    model_source: str
    channels: int
    grid: tuple[int, int] | None
    precision: Precision
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        """JSON, as it stands in the table's schema."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> About:
        """The reverse of `to_bytes`."""
        values = json.loads(text)
        values["grid"] = tuple(values["grid"]) if values["grid"] else None
        return cls(**values)


def row_schema(channels: int, metadata: dict[bytes, bytes] | None = None) -> pa.Schema:
    """The columns of a gallery's table."""
    vector = pa.list_(pa.float16(), channels)
    return pa.schema(
        [
            pa.field("id", pa.string(), nullable=False, metadata=_PRIMARY_KEY),
            pa.field("path", pa.string()),
            pa.field("folder", pa.string()),
            pa.field("name", pa.string()),
            pa.field("hash", pa.string()),
            pa.field("size", pa.int64()),
            pa.field("width", pa.int32()),
            pa.field("height", pa.int32()),
            pa.field("taken", pa.timestamp("s")),
            pa.field("modified", pa.timestamp("s")),
            pa.field("indexed", pa.timestamp("s")),
            pa.field("tags", pa.list_(pa.string())),
            pa.field("description", pa.string()),
            pa.field("described", pa.bool_()),
            pa.field("thumbnail", pa.binary()),
            pa.field("original", pa.large_binary()),
            pa.field("patches", pa.binary()),
            pa.field("words", pa.binary()),
            pa.field("sketch", pa.binary()),
            pa.field("pixel_vector", vector),
            pa.field("description_vector", vector),
            pa.field("text_vector", vector),
        ],
        metadata=metadata,
    )


class Store:
    """One Lance table in a folder or a bucket.

    On a disk, commits of all processes queue on a lock file, so that whatever a killed writer left
    behind can be told from work in progress and swept. In a bucket, Lance's own conflict detection
    holds, and a commit that lost the race is tried again.
    """

    def __init__(self, location: str | Path, table: Any, connection: Any) -> None:
        self.location = str(location)
        self._table = table
        self._connection = connection
        self._still: Store | None = None
        # What was asked of a version held still stays true.
        self._known: dict[str, Any] | None = None
        metadata = table.schema.metadata or {}
        if b"seps" not in metadata:
            raise ValueError(f"{location}: expected a gallery, found another table")
        self.about = About.from_bytes(metadata[b"seps"])
        if self.about.format != FORMAT:
            raise ValueError(
                f"{location}: expected gallery format {FORMAT}, found {self.about.format}: index again"
            )
        self.schema = row_schema(self.about.channels)

    @classmethod
    def create(cls, location: str | Path, about: About) -> Store:
        """A new, empty table where there is none."""
        folder = local(location)
        if folder is not None:
            require_vacant(folder)
        with explain_failures(location):
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            connection = lancedb.connect(str(location), read_consistency_interval=timedelta(0))
            table = connection.create_table(
                TABLE, schema=row_schema(about.channels, {b"seps": about.to_bytes()})
            )
            store = cls(location, table, connection)
            store._index_columns()
        return store

    @classmethod
    def open(cls, location: str | Path) -> Store:
        """The table that stands there."""
        folder = local(location)
        if folder is not None and not (folder / f"{TABLE}.lance" / "_versions").is_dir():
            what = (
                "nothing" if not folder.exists() else "a file" if folder.is_file() else "a folder without one"
            )
            raise ValueError(
                f"{location}: expected a gallery, found {what}; `seps index PHOTOS GALLERY` makes one"
            )
        connection = lancedb.connect(str(location), read_consistency_interval=timedelta(0))
        try:
            table = connection.open_table(TABLE)
        except (ValueError, FileNotFoundError, RuntimeError, OSError) as error:
            raise ValueError(
                f"{location}: expected a gallery, found none that opens ({sentence(error)})"
            ) from error
        return cls(location, table, connection)

    @classmethod
    def exists(cls, location: str | Path) -> bool:
        """Whether a gallery stands there."""
        folder = local(location)
        if folder is not None:
            versions = folder / f"{TABLE}.lance" / "_versions"
            return versions.is_dir() and any(versions.iterdir())
        return TABLE in lancedb.connect(str(location)).list_tables().tables

    def still(self) -> Store:
        """The newest version, held still to read from: row numbers found in it stay true."""
        version, held = self._table.version, self._still
        if held is None or held._table.version != version:
            table = self._connection.open_table(TABLE)
            table.checkout(version)
            held = Store(self.location, table, self._connection)
            held._known = {}
            self._still = held
        return held

    def _ask(self, question: str, answer: Callable[[], Result]) -> Result:
        """An answer, kept where the version is held still."""
        if self._known is None:
            return answer()
        if question not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[question] = answer()
        return self._known[question]

    def write(self, rows: pa.Table) -> None:
        """Insert rows, or replace those of the same id; all of them or, on failure, none."""
        if not rows.num_rows:
            return

        def merge() -> None:
            merging = self._table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
            merging.execute(rows, on_bad_vectors="null")

        self._commit(merge)

    def delete(self, where: str) -> int:
        """Remove the rows of a condition; -> how many there were."""

        def remove() -> int:
            count = self.count(where)
            if count:
                self._table.delete(whole(where))
            return count

        return self._commit(remove)

    def count(self, where: str | None = None) -> int:
        """Number of rows, of those that meet a condition if there is one."""
        with explain_filters(where):
            return self._ask(
                f"count {where}", lambda: self._table.count_rows(None if where is None else whole(where))
            )

    def fetch(self, ids: Sequence[str], columns: Sequence[str]) -> pa.Table:
        """Some columns of some rows, in the order of ids; one that is not there is left out."""
        wanted = ["id", *columns]
        if not ids:
            return self.schema.empty_table().select(wanted)
        rows = self._table.search().where(among(ids)).select(wanted).limit(len(ids)).to_arrow()
        places = {item: place for place, item in enumerate(rows.column("id").to_pylist())}
        order = [places[item] for item in ids if item in places]
        return rows.take(pa.array(order, pa.int64())).combine_chunks()

    def take(self, rows: Sequence[int], columns: Sequence[str]) -> pa.Table:
        """Some columns of rows of a version held still, and their numbers, in the order of rows."""
        wanted = list(dict.fromkeys((ROW, *columns)))
        if not rows:
            return self.schema.append(pa.field(ROW, pa.uint64())).empty_table().select(wanted)
        found = self._table.take_row_ids(list(rows)).select(wanted).to_arrow()
        places = {row: place for place, row in enumerate(found.column(ROW).to_pylist())}
        return found.take(pa.array([places[row] for row in rows], pa.int64())).combine_chunks()

    def scan(
        self, columns: Sequence[str], where: str | None = None, batch_rows: int = 256
    ) -> Iterator[pa.RecordBatch]:
        """All rows of one version, or those of a condition, in batches of bounded size."""
        query = self._table.search().select(list(columns)).limit(2**31 - 1)
        with explain_filters(where):
            query = query if where is None else query.where(whole(where))
            batches = query.to_batches(batch_size=batch_rows)
            for batch in batches:
                for start in range(0, batch.num_rows, batch_rows):
                    yield batch.slice(start, batch_rows)

    def nearest(
        self, column: str, vector: Sequence[float], limit: int, where: str | None = None, exact: bool = False
    ) -> list[tuple[int, float]]:
        """The rows whose vector has the largest cosine with a given one: (row, cosine), best first."""
        query = self._table.search(vector, vector_column_name=column).distance_type("cosine")
        if exact:
            query = query.bypass_vector_index()
        elif self._has_index(column):
            query = query.nprobes(_PROBES).refine_factor(_REFINE)
        query = query.select(["_distance"]).with_row_id(True).limit(limit)
        with explain_filters(where):
            found = (query if where is None else query.where(whole(where), prefilter=True)).to_arrow()
        cosines = [1 - distance for distance in found["_distance"].to_pylist()]
        return list(zip(found[ROW].to_pylist(), cosines, strict=True))

    def matching(self, text: str, limit: int, where: str | None = None) -> list[tuple[int, float]]:
        """The rows whose description shares words with a text: (row, relevance), best first."""
        wanted = MatchQuery(text, "description")  # type: ignore[call-arg] # its defaults hide in a dataclass
        query = self._table.search(wanted).select(["_score"]).with_row_id(True).limit(limit)
        with explain_filters(where):
            found = (query if where is None else query.where(whole(where), prefilter=True)).to_arrow()
        return list(zip(found[ROW].to_pylist(), found["_score"].to_pylist(), strict=True))

    def tend(self) -> None:
        """Compact when the table has fallen into many small pieces or its indexes lag behind."""
        stats = self._table.stats()
        if (
            stats["fragment_stats"]["num_small_fragments"] > _SMALL_FRAGMENTS
            or self.unindexed() > _UNINDEXED_ROWS
        ):
            self.compact()

    def compact(self) -> None:
        """Merge small fragments, bring the indexes up to date, sweep old versions and strays."""

        def tidy() -> None:
            # Files that no version speaks of are strays only where the lock keeps other writers out.
            alone = local(self.location) is not None
            self._table.optimize(cleanup_older_than=KEEP_VERSIONS, delete_unverified=alone)
            self._index_vectors()

        self.sweep()
        self._commit(tidy)

    def sweep(self) -> int:
        """Remove the temporary files of killed writers, which on a disk the lock tells apart. -> how many"""
        folder = local(self.location)
        if folder is None:
            return 0
        with self.lock(), explain_failures(self.location):
            strays = [path for path in (folder / f"{TABLE}.lance").rglob(".tmp*") if path.is_file()]
            for path in strays:
                path.unlink(missing_ok=True)
        if strays:
            logger.info("%s: swept %d temporary files of a killed writer", self.location, len(strays))
        return len(strays)

    def unindexed(self) -> int:
        """Rows that the index of identities does not hold yet."""
        counts = [
            found.num_unindexed_rows
            for index in self._table.list_indices()
            if index.columns == ["id"] and (found := self._table.index_stats(index.name)) is not None
        ]
        return max(counts, default=self.count())

    def stats(self) -> dict[str, Any]:
        """Rows, versions, fragments, bytes on disk and what is indexed how."""
        stats = self._table.stats()
        folder = local(self.location)
        files = [] if folder is None else [path for path in folder.rglob("*") if path.is_file()]
        return {
            "images": self.count(),
            "described": self.count("described"),
            "bytes": sum(path.stat().st_size for path in files) if files else stats["total_bytes"],
            "fragments": stats["fragment_stats"]["num_fragments"],
            "versions": len(self._table.list_versions()),
            "indexes": {index.columns[0]: index.index_type for index in self._table.list_indices()},
        }

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One writer at a time on a disk; a killed one's lock falls with it. In a bucket there is none."""
        folder = local(self.location)
        if folder is None:
            yield
            return
        import fcntl

        with (folder / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _commit(self, action: Callable[[], Result]) -> Result:
        """Run a change under the lock; where another machine's commit came first, try again."""
        for attempt in range(1, _TRIES + 1):
            try:
                with self.lock(), explain_failures(self.location):
                    return action()
            except RuntimeError as error:
                if "conflict" not in str(error).lower() or attempt == _TRIES:
                    raise
                logger.info("%s: another writer came first, try %d", self.location, attempt)
                time.sleep(random.uniform(0, 0.05 * attempt))
        raise RuntimeError(f"{self.location}: no try was made")

    def _index_columns(self) -> None:
        with warnings.catch_warnings():
            self._table.create_index("id", config=BTree())
            self._table.create_index("description", config=FTS(base_tokenizer="icu"))

    def _index_vectors(self) -> None:
        """Index the vectors once an exact scan of them is no longer the faster way."""
        for column in VECTORS:
            rows = self.count(f"{column} IS NOT NULL")
            if rows >= INDEX_FROM and not self._has_index(column):
                self._table.create_index(
                    metric="cosine", vector_column_name=column, index_type="IVF_SQ", replace=False
                )

    def _has_index(self, column: str) -> bool:
        indexes = self._ask("indexes", self._table.list_indices)
        return any(index.columns == [column] for index in indexes)

"""Indexing on many machines: Ray Data actors embed, and all of them write to the one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seps.data.records import Problems
from seps.gallery.descriptions import Said
from seps.gallery.gallery import load_gallery, said_beside
from seps.gallery.indexing import Added, Pace
from seps.gallery.pictures import Picture


class Embedder:
    """An actor: a model and a handle on the gallery, kept from one block of pictures to the next."""

    def __init__(self, location: str, model: str, pace: Pace) -> None:
        self.gallery = load_gallery(location, model)
        self.pace = pace

    def __call__(self, block: Mapping[str, np.ndarray]) -> dict[str, list[Any]]:
        """Add a block; -> what was done, and a sentence for each picture that cannot be read."""
        pictures = [
            Picture(Path(path), description=description or None, tags=tuple(filter(None, tags.split("\n"))))
            for path, description, tags in zip(
                block["path"], block["description"], block["tags"], strict=True
            )
        ]
        report = self.gallery.add(pictures, self.pace, said_beside, broken=Problems("skip"))
        return {
            "added": [report.added],
            "replaced": [report.replaced],
            "unchanged": [report.unchanged],
            "skipped": ["\n".join(f"{each.where}\0{each.what}" for each in report.skipped)],
        }


def index_on_cluster(
    address: str,
    location: str,
    model: str,
    paths: Sequence[Path],
    said: Callable[[Path], Said],
    pace: Pace,
    workers: int,
    advance: Callable[[int], None],
) -> Added:
    """Add pictures with so many actors; every machine must see the pictures, the gallery and the model."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ValueError(
            "ray: expected the package ray[data] (pip install 'seps[cluster]'), found none"
        ) from error
    if workers < 1:
        raise ValueError(f"workers: expected at least 1, found {workers}")
    started = not ray.is_initialized()
    if started:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    try:
        rows = [
            {"path": str(path), "description": words.description or "", "tags": "\n".join(words.tags)}
            for path, words in ((path, said(path)) for path in paths)
        ]
        blocks = ray.data.from_items(rows, override_num_blocks=max(1, min(workers, len(rows)))).map_batches(
            Embedder,
            fn_constructor_args=(location, model, pace),
            batch_size=pace.commit,
            concurrency=workers,
        )
        report = Added(skipped=Problems("skip"))
        for done in blocks.iter_rows():
            merge(report, done, advance)
        return report
    finally:
        if started:
            ray.shutdown()


def merge(report: Added, done: Mapping[str, Any], advance: Callable[[int], None]) -> None:
    """Add an actor's account of one block to the whole one."""
    lost = [line.split("\0") for line in done["skipped"].split("\n") if line]
    for where, what in lost:
        report.skipped.meet(where, what)
    report.added += int(done["added"])
    report.replaced += int(done["replaced"])
    report.unchanged += int(done["unchanged"])
    advance(int(done["added"] + done["replaced"] + done["unchanged"]) + len(lost))

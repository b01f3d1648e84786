"""What the default model costs on photographs: indexing against the bare encoder, cold start, queries, bytes.

    python benchmarks/mini.py PHOTOS [--count 1000] [--model seps-mini]

Nothing of the photographs is kept: the gallery stands in a temporary folder.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from seps.data.images import open_image
from seps.gallery import Gallery, Pace, find_pictures
from seps.gallery.sketching import EVERYDAY
from seps.model import DEFAULT, SepsModel, SepsProcessor, load


def encoder_rate(model: SepsModel, processor: SepsProcessor, paths: list[Path], batch: int) -> float:
    """Pictures a second of the vision encoder alone, on pixels that are ready."""
    ready = [
        processor.images([open_image(path) for path in paths[start : start + batch]])
        for start in range(0, len(paths), batch)
    ]
    with torch.inference_mode():
        model.encode_images(ready[0])
        start = time.perf_counter()
        for pixels in ready:
            model.encode_images(pixels)
    return len(paths) / (time.perf_counter() - start)


def query_times(gallery: Gallery, rounds: int) -> list[float]:
    """Milliseconds of each search for everyday sentences."""
    gallery.search(EVERYDAY[0])
    walls = []
    for _ in range(rounds):
        for text in EVERYDAY:
            start = time.perf_counter()
            gallery.search(text)
            walls.append(1000 * (time.perf_counter() - start))
    return walls


def cold_starts(location: str, tries: int) -> list[float]:
    """Seconds from the start of a process to its first results."""
    found = []
    for _ in range(tries):
        start = time.perf_counter()
        command = [sys.executable, "-m", "seps", "search", location, EVERYDAY[0], "--k", "3"]
        subprocess.run(command, check=True, capture_output=True)
        found.append(time.perf_counter() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", type=Path)
    parser.add_argument("--count", type=int, default=1000, help="photographs at most")
    parser.add_argument("--model", default=DEFAULT)
    parser.add_argument("--encoded", type=int, default=256, help="photographs for the bare encoder")
    parser.add_argument("--rounds", type=int, default=10, help="of six queries each")
    parser.add_argument("--starts", type=int, default=5, help="cold starts")
    options = parser.parse_args()
    start = time.perf_counter()
    model, processor = load(options.model)
    print(f"model read in {time.perf_counter() - start:.2f} s; {torch.get_num_threads()} threads")
    paths = list(islice(find_pictures(options.photos), options.count))
    bare = encoder_rate(model, processor, paths[: options.encoded], Pace().batch)
    with tempfile.TemporaryDirectory() as folder:
        gallery = Gallery.create(Path(folder) / "gallery", model, processor, model_source=options.model)
        start = time.perf_counter()
        gallery.add(paths)
        rate = len(paths) / (time.perf_counter() - start)
        print(
            f"{len(paths)} photographs: {rate:.1f} a second, the bare encoder {bare:.1f}: {rate / bare:.0%}"
        )
        stats = gallery.stats()
        tokens = sum(
            len(row["patches"]) for rows in gallery.store.scan(["patches"]) for row in rows.to_pylist()
        )
        print(
            f"{stats['bytes'] / len(paths):.0f} bytes a photograph, "
            f"of them {tokens / len(paths):.0f} of patches"
        )
        p50, p99 = np.percentile(query_times(gallery, options.rounds), [50, 99])
        print(f"query: p50 {p50:.0f} ms, p99 {p99:.0f} ms")
        starts = sorted(cold_starts(gallery.location, options.starts))
        print(f"cold start to first result: median {starts[len(starts) // 2]:.2f} s, best {starts[0]:.2f} s")


if __name__ == "__main__":
    main()

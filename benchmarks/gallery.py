"""How fast and how true two-stage search is: recall against the full scan, latency by size, bytes, memory.

Rows are the tokens of rendered scenes with their descriptions, repeated with noise to fill the size asked
for. Without --model the weights are random, which says nothing of recall.

    python benchmarks/gallery.py --model runs/demo/best --rows 1000 20000 100000
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch

from seps.data.scenes import Scenes
from seps.gallery import Gallery, searching
from seps.gallery.packing import pack, unpack
from seps.gallery.rows import encode_texts, halves, mean_word
from seps.model import SepsConfig, SepsModel, SepsProcessor, create, load
from seps.tokens import Tokens


class Source(NamedTuple):
    """Encoded scenes: patches, description words, and a query each."""

    images: Tokens
    dense: Tokens
    descriptions: list[str]
    queries: list[str]


def make_model(scenes: Scenes) -> tuple[SepsModel, SepsProcessor]:
    texts = [text for i in range(500) for text in (*scenes[i].captions, scenes[i].dense or "")]
    model, processor = create(SepsConfig(recipe="described", channels=128, global_term="loss"), texts)
    return model.eval(), processor


def encode(model: SepsModel, processor: SepsProcessor, scenes: Scenes, count: int) -> Source:
    features, words, descriptions, queries = [], [], [], []
    start = time.perf_counter()
    for first in range(0, count, 100):
        records = [scenes[i] for i in range(first, min(first + 100, count))]
        pixels = processor.images([scenes.open(i) for i in range(first, first + len(records))])
        texts = [record.dense or "" for record in records]
        with torch.inference_mode():
            images = model.encode_images(pixels)
            dense = encode_texts(model, processor, texts, model.recipe.description_length)
        features.append(images.features)
        mask = torch.ones(dense.features.shape[:2], dtype=torch.bool) if dense.mask is None else dense.mask
        words.extend(row[real] for row, real in zip(dense.features, mask, strict=True))
        descriptions.extend(texts)
        queries.extend(record.captions[0] for record in records)
    print(f"{count} scenes drawn and encoded in {time.perf_counter() - start:.0f} s")
    return Source(Tokens(torch.cat(features)), Tokens.ragged(words), descriptions, queries)


def fill(gallery: Gallery, source: Source, rows: int, noise: float, block: int = 2000) -> None:
    """Rows of the scenes in turn, each with noise of its own from the second round on."""
    model, schema = gallery.model, gallery.store.schema
    generator = torch.Generator().manual_seed(0)
    spread = (source.images.features.std() * noise, source.dense.features.std() * noise)
    for first in range(len(gallery), rows, block):
        places = torch.arange(first, min(first + block, rows))
        rounds = (places >= len(source.queries)).float().view(-1, 1, 1)
        at = places % len(source.queries)
        images, dense = source.images[at], source.dense[at]
        shaken = [
            Tokens(
                each.features + rounds * size * torch.randn(each.features.shape, generator=generator),
                each.mask,
            )
            for each, size in zip((images, dense), spread, strict=True)
        ]
        images, dense = shaken
        with torch.inference_mode():
            pixel, text = halves(model.global_images(images)), halves(model.global_texts(dense))
            mean = halves(mean_word(dense))
        now = [np.datetime64("2026-01-01T00:00:00", "s")] * len(places)
        own = {
            "id": [f"{place:016x}" for place in places.tolist()],
            "name": [f"{place}.jpg" for place in places.tolist()],
            "description": [source.descriptions[place] for place in at.tolist()],
            "patches": pack(images, gallery.store.about.precision),
            "words": pack(dense, gallery.store.about.precision),
            "pixel_vector": list(pixel),
            "description_vector": list(mean),
            "text_vector": list(text),
            **dict.fromkeys(("taken", "modified", "indexed"), now),
            **dict.fromkeys(("size", "width", "height"), [128] * len(places)),
            "tags": [[]] * len(places),
        }
        columns = [pa.array(own.get(field.name, [None] * len(places)), field.type) for field in schema]
        gallery.store.write(pa.table(columns, schema=schema))


def milliseconds(action, queries) -> tuple[float, float, float]:
    """p50 and p99 of the wall clock, and the mean processor time, per query."""
    walls, cpu = [], time.process_time()
    for query in queries:
        start = time.perf_counter()
        action(query)
        walls.append(1000 * (time.perf_counter() - start))
    cpu = 1000 * (time.process_time() - cpu) / len(walls)
    return float(np.percentile(walls, 50)), float(np.percentile(walls, 99)), cpu


def memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(gallery: Gallery, queries: list[str], scans: int, truths: int) -> None:
    rows, stats = len(gallery), gallery.stats()
    print(f"\n## {rows} rows: {stats['bytes'] / rows:.0f} bytes each with all indexes {stats['indexes']}")
    gallery.search(queries[0])
    p50, p99, cpu = milliseconds(gallery.search, queries)
    print(f"two stages        p50 {p50:8.1f} ms  p99 {p99:8.1f} ms  processor {cpu:8.1f} ms")
    batch = time.perf_counter()
    gallery.search(queries[:32])
    print(f"two stages, batch of 32: {1000 * (time.perf_counter() - batch) / 32:.1f} ms a query")
    vectors = gallery.model.global_texts(gallery.encode_texts(queries[:30])).tolist()
    limit = searching.CANDIDATES
    for exact in (False, True):
        nearest = milliseconds(
            lambda v, e=exact: gallery.store.nearest("pixel_vector", v, limit, None, e), vectors
        )
        print(
            f"pixel vector, {'scan ' if exact else 'as is'}       p50 {nearest[0]:6.1f} ms  "
            f"p99 {nearest[1]:6.1f} ms"
        )
    if scans:
        s50, _, scpu = milliseconds(lambda query: gallery.search(query, exact=True), queries[:scans])
        print(f"full scan         p50 {s50:8.1f} ms                    processor {scpu:8.1f} ms")
        print(
            f"two stages are {s50 / p50:.0f} times as fast by the clock, "
            f"{scpu / cpu:.0f} times by processor time"
        )
    if truths:
        chosen = queries[:truths]
        exact = [{hit.id for hit in hits} for hits in gallery.search(chosen, exact=True)]
        wanted = searching.CANDIDATES
        for count in (20, 40, 80, 160, 320):
            searching.CANDIDATES = count
            found = [{hit.id for hit in hits} for hits in gallery.search(chosen)]
            share = np.mean([len(a & b) / len(a) for a, b in zip(exact, found, strict=True)])
            print(f"{count:4d} candidates find {100 * share:6.2f} % of the exact top 10 ({truths} queries)")
        searching.CANDIDATES = wanted
    print(f"peak memory {memory():.0f} MiB")


def compare_precisions(model: SepsModel, processor: SepsProcessor, source: Source, texts: int = 50) -> None:
    """What eight and sixteen bits do to the order of the pictures."""
    words = encode_texts(model, processor, source.queries[:texts])
    rows = slice(0, min(1000, len(source.queries)))
    images, dense = source.images[rows], source.dense[rows]
    with torch.inference_mode():
        truth = model.score(images, words, dense)
        for precision in ("int8", "fp16"):
            kept = [unpack(pack(each, precision), each.channels) for each in (images, dense)]
            scores = model.score(kept[0], words, kept[1])
            same = np.mean(
                [
                    len(set(a.tolist()) & set(b.tolist())) / 10
                    for a, b in zip(truth.topk(10, 0).indices.T, scores.topk(10, 0).indices.T, strict=True)
                ]
            )
            first = (truth.argmax(0) == scores.argmax(0)).float().mean()
            size = sum(len(b or b"") for each in (images, dense) for b in pack(each, precision)) / len(images)
            spread = (scores - truth).abs().mean() / truth.std(0).mean()
            print(
                f"{precision}: {size:.0f} bytes of tokens an image, "
                f"mean error {100 * spread:.2f} % of the scores' "
                f"spread, top 10 shared {100 * same:.1f} %, first the same {100 * first:.1f} %"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="")
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 20_000])
    parser.add_argument("--scenes", type=int, default=2000, help="distinct scenes behind the rows")
    parser.add_argument("--noise", type=float, default=0.1, help="of the tokens, in their standard deviation")
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--truths", type=int, default=50, help="queries whose recall is measured")
    parser.add_argument("--scans", type=int, default=3, help="full scans that are timed")
    parser.add_argument("--scan-most", type=int, default=20_000, help="rows beyond which nothing is scanned")
    options = parser.parse_args()
    torch.manual_seed(0)
    scenes = Scenes(max(options.scenes, 500), seed=1, split="test")
    model, processor = load(options.model) if options.model else make_model(scenes)
    source = encode(model, processor, scenes, options.scenes)
    compare_precisions(model, processor, source)
    with tempfile.TemporaryDirectory() as folder:
        gallery = Gallery.create(Path(folder) / "gallery", model, processor)
        for rows in sorted(options.rows):
            start = time.perf_counter()
            fill(gallery, source, rows, options.noise)
            gallery.compact()
            print(f"\nfilled to {rows} rows in {time.perf_counter() - start:.0f} s")
            scanned = rows <= options.scan_most
            queries = source.queries[: options.queries]
            measure(gallery, queries, scanned * options.scans, scanned * options.truths)


if __name__ == "__main__":
    main()

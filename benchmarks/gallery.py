"""How true and how fast two-stage search is: recall of the exact top 10, latency by size, bytes, memory.

Pictures are rendered scenes that are indexed from their files; sizes beyond their number are filled with the
tokens of these, each with noise of its own. Without --model the weights are random: such figures speak of
time and memory, not of recall. A folder that is named is kept, and a later run goes on with what is there.

    python benchmarks/gallery.py --model runs/demo/model/best --folder runs/gallery
    python benchmarks/gallery.py --model runs/demo/model/best --folder runs/gallery --described false
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from seps.data.records import Problems
from seps.data.scenes import Scenes, write
from seps.gallery import Gallery, Picture, Said, find_pictures, proposing, read_descriptions
from seps.gallery.packing import Precision, pack, unpack
from seps.gallery.rows import kept_tokens
from seps.gallery.searching import tokens_of
from seps.gallery.sketching import typical_texts
from seps.model import SepsConfig, SepsModel, SepsProcessor, create, load
from seps.tokens import Tokens

SEED = 1
# A result, of ten.
CANDIDATES = (2, 4, 8, 16, 32)


def make_model(scenes: Scenes) -> tuple[SepsModel, SepsProcessor]:
    texts = [text for i in range(500) for text in (*scenes[i].captions, scenes[i].dense or "")]
    model, processor = create(SepsConfig(recipe="described", channels=128, global_term="score"), texts)
    return model.eval(), processor


def peak(reset: bool = False) -> float:
    """Most memory this process held since the last reset, in MiB."""
    if reset:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def index(gallery: Gallery, pictures: Sequence[Path], said: dict[Path, Said]) -> None:
    """Add pictures from their files."""
    before = len(gallery)
    if before >= len(pictures):
        return
    floor, start = peak(reset=True), time.perf_counter()
    gallery.add(map(Picture, pictures), said=lambda picture: said.get(Path(str(picture.source)), Said()))
    rate = (len(gallery) - before) / (time.perf_counter() - start)
    print(
        f"indexed {len(gallery) - before} pictures, {rate:.0f} a second; "
        f"memory {floor:.0f} to {peak():.0f} MiB"
    )


def fill(gallery: Gallery, rows: int, noise: float, block: int = 1000) -> None:
    """Rows with the tokens of those that are there, each with noise of its own."""
    model, schema, store = gallery.model, gallery.store.schema, gallery.store
    typical = typical_texts(model, gallery.processor)
    generator = torch.Generator().manual_seed(SEED)
    sources = [
        row["id"] for batch in store.scan(["id"], "path IS NOT NULL", 4096) for row in batch.to_pylist()
    ]

    def shake(tokens: Tokens) -> Tokens:
        size = noise * tokens.features.std()
        shaken = tokens.features + size * torch.randn(tokens.features.shape, generator=generator)
        return Tokens(shaken, tokens.mask, tokens.cls)

    while (have := len(gallery)) < rows:
        first = have % len(sources)
        chosen = sources[first : first + min(block, rows - have)]
        found = store.fetch(chosen, schema.names[1:])
        images, dense = tokens_of(model, found)
        tokens = kept_tokens(
            model, shake(images), None if dense is None else shake(dense), typical, store.about.precision
        )
        own = {"id": [f"{have + place:016x}" for place in range(len(chosen))], "path": [None] * len(chosen)}
        columns = {name: found.column(name) for name in schema.names} | {
            name: pa.array(values, schema.field(name).type) for name, values in (own | tokens).items()
        }
        store.write(pa.table([columns[name] for name in schema.names], schema=schema))


def clock(action: Callable[[str], object], queries: Sequence[str]) -> tuple[list[float], float]:
    """Milliseconds of each query by the clock, and of the processor for one in the mean."""
    walls, before = [], time.process_time()
    for query in queries:
        start = time.perf_counter()
        action(query)
        walls.append(1000 * (time.perf_counter() - start))
    return walls, 1000 * (time.process_time() - before) / len(walls)


def measure(gallery: Gallery, queries: Sequence[str], scans: int, truths: int) -> None:
    """Print what searching a gallery of this size costs and finds."""
    rows, stats = len(gallery), gallery.stats()
    floor = peak(reset=True)
    for query in queries[:3]:
        gallery.search(query)
    walls, busy = clock(gallery.search, queries)
    p50, p99 = np.percentile(walls, [50, 99])
    start = time.perf_counter()
    gallery.search(list(queries[:32]))
    batch = 1000 * (time.perf_counter() - start) / len(queries[:32])
    print(f"\n{rows} rows, {stats['bytes'] / rows:.0f} bytes each, indexes {', '.join(stats['indexes'])}")
    print(
        f"two stages: p50 {p50:.0f} ms, p99 {p99:.0f} ms, of the processor {busy:.0f} ms; "
        f"in a batch of 32 {batch:.0f} ms a query"
    )
    print(f"memory {floor:.0f} MiB before, {peak():.0f} MiB at most")
    if scans:
        peak(reset=True)
        scan_walls, scan_busy = clock(lambda query: gallery.search(query, exact=True), queries[:scans])
        full = float(np.median(scan_walls))
        print(
            f"full scan: {full:.0f} ms, of the processor {scan_busy:.0f} ms: "
            f"{full / p50:.0f} times as long by the clock, {scan_busy / busy:.0f} times by the processor; "
            f"memory {peak():.0f} MiB at most"
        )
    if truths:
        chosen = list(queries[:truths])
        exact = [{hit.id for hit in hits} for hits in gallery.search(chosen, exact=True)]
        name = "DESCRIBED_A_RESULT" if stats["described"] == rows else "SKETCHED_A_RESULT"
        usual = getattr(proposing, name)
        for each in sorted({*CANDIDATES, usual}):
            setattr(proposing, name, each)
            found = [{hit.id for hit in hits} for hits in gallery.search(chosen)]
            share = np.mean([len(a & b) / len(a) for a, b in zip(exact, found, strict=True)])
            mark = " (the default)" if each == usual else ""
            print(
                f"{10 * each:4d} candidates{mark}: {100 * share:.2f} % of the exact top 10, {truths} queries"
            )
        setattr(proposing, name, usual)


def compare_precisions(gallery: Gallery, queries: Sequence[str], scenes: Scenes) -> None:
    """What eight and sixteen bits do to the order of pictures."""
    model, words = gallery.model, gallery.encode_texts(list(queries))
    images = Tokens(torch.cat([gallery.encode_images([scenes.open(i)]).features for i in range(len(scenes))]))
    dense = gallery.encode_texts([scenes[i].dense or "" for i in range(len(scenes))])
    with torch.inference_mode():
        truth = model.score(images, words, dense)
        precisions: tuple[Precision, ...] = ("int8", "fp16")
        for precision in precisions:
            kept = [unpack(pack(each, precision), each.channels) for each in (images, dense)]
            scores = model.score(kept[0], words, kept[1])
            tops = zip(truth.topk(10, 0).indices.T, scores.topk(10, 0).indices.T, strict=True)
            same = np.mean([len(set(a.tolist()) & set(b.tolist())) / 10 for a, b in tops])
            first = (truth.argmax(0) == scores.argmax(0)).float().mean()
            size = sum(len(b or b"") for each in (images, dense) for b in pack(each, precision)) / len(images)
            error = (scores - truth).abs().mean() / truth.std(0).mean()
            print(
                f"{precision}: {size:.0f} bytes of tokens an image, mean error {100 * error:.2f} % of the "
                f"scores' spread, top 10 shared {100 * same:.1f} %, first the same {100 * first:.1f} %"
            )


def run(options: argparse.Namespace, folder: Path) -> None:
    scenes = Scenes(max(options.scenes, options.first + options.queries, 500), seed=SEED, split="test")
    model, processor = load(options.model) if options.model else make_model(scenes)
    if not (folder / "scenes" / "captions.jsonl").is_file():
        write(folder / "scenes", {"test": options.scenes}, seed=SEED)
    described = options.described == "true"
    file = folder / "scenes" / "captions.jsonl"
    said = read_descriptions(file, file.parent, Problems()) if described else {}
    place = folder / ("described" if described else "silent")
    gallery = (
        Gallery.open(place, model, processor) if place.exists() else Gallery.create(place, model, processor)
    )
    pictures = list(find_pictures(file.parent / "images"))[: options.scenes]
    queries = [scenes[options.first + i].captions[0] for i in range(options.queries)]
    if options.precisions:
        compare_precisions(gallery, queries[:50], Scenes(1000, seed=SEED, split="test"))
    for rows in sorted(options.rows):
        index(gallery, pictures[:rows], said)
        if len(gallery) < rows:
            start, floor = time.perf_counter(), peak(reset=True)
            fill(gallery, rows, options.noise)
            print(f"filled in {time.perf_counter() - start:.0f} s, memory {floor:.0f} to {peak():.0f} MiB")
        if len(gallery) == rows:
            gallery.compact()
            scanned = rows <= options.scan_most
            measure(gallery, queries, scanned * options.scans, scanned * options.truths)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="")
    parser.add_argument("--folder", default="", help="where scenes and galleries are kept")
    parser.add_argument("--described", default="true", choices=["true", "false"], help="index descriptions")
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 20_000])
    parser.add_argument("--scenes", type=int, default=20_000, help="rendered scenes; further rows are filled")
    parser.add_argument("--noise", type=float, default=0.1, help="of the tokens, in their standard deviation")
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the scene whose caption is the first query")
    parser.add_argument("--truths", type=int, default=50, help="queries whose recall is measured")
    parser.add_argument("--scans", type=int, default=3, help="full scans that are timed")
    parser.add_argument("--scan-most", type=int, default=20_000, help="rows beyond which nothing is scanned")
    parser.add_argument("--precisions", action="store_true", help="compare eight and sixteen bits first")
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        run(options, Path(options.folder or temporary))


if __name__ == "__main__":
    main()

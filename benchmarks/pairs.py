"""The engine for all pairs against a loop over texts, in one run: speed, memory, bound, parts and growth.

The loop is the ancestors' kind, written from the equations: for every text it ranks the patches of all
images, gathers the kept ones, runs the aggregation network on them, builds the tokens and aligns them.
In evaluation it works on as many images at a time as suits it best. Both compute the same scores, which is
checked before anything is timed; they are timed in turns, beside a large matrix product, and the best of
some rounds counts.

    python benchmarks/pairs.py [--repeats 3] [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from seps import SlimHead, Tokens, laps, paper
from seps import head as head_module
from seps.alignment import affinities
from seps.pairwise import engine, meeting, native
from seps.pairwise.texts import TextSide
from seps.slimming import apply, keep_count, min_max, unit

PATCHES, CHANNELS, LONGEST, DENSE = 196, 512, 24, 120
# Images and texts.
EVALUATION, TRAINING, SMALL = (64, 512), (64, 64), (16, 32)
SQUARE = 2048
RESULTS = Path(__file__).parent / "results"
CASES = {
    "eval": ("Evaluation, no dense text", laps(aggregate_ratio=0.4)),
    "paper": ("Evaluation, paper with dense text of the image", paper()),
    "train": ("Training step, no dense text", laps(aggregate_ratio=0.4)),
    "train_paper": ("Training step, paper with dense text of the image", paper()),
}
TARGETS = {("eval", "fp32"): 8, ("eval", "bf16"): 15, ("paper", "fp32"): 10, ("train", "fp32"): 6}


def make(case: str, images: int, texts: int, patches: int = PATCHES, longest: int = LONGEST):
    """A head and random inputs of a case, the same for the same arguments."""
    torch.manual_seed(0)
    recipe = CASES[case][1]
    head = SlimHead(recipe, patches, CHANNELS).train(case.startswith("train"))
    image_tokens = Tokens(torch.randn(images, patches, CHANNELS) + 0.2, cls=torch.randn(images, CHANNELS))
    lengths = torch.randint(min(4, longest), longest + 1, (texts,))
    words = Tokens.padded(torch.randn(texts, longest, CHANNELS), lengths)
    dense = None
    if recipe.dense != "none":
        dense = Tokens.padded(
            torch.randn(images, DENSE, CHANNELS), torch.randint(DENSE // 2, DENSE + 1, (images,))
        )
    return head, image_tokens, words, dense


def slim_by_gathering(head: SlimHead, name: str, patches: Tensor, saliency: Tensor) -> tuple[Tensor, Tensor]:
    """Aggregated tokens and residual token of a branch for one text. (B,N,C), (B,N) -> (B,J,C), (B,1,C)"""
    keep = keep_count(patches.shape[1], head.recipe.keep_ratio)
    order = saliency.detach().argsort(dim=1, descending=True, stable=True)
    channels = patches.shape[2]
    kept = patches.gather(1, order[:, :keep, None].expand(-1, -1, channels))
    dropped = patches.gather(1, order[:, keep:, None].expand(-1, -1, channels))
    rest = saliency.gather(1, order[:, keep:]).softmax(1)
    network = head.slimmer.networks[name if head.recipe.aggregation == "dual" else "shared"]
    weights = (apply(network, kept) * head.slimmer.scale).softmax(1)
    return weights.transpose(1, 2) @ kept, rest.unsqueeze(1) @ dropped


def scale(signal: Tensor) -> Tensor:
    """Eq. 2 over the patches. (B,N) -> (B,N)"""
    return min_max(signal.unsqueeze(1)).squeeze(1)


def loop(head: SlimHead, images: Tokens, texts: Tokens, dense: Tokens | None) -> Tensor:
    """The scores of all pairs, text by text. -> (B,T)"""
    patches, recipe = images.features, head.recipe
    names = recipe.branches if dense is not None else ("sparse",)
    with torch.no_grad():
        # Once for all texts.
        directions = unit(patches)
        own = (directions @ unit(images.mean()).unsqueeze(2)).squeeze(2)
        if recipe.scoring == "mix":
            own = recipe.mixing * 2 * scale(own)
        if dense is not None:
            own = own + recipe.mixing * scale((directions @ unit(dense.mean()).unsqueeze(2)).squeeze(2))
    settled = dict.fromkeys(names, own)
    if recipe.scoring == "mix":
        share = 1 - 2 * recipe.mixing
        settled = {name: own + share * head.slimmer.predictors[name](patches).squeeze(2) for name in names}
    columns = []
    for text in range(len(texts)):
        words = texts.features[text, : int(texts.lengths[text])]
        with torch.no_grad():
            guide = directions @ unit(words.mean(0))
        tokens, rests = [], []
        for name in names:
            heard = guide if recipe.scoring == "sum" else recipe.mixing * scale(guide)
            saliency = settled[name] + heard
            aggregated, rest = slim_by_gathering(head, name, patches, saliency)
            tokens.append(aggregated)
            rests.append(rest)
        slim = torch.cat([sum(tokens), sum(rests) / len(rests)], dim=1)
        if images.cls is not None:
            slim = torch.cat([images.cls.unsqueeze(1), slim], dim=1)
        columns.append(head.aligner.score(affinities(words, unit(slim), recipe.affinity), None))
    return torch.stack(columns, dim=1)


def step(case: str, method: Callable[[], Tensor], leaves: list[Tensor]) -> None:
    """One evaluation, or one training step: forward and backward of the head."""
    if not case.startswith("train"):
        with torch.no_grad():
            method()
        return
    for leaf in leaves:
        leaf.grad = None
    method().square().sum().backward()


def race(works: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The least of some durations of each work, taken in turns after one round to warm up."""
    best: dict[str, float] = {}
    for turn in range(repeats + 1):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            seconds = time.perf_counter() - start
            best[name] = min(seconds, best[name]) if turn > 1 else seconds
    return best


def methods(case: str, inputs, precision: str = "fp32") -> tuple[Callable[[], None], Callable[[], None]]:
    """The loop and the engine on the same inputs, as steps."""
    head, images, texts, dense = inputs
    leaves = [images.features, texts.features, *head.parameters()]
    for leaf in leaves[:2]:
        leaf.requires_grad_(case.startswith("train"))
    return (
        lambda: step(case, lambda: loop(head, images, texts, dense), leaves),
        lambda: step(case, lambda: head(images, texts, dense, precision=precision), leaves),
    )


def check(case: str) -> float:
    """The largest difference of the two methods' scores on a small input, relative to the largest score."""
    head, images, texts, dense = make(case, 4, 6)
    with torch.no_grad():
        expected, found = loop(head, images, texts, dense), head(images, texts, dense)
    error = float((expected - found).abs().max() / expected.abs().max())
    assert error < 1e-4, f"{case}: the two methods differ by {error}"
    return error


def multiplication() -> Callable[[], Tensor]:
    """A large fp32 product, to measure the machine by."""
    left, right = torch.randn(SQUARE, SQUARE), torch.randn(SQUARE, SQUARE)
    return lambda: torch.mm(left, right)


def operations(head: SlimHead, images: int, texts: Tokens) -> dict[str, float]:
    """Floating-point operations of the engine's own products for all pairs, without dense text, by part."""
    kept, tokens = keep_count(PATCHES, head.recipe.keep_ratio), head.slimmer.tokens
    words = float(texts.lengths.float().mean())
    pairs, hidden = images * len(texts), int(0.2 * CHANNELS)
    met = kept * CHANNELS * words + tokens * kept * words
    # Half of the symmetric form, in tiles of sixteen.
    lengths = tokens * kept * (kept + 16) / 2
    return {
        "image side": 2 * images * PATCHES * (CHANNELS * (hidden + 1) + hidden * tokens),
        "text side": 0,
        "guidance": 2 * pairs * PATCHES * CHANNELS,
        "top K and residual weights": 0,
        "Gram matrices": 2 * images * PATCHES**2 * CHANNELS,
        "residual token and CLS": 2 * pairs * ((PATCHES - kept) * CHANNELS + 2 * words * CHANNELS),
        "words with patches, lengths, tokens, eq. 5": 2 * pairs * (met + lengths),
    }


# What each part of an evaluation is called in the code; the last is called by the one before.
PARTS = {
    "image side": (head_module, "prepare_admitted"),
    "text side": (TextSide, "of"),
    "guidance": (engine, "signals"),
    "top K and residual weights": (engine, "decide_pairs"),
    "Gram matrices": (engine, "multiply_itself"),
    "residual token and CLS": (engine, "meet"),
    "words with patches, lengths, tokens, eq. 5": (meeting, "meet_compiled"),
}


def parts(repeats: int, quick: bool) -> list[dict]:
    """Where an evaluation in fp32 without dense text spends its time: seconds and operations of each part."""
    inputs = make("eval", *(SMALL if quick else EVALUATION))
    work = methods("eval", inputs)[1]
    best: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        spent = dict.fromkeys(PARTS, 0.0)
        for name, (place, function) in PARTS.items():
            timed = clock(getattr(place, function), spent, name)
            stack.enter_context(mock.patch.object(place, function, timed))
        for _ in range(repeats + 1):
            spent.update(dict.fromkeys(PARTS, 0.0))
            start = time.perf_counter()
            work()
            whole = time.perf_counter() - start
            if not best or whole < best["all"]:
                best = {**spent, "all": whole}
    inner, outer = list(PARTS)[-1], list(PARTS)[-2]
    best[outer] -= best[inner]
    counted = operations(inputs[0], len(inputs[1]), inputs[2])
    pairs = len(inputs[1]) * len(inputs[2])
    return [
        {
            "part": name,
            "microseconds": 1e6 * best[name] / pairs,
            "share": best[name] / best["all"],
            "rate": counted[name] / best[name],
        }
        for name in PARTS
    ]


def clock(function: Callable, spent: dict[str, float], name: str) -> Callable:
    """The same function, which adds the seconds it takes to those spent."""

    def timed(*given: object, **named: object) -> object:
        start = time.perf_counter()
        found = function(*given, **named)
        spent[name] += time.perf_counter() - start
        return found

    return timed


def speed(case: str, repeats: int, quick: bool) -> list[dict]:
    """Pairs a second of the loop and of the engine, and their ratio."""
    train = case.startswith("train")
    inputs = make(case, *(SMALL if quick else TRAINING if train else EVALUATION))
    head, images, texts, dense = inputs
    exact, rounded = (methods(case, inputs, precision)[1] for precision in ("fp32", "bf16"))
    works = {"fp32": exact, "bf16": rounded, "product": multiplication()}
    pairs = {"fp32": len(images) * len(texts), "bf16": len(images) * len(texts)}
    for some in (len(images),) if train else (16, 32, 64):
        # A few texts show what the loop costs, since each costs the same.
        few = len(texts) if train else min(len(texts), 16)
        rows = slice(0, min(some, len(images)))
        part = (head, images[rows], texts[slice(0, few)], None if dense is None else dense[rows])
        works[f"loop of {some}"] = methods(case, part)[0]
        pairs[f"loop of {some}"] = len(part[1]) * few
    seconds = race(works, repeats)
    rates = {name: count / seconds[name] for name, count in pairs.items()}
    best = max((name for name in rates if name.startswith("loop")), key=lambda name: rates[name])
    rows = []
    for precision in ("fp32", "bf16"):
        rate, slow = rates[precision], rates[best]
        row = {
            "case": case,
            "precision": precision,
            "loop": slow,
            "loop_images": int(best.split()[-1]),
            "engine": rate,
            "ratio": rate / slow,
            "product": 2 * SQUARE**3 / seconds["product"],
        }
        if case == "eval" and precision == "fp32":
            counted = sum(operations(head, len(images), texts).values())
            row["bound"] = counted / seconds[precision] / row["product"]
        rows.append(row)
        print(f"{case}, {precision}: {rate:,.0f} pairs/s, {rate / slow:.1f} times the loop", flush=True)
    return rows


def peak(case: str, method: str, images: int, texts: int) -> float:
    """Bytes that a process needed beyond its inputs; measured in a process of its own."""
    command = [sys.executable, __file__, "--memory", case, method, str(images), str(texts)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(result.stdout.strip().split("\n")[-1])


def measure_peak(case: str, method: str, images: int, texts: int) -> None:
    """Print how much larger than its inputs this process grew in one step."""
    small = methods(case, make(case, 2, 2))[method == "engine"]
    small()
    inputs = make(case, images, texts)
    work = methods(case, inputs)[method == "engine"]
    before, seen, done = resident(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            seen.append(resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    done.set()
    watcher.join()
    print(max(seen) - before)


def resident() -> int:
    """Bytes of memory this process holds now."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize()


def growth(repeats: int, quick: bool) -> dict[str, list[tuple[int, float]]]:
    """Microseconds a pair of the engine as one quantity grows, evaluation without dense text."""
    points: dict[str, list[tuple[int, float]]] = {}
    scale = 4 if quick else 1
    for name, values in {
        "images": (8, 16, 32, 64, 128),
        "texts": (8, 32, 128, 512, 1024),
        "patches": (49, 98, 196, 392, 576),
        "words": (4, 8, 16, 32, 64),
    }.items():
        points[name] = []
        for value in values:
            given = {"images": 32 // scale, "texts": 128 // scale, "patches": PATCHES, "longest": LONGEST}
            given["longest" if name == "words" else name] = value
            seconds = race({"engine": methods("eval", make("eval", **given))[1]}, repeats)["engine"]
            points[name].append((value, 1e6 * seconds / given["images"] / given["texts"]))
    return points


def report(found: dict) -> str:
    """The table in Markdown."""
    lines = [
        f"Two methods in one run on {found['machine']}, {found['threads']} threads, torch {found['torch']}, "
        f"kernel {found['kernel']}.",
        f"N={PATCHES}, C={CHANNELS}, rho 0.5, aggregation 0.4, 4 to {LONGEST} words, to {DENSE} dense words.",
        "",
        "| case | precision | loop, pairs/s | engine, pairs/s | ratio | target |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["speed"]:
        target = TARGETS.get((row["case"], row["precision"]), "")
        lines.append(
            f"| {CASES[row['case']][0]} | {row['precision']} | {row['loop']:,.0f} | {row['engine']:,.0f} "
            f"| {row['ratio']:.1f} | {target} |"
        )
    first = found["speed"][0]
    lines += [
        "",
        f"Evaluation of {EVALUATION[0]} images and {EVALUATION[1]} texts, where the loop did best with "
        f"{first['loop_images']} images at a time; training steps of {TRAINING[0]} and {TRAINING[1]}.",
        f"The machine's fp32 matrix product, {SQUARE} by {SQUARE}, beside the evaluation: "
        f"{first['product'] / 1e9:.0f} GFLOP/s; the evaluation's own products ran at {first['bound']:.0%} of "
        "that (target 60 %).",
        "",
        "| part of an evaluation, fp32, no dense text | µs a pair | share | GFLOP/s | of the product's |",
        "|---|---|---|---|---|",
    ]
    for part in found["parts"]:
        rate = f"{part['rate'] / 1e9:.0f} | {part['rate'] / first['product']:.0%}" if part["rate"] else " | "
        lines.append(f"| {part['part']} | {part['microseconds']:.2f} | {part['share']:.0%} | {rate} |")
    lines += ["", "| training step, no dense text | peak memory over the inputs | target |", "|---|---|---|"]
    tenth = next(iter(found["memory"].values())) / 10
    limits = ["", f"{tenth / 2**20:,.0f} MiB, a tenth of it", "4,096 MiB"]
    for (name, size), limit in zip(found["memory"].items(), limits, strict=True):
        lines.append(f"| {name} | {size / 2**20:,.0f} MiB | {limit} |")
    lines += ["", "| evaluation as one quantity grows | µs a pair |", "|---|---|"]
    for name, points in found["growth"].items():
        lines.append(f"| {name} | {', '.join(f'{x}: {y:.1f}' for x, y in points)} |")
    return "\n".join(lines) + "\n"


def plot(found: dict, path: Path) -> None:
    """Cost of a pair as each quantity grows."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(12, 2.8), sharey=True, layout="constrained")
    for axis, (name, points) in zip(axes, found["growth"].items(), strict=True):
        axis.plot([x for x, _ in points], [y for _, y in points], marker="o", color="#2a6f97")
        axis.set_xscale("log")
        axis.set_xticks([x for x, _ in points], [str(x) for x, _ in points])
        axis.minorticks_off()
        axis.set_xlabel(name)
        axis.grid(alpha=0.3)
    # Once for all, and when all is drawn: each axis would freeze the scale at its own.
    axes[0].set_yscale("log")
    axes[0].set_yticks([5, 10, 20, 50, 100], ["5", "10", "20", "50", "100"])
    axes[0].set_ylabel("µs a pair")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--memory", nargs=4, metavar=("CASE", "METHOD", "IMAGES", "TEXTS"))
    options = parser.parse_args()
    if options.memory:
        case, method, images, texts = options.memory
        measure_peak(case, method, int(images), int(texts))
        return
    for case in CASES:
        print(f"{case}: the two methods agree to {check(case):.1e}")
    found = {
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "kernel": "none" if native.library() is None else "compiled",
        "speed": [row for case in CASES for row in speed(case, options.repeats, options.quick)],
    }
    found["parts"] = parts(options.repeats, options.quick)
    side, large = (16, 32) if options.quick else (64, 256)
    found["memory"] = {
        f"loop, {side} × {side}": peak("train", "loop", side, side),
        f"engine, {side} × {side}": peak("train", "engine", side, side),
        f"engine, {large} × {large}": peak("train", "engine", large, large),
    }
    found["growth"] = growth(max(2, options.repeats // 2), options.quick)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "pairs.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "pairs.md").write_text(report(found), encoding="utf-8")
    plot(found, RESULTS / "pairs.png")
    print(report(found))


if __name__ == "__main__":
    main()

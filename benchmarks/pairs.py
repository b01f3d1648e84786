"""The engine for all pairs against a loop over texts, in one run: speed, memory, bound and growth.

The loop is the ancestors' kind, written from the equations: for every text it ranks the patches of all
images, gathers the kept ones, runs the aggregation network on them, builds the tokens and aligns them.
Both compute the same scores, which is checked before anything is timed.

    python benchmarks/pairs.py [--repeats 3] [--quick]
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from seps import SlimHead, Tokens, laps, paper
from seps.alignment import affinities
from seps.pairwise import native
from seps.slimming import apply, keep_count, min_max, unit

PATCHES, CHANNELS, LONGEST, DENSE = 196, 512, 24, 120
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


def loop(head: SlimHead, images: Tokens, texts: Tokens, dense: Tokens | None) -> Tensor:
    """The scores of all pairs, text by text. -> (B,T)"""
    patches, recipe = images.features, head.recipe
    names = recipe.branches if dense is not None else ("sparse",)
    with torch.no_grad():
        # Normalised once for all texts, as the ancestors do.
        directions = unit(patches)
        own = (directions @ unit(images.mean()).unsqueeze(2)).squeeze(2)
        described = None if dense is None else (directions @ unit(dense.mean()).unsqueeze(2)).squeeze(2)
    columns = []
    for text in range(len(texts)):
        words = texts.features[text, : int(texts.lengths[text])]
        with torch.no_grad():
            guide = directions @ unit(words.mean(0))
        tokens, rests = [], []
        for name in names:
            if recipe.scoring == "sum":
                saliency = own + guide
            else:
                signals = [guide] if described is None else [guide, described]
                scaled = [min_max(signal.unsqueeze(1)).squeeze(1) for signal in signals]
                predicted = head.slimmer.predictors[name](patches).squeeze(2)
                anchor = 2 * min_max(own.unsqueeze(1)).squeeze(1)
                saliency = (1 - 2 * recipe.mixing) * predicted + recipe.mixing * sum(scaled, start=anchor)
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


def best_time(work: Callable[[], None], repeats: int, warm: Callable[[], None] | None = None) -> float:
    """The least of some durations, after one round to warm up, of other work if that is long."""
    (warm or work)()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


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


def matmul_rate(repeats: int) -> float:
    """Floating-point operations a second of a large fp32 product."""
    left, right = torch.randn(2048, 2048), torch.randn(2048, 2048)
    return 2 * 2048**3 / best_time(lambda: torch.mm(left, right), max(repeats, 5))


def operations(head: SlimHead, images: int, texts: Tokens) -> float:
    """Floating-point operations of the engine's own products for all pairs, without dense text.

    Guidance, words with kept patches, tokens with words, half of the Gram form, the residual token.
    """
    kept, tokens = keep_count(PATCHES, head.recipe.keep_ratio), head.slimmer.tokens
    words = float(texts.lengths.float().mean())
    pair = (
        PATCHES * CHANNELS + kept * CHANNELS * words + tokens * kept * words + tokens * kept * (kept + 16) / 2
    )
    pair += (PATCHES - kept) * CHANNELS + 2 * words * CHANNELS
    return 2 * images * (pair * len(texts) + PATCHES**2 * CHANNELS)


def speed(case: str, repeats: int, quick: bool) -> list[dict]:
    """Pairs a second of the loop and of the engine, and their ratio."""
    train = case.startswith("train")
    images, texts = (64, 64) if train else (64, 512)
    if quick:
        images, texts = 16, 32
    few = 8 if train else 16
    inputs = make(case, images, texts)
    short = (inputs[0], inputs[1], inputs[2][:few], inputs[3])
    warm = methods(case, (*short[:2], short[2][:2], short[3]))[0]
    slow = images * few / best_time(methods(case, short)[0], repeats, warm)
    rows = []
    for precision in ("fp32", "bf16"):
        work = methods(case, inputs, precision)[1]
        seconds = best_time(work, repeats)
        rate = images * texts / seconds
        row = {"case": case, "precision": precision, "loop": slow, "engine": rate, "ratio": rate / slow}
        if case == "eval":
            # Measured beside the evaluation, since the machine's speed may change.
            row["bound"] = operations(inputs[0], images, inputs[2]) / seconds / matmul_rate(repeats)
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
            seconds = best_time(methods("eval", make("eval", **given))[1], repeats)
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
    lines += [
        "",
        f"fp32 matrix product of the machine in this run: {found['matmul'] / 1e9:.0f} GFLOP/s;",
        f"the evaluation's own products ran at {found['bound']:.0%} of that.",
        "",
        "| training step, no dense text | peak memory over the inputs |",
        "|---|---|",
    ]
    lines += [f"| {name} | {size / 2**20:,.0f} MiB |" for name, size in found["memory"].items()]
    return "\n".join(lines) + "\n"


def plot(found: dict, path: Path) -> None:
    """Cost of a pair as each quantity grows."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(12, 2.6), sharey=True)
    for axis, (name, points) in zip(axes, found["growth"].items(), strict=True):
        axis.plot([x for x, _ in points], [y for _, y in points], marker="o", color="#2a6f97")
        axis.set_xlabel(name)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("µs a pair")
    figure.tight_layout()
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
        "matmul": matmul_rate(options.repeats),
        "speed": [row for case in CASES for row in speed(case, options.repeats, options.quick)],
    }
    eval_row = next(row for row in found["speed"] if row["case"] == "eval")
    found["bound"] = eval_row["bound"]
    side, large = (16, 32) if options.quick else (64, 256)
    found["memory"] = {
        f"loop, {side} × {side}": peak("train", "loop", side, side),
        f"engine, {side} × {side}": peak("train", "engine", side, side),
        f"engine, {large} × {large}": peak("train", "engine", large, large),
    }
    found["growth"] = growth(options.repeats, options.quick)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "pairs.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "pairs.md").write_text(report(found), encoding="utf-8")
    plot(found, RESULTS / "pairs.png")
    print(report(found))


if __name__ == "__main__":
    main()

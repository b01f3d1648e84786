"""What slimming three modalities costs beside their backbone: time and memory, against all tokens kept.

Runs a backbone of the shape of ViT-B/16 with random weights at 256 x 128 and the slimmer behind it, forward
and forward with backward; "all tokens kept" averages every patch instead:

    python benchmarks/slimming_cost.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from seps.encoders import build_image_encoder
from seps.modalities import RGB_NIR_TIR, MultiModalSlimmer, reidentification
from seps.tokens import Tokens

VIT = {
    "model_type": "vit",
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "image_size": 224,
    "patch_size": 16,
}


def seconds(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The median of each after one that does not count; in turns, so that a slow moment meets them all."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            found[name].append(time.perf_counter() - started)
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def saved_bytes(run: Callable[[], object], weights: set[int]) -> int:
    """What autograd keeps for the backward pass beside the weights, every storage once."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    del result
    return sum(kept.values())


def parse() -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=2, help="sightings at once")
    parser.add_argument("--layers", type=int, default=12, help="of the backbone")
    parser.add_argument("--channels", type=int, default=512, help="of the slimmer")
    parser.add_argument("--repeats", type=int, default=3, help="runs of which the median is taken")
    return parser.parse_args()


def print_table(forward: dict[str, float], both: dict[str, float], memory: dict[str, int]) -> None:
    """Seconds and bytes of every part, and their share of the backbone's."""
    print("| part | forward | share | forward and backward | share | kept for backward | share |")
    print("|---|---|---|---|---|---|---|")
    for name, once in forward.items():
        cells = [f"{once * 1e3:.1f} ms", f"{100 * once / forward['backbone']:.1f} %"]
        cells += [f"{both[name] * 1e3:.1f} ms", f"{100 * both[name] / both['backbone']:.1f} %"]
        cells += [f"{memory[name] / 2**20:.1f} MiB", f"{100 * memory[name] / memory['backbone']:.1f} %"]
        print("| " + " | ".join([name, *cells]) + " |")


def main() -> None:
    given = parse()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    spec = {"kind": "huggingface", "config": {**VIT, "num_hidden_layers": given.layers}, "size": [256, 128]}
    encoder = build_image_encoder(spec, given.channels)
    slimmer = MultiModalSlimmer(RGB_NIR_TIR, reidentification(), encoder.patches, given.channels)
    pixels = torch.randn(3 * given.batch, 3, 256, 128)

    def encode() -> tuple[dict[str, Tokens], dict[str, Tensor]]:
        tokens = encoder(pixels)
        parts = {
            name: Tokens(tokens.features[place * given.batch : (place + 1) * given.batch])
            for place, name in enumerate(RGB_NIR_TIR)
        }
        return parts, {name: part.mean() for name, part in parts.items()}

    fixed = {name: Tokens(torch.randn(given.batch, encoder.patches, given.channels)) for name in RGB_NIR_TIR}
    anchors = {name: part.mean() for name, part in fixed.items()}
    learning = {name: Tokens(part.features.clone().requires_grad_()) for name, part in fixed.items()}

    def keep_all(patches: dict[str, Tokens]) -> Tensor:
        return torch.stack([part.mean() for part in patches.values()])

    def slim(patches: dict[str, Tokens], guides: dict[str, Tensor]) -> Tensor:
        return torch.stack([tokens.mean(1) for tokens in slimmer(patches, guides).values()])

    with torch.no_grad():
        runs: dict[str, Callable[[], object]] = {
            "backbone": encode,
            "all tokens kept": lambda: keep_all(fixed),
            "slimming": lambda: slim(fixed, anchors),
        }
        forward = seconds(runs, given.repeats)
    runs = {
        "backbone": lambda: keep_all(encode()[0]).sum().backward(),
        "all tokens kept": lambda: keep_all(learning).sum().backward(),
        "slimming": lambda: slim(learning, anchors).sum().backward(),
    }
    both = seconds(runs, given.repeats)
    modules = (encoder, slimmer)
    weights = {each.untyped_storage().data_ptr() for module in modules for each in module.parameters()}
    memory = {
        "backbone": saved_bytes(lambda: keep_all(encode()[0]), weights),
        "all tokens kept": saved_bytes(lambda: keep_all(learning), weights),
        "slimming": saved_bytes(lambda: slim(learning, anchors), weights),
    }
    tokens = slimmer(fixed, anchors)["rgb"].shape[1]
    count, body = (sum(each.numel() for each in module.parameters()) for module in (slimmer, encoder))
    whole, slim_bytes = (3 * each * given.channels * 4 / 2**10 for each in (encoder.patches, tokens))
    print(f"{encoder.patches} patches -> {tokens} tokens a modality, {whole:.0f} -> {slim_bytes:.0f} KiB a")
    print(f"sighting; the slimmer has {count:,} weights beside {body:,} of the backbone\n")
    print_table(forward, both, memory)


if __name__ == "__main__":
    main()

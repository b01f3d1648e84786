"""What rounding does to the scores and to the ranking: bf16 products, packed images in fp16 and int8.

Features are made: every image has four themes, its patches are a theme each plus noise, and its caption's
words are noisy copies of the themes, so that the right image is found for most captions but not for all.
Its description, for the recipes that read one, has more words of the kind and more noise.
They stand for no data set; what the table says is how far rounding moves scores and recall.

    python benchmarks/rounding.py
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from seps import SlimHead, Tokens, described, laps, paper
from seps.pairwise import pack, prepare, score, unpack

COUNT, PATCHES, CHANNELS, THEMES, DENSE = 300, 196, 512, 4, 100
RESULTS = Path(__file__).parent / "results"


def make(noise: float = 3.0) -> tuple[Tokens, Tokens, Tokens]:
    """Images, a caption and a description of each, in order."""
    torch.manual_seed(0)
    common = torch.randn(CHANNELS)
    themes = torch.randn(COUNT, THEMES, CHANNELS)
    which = torch.randint(0, 3 * THEMES, (COUNT, PATCHES))
    ground = torch.cat([themes, torch.randn(1, 2 * THEMES, CHANNELS).expand(COUNT, -1, -1)], dim=1)
    patches = ground.gather(1, which.unsqueeze(2).expand(-1, -1, CHANNELS)) + common
    patches = patches + noise * torch.randn_like(patches)

    def say(shortest: int, longest: int, noise: float) -> Tokens:
        said = torch.randint(0, THEMES, (COUNT, longest))
        words = themes.gather(1, said.unsqueeze(2).expand(-1, -1, CHANNELS)) + common
        lengths = torch.randint(shortest, longest + 1, (COUNT,))
        return Tokens.padded(words + noise * torch.randn_like(words), lengths)

    return Tokens(patches), say(4, 24, noise), say(DENSE // 2, DENSE, 4 * noise)


def recall(scores: Tensor, first: int) -> float:
    """Share of captions whose image is among the first, in percent. scores (B,T)"""
    rank = (scores > scores.diagonal().unsqueeze(0)).sum(0)
    return float((rank < first).float().mean()) * 100


def mean_length(packed: list[bytes]) -> int:
    """Bytes of an image, on average."""
    return round(sum(map(len, packed)) / len(packed))


def main() -> None:
    images, texts, dense = make()
    rows = []
    recipes = {"laps": laps(aggregate_ratio=0.4), "paper": paper(), "described": described()}
    for name, recipe in recipes.items():
        torch.manual_seed(1)
        head = SlimHead(recipe, PATCHES, CHANNELS).eval()
        with torch.no_grad():
            prepared = prepare(head, images, None if recipe.dense == "none" else dense)
            exact = score(head, prepared, texts)
            packed = {form: pack(prepared, form) for form in ("fp32", "fp16", "int8")}
            halved = score(head, prepared, texts, precision="bf16")
            changed = {"fp32": exact, "bf16 products": halved}
            for form, parts in packed.items():
                changed[f"packed {form}"] = score(head, unpack(parts), texts)
        for form, scores in changed.items():
            change = (scores - exact).abs()
            rows.append(
                {
                    "recipe": name,
                    "form": form,
                    "bytes": mean_length(packed[form.split()[1]]) if form.startswith("packed") else None,
                    "mean": float(change.mean()),
                    "largest": float(change.max()),
                    "spread": float(exact.std()),
                    "recall": [recall(scores, first) for first in (1, 5, 10)],
                    "first": float((scores.argmax(0) == exact.argmax(0)).float().mean()) * 100,
                }
            )
    lines = [
        "| recipe | form | bytes an image | mean change | largest | R@1 / 5 / 10 | same first image |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        found = " / ".join(f"{each:.1f}" for each in row["recall"])
        size = f"{row['bytes']:,}" if row["bytes"] else ""
        lines.append(
            f"| {row['recipe']} | {row['form']} | {size} | {row['mean']:.1e} "
            f"| {row['largest']:.1e} | {found} | {row['first']:.1f} % |"
        )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "rounding.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "rounding.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()

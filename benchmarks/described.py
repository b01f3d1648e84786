"""What descriptions are worth to a model, and whether pictures without one rank fairly beside them.

Measures a split whose pictures all have a description three times: without any, with all, and with those of a
random half alone. A fair ranking puts pictures of either kind among the first about as often as chance would,
so the share of described pictures among the ten first should be near one half:

    python benchmarks/described.py MODEL DATA --split dev
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import torch
from torch import Tensor

from seps.evaluation import Corpus, encode, figures_of, score_all, score_globally
from seps.metrics import measure_retrieval
from seps.model import SepsModel, load
from seps.sources import ReadOptions, open_source

COLUMNS = ("i2t_r1", "i2t_r5", "i2t_r10", "t2i_r1", "t2i_r5", "t2i_r10", "rsum")


def found(scores: Tensor, corpus: Corpus, texts: Tensor, k: int = 10) -> float:
    """Share of some texts whose picture is among the k first, in percent."""
    first = scores[:, texts].topk(k, dim=0).indices
    return 100 * float((first == corpus.owners[texts]).any(0).float().mean())


def half(model: SepsModel, corpus: Corpus, seed: int) -> dict[str, float]:
    """The gallery in which a random half lost its description."""
    if corpus.dense is None:
        raise SystemExit("DATA: expected pictures with descriptions, found none")
    lost = torch.randperm(len(corpus.images), generator=torch.Generator().manual_seed(seed)) % 2 == 0
    scores = score_all(model, replace(corpus, dense=corpus.dense.without(lost)))
    first = scores.topk(min(10, len(scores)), dim=0).indices
    asked = lost[corpus.owners]
    return {
        "rsum": measure_retrieval(scores, corpus.owners).rsum,
        "described among the ten first": 100 * float((~lost[first]).float().mean()),
        "t2i R@10 of the described": found(scores, corpus, (~asked).nonzero().squeeze(1)),
        "t2i R@10 of the others": found(scores, corpus, asked.nonzero().squeeze(1)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a model folder, or the name of one that comes with the package")
    parser.add_argument("data", help="a data folder")
    parser.add_argument("--split", default="dev", help="what to measure on (dev)")
    parser.add_argument("--limit", type=int, help="so many pictures of it")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the halves (0 1 2)")
    given = parser.parse_args()
    model, processor = load(given.model)
    corpus = encode(model, processor, open_source(given.data, ReadOptions(), given.split, given.limit))
    rows = {
        "global vectors alone": figures_of(measure_retrieval(score_globally(model, corpus), corpus.owners))
    }
    for name, kept in (("no descriptions", replace(corpus, dense=None)), ("all described", corpus)):
        if name == "no descriptions" or corpus.dense is not None:
            rows[name] = figures_of(measure_retrieval(score_all(model, kept), corpus.owners))
    print(f"{len(corpus.images)} pictures, {len(corpus.texts)} captions\n")
    print("| | i2t R@1 | R@5 | R@10 | t2i R@1 | R@5 | R@10 | rSum |\n|---|---|---|---|---|---|---|---|")
    for name, figures in rows.items():
        print(f"| {name} | " + " | ".join(f"{figures[column]:.1f}" for column in COLUMNS) + " |")
    if corpus.dense is not None:
        for seed in given.seeds:
            print(f"half described, seed {seed}: {json.dumps(half(model, corpus, seed))}")


if __name__ == "__main__":
    main()

"""`seps eval`: measure a model, or score matrices that were saved, and say so in Markdown, JSON and HTML."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seps.data.records import Collection, Problems, Record, Source, written_beside
from seps.distributed import choose_device
from seps.evaluation import (
    chance_rsum,
    encode,
    figures_of,
    measure_grounding,
    on_side,
    score_all,
    score_globally,
)
from seps.features import Features
from seps.metrics import measure_folds, measure_retrieval, rank_queries
from seps.model import SepsModel, SepsProcessor, load
from seps.objective import Scored
from seps.recipe import Side
from seps.report_page import write_page
from seps.sources import ReadOptions, open_source, truths_of

logger = logging.getLogger(__name__)

SCORES = "scores.npz"
COCO_TEST, COCO_FOLDS = 5000, 5
SIDES = {
    "none": "no dense text",
    "image": "dense text on the image side (written when the image is indexed; the query brings none)",
    "text": "dense text on the text side (published protocol: the query brings the description of the very "
    "image it looks for, which no user has)",
}


@dataclass(frozen=True)
class EvalOptions:
    """Measure a model on data: recall both ways, median rank and rSum, with a report."""

    model: str
    """A model folder or hub name, or the scores.npz of an earlier evaluation."""
    data: str
    """A data folder of any known layout, or "scenes"."""
    split: str = "test"
    """The split to measure on."""
    out: str = "runs/eval"
    """Folder of report.md, report.json, report.html, ranks.jsonl and scores.npz."""
    ensemble: tuple[str, ...] = ()
    """Further scores.npz of the same data; the mean of all scores is measured."""
    folds: int | None = None
    """Also the mean over so many parts of the images; 5 by itself on 5,000 images, which is COCO's 1K."""
    dense_side: Side | None = None
    """Hang dense text on this side instead of the one the model was trained with."""
    scored: Scored = "alignment"
    """Score by slimming and alignment, or by the cosine of the global vectors alone."""
    examples: int = 6
    """Best and worst queries of each kind that the report shows."""
    cache: str | None = None
    """Folder of kept features of frozen backbones; what is missing is computed and kept."""
    batch_size: int = 64
    """Images encoded at once."""
    workers: int = 0
    """Processes that decode images."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""
    read: ReadOptions = field(default_factory=ReadOptions)
    """How the data is read."""

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("folds", 1), ("workers", 0), ("examples", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}: expected at least {least}, found {value}")


@dataclass(frozen=True)
class Scores:
    """A score matrix (B,T) with owners (T,), image names, dense side, and where it came from."""

    values: Tensor
    owners: Tensor
    names: tuple[str, ...]
    side: str
    origin: Mapping[str, Any]

    def save(self, path: Path) -> None:
        """As a compressed array file without pickles."""
        about = {"names": self.names, "side": self.side, "origin": dict(self.origin)}
        with written_beside(path, "wb") as file:
            np.savez_compressed(
                file,
                scores=self.values.numpy(),
                owners=self.owners.numpy(),
                about=np.array(json.dumps(about)),
            )

    @classmethod
    def read(cls, path: Path) -> Scores:
        """What `save` wrote."""
        if not path.is_file():
            raise FileNotFoundError(f"{path}: there is no such score matrix")
        try:
            with np.load(path, allow_pickle=False) as found:
                about = json.loads(str(found["about"]))
                values, owners = torch.from_numpy(found["scores"]), torch.from_numpy(found["owners"])
                return cls(values, owners, tuple(about["names"]), about["side"], about["origin"])
        except (ValueError, KeyError, OSError, EOFError):
            raise ValueError(
                f"{path}: expected scores that `seps eval` saved, found something else"
            ) from None


def combine(parts: Sequence[Scores]) -> Scores:
    """The mean of score matrices of the same images and texts."""
    first = parts[0]
    for part in parts[1:]:
        if part.names != first.names or not torch.equal(part.owners, first.owners):
            raise ValueError(
                f"ensemble: expected scores of the same {len(first.names)} images and {len(first.owners)} "
                f"texts in the same order, found {len(part.names)} and {len(part.owners)} others"
            )
    if len(parts) == 1:
        return first
    sides = sorted({part.side for part in parts})
    values = torch.stack([part.values for part in parts]).mean(0)
    origin = {"ensemble": [dict(part.origin) for part in parts]}
    return Scores(values, first.owners, first.names, " and ".join(sides), origin)


def run(options: EvalOptions) -> int:
    """`seps eval`."""
    out = Path(options.out)
    source = open_source(options.data, options.read, options.split)
    others = [Scores.read(Path(path)) for path in options.ensemble]
    if options.model.endswith(".npz"):
        scores, extra, indices = _recall(options, source)
    else:
        scores, extra, indices = _measure(options, source, *load(options.model))
        scores.save(out / SCORES)
    scores = combine([scores, *others])
    out.mkdir(parents=True, exist_ok=True)
    found = summarise(scores, options) | extra
    write_ranks(scores, [source[index] for index in indices], out / "ranks.jsonl")
    _write(out / "report.json", json.dumps(found, indent=2) + "\n")
    text = markdown(found)
    _write(out / "report.md", text)
    write_page(out / "report.html", text, scores.values, scores.owners, source, indices, options.examples)
    logger.info("%s\nreport: %s", text, out / "report.html")
    return 0


def _recall(options: EvalOptions, source: Source) -> tuple[Scores, dict[str, Any], list[int]]:
    """Saved scores and the places of their images in the source."""
    scores = Scores.read(Path(options.model))
    by_name = {source[index].image_id: index for index in range(len(source))}
    missing = next((name for name in scores.names if name not in by_name), None)
    if missing is not None:
        raise ValueError(f"{options.model}: expected scores of images in {options.data}, found {missing!r}")
    indices = [by_name[name] for name in scores.names]
    texts = sum(len(source[index].captions) for index in indices)
    if texts != len(scores.owners):
        raise ValueError(
            f"{options.model}: expected scores of the {texts} texts of these images in {options.data}, "
            f"found scores of {len(scores.owners)}"
        )
    return scores, {}, indices


def _measure(
    options: EvalOptions, source: Source, model: SepsModel, processor: SepsProcessor
) -> tuple[Scores, dict[str, Any], list[int]]:
    """A model's scores, what only the model can tell, and the places of the images that could be read."""
    Path(options.out).mkdir(parents=True, exist_ok=True)  # or refused before the work
    if options.dense_side is not None:
        model = on_side(model, options.dense_side)
    torch.nn.Module.to(model, choose_device(options.device))
    problems = Problems(options.read.broken)
    features = None if options.cache is None else Features.open(options.cache, model, processor)
    corpus = encode(
        model, processor, source, features, options.batch_size, options.workers, problems=problems
    )
    values = score_all(model, corpus) if options.scored == "alignment" else score_globally(model, corpus)
    unused = corpus.dense is None or options.scored == "global"
    side = "none" if unused else model.recipe.dense_side
    origin = {"model": options.model, "scored": options.scored, "recipe": asdict(model.recipe)}
    names = tuple(record.image_id for record in corpus.records)
    extra: dict[str, Any] = {}
    truths = truths_of(source, corpus.indices, options.data)
    if truths is not None:
        extra["grounding"] = measure_grounding(model, processor, corpus, truths).figures()
    skipped = [*(source.problems if isinstance(source, Collection) else ()), *corpus.problems]
    if skipped:
        extra["skipped"] = [str(problem) for problem in skipped]
    extra["parameters"] = _count(model)
    return Scores(values, corpus.owners, names, side, origin), extra, list(corpus.indices)


def _count(model: SepsModel) -> dict[str, int]:
    return {
        "all": sum(parameter.numel() for parameter in model.parameters()),
        "head": sum(parameter.numel() for parameter in model.head.parameters()),
    }


def summarise(scores: Scores, options: EvalOptions) -> dict[str, Any]:
    """Everything measured, as plain values."""
    images, texts = scores.values.shape
    found: dict[str, Any] = {
        "model": options.model,
        "data": options.data,
        "split": options.split,
        "images": images,
        "texts": texts,
        "dense_side": scores.side,
        "origin": dict(scores.origin),
        "retrieval": figures_of(measure_retrieval(scores.values, scores.owners)),
        "chance_rsum": chance_rsum(images, texts),
    }
    folds = options.folds or (COCO_FOLDS if images == COCO_TEST else None)
    if folds:
        found["folds"] = {"count": folds, **figures_of(measure_folds(scores.values, scores.owners, folds))}
    return found


def markdown(found: Mapping[str, Any]) -> str:
    """The report in words and a table."""
    side = found["dense_side"]
    lines = [
        f"# {found['model']} on {found['data']}, split {found['split']}",
        "",
        f"{found['images']:,} images, {found['texts']:,} texts; {SIDES.get(side, f'dense text: {side}')}.",
        *_members(found["origin"].get("ensemble", ())),
        "",
        "| | i2t R@1 | R@5 | R@10 | median | t2i R@1 | R@5 | R@10 | median | rSum |",
        "|---|---|---|---|---|---|---|---|---|---|",
        _row("all images", found["retrieval"]),
    ]
    if "folds" in found:
        folds = found["folds"]
        lines.append(_row(f"mean of {folds['count']} folds", folds))
    lines += ["", f"Blind guessing reaches an rSum of {found['chance_rsum']:.1f}."]
    if "grounding" in found:
        ground = found["grounding"]
        lines += [
            "",
            "| against the truth of the scenes | % | by chance |",
            "|---|---|---|",
            f"| kept patches that show a thing | {ground['kept']:.1f} | {ground['kept_chance']:.1f} |",
            "| kept patches that show a thing the caption names "
            f"| {ground['named']:.1f} | {ground['named_chance']:.1f} |",
            "| words whose closest patch shows their thing "
            f"| {ground['pointing']:.1f} | {ground['pointing_chance']:.1f} |",
        ]
    if "skipped" in found:
        lines += ["", f"Broken items left out: {len(found['skipped'])}."]
    return "\n".join(lines) + "\n"


def _members(origins: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whose scores an ensemble is the mean of."""
    if not origins:
        return []
    names = ", ".join(f"{origin.get('model')} ({origin.get('scored')})" for origin in origins)
    return ["", f"Scores are the mean of {len(origins)} matrices: {names}."]


def _row(name: str, figures: Mapping[str, float]) -> str:
    cells = []
    for side in ("i2t", "t2i"):
        cells += [f"{figures[f'{side}_r{k}']:.1f}" for k in (1, 5, 10)]
        cells.append(f"{figures[f'{side}_median_rank']:g}")
    return f"| {name} | {' | '.join(cells)} | {figures['rsum']:.1f} |"


def write_ranks(scores: Scores, records: Sequence[Record], path: Path) -> None:
    """One line a query: what was asked, and the rank of its best right answer."""
    of_images, of_texts = rank_queries(scores.values, scores.owners)
    captions = [caption for record in records for caption in record.captions]
    with written_beside(path) as file:
        for name, rank in zip(scores.names, of_images.tolist(), strict=True):
            file.write(json.dumps({"query": "image", "image": name, "rank": rank}) + "\n")
        for text, owner, rank in zip(captions, scores.owners.tolist(), of_texts.tolist(), strict=True):
            line = {"query": "text", "text": text, "image": scores.names[owner], "rank": rank}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _write(path: Path, text: str) -> None:
    with written_beside(path) as file:
        file.write(text)

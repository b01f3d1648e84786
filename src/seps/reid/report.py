"""How good a re-identification model is, as a report in Markdown and JSON: `seps reid eval`."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from seps.data.records import Problems, written_beside
from seps.distributed import choose_device
from seps.reid.data import Account, Broken, Dataset, Protocols, hold_out, opening, without_match
from seps.reid.measure import Figure, absences, compared, describe_all, distances_of, label, rank
from seps.reid.model import Features, ReIdModel, load
from seps.reid.reranking import rerank
from seps.reid.sources import SightingOptions, open_dataset

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvalOptions:
    """Measure a re-identification model: `seps reid eval runs/reid/best --data.folder RGBNT201`.

    Without a folder, on the built-in people. Prints mAP and CMC (R1, R5, R10) of every feature with all
    modalities, and with some taken away: a row r is measured without rgb, a row nt without nir and tir.
    """

    model: str
    """The model's folder: best/ of its run."""
    data: SightingOptions = field(default_factory=SightingOptions)
    """The data."""
    split: Literal["test", "dev"] = "test"
    """The test set, or the identities that training held out (with its dev_share and dev_seed)."""
    protocol: Literal["auto", "camera", "scene"] = "auto"
    """What is removed before ranking beside a query's own identity; auto is the dataset's own."""
    missing: bool = True
    """Whether to measure with modalities taken away too."""
    rerank: bool = False
    """Whether to add a line with k-reciprocal re-ranking."""
    report: str | None = None
    """Folder for report.md and report.json, which name what was left out too."""
    batch_size: int = 64
    """Sightings that are described at once."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, found {self.batch_size}")


@dataclass(frozen=True)
class Report:
    """Figures of a model on a dataset, and what of the data was left out."""

    dataset: str
    split: str
    protocol: Protocols
    queries: int
    gallery: int
    figures: tuple[Figure, ...]
    problems: tuple[str, ...]

    def to_markdown(self) -> str:
        """The report as a table and a list."""
        lines = [
            f"# Re-identification on {self.dataset}, {self.split}",
            "",
            f"{self.queries} queries, {self.gallery} sightings in the gallery, {self.protocol} protocol.",
            "",
            "| missing | feature | mAP | R1 | R5 | R10 |",
            "|---|---|---|---|---|---|",
        ]
        for each in self.figures:
            ranking = each.ranking
            values = [ranking.mean_average_precision, *(ranking.at(place) for place in (1, 5, 10))]
            feature = f"{each.features}, re-ranked" if each.reranked else each.features
            cells = " | ".join(f"{value:.1f}" for value in values)
            lines.append(f"| {label(each.absent)} | {feature} | {cells} |")
        gone = sorted({name for each in self.figures for name in each.absent})
        if gone:
            letters = ", ".join(f"{label((name,))} {name}" for name in gone)
            lines += ["", f"Missing is what was taken away from queries and gallery alike: {letters}."]
        lines += ["", f"Left out: {len(self.problems)}."]
        return "\n".join([*lines, *(f"- {problem}" for problem in self.problems)]) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "dataset": self.dataset,
            "split": self.split,
            "protocol": self.protocol,
            "queries": self.queries,
            "gallery": self.gallery,
            "figures": [
                {
                    "missing": label(each.absent),
                    "features": each.features,
                    "reranked": each.reranked,
                    "mAP": each.ranking.mean_average_precision,
                    **{f"r{place}": each.ranking.at(place) for place in (1, 5, 10)},
                }
                for each in self.figures
            ],
            "left_out": list(self.problems),
        }

    def write(self, folder: Path) -> None:
        """report.md and report.json, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        with written_beside(folder / "report.json") as file:
            json.dump(self.to_dict(), file, indent=2)
        with written_beside(folder / "report.md") as file:
            file.write(self.to_markdown())


def with_matches(dataset: Dataset, protocol: Protocols, broken: Broken) -> Dataset:
    """The dataset with the queries that have a right answer; others are refused, or named and left out."""
    lost = set(without_match(dataset.query, dataset.gallery, protocol))
    if len(lost) == len(dataset.query):
        raise ValueError(f"query: expected one with a right answer of another {protocol}, found none")
    account = Account(broken)
    for place in sorted(lost):
        name = dataset.query[place].name
        account.meet(name, f"expected a right answer of another {protocol} in the gallery, found none")
    problems = Problems("skip", [*dataset.problems, *account.settle()])
    kept = tuple(sighting for place, sighting in enumerate(dataset.query) if place not in lost)
    return replace(dataset, query=kept, problems=problems)


def open_split(data: SightingOptions, split: str, protocol: str) -> tuple[Dataset, Protocols]:
    """Queries and gallery to measure on, and the protocol."""
    if split == "dev":
        if not data.dev_share:
            raise ValueError("data.dev_share: expected above 0 to measure on what was held out, found 0")
        dataset = hold_out(open_dataset(data, ("train",)), data.dev_share, data.dev_seed)
    else:
        dataset = open_dataset(data, ("query", "gallery"))
    chosen: Protocols = dataset.protocol if protocol == "auto" else protocol  # type: ignore[assignment]
    return with_matches(dataset, chosen, data.broken), chosen


def measure(
    model: ReIdModel,
    dataset: Dataset,
    protocol: Protocols,
    missing: bool = True,
    reranked: bool = False,
    batch_size: int = 64,
    workers: int = 0,
    broken: Broken = "refuse",
) -> list[Figure]:
    """Every feature with every modality there and with some taken away; the model's own re-ranked."""
    choices = absences(model.config.modalities) if missing else [()]
    problems = opening(dataset, broken)
    gallery = describe_all(model, dataset.gallery, choices, batch_size, workers, problems, "gallery")
    query = gallery
    if dataset.query != dataset.gallery:
        query = describe_all(model, dataset.query, choices, batch_size, workers, problems, "queries")
    figures = []
    for choice in choices:
        for kind in compared(model):
            distances = distances_of(query[kind, choice], gallery[kind, choice])
            ranking = rank(distances, dataset.query, dataset.gallery, protocol)
            figures.append(Figure(kind, choice, protocol, False, ranking))
    if reranked:
        own = model.config.features
        figures.append(_reranked(own, query[own, ()], gallery[own, ()], dataset, protocol))
    return figures


def _reranked(kind: Features, query: Any, gallery: Any, dataset: Dataset, protocol: Protocols) -> Figure:
    distances = rerank(
        distances_of(query, gallery), distances_of(query, query), distances_of(gallery, gallery)
    )
    return Figure(kind, (), protocol, True, rank(distances, dataset.query, dataset.gallery, protocol))


def names_of(problems: Sequence[object]) -> tuple[str, ...]:
    """Problems as sentences, each once."""
    return tuple(dict.fromkeys(str(problem) for problem in problems))


def evaluate(options: EvalOptions) -> Report:
    """The report that the options ask for."""
    model = load(options.model).to(choose_device(options.device))
    dataset, protocol = open_split(options.data, options.split, options.protocol)
    figures = measure(
        model,
        dataset,
        protocol,
        options.missing,
        options.rerank,
        options.batch_size,
        options.data.workers,
        options.data.broken,
    )
    return Report(
        dataset.name,
        options.split,
        protocol,
        len(dataset.query),
        len(dataset.gallery),
        tuple(figures),
        names_of(list(dataset.problems)),
    )


def run(options: EvalOptions) -> int:
    """`seps reid eval`."""
    report = evaluate(options)
    logger.info("%s", report.to_markdown())
    if options.report is not None:
        report.write(Path(options.report))
        logger.info("report: %s", options.report)
    return 0

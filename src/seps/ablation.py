"""`seps ablate`: choices of the method trained at equal budget, and the table of what each of them does."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, cast

from seps.data.records import written_beside
from seps.distributed import World, choose_device
from seps.evaluation import COLUMN_NAMES, COLUMNS
from seps.objective import Scored
from seps.options import RecipeOptions, TrainOptions, recipe_from
from seps.progress import progress_bar
from seps.retrieval import train
from seps.snapshots import require_same

logger = logging.getLogger(__name__)

RESULT = "result.json"
"""What a cell that is done leaves in its folder."""

# The baseline, the presets, and the seven choices in which the paper and its released code differ. The ratio
# loss has a gradient under gates alone, so that its row has them too and is to be read against theirs.
STUDY: dict[str, dict[str, Any]] = {
    "mean-pooled global cosine": {"preset": "laps", "scored": "global"},
    "laps": {"preset": "laps"},
    "released": {"preset": "released"},
    "paper": {"preset": "paper"},
    "described": {"preset": "described"},
    "paper, scoring: sum of raw cosines": {"preset": "paper", "scoring": "sum"},
    "paper, dense text: a branch of its own": {"preset": "paper", "dense": "branch"},
    "paper, aggregation: shared": {"preset": "paper", "aggregation": "shared"},
    "paper, alignment: leaky-relu, mean": {"preset": "paper", "affinity": "leaky_relu", "pooling": "mean"},
    "paper, selection: gates": {"preset": "paper", "selection": "gates"},
    "paper, no gradient to the patches": {"preset": "paper", "detach_selection": True},
    "paper, ratio loss: summed": {"preset": "paper", "selection": "gates", "ratio_form": "summed"},
}


@dataclass(frozen=True)
class AblateOptions:
    """Train a grid of choices at equal budget and print the table: `seps ablate recipe.yaml --seeds [0,1,2]`.

    Every cell is a run of its own that resumes if it was broken; a cell that is done is not done again.
    """

    out: str = "runs/ablation"
    """Folder of table.md, table.json and one run a cell and seed."""
    grid: dict[str, dict[str, Any]] = field(default_factory=lambda: dict(STUDY))
    """Rows by name: a preset and the choices that replace its own; "scored: global" is the baseline; a name
    with a dot, such as "objective.loss", replaces what all cells share."""
    only: tuple[str, ...] = ()
    """Names of the rows to do, all of them if none is given."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """A run for each; the table shows the mean and the spread."""
    train: TrainOptions = field(default_factory=TrainOptions)
    """What all cells share: data, encoders, optimiser, epochs or steps."""

    def __post_init__(self) -> None:
        if not self.grid or not self.seeds:
            raise ValueError("grid, seeds: expected at least one of each, found none")
        unknown = next((name for name in self.only if name not in self.grid), None)
        if unknown is not None:
            raise ValueError(f"only: expected rows of the grid ({', '.join(self.grid)}), found {unknown!r}")
        folders: dict[str, str] = {}
        for name, choices in self.grid.items():
            cell_options(self, name, choices, self.seeds[0])
            other = folders.setdefault(_slug(name), name)
            if other != name:
                raise ValueError(
                    f"grid: expected names that differ in their letters, found {other!r}, {name!r}"
                )


def cell_options(options: AblateOptions, name: str, choices: Mapping[str, Any], seed: int) -> TrainOptions:
    """The training of one cell: what all share, with the row's choices and a seed."""
    shared = replace_sections(options.train, name, {key: choices[key] for key in choices if "." in key})
    chosen = {key: value for key, value in choices.items() if "." not in key}
    scored: Scored = chosen.pop("scored", "alignment")
    try:
        recipe = RecipeOptions(**chosen)
    except TypeError:
        known = ", ".join(("scored", *asdict(RecipeOptions())))
        raise ValueError(f"grid.{name}: expected choices out of {known}, found {', '.join(chosen)}") from None
    folder = Path(options.out) / "runs" / f"{_slug(name)}-seed{seed}"
    return replace(
        shared,
        recipe=recipe,
        objective=replace(shared.objective, scored=scored),
        run=replace(shared.run, folder=str(folder), seed=seed),
    )


def replace_sections(shared: TrainOptions, name: str, choices: Mapping[str, Any]) -> TrainOptions:
    """The shared options with the dotted ones of a row in their place."""
    for key, value in choices.items():
        section, _, option = key.partition(".")
        inner = getattr(shared, section, None)
        if section == "run" or option not in getattr(inner, "__dataclass_fields__", ()):
            raise ValueError(
                f"grid.{name}: expected an option of data, model, objective or optim, found {key!r}"
            )
        changes: dict[str, Any] = {section: replace(cast(Any, inner), **{option: value})}
        shared = replace(shared, **changes)
    return shared


def _slug(name: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def cells(options: AblateOptions) -> Iterator[tuple[str, int, TrainOptions]]:
    """Row, seed and training of every cell, seed by seed, so that an unfinished table has every row."""
    for seed in options.seeds:
        for name, choices in options.grid.items():
            if not options.only or name in options.only:
                yield name, seed, cell_options(options, name, choices, seed)


def run(options: AblateOptions) -> int:
    """`seps ablate`."""
    world = World(device=choose_device(options.train.device))
    results = finished(options)
    every = list(cells(options))
    with progress_bar("cells", len(every)) as advance:
        for name, seed, training in every:
            if seed not in results[name]:
                results[name][seed] = do_cell(training, world)
            advance(note=name)
            write_table(results, options)
    logger.info("%s", (Path(options.out) / "table.md").read_text(encoding="utf-8"))
    return 0


def finished(options: AblateOptions) -> dict[str, dict[int, dict[str, float]]]:
    """The figures of all cells of the grid that are done, whatever rows and seeds are asked for now."""
    results: dict[str, dict[int, dict[str, float]]] = {name: {} for name in options.grid}
    for name, choices in options.grid.items():
        for file in sorted((Path(options.out) / "runs").glob(f"{_slug(name)}-seed*/{RESULT}")):
            seed = file.parent.name.removeprefix(f"{_slug(name)}-seed")
            if seed.isdigit():
                training = cell_options(options, name, choices, int(seed))
                found = json.loads(file.read_text(encoding="utf-8"))
                require_same(plain(training), found["options"], file.parent)
                results[name][int(seed)] = dict(found["figures"])
    return {name: dict(sorted(seeds.items())) for name, seeds in results.items()}


def do_cell(training: TrainOptions, world: World) -> dict[str, float]:
    """The dev figures of a cell's best epoch, and the file that says that it is done."""
    outcome = train(training, world)
    figures = dict(outcome.best) | {"steps": float(outcome.steps)}
    with written_beside(Path(training.run.folder) / RESULT) as file:
        json.dump({"options": plain(training), "figures": figures}, file, indent=1)
    return figures


def plain(training: TrainOptions) -> Any:
    """Options as they come back from a file."""
    return json.loads(json.dumps(asdict(training)))


def write_table(results: Mapping[str, Mapping[int, Mapping[str, float]]], options: AblateOptions) -> None:
    """The table so far, as Markdown and as JSON."""
    results = {name: seeds for name, seeds in results.items() if seeds}
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    with written_beside(out / "table.json") as file:
        json.dump(results, file, indent=1)
    with written_beside(out / "table.md") as file:
        file.write(table(results, options))


def table(results: Mapping[str, Mapping[int, Mapping[str, float]]], options: AblateOptions) -> str:
    """Mean and spread over the seeds of every row, and what each gains over the first."""
    shared = options.train
    head = [
        f"Dev split {shared.data.dev!r} of {shared.data.folder}, best epoch of equally many steps, "
        f"mean ± standard deviation over the seeds, loss {shared.objective.loss}.",
        "",
        f"| | dense side | seeds | steps | {COLUMN_NAMES} | to the first |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    first = _mean(next(iter(results.values())).values(), "rsum")
    rows = []
    for name, seeds in results.items():
        figures = list(seeds.values())
        cells_ = [_cell(figures, column) for column in COLUMNS]
        budget = f"{_side(options, name)} | {len(seeds)} | {_mean(figures, 'steps'):.0f}"
        gain = f"{_mean(figures, 'rsum') - first:+.1f}"
        rows.append(f"| {name} | {budget} | {' | '.join(cells_)} | {gain} |")
    return "\n".join([*head, *rows]) + "\n"


def _side(options: AblateOptions, name: str) -> str:
    training = cell_options(options, name, options.grid[name], options.seeds[0])
    recipe = recipe_from(training.recipe)
    return "none" if recipe.dense == "none" else recipe.dense_side


def _mean(figures: Any, name: str) -> float:
    return fmean(each[name] for each in figures)


def _cell(figures: Sequence[Mapping[str, float]], name: str) -> str:
    values = [each[name] for each in figures]
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{fmean(values):.1f}{spread}"

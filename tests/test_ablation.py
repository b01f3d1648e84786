"""The grid: every cell a run at equal budget, done once, with mean and spread."""

import json
from dataclasses import replace

import pytest

from seps.ablation import STUDY, AblateOptions, cell_options, cells, run, table
from seps.recipe import paper
from seps.retrieval import recipe_from
from test_retrieval import options

GRID = {"baseline": {"preset": "laps", "scored": "global"}, "keep a quarter": {"keep_ratio": 0.25}}


def test_a_grid_becomes_a_table_and_is_done_once(tmp_path, monkeypatch):
    asked = AblateOptions(str(tmp_path), GRID, seeds=(0, 1), train=options())
    assert run(asked) == 0
    found = json.loads((tmp_path / "table.json").read_text())
    assert list(found) == list(GRID)
    assert {figures["steps"] for row in found.values() for figures in row.values()} == {3.0}
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in lines[-2:]] == list(GRID)
    assert lines[-1].count("±") == 7
    monkeypatch.setattr("seps.ablation.train", lambda *_: pytest.fail("done again"))
    assert run(asked) == 0
    other = replace(asked, train=options(objective={"margin": 0.5}))
    with pytest.raises(ValueError, match=r"holds a run with objective\.margin"):
        run(other)


def test_what_is_done_stays_in_the_table_whatever_is_asked_for_next(tmp_path):
    """Rows and seeds one at a time: a resumed grid begins its table with all that was done before."""
    asked = AblateOptions(str(tmp_path), GRID, train=options())
    tables = []
    for only, seeds in ((("baseline",), (1,)), (("keep a quarter",), (1,)), ((), (0, 1))):
        run(replace(asked, only=only, seeds=seeds))
        tables.append(json.loads((tmp_path / "table.json").read_text()))
    seeds = [{name: sorted(row) for name, row in each.items()} for each in tables]
    assert seeds[0] == {"baseline": ["1"]}
    assert seeds[1] == {"baseline": ["1"], "keep a quarter": ["1"]}
    assert seeds[2] == {"baseline": ["0", "1"], "keep a quarter": ["0", "1"]}
    assert tables[2]["baseline"]["1"] == tables[0]["baseline"]["1"]


def test_the_study_holds_the_seven_differences_one_at_a_time():
    asked = AblateOptions(seeds=(3,), train=options())
    recipes = {name: recipe_from(training.recipe) for name, _, training in cells(asked)}
    assert recipes["paper"] == paper()
    assert len(STUDY) == len(recipes) == 12
    changed = [name for name in recipes if name.startswith("paper, ")]
    assert len(changed) == 7
    assert len({recipes[name] for name in changed} | {paper()}) == 8


def test_cells_share_all_but_the_choice():
    asked = AblateOptions(grid=GRID, train=options())
    first, second = (cell_options(asked, name, GRID[name], 1) for name in GRID)
    assert first.objective.scored == "global"
    assert second.objective.scored == "alignment"
    assert recipe_from(second.recipe).keep_ratio == 0.25
    assert (first.data, first.optim, first.run.seed) == (second.data, second.optim, 1)
    assert first.run.folder != second.run.folder


def test_the_table_shows_mean_spread_and_gain():
    figures = dict.fromkeys(("i2t_r1", "i2t_r5", "i2t_r10", "t2i_r1", "t2i_r5", "t2i_r10", "steps"), 1.0)
    results = {
        "baseline": {0: {**figures, "rsum": 100.0}},
        "keep a quarter": {0: {**figures, "rsum": 110.0}, 1: {**figures, "rsum": 114.0}},
    }
    lines = table(results, AblateOptions(grid=GRID, train=options())).splitlines()
    assert "| 112.0 ± 2.8 | +12.0 |" in lines[-1]
    assert "none" in lines[-2]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"grid": {}}, "at least one of each"),
        ({"only": ("nothing",)}, "found 'nothing'"),
        ({"grid": {"x": {"keep": 1}}}, "expected choices out of"),
        (
            {"grid": {"a b": {}, "a, b": {}}},
            "expected names that differ in their letters, found 'a b', 'a, b'",
        ),
    ],
)
def test_a_grid_that_cannot_be_is_refused(changes, what):
    with pytest.raises(ValueError, match=what):
        AblateOptions(**{"grid": GRID, **changes})

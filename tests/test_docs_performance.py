"""The page on performance shows what the benchmarks wrote, and these time what they say."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pairs():
    spec = importlib.util.spec_from_file_location("pairs", ROOT / "benchmarks" / "pairs.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["pairs"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["pairs"]


@pytest.mark.parametrize("name", ["pairs", "rounding"])
def test_the_page_shows_the_tables_of_the_last_run(name):
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8").splitlines()
    result = (ROOT / "benchmarks" / "results" / f"{name}.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in result if line.startswith("|")]
    assert len(rows) > 10
    assert not set(rows) - set(page)


@pytest.mark.parametrize("case", ["eval", "train_paper"])
def test_the_loop_computes_what_the_engine_computes(pairs, case):
    assert pairs.check(case) < 1e-5


def test_the_parts_of_an_evaluation_are_all_of_it_and_no_more(pairs):
    found = pairs.parts(1, True)
    assert [each["part"] for each in found] == list(pairs.PARTS)
    assert all(each["share"] > 0 for each in found[:-1])
    assert sum(each["share"] for each in found) < 1

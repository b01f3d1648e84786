"""The snippet of docs/reid.md runs as it stands, and its settings are those its table was measured with."""

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path

import torch

from seps.cli import parse
from seps.reid.training import TrainOptions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reid.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (code,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return code


def test_the_snippet_runs():
    names: dict[str, object] = {"__name__": "reid"}
    exec(compile(block("python"), "docs/reid.md", "exec"), names)
    torch.testing.assert_close(names["features"].norm(dim=1), torch.ones(2))


def test_the_settings_are_those_of_the_table(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("reid_table", ROOT / "benchmarks" / "reid_table.py")
    table = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "reid_table", table)
    spec.loader.exec_module(table)
    (tmp_path / "people.yaml").write_text(block("yaml"))
    given = parse(TrainOptions, [str(tmp_path / "people.yaml")])
    measured = table.options(tmp_path, "both", seed=0, epochs=14)
    assert replace(given, run=replace(given.run, folder=str(tmp_path))) == measured

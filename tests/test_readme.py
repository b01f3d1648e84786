"""What the README shows runs as it stands: its Python, its commands, its links."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from seps.cli import COMMANDS, choose, parse

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced examples of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


EXAMPLES = blocks("python")
LINES = [line for block in blocks("bash") for line in block.splitlines()]


def test_the_two_commands_come_first():
    first = [line.split("#")[0].split() for line in blocks("bash")[0].splitlines()]
    assert first == [["make", "demo"], ["make", "test"]]


@pytest.mark.parametrize("code", EXAMPLES)
def test_readme_example_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(README), "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("seps ")])
def test_a_command_of_the_readme_is_one_that_there_is(line, monkeypatch):
    monkeypatch.chdir(ROOT)  # the recipe files are named from there
    name, words = choose(shlex.split(line, comments=True)[1:])
    command = COMMANDS[name]
    assert parse(getattr(import_module(command.module), command.options), words, name)


def test_every_target_of_make_is_one_that_there_is():
    targets = {match for line in LINES for match in re.findall(r"^make (\w[\w-]*)", line)}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)

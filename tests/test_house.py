"""What is true of every file of the project."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LARGEST = 2**20
# Files that may be larger, each with its reason beside it.
LARGE = {"src/seps/shipped/seps-mini/model.int8.safetensors": "what the default model learned"}
# What no file may say, and why.
FORBIDDEN = {
    r"(?<![\w.~])/(?:home|root|Users|work)/\w": "names a path of one machine",
    r"\bpythonhosted\.org|\bpypi\.org/simple|--(?:extra-)?index-url|\bregistry\.npmjs": "names a registry",
    r"\b(?:TODO|FIXME|XXX)\b|\bNotImplementedError\b": "is unfinished",
    r"^(?:<{7}|>{7}) ": "holds a merge conflict",
}
TEXT = {
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".cff",
    ".yaml",
    ".yml",
    ".json",
    ".html",
    ".css",
    ".js",
    ".svg",
    ".sh",
    "",
}


def tracked_files() -> list[Path]:
    """Files under version control; a released archive has none to look at."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a working copy: what is tracked is unknown")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    return [path for name in listed.decode().split("\0") if name and (path := ROOT / name).is_file()]


def complaints(text: str) -> list[str]:
    """What a text says that it may not, with the line it stands on."""
    return [
        f"line {text.count(chr(10), 0, match.start()) + 1} {reason}: {match.group(0)!r}"
        for pattern, reason in FORBIDDEN.items()
        for match in re.finditer(pattern, text, re.MULTILINE)
    ]


def test_no_file_says_what_it_may_not():
    found = {
        str(path.relative_to(ROOT)): sentences
        for path in tracked_files()
        if path.suffix in TEXT
        and path != Path(__file__)
        and (sentences := complaints(path.read_text(encoding="utf-8")))
    }
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        'open("/home/someone/data")',
        "pip install --index-url x",
        "# TODO later",
        "raise NotImplementedError",
        "a\n<<<<<<< ours",
    ],
)
def test_the_rules_bite(text):
    assert complaints(text)


def test_the_rules_leave_ordinary_text_alone():
    assert not complaints("https://arxiv.org/abs/1 src/home/x tests/work/y ~/work/data")


def test_tracked_files_are_small():
    large = {
        name: path.stat().st_size
        for path in tracked_files()
        if path.stat().st_size > LARGEST and (name := str(path.relative_to(ROOT))) not in LARGE
    }
    assert not large


def test_dependencies_are_pinned_in_one_place():
    assert not (ROOT / "uv.lock").exists()
    assert not list(ROOT.glob("requirements*.txt"))
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").split("\n")
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pins if line), pins


def test_the_version_is_said_once():
    """Package metadata, citation and `seps.__version__` agree."""
    import seps

    with (ROOT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    assert f"version: {version}" in (ROOT / "CITATION.cff").read_text(encoding="utf-8").split("\n")
    assert seps.__version__ == version


def test_every_test_module_tests_something():
    empty = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if not re.search(r"^\s*def test_\w+\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert not empty


def test_make_help_lists_every_target():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    assert phony
    described = re.findall(r"^([a-z-]+):.*## \S", makefile, re.MULTILINE)
    assert sorted(described) == sorted(phony.group(1).split())

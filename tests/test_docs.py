"""The documentation speaks of what there is: files, headings, tests, functions; and its method runs."""

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
METHOD = ROOT / "docs" / "method.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TESTS = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def anchors(page: Path) -> set[str]:
    """What a link may name behind the '#' of a page, as the usual readers of Markdown make it."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        place, _, anchor = target.partition("#")
        file = (page.parent / place).resolve() if place else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pages
def test_every_test_that_is_named_exists(page):
    text = page.read_text(encoding="utf-8")
    for file in re.findall(r"`(?:tests/)?([\w/]*test_\w+\.py)", text):
        assert list((ROOT / "tests").rglob(Path(file).name)), file
    for name in re.findall(r"(?:`|::)(test_\w+)`", text):
        assert f"def {name}(" in TESTS, name


def test_the_index_lists_every_page():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == {
        page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"
    }


def test_every_function_beside_an_equation_exists():
    named = re.findall(r"`((?:slimming|alignment|losses|head|recipe)\.\w+)`", METHOD.read_text("utf-8"))
    assert len(named) > 10
    for name in named:
        module, function = name.split(".")
        assert hasattr(import_module(f"seps.{module}"), function), name


def test_the_examples_of_the_method_run_one_after_the_other():
    found = re.findall(r"^```python\n(.*?)^```", METHOD.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {"__name__": "method"}
    for code in found:
        exec(compile(code, str(METHOD), "exec"), names)
    assert names["scores"].shape == (8, 10)
    assert names["similarity"].shape == (8, 10)

"""Imports point one way, and `import seps` stays cheap."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "seps"

# Each module imports from those above it only; a new module takes its place here.
ORDER = [
    "tokens",
    "recipe",
    "noise",
    "slimming",
    "cca",
    "alignment",
    "losses",
    "pairwise",
    "head",
    "modalities",
    "data",
    "naming",
    "encoders",
    "processor",
    "eightbit",
    "configuration",
    "global_term",
    "model",
    "blending",
    "shrinking",
    "compat",
    "checkpoints",
    "metrics",
    "progress",
    "distributed",
    "optimisation",
    "snapshots",
    "journal",
    "training",
    "features",
    "objective",
    "sources",
    "evaluation",
    "weighing",
    "baseline",
    "report_page",
    "report",
    "options",
    "retrieval",
    "ablation",
    "chat",
    "captions",
    "gallery",
    "explanation",
    "reid",
    "cli",
    "web",
    "demo",
]
# Narrower than the order: what a module may import besides itself.
ONLY = {"data": {"tokens"}}
# Too heavy, or optional: imported where they are used.
HEAVY = [
    "transformers",
    "lancedb",
    "fastapi",
    "matplotlib",
    "ray",
    "jsonargparse",
    "rich",
    "PIL",
    "scipy",
    "torch._dynamo",
    "yaml",
]


def modules(package: Path) -> dict[str, list[Path]]:
    """Files of each top module of the package; a sub-package is one module."""
    found: dict[str, list[Path]] = {}
    for path in sorted(package.rglob("*.py")):
        top = path.relative_to(package).parts[0].removesuffix(".py")
        found.setdefault(top, []).append(path)
    return {name: paths for name, paths in found.items() if name not in ("__init__", "__main__")}


def imported_modules(path: Path, package: Path) -> set[str]:
    """Top modules of the package that a file imports, in any form and wherever the import stands."""
    here = [package.name, *path.relative_to(package).parent.parts]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            origin = [*base, *(node.module.split(".") if node.module else [])]
            dotted = [".".join([*origin, alias.name]) for alias in node.names]
        else:
            continue
        for name in dotted:
            first, _, rest = name.partition(".")
            # The version is the package's own; everything else of its front stands on the modules.
            if first == package.name and rest != "__version__":
                names.add(rest.split(".")[0] or "__init__")
    return names


def broken_rules(package: Path, order: list[str], only: dict[str, set[str]]) -> list[str]:
    """A sentence for every module without a place and every import that points the wrong way."""
    sentences = []
    for name, paths in modules(package).items():
        if name not in order:
            sentences.append(f"{name}: has no place in ORDER; add it below everything it imports")
            continue
        allowed = only.get(name, set(order[: order.index(name)])) | {name}
        for path in paths:
            sentences.extend(
                f"{path.relative_to(package)}: imports {target}, which {name} may not"
                for target in sorted(imported_modules(path, package) - allowed)
            )
    return sentences


def test_imports_point_one_way():
    assert not broken_rules(PACKAGE, ORDER, ONLY)


@pytest.mark.parametrize(
    ("files", "sentences"),
    [
        ({"low.py": "import torch", "high.py": "from house.low import thing"}, []),
        (
            {"high.py": "import json", "low.py": "import house.high"},
            ["low.py: imports high, which low may not"],
        ),
        ({"low.py": "def f():\n    from . import high"}, ["low.py: imports high, which low may not"]),
        (
            {"room/a.py": "from .b import x\nfrom ..low import y", "room/b.py": "from house.room.a import z"},
            [],
        ),
        ({"room/a.py": "from ..high import y"}, ["room/a.py: imports high, which room may not"]),
        ({"low.py": "from house import Thing"}, ["low.py: imports Thing, which low may not"]),
        ({"new.py": ""}, ["new: has no place in ORDER; add it below everything it imports"]),
    ],
)
def test_the_rule_sees_every_form_of_import(tmp_path, files, sentences):
    package = tmp_path / "house"
    for name, source in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    assert broken_rules(package, ["low", "room", "high"], {}) == sentences


def test_a_narrower_rule_beats_the_order(tmp_path):
    package = tmp_path / "house"
    package.mkdir()
    (package / "high.py").write_text("import house.low, house.room", encoding="utf-8")
    assert broken_rules(package, ["low", "room", "high"], {"high": {"low"}}) == [
        "high.py: imports room, which high may not"
    ]


def run_python(code: str) -> str:
    """What a fresh interpreter prints."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout.strip()


def test_importing_seps_loads_nothing_heavy():
    assert run_python(f"import sys, seps; print(*[name for name in {HEAVY!r} if name in sys.modules])") == ""


def test_importing_seps_leaves_everything_as_it_was():
    """No seed, default, thread count or log handler is set at import."""
    code = (
        "import logging, torch\n"
        "def state():\n"
        "    return (torch.initial_seed(), torch.get_default_dtype(), torch.get_num_threads(),\n"
        "            torch.is_grad_enabled(), len(logging.root.handlers))\n"
        "before = state()\n"
        "import seps\n"
        "print(before == state())"
    )
    assert run_python(code) == "True"

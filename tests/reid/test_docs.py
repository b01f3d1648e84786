"""The snippet of docs/reid.md runs as it stands."""

import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "reid.md"


def test_the_snippet_runs():
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {"__name__": "reid"}
    exec(compile(code, str(PAGE), "exec"), names)
    torch.testing.assert_close(names["features"].norm(dim=1), torch.ones(2))

"""The snippets of docs/modalities.md run as they stand, and what their comments promise holds."""

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[1] / "docs" / "modalities.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_there_is_a_snippet_of_ten_lines_for_each_kind_of_input():
    assert len(SNIPPETS) == 3
    assert all(len([line for line in each.splitlines() if line.strip()]) <= 10 for each in SNIPPETS)


@pytest.mark.parametrize("code", SNIPPETS)
def test_a_snippet_runs(code):
    names: dict[str, object] = {"__name__": "modalities"}
    exec(compile(code, str(PAGE), "exec"), names)
    if "tokens" in names:
        assert all(each.shape == (8, 31, 512) for each in names["tokens"].values())
        assert names["kept"].shape == (8, 128) and names["kept"].sum(1).tolist() == [77] * 8
    else:
        shape = (4, 6) if "seen" in names else (4, 4)
        assert names["scores"].shape == shape and bool(torch.isfinite(names["scores"]).all())

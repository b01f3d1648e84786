"""Weights in eight bits: how far they may be off, and files that do not fit."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from making import refusal
from seps.eightbit import SMALLEST, fill_shrunk, grow, shrink, write_shrunk


@given(st.integers(0, 1000), st.floats(1e-6, 1e3))
def test_every_entry_is_within_half_a_step_of_its_row(seed: int, size: float) -> None:
    matrix = size * torch.randn(64, 80, generator=torch.Generator().manual_seed(seed))
    matrix[3] = 0
    shrunk = shrink({"a": matrix})
    assert shrunk["a"].dtype == torch.int8
    step = matrix.abs().amax(1, keepdim=True) / 127
    assert bool(((grow(shrunk)["a"] - matrix).abs() <= 0.5001 * step + 1e-12).all())


def test_small_weights_and_vectors_stay_as_they_are() -> None:
    state = {
        "vector": torch.randn(9000),
        "small": torch.randn(8, SMALLEST // 8 - 1),
        "count": torch.arange(5),
    }
    for name, tensor in grow(shrink(state)).items():
        assert torch.equal(tensor, state[name]) and tensor.dtype == state[name].dtype


def make() -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(70, 60), "b": nn.Linear(3, 2)})


def test_a_file_is_a_quarter_and_comes_back(tmp_path: Path) -> None:
    own, other = make(), make()
    write_shrunk(own.state_dict(), tmp_path / "w.safetensors")
    fill_shrunk(other, tmp_path / "w.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]
    assert torch.equal(other["b"].weight, own["b"].weight)
    torch.testing.assert_close(other["a"].weight, own["a"].weight, rtol=0, atol=1e-3)
    assert (tmp_path / "w.safetensors").stat().st_size < 6500


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("b.bias"), "lacks b.bias (1 in all)"),
        (lambda state: state.update(c=torch.zeros(2)), "has no place for c (1 in all)"),
        (lambda state: state.update({"b.bias": torch.zeros(5)}), "size mismatch for b.bias"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, change: object, words: str) -> None:
    state = dict(make().state_dict())
    change(state)  # type: ignore[operator]
    write_shrunk(state, tmp_path / "w.safetensors")
    sentence = refusal(lambda: fill_shrunk(make(), tmp_path / "w.safetensors"))
    assert "expected the weights that config.json describes" in sentence and words in sentence


def test_names_that_are_elsewhere_may_be_missing_and_a_broken_file_is_named(tmp_path: Path) -> None:
    state = dict(make().state_dict())
    del state["b.bias"]
    file = tmp_path / "w.safetensors"
    write_shrunk(state, file)
    fill_shrunk(make(), file, {"b.bias"})
    file.write_bytes(file.read_bytes()[:100])
    assert str(file) in refusal(lambda: fill_shrunk(make(), file))

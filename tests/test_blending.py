"""Blending: the straight line between two models, and what has no such line."""

import copy
from pathlib import Path

import pytest
import torch

from making import refusal
from seps.blending import BlendOptions, blend, run
from seps.model import SepsConfig, create, load

LIGHT = {"kind": "light", "width": 16}


def made(channels: int = 16):
    config = SepsConfig("described", channels, {**LIGHT, "size": 32}, LIGHT, "score")
    return create(config, texts=["a red dog", "two blue cats"])


def trained(model):
    """The same model a little further on."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight += torch.randn_like(weight)
    return other


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_every_weight_lies_on_the_line(share: float) -> None:
    model, _ = made()
    other, start = trained(model), copy.deepcopy(model).state_dict()
    blend(model, other, share)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, (1 - share) * start[name] + share * other.state_dict()[name])


def test_the_command_writes_a_model_between_both(tmp_path: Path) -> None:
    model, processor = made()
    for name, each in (("before", model), ("after", trained(model))):
        each.save_pretrained(tmp_path / name)
        processor.save_pretrained(tmp_path / name)
    assert run(BlendOptions(*(str(tmp_path / name) for name in ("before", "after", "out")))) == 0
    before, after, found = (load(tmp_path / name)[0].state_dict() for name in ("before", "after", "out"))
    for name, weight in found.items():
        torch.testing.assert_close(weight, (before[name] + after[name]) / 2)


def test_models_of_different_shapes_are_refused() -> None:
    sentence = refusal(lambda: blend(made()[0], made(channels=32)[0], 0.5))
    assert sentence.startswith("other: expected a model trained from the first, with ")
    assert "of shape" in sentence


def test_a_share_beyond_the_line_is_refused() -> None:
    assert refusal(lambda: BlendOptions("a", "b", "c", 1.5)) == "share: expected 0 to 1, found 1.5"


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    sentence = refusal(lambda: run(BlendOptions("seps-mini", "seps-mini", str(tmp_path))))
    assert sentence == f"out: expected a folder that is empty or not there yet, found {tmp_path}"

"""A shrunk folder scores as the whole one does, and nothing is overwritten."""

from pathlib import Path

import torch

from making import refusal
from seps.model import SepsConfig, create, load
from seps.shrinking import ShrinkOptions, run

LIGHT = {"kind": "light", "width": 64}


def test_a_shrunk_model_is_small_and_scores_alike(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = create(SepsConfig("laps", 64, {**LIGHT, "size": 64}, LIGHT), texts=["a red dog", "two blue cats"])
    for part in made:
        part.save_pretrained(tmp_path / "whole")
    assert run(ShrinkOptions(str(tmp_path / "whole"), str(tmp_path / "small"))) == 0
    sizes = [sum(file.stat().st_size for file in (tmp_path / name).glob("*.safetensors"))
             for name in ("whole", "small")]  # fmt: skip
    assert sizes[1] < 0.5 * sizes[0]
    pixels = torch.randn(3, 3, 64, 64)
    scores = []
    for name in ("whole", "small"):
        model, processor = load(tmp_path / name)
        with torch.no_grad():
            scores.append(model(pixels, **{k: v for k, v in processor.texts(["a red dog", "cats"]).items()
                                           if k != "words"}))  # fmt: skip
    assert (scores[0] - scores[1]).abs().max() < 0.05 * scores[0].abs().max()


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    sentence = refusal(lambda: run(ShrinkOptions("seps-mini", str(tmp_path))))
    assert sentence == f"out: expected a folder that is empty or not there yet, found {tmp_path}"
    assert (tmp_path / "mine.txt").read_text() == "kept"

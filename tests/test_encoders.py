"""Encoders: the grid, what is CLS and what a register, masks, freezing, and what is refused."""

import json

import pytest
import torch

from seps.encoders import build_image_encoder, build_text_encoder
from seps.encoders.huggingface import FAMILIES, HuggingFaceVision
from seps.encoders.layers import Neck, NeckOptions, Stack
from seps.tokens import Tokens

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
PLAIN = {**SMALL, "image_size": 32, "patch_size": 8}
DINO = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 2, "image_size": 28}
SHIFTED = {
    "image_size": 64,
    "patch_size": 4,
    "embed_dim": 4,
    "depths": [1, 1, 2, 1],
    "num_heads": [1, 2, 2, 4],
    "window_size": 2,
}
VISION = {
    "vit": PLAIN,
    "deit": PLAIN,
    "dinov2": {**DINO, "patch_size": 7},
    "dinov2_with_registers": {**DINO, "patch_size": 7, "num_register_tokens": 3},
    "dinov3_vit": {**PLAIN, "num_register_tokens": 4},
    "siglip_vision_model": PLAIN,
    "clip_vision_model": PLAIN,
    "swin": SHIFTED,
    "swinv2": SHIFTED,
}
BERT = {"model_type": "bert", **SMALL, "vocab_size": 40, "max_position_embeddings": 12}


def vision_spec(family, **changes):
    return {"kind": "huggingface", "config": {"model_type": family, **VISION[family]}, **changes}


@pytest.fixture(params=["light", *VISION])
def image_spec(request):
    if request.param == "light":
        return {"kind": "light", "size": 32, "width": 16, "layers": 1}
    return vision_spec(request.param)


def pixels_for(encoder, count=2):
    return torch.randn(count, 3, *encoder.image_size)


def test_every_known_family_is_tried_here():
    assert set(VISION) == set(FAMILIES)


def test_the_grid_is_what_the_backbone_yields(image_spec):
    encoder = build_image_encoder(image_spec, channels=10)
    raw = encoder.backbone(pixels_for(encoder))
    tokens = encoder.neck(raw)
    assert encoder.patches == encoder.grid[0] * encoder.grid[1]
    assert tokens.features.shape == (2, encoder.patches, 10)
    assert (tokens.cls is not None) == encoder.body.has_cls


@pytest.mark.parametrize("family", VISION)
@pytest.mark.parametrize("size", [48, [70, 40]])
def test_other_sizes_and_shapes_than_trained(family, size):
    encoder = build_image_encoder(vision_spec(family, size=size), channels=10)
    assert encoder(pixels_for(encoder, 1)).features.shape[1] == encoder.patches


@pytest.mark.parametrize(("size", "patches"), [(224, 49), (384, 144)])
def test_swin_halves_its_grid_three_times(size, patches):
    config = {**SHIFTED, "depths": [1, 1, 1, 1], "image_size": 224, "window_size": 7}
    spec = {"kind": "huggingface", "config": {"model_type": "swin", **config}, "size": size}
    assert build_image_encoder(spec, channels=8).patches == patches


@pytest.mark.parametrize(("family", "before"), [("vit", 1), ("deit", 2), ("dinov2_with_registers", 4)])
def test_patches_stand_in_row_order_after_cls_and_registers(family, before):
    """The patch tokens are the network's own, from the first patch on."""
    backbone = HuggingFaceVision(config={"model_type": family, **VISION[family]}).eval()
    pixels = torch.randn(1, 3, backbone.view.height, backbone.view.width)
    hidden = backbone.network(pixel_values=pixels).last_hidden_state
    tokens = backbone(pixels)
    torch.testing.assert_close(tokens.features, hidden[:, before:])
    torch.testing.assert_close(tokens.cls, hidden[:, 0])


def test_a_square_number_of_tokens_does_not_hide_the_cls():
    """Eight patches and a CLS are nine tokens, a square: still eight patches."""
    spec = {"kind": "huggingface", "config": {"model_type": "vit", **PLAIN}, "size": [16, 32]}
    tokens = build_image_encoder(spec, channels=8)(torch.randn(1, 3, 16, 32))
    assert tokens.features.shape[1] == 8
    assert tokens.cls is not None


@pytest.mark.parametrize("model_type", ["clip", "siglip"])
def test_a_two_tower_configuration_lends_its_vision_tower(model_type):
    config = {"model_type": model_type, "vision_config": PLAIN, "text_config": {**SMALL, "vocab_size": 30}}
    encoder = build_image_encoder({"kind": "huggingface", "config": config}, channels=8)
    assert encoder.patches == 16
    assert encoder.spec["config"]["model_type"] == f"{model_type}_vision_model"


def test_backbone_from_a_folder_keeps_its_weights_and_its_view(tmp_path):
    source = HuggingFaceVision(config={"model_type": "vit", **PLAIN})
    source.network.save_pretrained(tmp_path)
    told = {
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.4, 0.5, 0.6],
        "size": {"shortest_edge": 40},
        "crop_size": {"height": 32, "width": 32},
        "do_center_crop": True,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(told), encoding="utf-8")
    encoder = build_image_encoder({"kind": "huggingface", "name": str(tmp_path)}, channels=8)
    assert (encoder.mean, encoder.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert (encoder.image_size, encoder.view.fit, encoder.view.crop_share) == ((32, 32), "crop", 0.8)
    for name, value in source.network.state_dict().items():
        torch.testing.assert_close(encoder.body.network.state_dict()[name], value)
    overridden = build_image_encoder(
        {"kind": "huggingface", "name": str(tmp_path), "mean": [0, 0, 0], "size": 48, "fit": "squash"}
    )
    assert (overridden.mean, overridden.image_size) == ((0.0, 0.0, 0.0), (48, 48))
    assert overridden.patches == 36


def test_a_spec_builds_the_same_encoder_again(image_spec):
    encoder = build_image_encoder({**image_spec, "neck": {"layers": 1, "heads": 2}}, channels=10)
    again = build_image_encoder(json.loads(json.dumps(encoder.spec)), channels=10)
    assert again.spec == encoder.spec
    again.load_state_dict(encoder.state_dict())
    pixels = pixels_for(encoder)
    torch.testing.assert_close(again.eval()(pixels).features, encoder.eval()(pixels).features)


TEXTS = {
    "light": {"kind": "light", "vocabulary": 40, "width": 16, "special": [0, 3, 4]},
    "bert": {"kind": "huggingface", "config": BERT, "special": [0, 3, 4]},
    "distilbert": {
        "kind": "huggingface",
        "config": {"model_type": "distilbert", "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24},
        "special": [0, 3, 4],
    },
    "roberta": {
        "kind": "huggingface",
        "config": {"model_type": "roberta", **SMALL, "vocab_size": 40, "max_position_embeddings": 14},
        "special": [0, 3, 4],
    },
    "mpnet": {
        "kind": "huggingface",
        "config": {"model_type": "mpnet", **SMALL, "vocab_size": 40, "max_position_embeddings": 14},
        "special": [0, 3, 4],
    },
    "modernbert": {
        "kind": "huggingface",
        "config": {
            "model_type": "modernbert",
            **SMALL,
            "vocab_size": 40,
            "pad_token_id": 0,
            "bos_token_id": 3,
            "eos_token_id": 4,
            "cls_token_id": 3,
            "sep_token_id": 4,
        },
    },
}
IDS = torch.tensor([[3, 7, 8, 9, 4], [3, 7, 4, 0, 0], [3, 4, 0, 0, 0], [0, 0, 0, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)


@pytest.fixture(params=TEXTS)
def text_spec(request):
    return TEXTS[request.param]


def test_special_tokens_leave_the_mask(text_spec):
    encoder = build_text_encoder(text_spec, channels=10).eval()
    tokens = encoder(IDS, MASK)
    assert tokens.features.shape == (4, 5, 10)
    # A text of special tokens alone keeps them; a row without any token stays absent.
    assert tokens.mask.tolist() == [
        [False, True, True, True, False],
        [False, True, False, False, False],
        [True, True, False, False, False],
        [False, False, False, False, False],
    ]
    assert torch.isfinite(tokens.features).all()


def test_special_tokens_stay_if_asked(text_spec):
    encoder = build_text_encoder({**text_spec, "keep_special": True}, channels=10).eval()
    assert torch.equal(encoder(IDS, MASK).mask, MASK)
    assert encoder.spec["keep_special"] is True


def test_padding_changes_no_word(text_spec):
    encoder = build_text_encoder({**text_spec, "neck": {"layers": 1, "heads": 2}}, channels=10).eval()
    alone = encoder(IDS[1:2, :3], MASK[1:2, :3])
    padded = encoder(IDS, MASK)
    torch.testing.assert_close(padded.features[1, :3], alone.features[0], atol=1e-5, rtol=1e-5)


def test_word_order_matters(text_spec):
    encoder = build_text_encoder(text_spec, channels=10).eval()
    swapped = IDS[:1, [0, 2, 1, 3, 4]]
    there, back = encoder(IDS[:1], MASK[:1]).features, encoder(swapped, MASK[:1]).features
    assert (there[0, [0, 2, 1, 3, 4]] - back[0]).abs().max() > 1e-6


def test_light_text_has_no_longest():
    encoder = build_text_encoder(TEXTS["light"], channels=10)
    ids = torch.full((1, 700), 7)
    assert encoder(ids, ids > 0).features.shape == (1, 700, 10)


def test_context_layers_see_only_real_tokens():
    neck = Neck(6, 8, NeckOptions(layers=2, heads=2)).eval()
    features, cls = torch.randn(2, 5, 6), torch.randn(2, 6)
    whole = neck(Tokens.padded(features, [3, 5]))
    part = neck(Tokens(features[:1, :3]))
    torch.testing.assert_close(whole.features[0, :3], part.features[0])
    with_cls = neck(Tokens(features, cls=cls))
    assert with_cls.cls.shape == (2, 8)
    assert (with_cls.features - neck(Tokens(features)).features).abs().max() > 1e-6


def test_recomputation_changes_no_gradient():
    stack, x = Stack(8, 2, 2), torch.randn(2, 4, 8)
    gradients = []
    for recomputes in (False, True):
        stack.gradient_checkpointing = recomputes
        stack.zero_grad()
        stack(x).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in stack.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_frozen_backbone_neither_learns_nor_drops():
    spec = {**TEXTS["light"], "dropout": 0.5, "tuning": "frozen"}
    encoder = build_text_encoder(spec, channels=10).train()
    first, second = encoder(IDS, MASK), encoder(IDS, MASK)
    torch.testing.assert_close(first.features, second.features)
    first.features.sum().backward()
    assert all(parameter.grad is None for parameter in encoder.body.parameters())
    assert all(parameter.grad is not None for parameter in encoder.neck.parameters())
    encoder.tune("full")
    encoder(IDS, MASK).features.square().sum().backward()
    assert encoder.body.words.weight.grad.abs().sum() > 0
    assert encoder.spec["tuning"] == "full"


def test_every_weight_of_every_backbone_learns(image_spec):
    encoder = build_image_encoder(image_spec, channels=10).train()
    tokens = encoder(pixels_for(encoder))
    total = tokens.features.square().sum()
    (total if tokens.cls is None else total + tokens.cls.square().sum()).backward()
    idle = [name for name, parameter in encoder.named_parameters() if parameter.grad is None]
    assert idle == []


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"kind": "heavy"}, "image_encoder.kind: expected one of light, huggingface.*found 'heavy'"),
        ({}, "image_encoder.kind: expected one of .*found None"),
        ("light", "image_encoder: expected a mapping with a 'kind', found 'light'"),
        ({"kind": "light", "depth": 3}, "image_encoder: expected the keys kind, .*found 'depth'"),
        ({"kind": "light", "size": 100}, "size: expected a multiple of 16.*found 100"),
        ({"kind": "light", "heads": 5}, "heads: expected a divisor of the 128 channels, found 5"),
        ({"kind": "light", "tuning": "half"}, "tuning: expected one of full, frozen, found 'half'"),
        (
            {"kind": "light", "neck": {"depth": 1}},
            "neck: expected the keys layers, heads, dropout, channel_dropout, found 'dep",
        ),
        ({"kind": "huggingface"}, "image_encoder: expected a 'name' .* or a 'config', found neither"),
        ({"kind": "huggingface", "config": {"model_type": "bert"}}, "known family .*found 'bert'"),
        (
            {"kind": "huggingface", "config": {"model_type": "vitt"}},
            "expected a configuration of trans.*'vitt'",
        ),
        ({"kind": "huggingface", "name": "./nowhere"}, "readable configuration, found './nowhere'"),
        (vision_spec("vit", size=4), "size: expected at least one patch of 8 pixels, found 4x4"),
        (vision_spec("vit", size=[8, 8, 8]), "size: expected a positive integer or .*found"),
        (vision_spec("vit", mean=[0.5]), "mean: expected three numbers, found"),
    ],
)
def test_a_wrong_spec_meets_one_sentence(spec, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        build_image_encoder(spec, channels=8)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("pixels", "sentence"),
    [
        (torch.zeros(2, 3, 24, 32), r"expected shape \(B, 3, 32, 32\), found \(2, 3, 24, 32\)"),
        (torch.zeros(0, 3, 32, 32), r"expected shape \(B, 3, 32, 32\), found \(0, "),
        (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), "floating-point numbers, found torch.uint8"),
    ],
)
def test_wrong_pixels_meet_one_sentence(pixels, sentence):
    with pytest.raises(ValueError, match=sentence):
        build_image_encoder({"kind": "light", "size": 32, "width": 16}, channels=8)(pixels)


@pytest.mark.parametrize(
    ("ids", "mask", "sentence"),
    [
        (IDS[0], MASK[0], r"ids: expected integers of shape \(T, L\)"),
        (IDS.float(), MASK, "ids: expected integers"),
        (IDS, MASK.long(), "mask: expected booleans"),
        (IDS, MASK[:2], r"mask: expected booleans of shape \(4, 5\)"),
        (IDS + 40, MASK, "ids: expected below 40"),
        (torch.full((1, 13), 7), torch.ones(1, 13, dtype=torch.bool), "at most 12 tokens .*found 13"),
    ],
)
def test_wrong_ids_meet_one_sentence(ids, mask, sentence):
    with pytest.raises(ValueError, match=sentence):
        build_text_encoder(TEXTS["bert"], channels=8)(ids, mask)


def test_unknown_text_backbone_meets_one_sentence():
    with pytest.raises(
        ValueError, match="text_encoder: expected a backbone of a known family .*found 'gpt2'"
    ):
        build_text_encoder({"kind": "huggingface", "config": {"model_type": "gpt2"}})


def test_kept_features_of_another_width_meet_one_sentence():
    encoder = build_image_encoder({"kind": "light", "size": 32, "width": 16}, channels=8)
    with pytest.raises(ValueError, match="expected 16 channels of the backbone, found 24"):
        encoder.neck(Tokens(torch.randn(1, 4, 24)))

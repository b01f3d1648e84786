"""The re-identification model: absence, heads, camera embedding, any backbone, saving and loading."""

import pytest
import torch

from seps.modalities import RGB_NIR_TIR, reidentification
from seps.reid.model import GlobalLocal, NeckedHead, ReIdConfig, ReIdModel, class_of, load
from seps.tokens import Tokens

LIGHT = {"kind": "light", "size": [64, 32], "width": 16, "layers": 1, "heads": 2}


def make(**changes) -> ReIdModel:
    torch.manual_seed(0)
    return ReIdModel(
        ReIdConfig(**{"image_encoder": LIGHT, "channels": 16, "identities": 5, **changes})
    ).eval()


def pictures(batch=3, size=(64, 32), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(batch, 3, *size, generator=generator) for name in RGB_NIR_TIR}


@pytest.mark.parametrize(("features", "width"), [("both", 96), ("original", 48), ("slimmed", 48)])
def test_features_are_of_unit_length(features, width):
    found = make(features=features)(pictures())
    assert found.shape == (3, width)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(3))


def test_both_halves_weigh_alike():
    found = make()(pictures())
    torch.testing.assert_close(found[:, :48].norm(dim=1), found[:, 48:].norm(dim=1))


def test_an_absent_modality_leaves_zeros_in_every_feature():
    model = make().train()
    present = {"nir": torch.tensor([True, False, True])}
    description = model.describe(model.encode(pictures()), present)
    for feature in (description.original, description.slimmed):
        assert not feature[1, 16:32].any() and feature[0, 16:32].any()
    for kind in ("original", "slimmed"):
        vector = model.compare(description, kind)
        assert not vector[1, 16:32].any() and vector[0, 16:32].any()


def test_what_an_absent_modality_holds_does_not_matter():
    model, given = make(), pictures()
    present = {"tir": torch.tensor([True, False, True])}
    other = given | {"tir": given["tir"] * torch.tensor([1.0, -7.0, 1.0]).view(3, 1, 1, 1)}
    torch.testing.assert_close(model(given, present), model(other, present))


def test_a_modality_left_out_equals_one_absent_everywhere():
    model, given = make(), pictures()
    nowhere = model(given, {"rgb": torch.zeros(3, dtype=torch.bool)})
    del given["rgb"]
    torch.testing.assert_close(model(given), nowhere)


def test_the_backbone_is_shared_and_modalities_do_not_meet_in_it():
    model, given = make(), pictures()
    whole = model.encode(given)
    alone = model.encode({"tir": given["tir"]})
    torch.testing.assert_close(whole["tir"].patches.features, alone["tir"].patches.features)


def test_absent_modalities_take_no_part_in_the_statistics():
    head = NeckedHead(2, 4, 3).train()
    features = torch.randn(6, 8)
    presence = torch.tensor([[True, True]] * 4 + [[True, False]] * 2)
    found = head.normalise(features, presence)
    part = features[:4, 4:]
    expected = (part - part.mean(0)) / (part.var(0, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(found[:4, 4:], expected)
    assert not found[4:, 4:].any()
    assert head.classifier.bias is None and not head.norms[0].bias.requires_grad


def test_a_single_sample_can_be_trained_on():
    head = NeckedHead(2, 4, 3).train()
    found = head(torch.randn(1, 8), torch.tensor([[True, False]]))
    assert torch.isfinite(found).all()


def test_global_local_is_the_formula():
    reduction = GlobalLocal(6)
    feature, patches = torch.randn(2, 6), torch.randn(2, 4, 6)
    joined = torch.cat([feature, patches.mean(1)], 1)
    inner = reduction.reduce(torch.nn.functional.layer_norm(joined, (12,), *reduction.norm.parameters()))
    torch.testing.assert_close(reduction(feature, Tokens(patches)), inner * torch.sigmoid(1.702 * inner))


def test_without_cls_the_global_feature_is_a_learned_mean_of_the_patches():
    model = make()
    encoded = model.encode(pictures())["rgb"]
    torch.testing.assert_close(encoded.global_feature, encoded.patches.mean())
    torch.nn.init.normal_(model.pools["rgb"].attention.weight)
    moved = model.encode(pictures())["rgb"]
    weights = (moved.patches.features @ model.pools["rgb"].attention.weight[0]).softmax(1)
    expected = torch.einsum("bn,bnc->bc", weights, moved.patches.features)
    torch.testing.assert_close(moved.global_feature, expected)


def test_the_camera_embedding_moves_known_cameras_only():
    model, given = make(cameras=(1, 4)), pictures()
    plain = model(given)
    assert not torch.allclose(model(given, cameras=torch.tensor([1, 4, 1]))[0], plain[0])
    torch.testing.assert_close(model(given, cameras=torch.tensor([7, 7, 7])), plain)
    encoded = model.encode(given, torch.tensor([4, 7, 1]))["rgb"].patches.features
    shift = encoded - model.encode(given)["rgb"].patches.features
    torch.testing.assert_close(shift[0, 0], model.cameras.weight[1], atol=1e-5, rtol=1e-4)
    assert not shift[1].any()
    with pytest.raises(ValueError, match="cameras: expected 3 numbers"):
        model(given, cameras=torch.tensor([1]))


def test_every_weight_in_use_learns():
    model = make(recipe=reidentification(selection="straight_through"), global_local=True).train()
    description = model.describe(model.encode(pictures(4)))
    sum(model.logits(description, kind).square().sum() for kind in ("original", "slimmed")).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
            # A constant added to all logits of a token cancels in the softmax over patches.
            assert bool(parameter.grad.any()) or name.endswith("networks.sparse.3.bias"), name


@pytest.mark.parametrize("size", [(256, 128), (128, 256)])
def test_a_vision_transformer_at_the_published_sizes(size):
    """Trained at 224 x 224, used at 256 x 128 or 128 x 256: 128 patches become 31 tokens a modality."""
    tiny = {
        "model_type": "vit",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 224,
        "patch_size": 16,
    }
    model = make(image_encoder={"kind": "huggingface", "config": tiny, "size": list(size)}, channels=24)
    assert model.encoder.patches == 128
    encoded = model.encode(pictures(2, size))
    description = model.describe(encoded)
    assert description.slim["tir"].tokens.shape == (2, 31, 24)
    assert description.slim["rgb"].kept.sum(1).tolist() == [77, 77]
    assert description.original.shape == (2, 72)


def test_any_set_of_modalities():
    model = make(modalities=("day", "depth"))
    found = model({name: torch.randn(2, 3, 64, 32) for name in ("day", "depth")})
    assert found.shape == (2, 64)


def test_saving_and_loading(tmp_path):
    model, given = make(cameras=(0, 3), recipe=reidentification(keep_ratio=0.7)), pictures()
    model.save(tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    modes = {path.stat().st_mode for path in (tmp_path / "model").iterdir()}
    assert len(modes) == 1  # who may read the configuration may read the weights
    again = load(tmp_path / "model")
    assert (
        not again.training and again.config.recipe == model.config.recipe and again.config.cameras == (0, 3)
    )
    cameras = torch.tensor([0, 3, 0])
    assert torch.equal(again(given, cameras=cameras), model(given, cameras=cameras))


def test_a_broken_folder_meets_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="there is no such folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="expected a model's configuration"):
        load(tmp_path)
    make().save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not the weights of this model"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"recipe": {}}')
    with pytest.raises(ValueError, match="not the configuration of a re-identification model"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: make(features="all"), "features: expected both, original, slimmed"),
        (lambda: make(identities=0), "identities, channels"),
        (lambda: make()({}), "pixels: expected some of rgb, nir, tir"),
        (lambda: make()({"sound": torch.randn(1, 3, 64, 32)}), "found 'sound'"),
        (lambda: make()(pictures() | {"tir": torch.randn(2, 3, 64, 32)}), "equally many of every modality"),
        (lambda: make()(pictures(size=(32, 32))), r"pixels: expected shape \(B, 3, 64, 32\)"),
    ],
)
def test_bad_input_meets_one_sentence(build, sentence):
    with pytest.raises(ValueError, match=sentence):
        build()


def test_classes_follow_the_order_of_identities():
    assert class_of([7, 3, 7, 12]) == {3: 0, 7: 1, 12: 2}

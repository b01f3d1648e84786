"""Slimming of several modalities: the ancestors' numbers, the equations, and what absence means."""

import pytest
import torch
from torch import Tensor

from seps.compat import MultiModalSDTPS
from seps.modalities import RGB_NIR_TIR, MultiModalSlimmer, reidentification
from seps.slimming import aggregate_count, keep_count
from seps.tokens import Tokens

CHANNELS = 16
Inputs = tuple[dict[str, Tokens], dict[str, Tensor]]


def make(names=RGB_NIR_TIR, batch=3, patches=12, seed=0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    tokens = {name: Tokens(torch.randn(batch, patches, CHANNELS, generator=generator)) for name in names}
    return tokens, {name: torch.randn(batch, CHANNELS, generator=generator) for name in names}


def slimmer(names=RGB_NIR_TIR, patches=12, **changes) -> MultiModalSlimmer:
    torch.manual_seed(1)
    return MultiModalSlimmer(names, reidentification(**changes), patches, CHANNELS).eval()


def slow_tokens(model, tokens: Inputs, sample: int, name: str, present: set[str]) -> Tensor:
    """Equations 1 to 4 for one sample and modality, written out patch by patch."""
    patches, anchors = tokens
    values, part, recipe = patches[name].features[sample], model.slimmers[name], model.recipe
    others = [other for other in model.modalities if other != name]

    def scaled(vector):
        cosines = torch.stack([torch.cosine_similarity(patch, vector, dim=0) for patch in values])
        return (cosines - cosines.min()) / (cosines.max() - cosines.min() + 1e-8)

    share = 1 - max(2, len(others)) * recipe.mixing
    score = share * part.predictors["sparse"](values).squeeze(1)
    score = score + 2 * recipe.mixing * scaled(anchors[name][sample])
    for other in others:
        if other in present:
            score = score + recipe.mixing * scaled(anchors[other][sample])
    keep = keep_count(len(values), recipe.keep_ratio)
    order = score.argsort(descending=True)
    kept, dropped = sorted(order[:keep].tolist()), sorted(order[keep:].tolist())
    logits = part.networks["sparse"](values[kept]) * part.scale[0, 0]
    rows = [logits[:, j].softmax(0) @ values[kept] for j in range(logits.shape[1])]
    rows.append(score[dropped].softmax(0) @ values[dropped])
    return torch.stack(rows)


@pytest.mark.parametrize("names", [("rgb",), ("a", "b"), RGB_NIR_TIR, ("a", "b", "c", "d"), tuple("abcde")])
def test_any_number_of_modalities_agrees_with_the_equations(names):
    model = slimmer(names)
    inputs = make(names)
    slim = model(*inputs)
    assert list(slim) == list(names)
    for name in names:
        for sample in range(3):
            expected = slow_tokens(model, inputs, sample, name, set(names))
            torch.testing.assert_close(slim[name][sample], expected, atol=1e-5, rtol=1e-4)


def test_counts_of_the_re_identification_setting():
    assert (keep_count(128, 0.6), aggregate_count(128, 0.4, 0.6)) == (77, 30)
    model = slimmer(patches=128)
    seen = model.inspect(*make(patches=128))
    assert all(each.tokens.shape == (3, 31, CHANNELS) for each in seen.values())
    assert all(each.kept.sum(1).tolist() == [77] * 3 for each in seen.values())


def test_modalities_may_have_different_numbers_of_patches():
    patches = {"rgb": 12, "sound": 30}
    model = slimmer(("rgb", "sound"), patches)
    tokens = {name: Tokens(torch.randn(2, count, CHANNELS)) for name, count in patches.items()}
    slim = model(tokens, {name: torch.randn(2, CHANNELS) for name in patches})
    assert [slim[name].shape[1] for name in patches] == [int(12 * 0.24) + 1, int(30 * 0.24) + 1]


def test_an_absent_modality_guides_nothing_for_that_sample_only():
    model, inputs = slimmer(), make()
    present = {"nir": torch.tensor([True, False, True])}
    seen, whole = model.inspect(*inputs, present), model.inspect(*inputs)
    for name in ("rgb", "tir"):
        for sample in range(3):
            there = set(RGB_NIR_TIR) - ({"nir"} if sample == 1 else set())
            expected = slow_tokens(model, inputs, sample, name, there)
            torch.testing.assert_close(seen[name].tokens[sample], expected, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(seen[name].tokens[1], whole[name].tokens[1])
    assert not seen["nir"].tokens[1].any() and not seen["nir"].kept[1].any()
    torch.testing.assert_close(seen["nir"].tokens[[0, 2]], whole["nir"].tokens[[0, 2]])


@pytest.mark.parametrize("selection", ["topk", "straight_through", "gumbel_topk", "gates", "soft"])
def test_an_absent_modality_may_hold_anything_and_learns_nothing(selection):
    model = slimmer(selection=selection).train()
    patches, anchors = make()
    wild = patches["tir"].features.clone()
    wild[0] = torch.nan
    wild.requires_grad_()
    anchor = anchors["tir"].clone()
    anchor[0] = torch.inf
    seen = model.inspect(
        patches | {"tir": Tokens(wild)}, anchors | {"tir": anchor}, {"tir": torch.tensor([False, True, True])}
    )
    total = sum(each.tokens.square().sum() + each.feature.sum() for each in seen.values())
    assert torch.isfinite(total)
    total.backward()
    assert not wild.grad[0].any() and wild.grad[1:].any(-1).any(-1).all()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    assert gradients and all(torch.isfinite(gradient).all() for gradient in gradients)


def test_a_modality_absent_everywhere_equals_one_left_out():
    model, (patches, anchors) = slimmer(), make()
    nowhere = model(patches, anchors, {"nir": torch.zeros(3, dtype=torch.bool)})
    del patches["nir"], anchors["nir"]
    left_out = model(patches, anchors)
    assert set(left_out) == {"rgb", "tir"}
    for name, tokens in left_out.items():
        torch.testing.assert_close(tokens, nowhere[name])


def test_samples_do_not_meet_each_other():
    model, (patches, anchors) = slimmer(), make()
    whole = model(patches, anchors)
    for sample in range(3):
        alone = model(
            {name: each[[sample]] for name, each in patches.items()},
            {name: each[[sample]] for name, each in anchors.items()},
        )
        for name in RGB_NIR_TIR:
            torch.testing.assert_close(alone[name][0], whole[name][sample], atol=1e-6, rtol=1e-5)


def test_padding_changes_nothing():
    model, (patches, anchors) = slimmer(), make()
    longer = torch.full((3, 15, CHANNELS), 1e6)
    longer[:, :12] = patches["rgb"].features
    padded = patches | {"rgb": Tokens.padded(longer, [12, 12, 12])}
    torch.testing.assert_close(model(padded, anchors)["rgb"], model(patches, anchors)["rgb"])


def test_guidance_sends_no_gradient():
    model, (patches, anchors) = slimmer().train(), make()
    for anchor in anchors.values():
        anchor.requires_grad_()
    sum(tokens.sum() for tokens in model(patches, anchors).values()).backward()
    assert all(anchor.grad is None for anchor in anchors.values())


def test_the_guides_of_the_others_matter():
    model, (patches, anchors) = slimmer(), make()
    other = model(patches, anchors | {"tir": -anchors["tir"]})
    whole = model(patches, anchors)
    assert not torch.allclose(other["rgb"], whole["rgb"])
    assert not torch.allclose(other["nir"], whole["nir"])


def test_tokens_are_aggregated_not_gathered():
    """Fewer tokens than kept patches, each of them a convex combination of patches."""
    seen = slimmer().inspect(*make())["rgb"]
    assert seen.tokens.shape[1] - 1 < int(seen.kept[0].sum())
    weights = seen.branch.aggregation[:, 0]
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:2]))
    assert bool((weights >= 0).all()) and bool(((weights > 0).sum(-1) > 1).all())


@pytest.mark.parametrize(("ratio", "tokens"), [(0.2, 1), (0.4, 2), (1.0, 7)])
def test_the_aggregation_ratio_sets_the_number_of_tokens(ratio, tokens):
    assert slimmer(aggregate_ratio=ratio)(*make())["tir"].shape[1] == tokens + 1
    compat = MultiModalSDTPS(CHANNELS, 12, aggr_ratio=ratio)
    patches, anchors = make()
    enhanced = compat(*(each.features for each in patches.values()), *anchors.values())[0]
    assert enhanced.shape[1] == tokens + 1


def test_the_gumbel_switch_has_an_effect():
    """The decision's gradient reaches the predictor, and differs from draw to draw; the value stays."""
    patches, anchors = make()
    inputs = (*(each.features for each in patches.values()), *anchors.values())

    def gradients(noisy: bool, seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        model = MultiModalSDTPS(CHANNELS, 12, use_gumbel=noisy).train()
        torch.manual_seed(seed)
        tokens = model(*inputs)[0]
        # Of the aggregated tokens alone: the residual token teaches the predictor without any noise.
        tokens[:, :-1].square().sum().backward()
        found = model.get_parameter("rgb_sparse.score_predictor.0.weight").grad
        return tokens.detach(), torch.zeros(()) if found is None else found

    plain, still = gradients(False, 1)
    first, one = gradients(True, 1)
    second, other = gradients(True, 2)
    assert not still.any() and one.any() and other.any()
    assert not torch.allclose(one, other)
    torch.testing.assert_close(first, plain)
    torch.testing.assert_close(second, plain)


def test_sampling_draws_other_patches_and_evaluation_does_not():
    model, inputs = slimmer(selection="gumbel_topk"), make()
    torch.testing.assert_close(model(*inputs)["rgb"], model(*inputs)["rgb"])
    model.train()
    assert not torch.equal(model.inspect(*inputs)["rgb"].kept, model.inspect(*inputs)["rgb"].kept)


def test_half_precision_is_lifted():
    model, (patches, anchors) = slimmer(), make()
    half = model(
        {name: each.to(torch.bfloat16) for name, each in patches.items()},
        {name: each.bfloat16() for name, each in anchors.items()},
    )
    assert half["rgb"].dtype == torch.float32


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: slimmer(()), "at least one"),
        (lambda: slimmer(("rgb", "rgb")), "different names"),
        (lambda: slimmer(patches={"rgb": 12}), "expected a number for rgb, nir, tir"),
        (lambda: slimmer(dense="fused"), "dense='none'"),
        (lambda: slimmer(tuple("abcdef")), "mixing: expected at most 0.2 with 5 guides"),
        (lambda: slimmer()({}, {}), "expected some of rgb, nir, tir"),
        (lambda: slimmer()(*make(("rgb", "sound"))), "found 'sound'"),
        (lambda: slimmer()(make()[0], {}), r"global_features\['rgb'\]: expected shape \(3, 16\), found none"),
        (lambda: slimmer()(make()[0] | {"tir": make(batch=2)[0]["tir"]}, make()[1]), r"patches\['tir'\]"),
        (lambda: slimmer()(*make(), {"rgb": torch.ones(3)}), r"present\['rgb'\]: expected 3 booleans"),
        (
            lambda: slimmer()(make()[0], make()[1] | {"nir": torch.full((3, CHANNELS), torch.nan)}),
            r"global_features\['nir'\]: expected finite",
        ),
    ],
)
def test_bad_input_meets_one_sentence(build, sentence):
    with pytest.raises(ValueError, match=sentence):
        build()

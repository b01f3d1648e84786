import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from making import SELECTIONS, make_images, make_words, refusal
from seps.head import SlimHead
from seps.losses import ratio
from seps.recipe import described, laps, paper, released
from seps.slimming import (
    Branch,
    Slimmer,
    aggregate_count,
    aggregation_weights,
    decide,
    guidance,
    keep_count,
    min_max,
    mix,
    residual_weights,
    token_weights,
    top_mask,
    unit,
)
from seps.tokens import Tokens

NOISY = ("straight_through", "gumbel_topk", "gates")
GRADED = (*NOISY, "soft")


def random_decision(images: int, texts: int, patches: int, keep: int) -> tuple[Tensor, Tensor]:
    saliency = torch.randn(images, texts, patches)
    return saliency, top_mask(saliency, torch.full((images,), keep))


# Counts


@pytest.mark.parametrize(
    ("patches", "keep_ratio", "aggregate_ratio", "kept", "aggregated"),
    [(196, 0.5, 0.4, 98, 39), (49, 0.8, 0.6, 40, 23), (128, 0.6, 0.4, 77, 30), (1, 0.01, 0.01, 1, 1)],
)
def test_counts_of_the_specification(patches, keep_ratio, aggregate_ratio, kept, aggregated):
    assert keep_count(patches, keep_ratio) == kept
    assert aggregate_count(patches, aggregate_ratio, keep_ratio) == aggregated
    slimmer = Slimmer(paper(keep_ratio=keep_ratio, aggregate_ratio=aggregate_ratio), patches, 16)
    images = Tokens(torch.randn(2, patches, 16))
    branches = slimmer(images, {"sparse": [torch.randn(1, 3, 16)]})
    assert branches["sparse"].kept.sum(-1).eq(kept).all()
    assert token_weights(list(branches.values())).shape == (2, 3, aggregated + 1, patches)


@pytest.mark.parametrize("cls", [False, True])
def test_a_cls_token_comes_first_and_is_never_guessed(cls):
    # 49 patches is a square number, 50 tokens with CLS is none; and the other way round.
    images = make_images(2, 49, 16, cls=cls)
    recipe = paper(keep_ratio=0.8, aggregate_ratio=0.6, dense="none")
    seen = SlimHead(recipe, 49, 16).inspect(images, make_words(channels=16))
    assert seen.tokens["sparse"].shape == (2, 5, 24 + cls, 16)
    if cls:
        torch.testing.assert_close(seen.tokens["sparse"][:, 0, 0], unit(images.cls))


def test_parameters_of_the_heads():
    def parameters(recipe, patches, channels):
        return sum(each.numel() for each in SlimHead(recipe, patches, channels).parameters())

    halves = {"keep_ratio": 0.5, "aggregate_ratio": 0.5}
    assert parameters(released(**halves), 16, 32) == 291
    assert parameters(paper(**halves), 16, 32) == 1_198
    assert parameters(released(**halves), 196, 512) == 58_398
    assert parameters(paper(**halves), 196, 512) == 248_452


# Equations 1 to 3


def test_unit_vectors_and_the_zero_vector():
    vectors = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
    units = unit(vectors)
    torch.testing.assert_close(units, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    units.sum().backward()
    assert vectors.grad[1].tolist() == [0, 0]
    assert torch.isfinite(vectors.grad).all()


def test_guidance_is_a_cosine_of_the_image_or_of_the_text_and_does_not_teach():
    patches = torch.tensor([[[2.0, 0.0], [0.0, 3.0], [1.0, 1.0]], [[0.0, 1.0], [0.0, 0.0], [-1.0, 0.0]]])
    patches.requires_grad_()
    half = math.sqrt(0.5)
    own = guidance(patches, torch.tensor([[[5.0, 0.0]], [[0.0, 1.0]]]))
    torch.testing.assert_close(own, torch.tensor([[[1, 0, half]], [[1, 0, 0.0]]]))
    texts = guidance(patches, torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]))
    torch.testing.assert_close(texts, torch.tensor([[[1, 0, half], [0, 1, half]], [[0, 0, -1], [1, 0, 0.0]]]))
    assert not texts.requires_grad


def test_min_max_spans_the_real_patches():
    signal = torch.tensor([[[1.0, 3.0, 2.0]], [[4.0, 8.0, 99.0]]])
    torch.testing.assert_close(min_max(signal[:1]), torch.tensor([[[0, 1, 0.5]]]))
    mask = torch.tensor([[True, True, True], [True, True, False]])
    torch.testing.assert_close(min_max(signal, mask), torch.tensor([[[0, 1, 0.5]], [[0, 1, 0.0]]]))
    assert min_max(torch.ones(1, 1, 3)).tolist() == [[[0, 0, 0]]]


def test_the_mix_shrinks_the_prediction_by_the_number_of_guides():
    predicted, anchor = torch.tensor([[[0.8]]]), torch.tensor([[[0.5]]])
    one, two, three = (torch.tensor([[[value]]]) for value in (0.2, 0.6, 1.0))

    def mixed(guides, mixing=0.25):
        return mix(predicted, anchor, guides, mixing).item()

    assert mixed([one, two]) == pytest.approx(0.5 * 0.8 + 0.25 * (0.2 + 0.6 + 2 * 0.5))
    assert mixed([one]) == pytest.approx(0.5 * 0.8 + 0.25 * (0.2 + 2 * 0.5))
    assert mixed([one, torch.zeros(1, 1, 1)]) == pytest.approx(mixed([one]))
    assert mixed([]) == pytest.approx(0.5 * 0.8 + 0.25 * 2 * 0.5)
    assert mixed([one, two, three]) == pytest.approx(0.25 * 0.8 + 0.25 * (0.2 + 0.6 + 1.0 + 2 * 0.5))
    assert mixed([one, two], 0.0) == pytest.approx(0.8)


# Selection


def test_the_top_patches_stay_and_ties_go_to_the_earlier():
    saliency = torch.tensor([[[0.1, 0.9, 0.5, 0.5]], [[1.0, 1.0, 1.0, 1.0]]])
    assert top_mask(saliency, torch.tensor([2, 3])).tolist() == [[[0, 1, 1, 0]], [[1, 1, 1, 0]]]


def test_kept_patches_are_listed_the_most_salient_first():
    saliency = torch.tensor([[[0.1, 0.9, 0.5, 0.7]]])
    decision = top_mask(saliency, torch.tensor([3]))
    branch = Branch(saliency, decision, decision.unsqueeze(2), decision)
    assert branch.indices(0).tolist() == [1, 3, 2]


@given(st.integers(1, 12), st.data())
def test_every_hard_mode_keeps_its_number_of_real_patches(patches, data):
    keep = data.draw(st.integers(1, patches))
    padding = data.draw(st.integers(0, 3))
    saliency = torch.randn(2, 3, patches + padding)
    mask = torch.arange(patches + padding).lt(patches).expand(2, -1)
    for mode in ("topk", "straight_through", "gumbel_topk"):
        decision = decide(saliency, torch.tensor([keep, keep]), mode, mask, torch.rand_like(saliency))
        assert set(decision.unique().tolist()) <= {0.0, 1.0}
        assert decision.sum(-1).eq(keep).all()
        assert not decision[..., patches:].any()


def test_straight_through_selects_what_topk_selects():
    saliency, hard = random_decision(3, 4, 10, 4)
    uniform = torch.rand_like(saliency)
    assert torch.equal(decide(saliency, torch.full((3,), 4), "straight_through", uniform=uniform), hard)


def test_the_sampled_ranking_differs_and_follows_the_saliency():
    saliency = torch.tensor([3.0, 1.0, 0.0, -1.0]).expand(2000, 1, 4)
    decision = decide(
        saliency, torch.ones(2000).long(), "gumbel_topk", uniform=torch.rand(2000, 1, 4).clamp(1e-6)
    )
    # The Gumbel-max trick: patches are drawn with the probabilities of the softmax.
    torch.testing.assert_close(decision.mean((0, 1)), saliency[0, 0].softmax(-1), atol=0.03, rtol=0)


def test_gates_open_with_the_odds_and_never_close_all():
    odds = torch.tensor([-2.0, 0.0, 3.0]).expand(4000, 1, 3)
    decision = decide(odds, torch.ones(4000).long(), "gates", uniform=torch.rand(4000, 1, 3).clamp(1e-6))
    torch.testing.assert_close(decision[..., :2].mean((0, 1)), odds[0, 0, :2].sigmoid(), atol=0.03, rtol=0)
    assert decision[..., 2].all()  # the best patch stays whatever the draw
    shut = decide(
        torch.full((1, 1, 3), -50.0), torch.tensor([1]), "gates", uniform=torch.full((1, 1, 3), 0.5)
    )
    assert shut.sum() == 1


def test_soft_weighs_every_patch():
    saliency = torch.tensor([[[0.0, 1.0, 2.0]]])
    decision = decide(saliency, torch.tensor([2]), "soft")
    torch.testing.assert_close(decision, (2 * saliency.softmax(-1)).clamp(max=1))
    assert decide(saliency, torch.tensor([2]), "soft", temperature=0.1)[0, 0, 0] < decision[0, 0, 0]


def test_topk_sends_no_gradient_and_every_other_mode_does():
    for mode in SELECTIONS:
        saliency = torch.randn(2, 3, 8, requires_grad=True)
        decision = decide(saliency, torch.tensor([4, 4]), mode, uniform=torch.rand(2, 3, 8).clamp(1e-6))
        assert decision.requires_grad == (mode in GRADED)


@pytest.mark.parametrize("mode", SELECTIONS)
def test_an_item_of_nothing_but_padding_stays_finite(mode):
    saliency = torch.randn(2, 3, 8, requires_grad=True)
    mask = torch.tensor([[True] * 8, [False] * 8])
    decision = decide(saliency, torch.tensor([4, 1]), mode, mask, torch.rand(2, 3, 8).clamp(1e-6))
    weights = aggregation_weights(torch.randn(2, 5, 8), decision)
    assert torch.isfinite(weights).all()
    (gradient,) = torch.autograd.grad(weights.square().sum() + 0 * saliency.sum(), saliency)
    assert torch.isfinite(gradient).all()


def test_what_a_decision_needs_is_asked_for():
    saliency, keep = torch.zeros(1, 1, 2), torch.tensor([1])
    assert refusal(lambda: decide(saliency, keep, "gates")) == (
        "uniform: expected numbers for the noise of selection 'gates', found none"
    )
    assert refusal(lambda: decide(saliency, keep, "best")) == (
        "selection: expected one of topk, straight_through, gumbel_topk, gates, soft, found 'best'"
    )


# Equation 4


@given(st.integers(1, 4), st.integers(1, 12), st.data())
def test_a_hard_decision_equals_gathering(tokens, patches, data):
    keep = data.draw(st.integers(1, patches))
    spread = data.draw(st.sampled_from([0.1, 1.0, 30.0]))
    _, decision = random_decision(2, 3, patches, keep)
    logits = spread * torch.randn(2, tokens, patches)
    weights = aggregation_weights(logits, decision)
    assert weights.shape == (2, 3, tokens, patches)
    for image in range(2):
        for text in range(3):
            kept = decision[image, text].nonzero().squeeze(1)
            expected = torch.zeros(tokens, patches)
            expected[:, kept] = logits[image][:, kept].softmax(-1)
            torch.testing.assert_close(weights[image, text], expected, atol=1e-6, rtol=1e-5)


@given(st.integers(2, 12), st.data())
def test_the_residual_token_gathers_what_was_dropped(patches, data):
    keep = data.draw(st.integers(1, patches - 1))
    saliency, decision = random_decision(2, 2, patches, keep)
    weights = residual_weights(saliency, decision)
    expected = saliency.masked_fill(decision > 0.5, -math.inf).softmax(-1)
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)


def test_sharpness_sets_tokens_apart_before_anything_is_learned():
    def likeness(sharpness: float) -> float:
        torch.manual_seed(0)
        slimmer = Slimmer(paper(sharpness=sharpness), 64, 32)
        branch = slimmer(Tokens(patches), {"sparse": [torch.randn(1, 1, 32)]})["sparse"]
        tokens = unit(branch.aggregation[0] @ patches)
        return float((tokens @ tokens.transpose(1, 2)).mean().detach())

    patches = torch.randn(3, 64, 32)
    alike, apart, further = (likeness(sharpness) for sharpness in (1.0, 8.0, 32.0))
    assert alike > 0.9
    assert further < apart < 0.7


def test_where_nothing_was_kept_there_is_no_token():
    logits, decision = torch.randn(1, 2, 5, requires_grad=True), torch.zeros(1, 3, 5)
    weights = aggregation_weights(logits, decision)
    weights.sum().backward()
    assert weights.shape == (1, 3, 2, 5)
    assert not weights.any()
    assert not logits.grad.any()


def test_where_nothing_was_dropped_there_is_no_residual():
    saliency = torch.randn(1, 2, 5, requires_grad=True)
    weights = residual_weights(saliency, torch.ones(1, 2, 5))
    weights.sum().backward()
    assert not weights.any()
    assert not saliency.grad.any()


def test_padding_is_neither_kept_nor_left_over():
    saliency = torch.tensor([[[0.0, 1.0, 50.0]]])
    decision = torch.tensor([[[0.0, 1.0, 0.0]]])
    weights = residual_weights(saliency, decision, torch.tensor([[True, True, False]]))
    assert weights.tolist() == [[[1, 0, 0]]]


def make_branch(rows: float, residual: float, present: Tensor | None = None) -> Branch:
    values = torch.zeros(2, 1, 1)
    return Branch(values, values, torch.full((2, 1, 1, 1), rows), torch.full((2, 1, 1), residual), present)


def test_branches_add_their_tokens_and_average_their_residual():
    whole = token_weights([make_branch(1.0, 0.4), make_branch(10.0, 0.8)])
    torch.testing.assert_close(whole[:, 0, :, 0], torch.tensor([[11.0, 0.6], [11.0, 0.6]]))
    partly = token_weights([make_branch(1.0, 0.4), make_branch(10.0, 0.8, torch.tensor([[True], [False]]))])
    torch.testing.assert_close(partly[:, 0, :, 0], torch.tensor([[11.0, 0.6], [1.0, 0.4]]))


def test_a_branch_that_takes_no_part_weighs_nothing_and_teaches_nothing():
    branch = make_branch(1.0, 0.4, torch.tensor([[True], [False]]))
    branch.residual.requires_grad_()
    weights = token_weights([branch])
    weights.sum().backward()
    torch.testing.assert_close(weights[:, 0, :, 0], torch.tensor([[1.0, 0.4], [0.0, 0.0]]))
    assert branch.residual.grad.flatten().tolist() == [1, 0]


# The gradient of the decision, and the two traps of the known implementations


def decision_gradients(aggregate, mode: str, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of a loss with respect to the tokens and to the saliency, and what was kept."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(2, 12, 8, generator=generator)
    logits = scale * torch.randn(2, 3, 12, generator=generator)
    saliency = torch.rand(2, 4, 12, generator=generator).requires_grad_()
    uniform = torch.rand(2, 4, 12, generator=generator).clamp(1e-6)
    decision = decide(saliency, torch.tensor([5, 5]), mode, uniform=uniform)
    tokens = aggregate(logits, decision) @ values.unsqueeze(1)
    tokens.retain_grad()
    (tokens * torch.randn(tokens.shape, generator=generator)).sum().backward()
    return tokens.grad, saliency.grad, decision.detach() > 0.5


def subtracted(logits: Tensor, decision: Tensor) -> Tensor:
    """The ancestors' form: what is dropped is pushed out of the softmax by a huge number."""
    return (logits.unsqueeze(1) - (1 - decision.unsqueeze(2)) * 1e10).softmax(-1)


def gathered(logits: Tensor, decision: Tensor) -> Tensor:
    """The other ancestors' form: the kept patches are taken out by their indices."""
    kept = (decision.detach() > 0.5).unsqueeze(2)
    return logits.unsqueeze(1).masked_fill(~kept, -math.inf).softmax(-1)


@pytest.mark.parametrize("mode", ["straight_through", "gumbel_topk", "gates"])
@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_the_decision_reaches_the_score_of_dropped_patches_at_a_sane_scale(mode, scale):
    tokens, saliency, kept = decision_gradients(aggregation_weights, mode, scale)
    assert torch.isfinite(saliency).all()
    assert (saliency[~kept] != 0).all()
    assert 1e-2 < saliency.abs().max() / tokens.abs().max() < 1e2


def test_trap_of_fixed_indices_is_absent():
    leaves = torch.randn(2, 4, 12, requires_grad=True)
    decision = decide(leaves, torch.tensor([5, 5]), "straight_through", uniform=torch.rand(2, 4, 12))
    logits = torch.randn(2, 3, 12, requires_grad=True)
    assert torch.autograd.grad(gathered(logits, decision).square().sum(), leaves, allow_unused=True) == (
        None,
    )
    (ours,) = torch.autograd.grad(aggregation_weights(logits, decision).square().sum(), leaves)
    assert ours.count_nonzero() == ours.numel()


def test_trap_of_the_huge_subtraction_is_absent():
    tokens, theirs, kept = decision_gradients(subtracted, "straight_through")
    assert theirs.abs().max() / tokens.abs().max() > 1e6
    tokens, ours, same = decision_gradients(aggregation_weights, "straight_through")
    assert torch.equal(kept, same)
    assert ours.abs().max() / tokens.abs().max() < 1e2


def test_the_three_forms_agree_in_value():
    _, decision = random_decision(2, 3, 9, 4)
    logits = torch.randn(2, 5, 9)
    torch.testing.assert_close(aggregation_weights(logits, decision), gathered(logits, decision))
    torch.testing.assert_close(aggregation_weights(logits, decision), subtracted(logits, decision))


def selected(mode: str, seed: int = 5) -> tuple[Branch, Tensor]:
    """What a slimmer in training decides, and the gradient its predictor receives."""
    torch.manual_seed(0)
    slimmer = Slimmer(paper(dense="none", selection=mode), 16, 32).train()
    images = make_images(cls=False)
    branch = slimmer(images, {"sparse": [torch.randn(1, 5, 32)]}, seed=seed)["sparse"]
    (token_weights([branch]) @ images.features.unsqueeze(1)).square().sum().backward()
    return branch, slimmer.predictors["sparse"][0].weight.grad


def test_switching_the_noise_on_changes_gradients_and_the_sampled_selection():
    plain, without = selected("topk")
    through, gradient = selected("straight_through")
    assert torch.equal(through.decision, plain.decision)
    assert not torch.allclose(gradient, without, rtol=1e-2)
    _, other = selected("straight_through", seed=6)
    assert not torch.allclose(gradient, other, rtol=1e-4)
    sampled, gradient = selected("gumbel_topk")
    assert not torch.equal(sampled.decision, plain.decision)
    assert not torch.allclose(gradient, without, rtol=1e-2)
    assert not torch.equal(selected("gumbel_topk", seed=6)[0].decision, sampled.decision)


@pytest.mark.parametrize("mode", SELECTIONS)
def test_evaluation_takes_the_top_whatever_the_mode(mode):
    slimmer = Slimmer(paper(dense="none", selection=mode), 16, 32)
    images, guides = make_images(cls=False), {"sparse": [torch.randn(1, 5, 32)]}
    torch.manual_seed(3)
    first = slimmer.eval()(images, guides, seed=1)["sparse"]
    second = slimmer(images, guides, seed=2)["sparse"]
    assert torch.equal(first.decision, second.decision)
    assert torch.equal(first.decision, top_mask(first.saliency.detach(), torch.full((4,), 8)))


# Equation 7 meets the decision


@pytest.mark.parametrize("mode", SELECTIONS)
def test_only_gates_give_the_ratio_loss_a_gradient(mode):
    slimmer = Slimmer(paper(dense="none", selection=mode), 16, 32).train()
    images = make_images(cls=False)
    branch = slimmer(images, {"sparse": [torch.randn(1, 5, 32)]})["sparse"]
    loss = ratio([branch.decision], 0.3)
    assert loss > 0
    if not loss.requires_grad:
        assert mode == "topk"
        return
    reached = torch.autograd.grad(loss, slimmer.predictors.parameters(), allow_unused=True)
    size = max(float(gradient.abs().max()) for gradient in reached)
    # A softmax over the patches has a constant mean; only its clamp at 1 lets a little through.
    assert size > 1e-4 if mode == "gates" else size < 1e-7


@pytest.mark.parametrize("keep_ratio", [0.3, 0.7])
@pytest.mark.parametrize("preset", [paper, laps, described])
def test_the_ratio_loss_moves_the_kept_share_of_gates(preset, keep_ratio):
    recipe = preset(selection="gates", keep_ratio=keep_ratio)
    slimmer = Slimmer(recipe, 32, 16).train()
    images = make_images(8, 32, 16, cls=False)
    guides = {name: [torch.randn(1, 6, 16)] for name in recipe.branches}
    with torch.no_grad():
        for gate in slimmer.gates.values():  # start on the wrong side
            gate.threshold += 0.4 if keep_ratio > 0.5 else -0.4
    optimiser = torch.optim.Adam(slimmer.parameters(), lr=0.03)

    def shares(seed):
        return [branch.decision for branch in slimmer(images, guides, seed=seed).values()]

    def distances(seed):
        return [abs(share.mean().item() - keep_ratio) for share in shares(seed)]

    start = distances(0)
    for step in range(120):
        optimiser.zero_grad()
        ratio(shares(step), keep_ratio).backward()
        optimiser.step()
    assert min(start) > 0.2
    assert max(distances(999)) < 0.05


# The slimmer


def test_a_slimmer_asks_for_channels_that_its_networks_can_use():
    assert refusal(lambda: Slimmer(paper(), 16, 4)) == (
        "patches, channels: expected at least 1 patch and 5 channels, found 16 and 4"
    )
    assert refusal(lambda: Slimmer(paper(), 0, 32)) == (
        "patches, channels: expected at least 1 patch and 5 channels, found 0 and 32"
    )
    assert refusal(lambda: Slimmer(paper(), 16.0, 32)) == (
        "patches, channels: expected at least 1 patch and 5 channels, found 16.0 and 32"
    )
    assert refusal(lambda: Slimmer("paper", 16, 32)) == "recipe: expected a Recipe, found 'paper'"


def test_any_number_of_guides_and_an_anchor_of_its_own():
    slimmer = Slimmer(paper(dense="none"), 16, 32).eval()
    images = make_images(cls=False)
    guides = [torch.randn(4, 1, 32) for _ in range(4)]
    seen = [slimmer(images, {"sparse": guides[:count]})["sparse"].saliency for count in range(5)]
    assert all(not torch.allclose(one, two) for one, two in pairwise(seen))
    anchored = slimmer(images, {"sparse": []}, anchor=guides[0][:, 0])["sparse"].saliency
    torch.testing.assert_close(
        anchored,
        mix(
            slimmer.predicted(images, "sparse"),
            min_max(guidance(images.features, guides[0])),
            [],
            slimmer.recipe.mixing,
        ),
    )


def test_images_of_different_lengths_keep_their_own_share():
    slimmer = Slimmer(laps(keep_ratio=0.5), 16, 32).eval()
    images = Tokens.padded(torch.randn(3, 16, 32), [16, 7, 1])
    assert slimmer(images, {"sparse": []})["sparse"].kept.sum(-1).flatten().tolist() == [8, 4, 1]

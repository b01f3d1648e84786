import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from making import refusal
from seps.losses import hinge, info_nce, ratio, ratio_of, same_image
from seps.recipe import laps, paper, released

SCORES = torch.tensor([[0.9, 0.8, 0.1], [0.3, 0.5, 0.6], [0.2, 0.75, 0.7]])


# The hinge, eq. 6


def test_hinge_by_hand():
    # Own pairs 0.9, 0.5, 0.7 and margin 0.2.
    texts = [[0.1, 0.0], [0.0, 0.3], [0.0, 0.25]]  # of each image: the wrong texts
    images = [[0.0, 0.0], [0.5, 0.45], [0.0, 0.1]]  # of each text: the wrong images
    everything = sum(map(sum, texts)) + sum(map(sum, images))
    hardest = sum(map(max, texts)) + sum(map(max, images))
    assert hinge(SCORES, negatives="all").item() == pytest.approx(everything)
    assert hinge(SCORES, negatives="hardest").item() == pytest.approx(hardest)
    assert hinge(SCORES, margin=0.0, negatives="hardest").item() == pytest.approx(0.1 + 0.05 + 0.3)


def test_texts_of_the_same_image_are_never_negatives():
    twins = torch.tensor([7, 3, 3])
    expected = torch.tensor([[1, 0, 0], [0, 1, 1], [0, 1, 1]]).bool()
    assert torch.equal(same_image(SCORES, twins), expected)
    assert torch.equal(same_image(SCORES, twins.tolist()), expected)
    assert hinge(SCORES, twins, "all").item() == pytest.approx(0.1 + 0.5)
    assert hinge(SCORES, torch.zeros(3), "hardest").item() == 0


def test_one_pair_has_no_negative():
    assert hinge(torch.tensor([[0.3]])).item() == 0
    assert info_nce(torch.tensor([[0.3]])).item() == pytest.approx(0)


@given(st.integers(1, 7), st.floats(0, 1))
def test_hinge_against_a_loop(batch, margin):
    scores, ids = torch.randn(batch, batch), torch.randint(0, 3, (batch,))
    everything = hardest = 0.0
    for own in range(batch):
        others = [each for each in range(batch) if ids[each] != ids[own]]
        texts = [max(0, margin + scores[own, each] - scores[own, own]) for each in others]
        images = [max(0, margin + scores[each, own] - scores[own, own]) for each in others]
        everything += sum(texts) + sum(images)
        hardest += max(texts, default=0) + max(images, default=0)
    assert float(hinge(scores, ids, "all", margin)) == pytest.approx(float(everything), abs=1e-4)
    assert float(hinge(scores, ids, "hardest", margin)) == pytest.approx(float(hardest), abs=1e-4)


# InfoNCE


def test_info_nce_by_hand():
    scores = torch.tensor([[2.0, 0.0], [1.0, 3.0]])
    rows = math.log(1 + math.exp(-2)) + math.log(1 + math.exp(-2))
    columns = math.log(1 + math.exp(-1)) + math.log(1 + math.exp(-3))
    assert info_nce(scores, temperature=1.0).item() == pytest.approx((rows + columns) / 4)
    assert info_nce(scores / 10, temperature=0.1).item() == pytest.approx((rows + columns) / 4)


def test_info_nce_leaves_out_other_texts_of_the_same_image():
    ids = torch.tensor([1, 2, 2])
    changed = SCORES.clone()
    changed[1, 2] = changed[2, 1] = 50.0
    torch.testing.assert_close(info_nce(changed, ids), info_nce(SCORES, ids))
    assert info_nce(changed) > info_nce(SCORES)


def test_the_temperature_learns():
    temperature = torch.tensor(0.07, requires_grad=True)
    info_nce(SCORES, torch.tensor([1, 2, 2]), temperature).backward()
    assert torch.isfinite(temperature.grad)
    assert temperature.grad != 0


# The ratio loss, eq. 7


def test_three_forms_of_the_ratio_loss_by_hand():
    sparse, dense = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([1.0, 0.0, 0.0, 0.0])
    both = [sparse, dense]  # shares 0.5 and 0.25
    assert ratio(both, 0.6, "joint").item() == pytest.approx((0.6 - 0.5 - 0.25) ** 2)
    assert ratio(both, 0.6, "joint", 0.5, 2.0).item() == pytest.approx((0.6 - 0.25 - 0.5) ** 2)
    assert ratio(both, 0.6, "per_branch").item() == pytest.approx(0.1**2 + 0.35**2)
    assert ratio(both, 0.6, "per_branch", 0.5, 2.0).item() == pytest.approx(0.5 * 0.1**2 + 2 * 0.35**2)
    assert ratio(both, 0.6, "summed", 0.5, 2.0).item() == pytest.approx(0.15**2)
    for form in ("joint", "per_branch", "summed"):
        assert ratio([sparse], 0.6, form).item() == pytest.approx(0.1**2)


def test_branches_of_different_shape_count_alike():
    # A dense branch guided by the image alone decides once for all texts.
    sparse, dense = torch.rand(3, 4, 8), torch.rand(3, 1, 8)
    whole = dense.expand(3, 4, 8)
    for form in ("joint", "per_branch", "summed"):
        torch.testing.assert_close(ratio([sparse, dense], 0.5, form), ratio([sparse, whole], 0.5, form))


def test_a_recipe_brings_its_form_and_its_weights():
    decisions = [torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])]
    recipe = paper(ratio_form="joint", ratio_weight=3.0, sparse_weight=0.5, dense_weight=0.25, keep_ratio=0.3)
    assert ratio_of(recipe, decisions).item() == pytest.approx(3 * (0.3 - 0.25 - 0.25) ** 2)
    assert ratio_of(released(), decisions).item() == pytest.approx(2 * (1.5 - 0.5) ** 2)
    assert ratio_of(laps(), decisions[:1]).item() == 0


# Golden numbers


@pytest.mark.parametrize("negatives", ["all", "hardest"])
@pytest.mark.parametrize("with_ids", [False, True])
def test_golden_hinge_and_its_gradient(golden, negatives, with_ids):
    meta, case = golden("losses")
    name = f"hinge_hard{int(negatives == 'hardest')}_ids{int(with_ids)}"
    scores = case["in.scores"].requires_grad_()
    loss = hinge(scores, case["in.img_ids"] if with_ids else None, negatives, meta["margin"])
    loss.backward()
    torch.testing.assert_close(loss, case[f"out.{name}"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scores.grad, case[f"grad.{name}"], rtol=1e-5, atol=1e-6)


def test_golden_ratio_losses_and_total(golden):
    meta, case = golden("losses")
    decisions = [case["in.ds"], case["in.dd"]]
    weights = (meta["lambda_sparse"], meta["lambda_dense"])

    def close(found, name):
        torch.testing.assert_close(found, case[name], rtol=1e-5, atol=1e-8)

    close(ratio(decisions, meta["rho"], "per_branch", *weights), "out.ratio_per_branch")
    close(ratio(decisions, meta["rho"], "summed"), "out.ratio_joint")
    close(ratio(decisions, meta["rho"], "joint", *weights), "out.ratio_eq7")


# Bad input


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: hinge(torch.zeros(2, 3)), "scores: expected a square batch (B, B), found (2, 3)"),
        (lambda: info_nce(torch.zeros(0, 0)), "scores: expected a square batch (B, B), found (0, 0)"),
        (lambda: hinge(torch.zeros(2)), "scores: expected a square batch (B, B), found (2,)"),
        (
            lambda: hinge(torch.zeros(2, 2), torch.zeros(3)),
            "image_ids: expected 2 of them, found shape (3,)",
        ),
        (
            lambda: hinge(torch.zeros(2, 2), negatives="some"),
            "negatives: expected one of all, hardest, found 'some'",
        ),
        (lambda: ratio([], 0.5), "decisions: expected those of one or two branches, found 0"),
        (
            lambda: ratio([torch.zeros(1)], 0.5, "both"),
            "form: expected one of joint, per_branch, summed, found 'both'",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(build, sentence):
    assert refusal(build) == sentence

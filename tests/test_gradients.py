"""Every parameter of every recipe, in every mode of selection, receives a finite gradient."""

from dataclasses import replace

import pytest
import torch

from making import RECIPES, SELECTIONS, make_case, make_head
from seps.losses import ratio_of

CASES = [
    (name, mode)
    for name, recipe in RECIPES.items()
    for mode in SELECTIONS
    if mode == "topk" or not recipe.detach_selection
]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_every_parameter_receives_a_finite_gradient(name, mode):
    recipe = replace(RECIPES[name], selection=mode)
    images, texts, dense = make_case(recipe)
    if recipe.dense == "matched":  # half of the images described, so that both terms learn
        recipe = replace(recipe, description_dropout=0.0)
        dense = dense.without(torch.tensor([True, False, True, False]))
    head = make_head(recipe).train()
    seen = head.inspect(images, texts, dense)
    upstream = torch.randn_like(seen.scores)
    for scores in (seen.scores, head(images, texts, dense)):
        head.zero_grad()
        ((scores * upstream).sum() + ratio_of(recipe, seen.decisions)).backward(retain_graph=True)
        for key, parameter in head.named_parameters():
            assert parameter.grad is not None, key
            assert torch.isfinite(parameter.grad).all(), key
            # A softmax does not see a constant: the last bias before it learns nothing, by nature.
            silent = ".networks." in key and key.endswith(".3.bias")
            assert silent or parameter.grad.abs().max() > 0, key


@pytest.mark.parametrize("name", RECIPES)
def test_the_gradient_of_the_scores_is_the_slope_of_the_scores(name):
    """Against finite differences, where the decision is a constant: in evaluation."""
    recipe = RECIPES[name]
    images, texts, dense = make_case(recipe, count=2, patches=8, channels=16)
    images, texts = images.to(torch.float64), texts.to(torch.float64)
    dense = None if dense is None else dense.to(torch.float64)
    head = make_head(recipe, 8, 16).double()
    direction = [torch.randn_like(parameter) for parameter in head.parameters()]
    upstream = torch.randn(2, 5, dtype=torch.float64)
    gradients = torch.autograd.grad(
        (head(images, texts, dense) * upstream).sum(), list(head.parameters()), allow_unused=True
    )
    slope = sum(
        (gradient * step).sum()
        for gradient, step in zip(gradients, direction, strict=True)
        if gradient is not None
    )
    step = 1e-6

    def moved(sign):
        with torch.no_grad():
            for parameter, change in zip(head.parameters(), direction, strict=True):
                parameter += sign * step * change
            scores = (head(images, texts, dense) * upstream).sum()
            for parameter, change in zip(head.parameters(), direction, strict=True):
                parameter -= sign * step * change
        return scores

    torch.testing.assert_close(slope, (moved(1) - moved(-1)) / (2 * step), rtol=1e-4, atol=1e-6)

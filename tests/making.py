"""What the tests of the method are made of: random tokens and heads of a small size."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from seps.head import SlimHead
from seps.recipe import PRESETS, Recipe
from seps.tokens import Tokens

SELECTIONS = ("topk", "straight_through", "gumbel_topk", "gates", "soft")

# Every preset with every side and every form of dense text it knows.
RECIPES: dict[str, Recipe] = {
    "paper": PRESETS["paper"](),
    "paper, published protocol": PRESETS["paper"](dense_side="text"),
    "paper, one network": PRESETS["paper"](aggregation="shared"),
    "paper, no dense text": PRESETS["paper"](dense="none"),
    "released": PRESETS["released"](),
    "released, published protocol": PRESETS["released"](dense_side="text"),
    "released, not detached": PRESETS["released"](detach_selection=False),
    "laps": PRESETS["laps"](),
    "described": PRESETS["described"](),
    "described, slimmed": PRESETS["described"](description_tokens="slimmed", description_length=12),
}


def make_images(count: int = 4, patches: int = 16, channels: int = 32, cls: bool = True) -> Tokens:
    features = torch.randn(count, patches, channels)
    return Tokens(features, cls=torch.randn(count, channels) if cls else None)


def make_words(lengths: Iterable[int] = (5, 9, 1, 7, 3), channels: int = 32) -> Tokens:
    return Tokens.ragged([torch.randn(length, channels) for length in lengths])


def make_dense(recipe: Recipe, images: int = 4, texts: int = 5, channels: int = 32) -> Tokens | None:
    """Dense text for the side of a recipe, of 6 words and more; none where the recipe has none."""
    if recipe.dense == "none":
        return None
    return make_words(range(6, 6 + (images if recipe.dense_side == "image" else texts)), channels)


def make_case(recipe: Recipe, **sizes: Any) -> tuple[Tokens, Tokens, Tokens | None]:
    """Images, texts and the dense text a recipe wants."""
    images = make_images(**sizes)
    return images, make_words(channels=images.channels), make_dense(recipe, len(images), 5, images.channels)


def make_head(recipe: Recipe, patches: int = 16, channels: int = 32) -> SlimHead:
    """A head in evaluation whose every parameter is off its start."""
    head = SlimHead(recipe, patches, channels).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return head


def relative_error(found: Tensor, expected: Tensor, floor: float = 1e-6) -> float:
    """Largest deviation, relative to the largest expected number."""
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=floor)).item()


def refusal(build: Callable[[], object]) -> str:
    """The sentence with which something is refused."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller reads the sentence
        build()
    return str(caught.value)

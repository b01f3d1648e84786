from dataclasses import FrozenInstanceError, fields, replace
from typing import Any, get_args, get_type_hints

import pytest
import torch

from making import make_case, make_head, refusal
from seps.losses import ratio_of
from seps.recipe import PRESETS, Recipe, described, laps, paper, released

# Values of the numeric choices to try, beside every name a choice of names allows.
NUMBERS: dict[str, tuple[Any, ...]] = {
    "top_k": (1, 7),
    "temperature": (0.5, 2.0),
    "detach_selection": (True, False),
    "ratio_weight": (0.0, 1.0),
    "sparse_weight": (0.0, 0.5),
    "dense_weight": (0.0, 0.5),
    "keep_ratio": (0.01, 0.3, 1.0),
    "aggregate_ratio": (0.01, 0.6, 1.0),
    "mixing": (0.0, 0.1, 0.5),
    "sharpness": (0.5, 8.0),
    "description_length": (1, 12),
    "description_dropout": (0.0, 0.9),
}
OVERRIDES = [
    (name, value)
    for name, hint in get_type_hints(Recipe).items()
    for value in (get_args(hint) or NUMBERS[name])
]
# Overrides of a preset that contradict its other choices.
REFUSED = {
    *((preset, "description_tokens", "slimmed") for preset in ("paper", "released", "laps")),
    ("described", "dense_side", "text"),
    *(("released", "selection", mode) for mode in ("straight_through", "gumbel_topk", "gates", "soft")),
}


def test_presets_are_the_table_of_the_specification():
    def choices(recipe: Recipe) -> tuple[str, ...]:
        return (
            recipe.scoring,
            recipe.dense,
            recipe.aggregation,
            recipe.affinity,
            recipe.pooling,
            recipe.ratio_form,
        )

    assert choices(paper()) == ("mix", "fused", "dual", "cosine", "mean_and_top", "per_branch")
    assert choices(released()) == ("sum", "branch", "shared", "leaky_relu", "mean", "summed")
    assert choices(laps()) == ("sum", "none", "shared", "leaky_relu", "mean", "per_branch")
    assert choices(described()) == ("mix", "matched", "dual", "cosine", "mean_and_top", "per_branch")
    assert [name for name, preset in PRESETS.items() if preset().detach_selection] == ["released"]
    assert {preset().dense_side for preset in PRESETS.values()} == {"image"}
    assert {preset().selection for preset in PRESETS.values()} == {"topk"}


def test_a_preset_takes_each_choice_by_name():
    assert paper(aggregation="shared") == replace(paper(), aggregation="shared")
    assert released(keep_ratio=0.3).keep_ratio == 0.3
    with pytest.raises(TypeError, match="keep_rate"):
        paper(keep_rate=0.3)


def test_a_recipe_never_changes():
    with pytest.raises(FrozenInstanceError):
        paper().keep_ratio = 0.3
    assert len({paper(), paper(), laps()}) == 2
    assert Recipe.names() == tuple(field.name for field in fields(Recipe))


@pytest.mark.parametrize(
    ("recipe", "branches"),
    [
        (paper(), ("sparse", "dense")),
        (paper(aggregation="shared"), ("sparse",)),
        (paper(dense="none"), ("sparse",)),
        (released(), ("sparse", "dense")),
        (laps(), ("sparse",)),
        (described(), ("sparse", "dense")),
        (described(aggregation="shared"), ("sparse",)),
    ],
)
def test_branches_follow_from_dense_text_and_aggregation(recipe, branches):
    assert recipe.branches == branches


@pytest.mark.parametrize("name", [name for name, hint in get_type_hints(Recipe).items() if get_args(hint)])
def test_an_unknown_name_is_refused_with_those_allowed(name):
    allowed = get_args(get_type_hints(Recipe)[name])
    for wrong in ("magic", None, 3, []):
        expected = f"{name}: expected one of {', '.join(allowed)}, found {wrong!r}"
        assert refusal(lambda wrong=wrong: Recipe(**{name: wrong})) == expected


@pytest.mark.parametrize(
    ("name", "wrong", "expected"),
    [
        ("keep_ratio", 0, "above 0 and at most 1"),
        ("keep_ratio", 1.01, "above 0 and at most 1"),
        ("keep_ratio", float("nan"), "above 0 and at most 1"),
        ("aggregate_ratio", -0.1, "above 0 and at most 1"),
        ("top_k", 0, "at least 1"),
        ("top_k", 2.5, "a whole number"),
        ("top_k", True, "a whole number"),
        ("description_length", 0, "at least 1"),
        ("mixing", -0.1, "at least 0 and finite"),
        ("mixing", float("nan"), "at least 0 and finite"),
        ("ratio_weight", float("inf"), "at least 0 and finite"),
        ("sparse_weight", "1", "a number"),
        ("dense_weight", None, "a number"),
        ("temperature", 0, "above 0 and finite"),
        ("temperature", float("nan"), "above 0 and finite"),
        ("sharpness", 0, "above 0 and finite"),
        ("description_dropout", 1, "0 to below 1"),
        ("detach_selection", "no", "True or False"),
        ("detach_selection", 1, "True or False"),
    ],
)
def test_a_number_out_of_place_is_refused(name, wrong, expected):
    assert refusal(lambda: Recipe(**{name: wrong})) == f"{name}: expected {expected}, found {wrong!r}"


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: described(dense_side="text"), ("dense='matched'", "dense_side='image'")),
        (lambda: paper(description_tokens="slimmed"), ("description_tokens='slimmed'", "'fused'")),
        (lambda: paper(mixing=0.6), ("mixing=0.6", "at most 0.5", "scoring='sum'")),
        (
            lambda: released(selection="gates"),
            ("selection='gates'", "detach_selection=True", "selection='topk' or detach_selection=False"),
        ),
    ],
)
def test_contradictions_are_refused_with_the_way_out(build, named):
    sentence = refusal(build)
    assert all(part in sentence for part in named), sentence


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("name", "value"), OVERRIDES)
def test_every_choice_overridden_alone_works_or_is_refused(preset, name, value):
    if (preset, name, value) in REFUSED:
        assert f"{name}={value!r}" in refusal(lambda: PRESETS[preset](**{name: value}))
        return
    recipe = PRESETS[preset](**{name: value})
    images, texts, dense = make_case(recipe, count=3)
    head = make_head(recipe)
    scores = head(images, texts, dense)
    seen = head.train().inspect(images, texts, dense)
    loss = seen.scores.sum() + ratio_of(recipe, seen.decisions)
    loss.backward()
    assert scores.shape == seen.scores.shape == (3, 5)
    assert torch.isfinite(scores).all()
    gradients = [parameter.grad for parameter in head.parameters() if parameter.grad is not None]
    assert gradients
    assert all(torch.isfinite(gradient).all() for gradient in gradients)

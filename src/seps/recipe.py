"""Recipe: the orthogonal choices of the method. Presets are functions that return one."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_type_hints

Scoring = Literal["mix", "sum"]
Dense = Literal["none", "fused", "branch", "matched"]
Side = Literal["image", "text"]
Aggregation = Literal["dual", "shared"]
Affinity = Literal["cosine", "leaky_relu"]
Pooling = Literal["mean", "mean_and_top", "top"]
Directions = Literal["both", "word_to_patch", "patch_to_word"]
Selection = Literal["topk", "straight_through", "gumbel_topk", "gates", "soft"]
RatioForm = Literal["joint", "per_branch", "summed"]
DescriptionTokens = Literal["words", "slimmed"]

_KINDS: dict[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
}


def expect_one_of(name: str, value: object, names: Any) -> None:
    """Refuse what is none of a `Literal`'s names."""
    if value not in get_args(names):
        raise ValueError(f"{name}: expected one of {', '.join(get_args(names))}, found {value!r}")


@dataclass(frozen=True)
class Recipe:
    """How patches are scored, selected, aggregated and aligned, and what dense text does.

    scoring: "mix" is eq. 1 to 3; "sum" adds raw cosines, without a predictor.
    dense: "none"; "fused" guides only; "branch" is a second, independent alignment; "matched" makes the
        description's words evidence of the image beside its patches.
    dense_side: whether dense text belongs to the image (deployable) or to the query (published protocol).
    aggregation: a weight network per branch ("dual") or one for all ("shared").
    affinity, pooling, directions, top_k: eq. 5 and its ablations.
    selection, temperature: the decision in training; evaluation always takes the top K.
    detach_selection: no gradient reaches the selected patches.
    ratio_form, ratio_weight, sparse_weight, dense_weight: eq. 7.
    keep_ratio, aggregate_ratio, mixing: rho, the aggregation ratio and beta.
    sharpness: how far apart the aggregated tokens start, a factor of their logits, learned from there; at 1
        each begins as nearly the mean of all kept patches.
    description_tokens, description_length, description_dropout: the description's own tokens ("matched").
    """

    scoring: Scoring = "mix"
    dense: Dense = "fused"
    dense_side: Side = "image"
    aggregation: Aggregation = "dual"
    affinity: Affinity = "cosine"
    pooling: Pooling = "mean_and_top"
    directions: Directions = "both"
    top_k: int = 5
    selection: Selection = "topk"
    temperature: float = 1.0
    detach_selection: bool = False
    ratio_form: RatioForm = "per_branch"
    ratio_weight: float = 2.0
    sparse_weight: float = 1.0
    dense_weight: float = 1.0
    keep_ratio: float = 0.5
    aggregate_ratio: float = 0.4
    mixing: float = 0.25
    sharpness: float = 1.0
    description_tokens: DescriptionTokens = "words"
    description_length: int = 128
    description_dropout: float = 0.3

    def __post_init__(self) -> None:
        self._refuse_wrong_kinds()
        self._refuse_wrong_ranges()
        self._refuse_contradictions()

    def _refuse_wrong_kinds(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if get_args(hint):
                expect_one_of(name, value, hint)
                continue
            kind, expected = _KINDS[hint]
            if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
                raise ValueError(f"{name}: expected {expected}, found {value!r}")

    def _refuse_wrong_ranges(self) -> None:
        for name in ("keep_ratio", "aggregate_ratio"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected above 0 and at most 1, found {getattr(self, name)}")
        for name in ("top_k", "description_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")
        for name in ("mixing", "ratio_weight", "sparse_weight", "dense_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: expected at least 0 and finite, found {getattr(self, name)}")
        for name in ("temperature", "sharpness"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: expected above 0 and finite, found {getattr(self, name)}")
        if not 0 <= self.description_dropout < 1:
            raise ValueError(f"description_dropout: expected 0 to below 1, found {self.description_dropout}")

    def _refuse_contradictions(self) -> None:
        if self.dense == "matched" and self.dense_side == "text":
            raise ValueError(
                "dense_side='text' hangs the description on the query, and dense='matched' makes it evidence"
                " of the image: use dense_side='image', or for the published protocol dense='fused', 'branch'"
            )
        if self.description_tokens == "slimmed" and self.dense != "matched":
            raise ValueError(
                f"description_tokens='slimmed' slims the words of dense='matched'; dense is {self.dense!r}"
            )
        if self.detach_selection and self.selection != "topk":
            raise ValueError(
                f"selection={self.selection!r} sends a gradient through the decision, which "
                "detach_selection=True forbids: use selection='topk' or detach_selection=False"
            )
        if self.scoring == "mix" and self.mixing > 0.5:
            raise ValueError(
                f"mixing={self.mixing} gives the learned score of scoring='mix' the wrong sign: its share is "
                "1 - 2·mixing (eq. 3), so use at most 0.5, or scoring='sum'"
            )

    @property
    def branches(self) -> tuple[str, ...]:
        """Names of the selecting branches when dense text is at hand."""
        second = self.dense == "branch" or (self.dense != "none" and self.aggregation == "dual")
        return ("sparse", "dense") if second else ("sparse",)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of all choices."""
        return tuple(field.name for field in fields(cls))


def paper(**changes: Any) -> Recipe:
    """The method as the paper describes it."""
    return replace(Recipe(), **changes)


def released(**changes: Any) -> Recipe:
    """The method as its released code does it, selection without gradient included."""
    start = Recipe(
        scoring="sum",
        dense="branch",
        aggregation="shared",
        affinity="leaky_relu",
        pooling="mean",
        detach_selection=True,
        ratio_form="summed",
    )
    return replace(start, **changes)


def laps(**changes: Any) -> Recipe:
    """The ancestor without dense text."""
    start = Recipe(scoring="sum", dense="none", aggregation="shared", affinity="leaky_relu", pooling="mean")
    return replace(start, **changes)


def described(**changes: Any) -> Recipe:
    """Ours: the description hangs on the image and its words are matched with the query's."""
    return replace(Recipe(dense="matched"), **changes)


PRESETS = {"paper": paper, "released": released, "laps": laps, "described": described}

"""What a model is made of, in the ecosystem's form: plain values that a folder's config.json holds."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, Literal

from transformers import PreTrainedConfig

from seps.recipe import PRESETS, Recipe

GlobalUse = Literal["none", "loss", "score"]
# Entries of config.json that are the ecosystem's, not ours.
PASSING = {
    "_attn_implementation",
    "_commit_hash",
    "_name_or_path",
    "attn_implementation",
    "auto_map",
    "dtype",
    "model_type",
    "name_or_path",
    "output_attentions",
    "torch_dtype",
    "transformers_version",
} | {field.name for field in fields(PreTrainedConfig)}


class SepsConfig(PreTrainedConfig):
    """What a model is made of.

    recipe: a `Recipe`, a dict of its choices, or a preset's name; channels: C; image_encoder, text_encoder:
    plain dicts (see `seps.encoders`); global_term: one vector an image and a text, "none", for a "loss" and
    the coarse search, or also added to the "score"; global_weight: its weight, learned from there on in
    "score"; initial_temperature: where the learned one of InfoNCE starts.
    """

    model_type = "seps"

    def __init__(
        self,
        recipe: Recipe | Mapping[str, Any] | str = "paper",
        channels: int = 512,
        image_encoder: Mapping[str, Any] | None = None,
        text_encoder: Mapping[str, Any] | None = None,
        global_term: GlobalUse = "none",
        global_weight: float = 1.0,
        initial_temperature: float = 0.07,
        **kwargs: Any,
    ) -> None:
        own = [
            name
            for name in inspect.signature(type(self).__init__).parameters
            if name not in ("self", "kwargs")
        ]
        for key in kwargs:
            if key not in PASSING:
                raise ValueError(f"config: expected the keys {', '.join(own)}, found {key!r}")
        if global_term not in ("none", "loss", "score"):
            raise ValueError(f"global_term: expected one of none, loss, score, found {global_term!r}")
        if channels < 5:
            raise ValueError(f"channels: expected at least 5, found {channels}")
        for name, value in (("global_weight", global_weight), ("initial_temperature", initial_temperature)):
            if not value > 0:
                raise ValueError(f"{name}: expected above 0, found {value}")
        self.recipe = asdict(recipe_of(recipe))
        self.channels = channels
        self.image_encoder = dict({"kind": "light"} if image_encoder is None else image_encoder)
        self.text_encoder = dict({"kind": "light"} if text_encoder is None else text_encoder)
        self.global_term = global_term
        self.global_weight = global_weight
        self.initial_temperature = initial_temperature
        super().__init__(**kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """What differs from the ecosystem's defaults, and all of ours: a folder outlives its defaults."""
        own = [name for name in inspect.signature(type(self).__init__).parameters if hasattr(self, name)]
        return super().to_diff_dict() | {name: getattr(self, name) for name in own}


def recipe_of(choice: Recipe | Mapping[str, Any] | str) -> Recipe:
    """The recipe of a name, of a dict of choices, or itself."""
    if isinstance(choice, Recipe):
        return choice
    if isinstance(choice, str):
        if choice not in PRESETS:
            raise ValueError(f"recipe: expected one of {', '.join(PRESETS)}, found {choice!r}")
        return PRESETS[choice]()
    for key in choice:
        if key not in Recipe.names():
            raise ValueError(f"recipe: expected the choices {', '.join(Recipe.names())}, found {key!r}")
    return Recipe(**choice)

"""Slimming of several aligned modalities: each is guided by its own global feature and by the others'.

Any named set will do, such as RGB, near infrared and thermal; a modality may be absent of a sample, and then
it guides nothing there, is zero there, and learns nothing from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from seps.pairwise.prepared import full_precision
from seps.recipe import Recipe, paper
from seps.slimming import Branch, Slimmer, learned_share, token_weights
from seps.tokens import Tokens

RGB_NIR_TIR = ("rgb", "nir", "tir")
"""The modalities of re-identification by day and by night."""

# The one branch that a slimmer without dense text has.
_BRANCH = "sparse"


def reidentification(**changes: Any) -> Recipe:
    """The recipe of re-identification: eq. 1 to 4 without dense text, 128 patches -> 77 -> 30 tokens."""
    return paper(**{"dense": "none", "keep_ratio": 0.6, "aggregate_ratio": 0.4, **changes})


@dataclass(frozen=True)
class Slimmed:
    """One modality after slimming.

    tokens (B,J+1,C), the residual token last, not normalised, zero where the modality is absent; branch:
    what was scored and decided, its T axis of length 1; present (B,) boolean.
    """

    tokens: Tensor
    branch: Branch
    present: Tensor

    @property
    def decision(self) -> Tensor:
        """The decision of every sample, with its gradient. -> (B,N)"""
        return self.branch.decision[:, 0]

    @property
    def kept(self) -> Tensor:
        """Which patches stay, none where the modality is absent. -> (B,N) boolean"""
        return self.branch.kept[:, 0] & self.present.unsqueeze(1)

    @property
    def feature(self) -> Tensor:
        """The mean of the tokens. -> (B,C)"""
        return self.tokens.mean(1)


class MultiModalSlimmer(nn.Module):
    """Slims the patches of every modality, with a predictor and an aggregation network each (eq. 1 to 4).

    patches is the number of patches of a modality, one number for all or one for each; it fixes J. All
    have the same C channels, since the global feature of one is compared with the patches of another.
    """

    def __init__(
        self, modalities: Sequence[str], recipe: Recipe, patches: int | Mapping[str, int], channels: int
    ) -> None:
        super().__init__()
        names = tuple(modalities)
        if not names or len(set(names)) != len(names):
            raise ValueError(f"modalities: expected different names, at least one, found {list(names)}")
        if recipe.dense != "none":
            raise ValueError(
                f"recipe: expected dense='none', since other modalities guide here, found {recipe.dense!r}"
            )
        if recipe.scoring == "mix":
            learned_share(len(names) - 1, recipe.mixing)
        counts = dict(patches) if isinstance(patches, Mapping) else dict.fromkeys(names, patches)
        if set(counts) != set(names):
            raise ValueError(f"patches: expected a number for {', '.join(names)}, found {sorted(counts)}")
        self.modalities = names
        self.recipe = recipe
        self.channels = channels
        self.slimmers = nn.ModuleDict({name: Slimmer(recipe, counts[name], channels) for name in names})

    def slimmer(self, name: str) -> Slimmer:
        """The slimmer of one modality."""
        return cast(Slimmer, self.slimmers[name])

    def forward(
        self,
        patches: Mapping[str, Tokens],
        global_features: Mapping[str, Tensor],
        present: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """The slim tokens of every modality given, (B,J+1,C) each; see `inspect`."""
        slimmed = self.inspect(patches, global_features, present)
        return {name: each.tokens for name, each in slimmed.items()}

    def inspect(
        self,
        patches: Mapping[str, Tokens],
        global_features: Mapping[str, Tensor],
        present: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Slimmed]:
        """The slim tokens together with every decision.

        patches (B,N,C) and global features (B,C) of each modality; present (B,) says of which samples a
        modality is there, of all if it has no entry; one that is left out of `patches` is absent everywhere.
        """
        here = self.admit(patches, global_features, present or {})
        first = next(iter(patches.values())).features
        with full_precision(first):
            dtype = torch.promote_types(first.dtype, torch.float32)
            # A missing guide counts as zero: the cosines of a zero vector are zero and stay so in eq. 2.
            anchors = {
                name: global_features[name].to(dtype).masked_fill(~here[name].unsqueeze(1), 0)
                for name in patches
            }
            nothing = torch.zeros(len(first), self.channels, dtype=dtype, device=first.device)
            return {
                name: self._slim(name, blank(tokens.to(dtype), here[name]), anchors, nothing, here[name])
                for name, tokens in patches.items()
            }

    def _slim(
        self, name: str, tokens: Tokens, anchors: Mapping[str, Tensor], nothing: Tensor, here: Tensor
    ) -> Slimmed:
        slimmer = self.slimmer(name)
        others = [anchors.get(other, nothing).unsqueeze(1) for other in self.modalities if other != name]
        seed = int(torch.randint(0, 2**31 - 1, ())) if slimmer.sampling else 0
        branches = slimmer(tokens, {_BRANCH: others}, anchor=anchors[name], seed=seed)
        values = slimmer.prepare(tokens).features
        slim = token_weights(list(branches.values()))[:, 0] @ values
        return Slimmed(slim.masked_fill(~here[:, None, None], 0), branches[_BRANCH], here)

    def admit(
        self,
        patches: Mapping[str, Tokens],
        global_features: Mapping[str, Tensor],
        present: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Check the inputs; of which samples each modality is there, (B,) boolean."""
        if not patches:
            raise ValueError(f"patches: expected some of {', '.join(self.modalities)}, found none")
        for argument, given in (("patches", patches), ("present", present)):
            for name in given:
                if name not in self.modalities:
                    raise ValueError(f"{argument}: expected {', '.join(self.modalities)}, found {name!r}")
        count = len(next(iter(patches.values())))
        here = {}
        for name, tokens in patches.items():
            expected = (count, self.channels)
            if len(tokens) != count or tokens.channels != self.channels:
                shape = tuple(tokens.features.shape)
                raise ValueError(f"patches[{name!r}]: expected ({count}, N, {self.channels}), found {shape}")
            anchor = global_features.get(name)
            if anchor is None or anchor.shape != expected:
                found = "none" if anchor is None else str(tuple(anchor.shape))
                raise ValueError(f"global_features[{name!r}]: expected shape {expected}, found {found}")
            mask = present.get(name, torch.ones(count, dtype=torch.bool, device=tokens.features.device))
            if mask.shape != (count,) or mask.dtype != torch.bool:
                raise ValueError(
                    f"present[{name!r}]: expected {count} booleans, found {mask.dtype} of {tuple(mask.shape)}"
                )
            here[name] = mask & tokens.present
            if not torch.compiler.is_compiling():
                blank(tokens, here[name]).require_finite(f"patches[{name!r}]")
                if not bool(torch.isfinite(anchor[here[name]]).all()):
                    what = "finite numbers, found NaN or infinity"
                    raise ValueError(f"global_features[{name!r}]: expected {what}")
        return here


def blank(tokens: Tokens, here: Tensor) -> Tokens:
    """The same tokens with zeros, which count as real, where the sample is absent. here (B,)"""
    features = tokens.features.masked_fill(~here[:, None, None], 0)
    return Tokens(features, None if tokens.mask is None else tokens.mask | ~here.unsqueeze(1))

"""The ancestors' state dicts under this package's names."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

_NAMES = (
    (r"^sparse_net(?:_cap)?\.score_predictor\.", "slimmer.predictors.sparse."),
    (r"^sparse_net_long\.score_predictor\.", "slimmer.predictors.dense."),
    (r"^aggr_net\.scale$", "slimmer.scale"),
    (r"^aggr_net\.weight\.", "slimmer.networks.shared."),
    (r"^aggr_net\.weight_(sparse|dense)\.", r"slimmer.networks.\1."),
    (r"^hrpa\.relevance_mlp\.", "aligner.relevance."),
    (r"^([^_.]+)_sparse\.score_predictor\.", r"slimmers.\1.predictors.sparse."),
    (r"^([^_.]+)_aggr\.scale$", r"slimmers.\1.scale"),
    (r"^([^_.]+)_aggr\.weight\.", r"slimmers.\1.networks.sparse."),
)
_KNOWN = "sparse_net_cap, sparse_net_long, aggr_net, hrpa, or a modality's rgb_sparse, rgb_aggr"


def import_state_dict(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An ancestor's state dict under the names of a `SlimHead`, of modalities of a `MultiModalSlimmer`.

    With one aggregation network the ancestors keep a second predictor that scores nothing: it is left out.
    """
    spare = "aggr_net.weight.0.weight" in state
    return {
        own_name(name): value
        for name, value in state.items()
        if not (spare and name.startswith("sparse_net_long."))
    }


def own_name(name: str) -> str:
    """Where a weight of the ancestors stands here."""
    for pattern, replacement in _NAMES:
        renamed, found = re.subn(pattern, replacement, name)
        if found:
            return renamed
    raise ValueError(f"state: expected names that begin with {_KNOWN}, found {name!r}")

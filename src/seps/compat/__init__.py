"""The ancestors' names, arguments and return values, over this package's own mathematics.

Everything here carries the parameter names of the ancestors, so their state dicts load with strict=True;
`import_state_dict` turns such a state dict into one of a `SlimHead` or a `MultiModalSlimmer`.
"""

from seps.compat.losses import ContrastiveLoss, RatioLoss, SEPSLoss
from seps.compat.parts import HRPA, DualTokenAggregation, TokenAggregation, TokenSparse, mask_xattn_one_text
from seps.compat.weights import import_state_dict
from seps.compat.wholes import (
    CrossSparseAggrNet,
    CrossSparseAggrNet_v2,
    MultiModalSDTPS,
    create_seps_model,
)

SDTPS = CrossSparseAggrNet
SDTPS_TokenSparse = TokenSparse
SDTPS_TokenAggregation = TokenAggregation
HRPA_function = mask_xattn_one_text

__all__ = [
    "HRPA",
    "SDTPS",
    "ContrastiveLoss",
    "CrossSparseAggrNet",
    "CrossSparseAggrNet_v2",
    "DualTokenAggregation",
    "HRPA_function",
    "MultiModalSDTPS",
    "RatioLoss",
    "SDTPS_TokenAggregation",
    "SDTPS_TokenSparse",
    "SEPSLoss",
    "TokenAggregation",
    "TokenSparse",
    "create_seps_model",
    "import_state_dict",
    "mask_xattn_one_text",
]

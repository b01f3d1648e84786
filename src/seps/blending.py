"""`seps blend`: the weights of two models averaged, one of which was trained from the other.

What a model gains on new data it often loses on what it knew; along the straight line between its weights
before and after, much of the gain is there before much of the loss.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from seps.data.records import folder_beside, require_vacant
from seps.model import SepsModel, load, save

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BlendOptions:
    """Average the weights of a model and of one that was trained from it.

    Weigh the result again if its score has several terms (`seps weigh`), and measure it with `seps eval`.
    """

    model: str
    """A model folder or hub name: where training started."""
    other: str
    """One trained from it (`model.start`)."""
    out: str
    """The folder to write."""
    share: float = 0.5
    """How far to go from the first to the second, 0 to 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share: expected 0 to 1, found {self.share}")


def run(options: BlendOptions) -> int:
    """`seps blend`."""
    out = Path(options.out)
    require_vacant("out", out)
    model, processor = load(options.model)
    blend(model, load(options.other)[0], options.share)
    with folder_beside(out) as folder:
        save(model, processor, folder)
    logger.info("%s: %g of %s, the rest of %s", out, options.share, options.other, options.model)
    return 0


@torch.no_grad()
def blend(model: SepsModel, other: SepsModel, share: float) -> None:
    """Move a model's weights towards another's; whole numbers stay."""
    theirs = other.state_dict()
    ours = model.state_dict()
    odd = next((name for name in {**ours, **theirs} if shape(ours, name) != shape(theirs, name)), None)
    if odd is not None:
        raise ValueError(
            f"other: expected a model trained from the first, with {odd} {shape(ours, odd)}, "
            f"found {shape(theirs, odd)}"
        )
    for name, weights in ours.items():
        if weights.is_floating_point():
            weights.lerp_(theirs[name].to(weights), share)


def shape(weights: dict[str, torch.Tensor], name: str) -> str:
    """The shape of a weight in words."""
    return f"of shape {tuple(weights[name].shape)}" if name in weights else "missing"

"""`seps shrink`: a model folder a quarter its size, for shipping and for a quick start."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from seps.model import load, save_small

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShrinkOptions:
    """Write a model with its matrices in eight bits; every command reads the folder like any other.

    Weights that come inside installed packages are left out. Measure the result with `seps eval`.
    """

    model: str
    """A model folder or hub name."""
    out: str
    """The folder to write."""


def run(options: ShrinkOptions) -> int:
    """`seps shrink`."""
    out = Path(options.out)
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise ValueError(f"out: expected a folder that is empty or not there yet, found {out}")
    weights = save_small(*load(options.model), out)
    logger.info("%s: %.1f MB", weights, weights.stat().st_size / 1e6)
    return 0

"""`seps shrink`: a model folder a quarter its size, for shipping and for a quick start."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from seps.data.records import folder_beside, require_vacant
from seps.model import SMALL, load, save_small

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
    require_vacant("out", out)
    model, processor = load(options.model)
    with folder_beside(out) as folder:
        size = save_small(model, processor, folder).stat().st_size
    logger.info("%s: %.1f MB", out / SMALL, size / 1e6)
    return 0

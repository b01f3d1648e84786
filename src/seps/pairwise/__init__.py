"""The same scores for all (image, text) pairs without ever building a token."""

from seps.pairwise.engine import score
from seps.pairwise.meeting import Precision
from seps.pairwise.packing import pack, unpack
from seps.pairwise.prepared import Prepared, prepare

__all__ = ["Precision", "Prepared", "pack", "prepare", "score", "unpack"]

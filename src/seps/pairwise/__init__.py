"""The same scores for all (image, text) pairs without ever building a token."""

from seps.pairwise.engine import Precision, score
from seps.pairwise.packing import pack, unpack
from seps.pairwise.prepared import Prepared, prepare

__all__ = ["Precision", "Prepared", "pack", "prepare", "score", "unpack"]

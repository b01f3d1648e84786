"""The same scores for all (image, text) pairs without ever building a token."""

from seps.pairwise.engine import Precision, score
from seps.pairwise.prepared import Prepared, prepare

__all__ = ["Precision", "Prepared", "prepare", "score"]

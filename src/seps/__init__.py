"""Fine-grained image-text retrieval: slim the patches, align them with the words."""

from seps.head import SlimHead
from seps.recipe import Recipe, described, laps, paper, released
from seps.tokens import Tokens

__version__ = "0.1.0"
__all__ = ["Recipe", "SlimHead", "Tokens", "described", "laps", "paper", "released"]

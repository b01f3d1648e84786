"""Fine-grained image-text retrieval: slim the patches, align them with the words."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from seps.head import SlimHead
from seps.recipe import Recipe, described, laps, paper, released
from seps.tokens import Tokens

if TYPE_CHECKING:
    from seps.explanation import explain
    from seps.gallery import Gallery
    from seps.modalities import MultiModalSlimmer
    from seps.model import SepsConfig, SepsModel, SepsProcessor, load

__version__ = "0.1.0"
__all__ = [
    "Gallery",
    "MultiModalSlimmer",
    "Recipe",
    "SepsConfig",
    "SepsModel",
    "SepsProcessor",
    "SlimHead",
    "Tokens",
    "described",
    "explain",
    "laps",
    "load",
    "paper",
    "released",
]

# What stands on heavier packages is imported when it is asked for.
_LATER = {
    "Gallery": "seps.gallery",
    "MultiModalSlimmer": "seps.modalities",
    "SepsConfig": "seps.model",
    "SepsModel": "seps.model",
    "SepsProcessor": "seps.model",
    "explain": "seps.explanation",
    "load": "seps.model",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'seps' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Encoders behind one seam: pixels or token ids in, `Tokens` of C channels out.

Every encoder is a backbone, which may be frozen and its features kept, and a trained neck above it; between
them a backbone may leave its own last layers to the encoder, where they learn over kept features. A plain
dict says which: ``kind``, ``tuning`` ("frozen" or "full"), ``neck`` (a dict of `NeckOptions`), and what the
kind's own constructor takes. A new kind is a line in IMAGE_KINDS or TEXT_KINDS.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from seps.data.images import View
from seps.encoders.layers import ENDS, Neck, NeckOptions, something
from seps.tokens import Tokens

__all__ = ["ImageEncoder", "NeckOptions", "TextEncoder", "build_image_encoder", "build_text_encoder"]

# kind -> module and class; a module is imported when its kind is asked for.
IMAGE_KINDS = {
    "light": ("seps.encoders.light", "LightVision"),
    "huggingface": ("seps.encoders.huggingface", "HuggingFaceVision"),
    "mini": ("seps.encoders.mini", "MiniVision"),
}
TEXT_KINDS = {
    "light": ("seps.encoders.light", "LightText"),
    "huggingface": ("seps.encoders.huggingface", "HuggingFaceText"),
    "mini": ("seps.encoders.mini", "MiniText"),
}
TUNINGS = ("full", "frozen")


class Backbone(Protocol):
    """What both kinds of backbone say of themselves.

    channels: of the raw features; scratch: whether it starts untrained by design, so that it learns at the
    full rate; spec: constructor arguments that build it again, without reading weights from anywhere.
    """

    channels: int
    scratch: bool
    spec: dict[str, Any]


class ImageBackbone(Backbone, Protocol):
    """Pixels (B,3,H,W) -> raw patches in row order, and CLS if there is one.

    It may have `above() -> module | None`: last layers of its own, (B,N',Cin') -> (B,N,channels), that learn
    over the features it yields without them.
    """

    view: View
    grid: tuple[int, int]
    has_cls: bool


class TextBackbone(Backbone, Protocol):
    """ids, mask (T,L) -> raw word features (T,L,C).

    special: ids that are no words; limit: the longest row it takes, None if any; vocabulary: number of ids.
    It may have `above`, which sees start and end before the words and yields the words: (T,2+L,Cin) ->
    (T,L,channels).
    """

    special: tuple[int, ...]
    limit: int | None
    vocabulary: int


class Encoder(nn.Module):
    """A backbone, frozen or tuned, under a trained neck."""

    body: Any

    def __init__(
        self, kind: str, backbone: nn.Module, channels: int, tuning: str, options: NeckOptions
    ) -> None:
        super().__init__()
        if tuning not in TUNINGS:
            raise ValueError(f"tuning: expected one of {', '.join(TUNINGS)}, found {tuning!r}")
        self.kind = kind
        self.options = options
        self.body = backbone
        self.top = self.body.above() if hasattr(self.body, "above") else None
        width = self.body.channels if self.top is None else self.top.channels
        self.neck = Neck(width, channels, options)
        self.tune(tuning)

    def tune(self, tuning: str) -> None:
        """Freeze the backbone ("frozen": no gradient, no dropout) or let it learn ("full")."""
        self.tuning = tuning
        self.body.requires_grad_(tuning == "full")
        self.train(self.training)

    def train(self, mode: bool = True) -> Encoder:
        """Training mode; a frozen backbone stays in evaluation mode, so that its features can be kept."""
        super().train(mode)
        self.body.train(mode and self.tuning == "full")
        return self

    @property
    def refill(self) -> Callable[[], None] | None:
        """Takes the backbone's weights from an installed package; None where a saved model holds them."""
        return getattr(self.body, "refill", None) if self.tuning == "frozen" else None

    def lift(self, raw: Tokens) -> Tokens:
        """Raw features through what the backbone left to learn, if anything. (B,N',Cin') -> (B,N,Cin)"""
        return raw if self.top is None else self.top(raw)

    def project(self, raw: Tokens) -> Tokens:
        """Raw features, kept or just computed -> (B,N,C)"""
        return self.neck(self.lift(raw))

    def pretrained(self) -> list[nn.Module]:
        """The parts that did not start from nothing."""
        return [each for each in (self.body, self.top) if each is not None and not self.body.scratch]

    @property
    def spec(self) -> dict[str, Any]:
        """The plain dict that builds this encoder again, weights apart."""
        return {"kind": self.kind, "tuning": self.tuning, "neck": asdict(self.options), **self.body.spec}


class ImageEncoder(Encoder):
    """Pixels (B,3,H,W) -> Tokens (B,N,C) of the patch grid in row order, and CLS if the backbone has one."""

    @property
    def view(self) -> View:
        """Size and normalisation of the pixels."""
        return self.body.view

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.body.grid

    @property
    def patches(self) -> int:
        """N"""
        return self.grid[0] * self.grid[1]

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.view.height, self.view.width

    @property
    def mean(self) -> tuple[float, float, float]:
        """Of the normalisation."""
        return self.view.mean

    @property
    def std(self) -> tuple[float, float, float]:
        """Of the normalisation."""
        return self.view.std

    def backbone(self, pixels: Tensor) -> Tokens:
        """Raw features, for the neck or for keeping. (B,3,H,W) -> (B,N,Cin)"""
        expected = (3, *self.image_size)
        if pixels.dim() != 4 or tuple(pixels.shape[1:]) != expected or len(pixels) == 0:
            raise ValueError(
                f"pixels: expected shape (B, 3, {expected[1]}, {expected[2]}), found {tuple(pixels.shape)}"
            )
        if not pixels.is_floating_point():
            raise ValueError(f"pixels: expected normalised floating-point numbers, found {pixels.dtype}")
        return self.body(pixels)

    def forward(self, pixels: Tensor) -> Tokens:
        """(B,3,H,W) -> (B,N,C)"""
        return self.project(self.backbone(pixels))


class TextEncoder(Encoder):
    """Token ids and their mask (T,L) -> Tokens (T,L,C), special tokens left out of the mask.

    A text of special tokens alone keeps them, so that an empty query still has something to say; a row
    without any token stays absent.
    """

    def __init__(
        self,
        kind: str,
        backbone: nn.Module,
        channels: int,
        tuning: str,
        options: NeckOptions,
        keep_special: bool = False,
    ) -> None:
        super().__init__(kind, backbone, channels, tuning, options)
        self.keep_special = keep_special

    @property
    def spec(self) -> dict[str, Any]:
        """The plain dict that builds this encoder again, weights apart."""
        return {**super().spec, "keep_special": self.keep_special}

    @property
    def limit(self) -> int | None:
        """The longest row of ids, special tokens included; None if there is no longest."""
        return self.body.limit

    def backbone(self, ids: Tensor, mask: Tensor) -> Tokens:
        """Raw features, for the neck or for keeping. ids, mask (T,L) -> (T,L,Cin)"""
        self._check(ids, mask)
        features = self.body(ids, something(mask))
        words = Tokens(features, mask if self.keep_special else self._words(ids, mask))
        return words if self.top is None else behind_ends(words, mask)

    @property
    def context(self) -> int:
        """How many tokens before the words only the layers left to learn look at."""
        return 0 if self.top is None else ENDS

    def forward(self, ids: Tensor, mask: Tensor) -> Tokens:
        """ids, mask (T,L) -> (T,L,C)"""
        return self.project(self.backbone(ids, mask))

    def _words(self, ids: Tensor, mask: Tensor) -> Tensor:
        special = torch.tensor(self.body.special, device=ids.device, dtype=ids.dtype)
        words = mask & ~torch.isin(ids, special)
        return torch.where(words.any(1, keepdim=True), words, mask)

    def _check(self, ids: Tensor, mask: Tensor) -> None:
        if ids.dim() != 2 or 0 in ids.shape or ids.is_floating_point():
            raise ValueError(
                f"ids: expected integers of shape (T, L), found {ids.dtype} of shape {tuple(ids.shape)}"
            )
        if mask.shape != ids.shape or mask.dtype != torch.bool:
            raise ValueError(
                f"mask: expected booleans of shape {tuple(ids.shape)}, found {mask.dtype} of shape "
                f"{tuple(mask.shape)}"
            )
        if self.limit is not None and ids.shape[1] > self.limit:
            raise ValueError(
                f"ids: expected at most {self.limit} tokens a text, which is as far as the text encoder "
                f"reaches, found {ids.shape[1]}"
            )
        if not ids.is_cuda and not torch.compiler.is_compiling() and ids.max() >= self.body.vocabulary:
            raise ValueError(
                f"ids: expected below {self.body.vocabulary}, the size of the text encoder's vocabulary, "
                f"found {int(ids.max())}"
            )


def behind_ends(words: Tokens, mask: Tensor) -> Tokens:
    """Start and end of every text, then its words: attention above does not ask for the order.

    words (T,L,C), mask (T,L) of all their tokens -> (T,2+L,C)
    """
    last = mask.sum(1).sub(1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, words.channels)
    ends = [words.features[:, :1], words.features.gather(1, last)]
    there = mask.any(1, keepdim=True)
    own = mask if words.mask is None else words.mask
    return Tokens(torch.cat([*ends, words.features], 1), torch.cat([there, there, own], 1))


def build_image_encoder(spec: Mapping[str, Any], channels: int = 512) -> ImageEncoder:
    """The image encoder of a plain dict, with C channels."""
    kind, tuning, options, rest = divide_spec("image_encoder", spec, IMAGE_KINDS)
    backbone = construct("image_encoder", kind, IMAGE_KINDS, rest)
    return ImageEncoder(kind, backbone, channels, tuning, options)


def build_text_encoder(spec: Mapping[str, Any], channels: int = 512) -> TextEncoder:
    """The text encoder of a plain dict, with C channels; `keep_special` makes special tokens words."""
    kind, tuning, options, rest = divide_spec("text_encoder", spec, TEXT_KINDS)
    keep = bool(rest.pop("keep_special", False))
    backbone = construct("text_encoder", kind, TEXT_KINDS, rest, also=("keep_special",))
    return TextEncoder(kind, backbone, channels, tuning, options, keep)


def divide_spec(
    name: str, spec: Mapping[str, Any], kinds: Mapping[str, tuple[str, str]]
) -> tuple[str, str, NeckOptions, dict[str, Any]]:
    """The kind, tuning and neck that every spec may name, and what is the kind's own."""
    if not isinstance(spec, Mapping):
        raise ValueError(f"{name}: expected a mapping with a 'kind', found {spec!r}")
    rest = dict(spec)
    kind = rest.pop("kind", None)
    if kind not in kinds:
        raise ValueError(f"{name}.kind: expected one of {', '.join(kinds)}, found {kind!r}")
    tuning = rest.pop("tuning", "full")
    neck = rest.pop("neck", {})
    known = [field.name for field in fields(NeckOptions)]
    if not isinstance(neck, Mapping):
        raise ValueError(f"{name}.neck: expected a mapping, found {neck!r}")
    for key in neck:
        if key not in known:
            raise ValueError(f"{name}.neck: expected the keys {', '.join(known)}, found {key!r}")
    return kind, tuning, NeckOptions(**neck), rest


def construct(
    name: str,
    kind: str,
    kinds: Mapping[str, tuple[str, str]],
    arguments: Mapping[str, Any],
    also: tuple[str, ...] = (),
) -> Any:
    """The backbone of a kind from its own arguments; an unknown one is refused."""
    module, attribute = kinds[kind]
    backbone = getattr(import_module(module), attribute)
    known = list(inspect.signature(backbone).parameters)
    for key in arguments:
        if key not in known:
            every = ["kind", "tuning", "neck", *also, *known]
            raise ValueError(f"{name}: expected the keys {', '.join(every)}, found {key!r}")
    return backbone(**arguments)

"""Calls of the compiled kernel: tensors in, tensors out."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_COUNTS = (
    "images", "texts", "patches", "channels", "tokens", "branches", "has_cls", "threads",
    "every_patch", "leaky", "mean", "top", "words_side", "tokens_side",
    "bound",
)  # fmt: skip
_ARRAYS = (
    "values", "gram", "cls", "words", "half_values", "half_words", "offsets",
    ("logits", 2), ("lifted", 2), ("decisions", 2), ("shares", 2),
    "residual", "first_weight", "first_bias", "second_weight", "second_bias", "scores", "upstream",
    "d_values", "d_gram", "d_cls", "d_words", ("d_logits", 2), ("d_decisions", 2), "d_residual",
    "d_relevance",
)  # fmt: skip
# The kernel keeps a pair's rows on its stack.
LARGEST_PATCHES, LARGEST_TOP = 4096, 64


class _Problem(ctypes.Structure):
    """The kernel's `Problem`, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _COUNTS),
        *(
            (each, ctypes.c_void_p) if isinstance(each, str) else (each[0], ctypes.c_void_p * each[1])
            for each in _ARRAYS
        ),
    ]


@dataclass(frozen=True)
class Reading:
    """How eq. 5 reads the cosines, and the relevance network's tensors, if there is one."""

    leaky: bool
    mean: bool
    words_side: bool
    tokens_side: bool
    relevance: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Meeting:
    """The tensors of some pairs: what `meet` is about.

    values (B,N,C), gram (B,N,N), cls (B,C) of unit length or None, words (L,C) of unit length in texts of
    some lengths; logits (B,J,N), decisions (B,T,N) and shares (B,T) of one or two branches; residual (B,T,N).
    """

    values: Tensor
    gram: Tensor
    cls: Tensor | None
    words: Tensor
    lengths: tuple[int, ...]
    logits: Sequence[Tensor]
    decisions: Sequence[Tensor]
    shares: Sequence[Tensor]
    residual: Tensor


def widen(tensor: Tensor, multiple: int = 32) -> Tensor:
    """The last axis padded with zeros to a multiple; contiguous."""
    return functional.pad(tensor, (0, -tensor.shape[-1] % multiple)).contiguous()


def meet(library: ctypes.CDLL, meeting: Meeting, reading: Reading, half: bool) -> Tensor:
    """Eq. 5 of every pair. -> (B,T)"""
    with torch.no_grad():
        given = arrays(meeting, reading, half)
        scores = torch.empty(len(meeting.values), len(meeting.lengths))
        run(library.meet, meeting, reading, {**given, "scores": scores})
    return scores


def arrays(meeting: Meeting, reading: Reading, half: bool) -> dict[str, Tensor | list[Tensor] | None]:
    """The tensors as the kernel wants them: contiguous, with rows of whole vectors."""
    values, words = widen(meeting.values), widen(meeting.words)
    lifted = [(logits - logits.amax(-1, keepdim=True)).exp() for logits in meeting.logits]
    offsets = torch.tensor([0, *meeting.lengths]).cumsum(0)
    relevance = [tensor.contiguous() for tensor in reading.relevance] or [None] * 4
    return {
        "values": values,
        "gram": widen(meeting.gram, 16),
        "cls": None if meeting.cls is None else widen(meeting.cls),
        "words": words,
        "half_values": values.bfloat16() if half else None,
        "half_words": words.bfloat16() if half else None,
        "offsets": offsets,
        "logits": [widen(logits, 16) for logits in meeting.logits],
        "lifted": [widen(each, 16) for each in lifted],
        "decisions": [decision.contiguous() for decision in meeting.decisions],
        "shares": [share.contiguous() for share in meeting.shares],
        "residual": meeting.residual.contiguous(),
        **dict(zip(("first_weight", "first_bias", "second_weight", "second_bias"), relevance, strict=True)),
    }


def run(function, meeting: Meeting, reading: Reading, given, every_patch: bool = False) -> None:
    """Call a function of the kernel on named arrays."""
    problem = _Problem(
        images=len(meeting.values),
        texts=len(meeting.lengths),
        patches=meeting.values.shape[1],
        channels=given["values"].shape[2],
        tokens=meeting.logits[0].shape[1],
        branches=len(meeting.logits),
        has_cls=meeting.cls is not None,
        threads=torch.get_num_threads(),
        every_patch=every_patch,
        leaky=reading.leaky,
        mean=reading.mean,
        top=reading.relevance[0].shape[1] if reading.relevance else 0,
        words_side=reading.words_side,
        tokens_side=reading.tokens_side,
    )
    for name, value in given.items():
        if isinstance(value, list):
            field = getattr(problem, name)
            for place, tensor in enumerate(value):
                field[place] = tensor.data_ptr()
        elif value is not None:
            setattr(problem, name, value.data_ptr())
    function(ctypes.byref(problem))


def select_top(
    library: ctypes.CDLL, saliency: Tensor, keep: Tensor, mask: Tensor | None, residual: bool
) -> tuple[Tensor, Tensor | None]:
    """`top_mask` of the saliency and, if asked for, its `residual_weights`. (B,T,N) -> twice the same"""
    images, texts, patches = saliency.shape
    saliency, keep = saliency.detach().contiguous(), keep.long().contiguous()
    decision = torch.empty_like(saliency)
    rest = torch.empty_like(saliency) if residual else None
    mask = None if mask is None else mask.contiguous()
    sizes = [ctypes.c_int64(n) for n in (images * texts, texts, patches, torch.get_num_threads())]
    pointers = [
        ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
        for tensor in (saliency, keep, mask, decision, rest)
    ]
    library.select_top(*pointers[:3], *sizes, *pointers[3:])
    return decision, rest

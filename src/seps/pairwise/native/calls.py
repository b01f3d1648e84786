"""Calls of the compiled kernel: tensors in, tensors out."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from seps.slimming import _GRADIENT_BOUND

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

    values (B,N,C); gram (B,N,N), or None to build the tokens; cls (B,C) of unit length or None; words (L,C)
    of unit length in texts of some lengths; logits (B,J,N), decisions (B,T,N) and shares (B,T) of one or two
    branches; residual (B,T,N).
    """

    values: Tensor
    gram: Tensor | None
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


@dataclass(frozen=True)
class Plan:
    """What of a call is no tensor, and how its tensors lie in a row."""

    lengths: tuple[int, ...]
    branches: int
    reading: Reading
    half: bool

    @property
    def place_of_decisions(self) -> int:
        """Where the decisions begin: after the meeting's five tensors, the network's four, the logits."""
        return 9 + self.branches

    def assemble(self, tensors: Sequence[Any]) -> tuple[Meeting, Reading]:
        """The meeting and its reading from tensors in a row."""
        values, gram, cls, words, residual, *rest = tensors
        relevance = tuple(each for each in rest[:4] if each is not None)
        logits, decisions, shares = (
            rest[4 + place * self.branches : 4 + (place + 1) * self.branches] for place in range(3)
        )
        meeting = Meeting(values, gram, cls, words, self.lengths, logits, decisions, shares, residual)
        return meeting, replace(self.reading, relevance=relevance)


class Meet(torch.autograd.Function):
    """Eq. 4 and 5 of every pair, which remembers nothing but its inputs. -> (B,T)"""

    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, plan: Plan, *tensors: Tensor | None) -> Tensor:
        """The scores."""
        ctx.library, ctx.plan = library, plan
        ctx.save_for_backward(*tensors)
        meeting, reading = plan.assemble(tensors)
        scores = torch.empty(len(meeting.values), len(meeting.lengths))
        run(library.meet, meeting, reading, {**arrays(meeting, reading, plan.half), "scores": scores})
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        """The gradients of the plan's tensors; every pair is computed again."""
        meeting, reading = ctx.plan.assemble(ctx.saved_tensors)
        given = arrays(meeting, reading, ctx.plan.half)
        branches = ctx.plan.branches
        every_patch = any(ctx.needs_input_grad[2 + ctx.plan.place_of_decisions + b] for b in range(branches))
        found = gradients(given, meeting, reading)
        run(
            ctx.library.meet_backward,
            meeting,
            reading,
            {**given, **found, "upstream": upstream.contiguous()},
            every_patch,
        )
        channels, patches = meeting.values.shape[2], meeting.values.shape[1]
        relevance: list[Tensor | None] = [None] * 4
        if reading.relevance:
            sizes = [each.numel() for each in reading.relevance]
            parts = found["d_relevance"].split(sizes)
            relevance = [part.view_as(each) for part, each in zip(parts, reading.relevance, strict=True)]
        return (
            None,
            None,
            found["d_values"][..., :channels],
            found["d_gram"][..., :patches],
            None if meeting.cls is None else found["d_cls"][..., :channels],
            found["d_words"][..., :channels],
            found["d_residual"],
            *relevance,
            *(each[..., :patches] for each in found["d_logits"]),
            *(found["d_decisions"] if every_patch else [None] * branches),
            *[None] * branches,
        )


def meet(library: ctypes.CDLL, meeting: Meeting, reading: Reading, half: bool) -> Tensor:
    """Eq. 4 and 5 of every pair, with gradients to all but the shares. -> (B,T)"""
    return Meet.apply(
        library,
        Plan(meeting.lengths, len(meeting.logits), replace(reading, relevance=()), half),
        meeting.values,
        meeting.gram,
        meeting.cls,
        meeting.words,
        meeting.residual,
        *(reading.relevance or [None] * 4),
        *meeting.logits,
        *meeting.decisions,
        *meeting.shares,
    )


def gradients(given: Mapping[str, Any], meeting: Meeting, reading: Reading) -> dict[str, Any]:
    """Room for the gradients of everything the kernel was given."""
    count = sum(each.numel() for each in reading.relevance)
    return {
        "d_values": torch.zeros_like(given["values"]),
        "d_gram": torch.zeros_like(given["gram"]),
        "d_cls": None if given["cls"] is None else torch.zeros_like(given["cls"]),
        "d_words": torch.zeros_like(given["words"]),
        "d_logits": [torch.zeros_like(each) for each in given["logits"]],
        "d_decisions": [torch.zeros_like(each) for each in meeting.decisions],
        "d_residual": torch.zeros_like(meeting.residual),
        "d_relevance": torch.zeros(count) if count else None,
    }


def arrays(meeting: Meeting, reading: Reading, half: bool) -> dict[str, Any]:
    """The tensors as the kernel wants them: contiguous, with rows of whole vectors."""
    values, words = widen(meeting.values), widen(meeting.words)
    lifted = [(logits - logits.amax(-1, keepdim=True)).exp() for logits in meeting.logits]
    offsets = torch.tensor([0, *meeting.lengths]).cumsum(0)
    relevance: Sequence[Tensor | None] = [each.contiguous() for each in reading.relevance] or [None] * 4
    return {
        "values": values,
        "gram": None if meeting.gram is None else widen(meeting.gram, 16),
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


def run(
    function: Callable[..., Any],
    meeting: Meeting,
    reading: Reading,
    given: Mapping[str, Any],
    every_patch: bool = False,
) -> None:
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
        bound=int(_GRADIENT_BOUND),
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

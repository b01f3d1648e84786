"""Calls of the compiled kernel: tensors in, tensors out."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from seps.slimming import GRADIENT_BOUND

_COUNTS = (
    "images", "texts", "patches", "channels", "tokens", "others", "branches", "threads",
    "every_patch", "leaky", "mean", "top", "words_side", "tokens_side", "bound",
)  # fmt: skip
_ARRAYS = (
    "values", "gram", "words", ("sides", 2), "products", "offsets",
    ("logits", 2), ("lifted", 2), ("decisions", 2), ("shares", 2),
    "first_weight", "first_bias", "second_weight", "second_bias", "scores", "upstream",
    "d_values", "d_words", "d_products", "d_gram",
    ("d_sides", 2), ("d_logits", 2), ("d_decisions", 2), "d_relevance",
)  # fmt: skip
# Floats in a vector of the kernel.
_WIDTH = 16


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

    lengths of the texts in words, L of them in all. Either values (B,N,C) and words (L,C), or the products
    (L,B,N) of both in bf16. gram (B,N,N), or None to build the tokens from the values. sides, each (L,B): the
    words' cosines with the tokens that are not aggregated. logits (B,J,N), decisions (B,T,N) and shares (B,T)
    of one or two branches.
    """

    lengths: tuple[int, ...]
    values: Tensor | None
    words: Tensor | None
    products: Tensor | None
    gram: Tensor | None
    sides: Sequence[Tensor]
    logits: Sequence[Tensor]
    decisions: Sequence[Tensor]
    shares: Sequence[Tensor]

    @property
    def channels(self) -> int:
        """C, where the vectors are given."""
        return 0 if self.values is None else self.values.shape[-1]


def widen(tensor: Tensor, size: int | None = None) -> Tensor:
    """The last axis padded with zeros to a size, or to whole vectors; contiguous."""
    short = -tensor.shape[-1] % _WIDTH if size is None else size - tensor.shape[-1]
    return (functional.pad(tensor, (0, short)) if short else tensor).contiguous()


@dataclass(frozen=True)
class Plan:
    """What of a call is no tensor, and how its tensors lie in a row."""

    lengths: tuple[int, ...]
    others: int
    branches: int
    reading: Reading

    @staticmethod
    def of(meeting: Meeting, reading: Reading) -> tuple[Plan, list[Tensor | None]]:
        """The plan of a meeting, and its tensors in a row."""
        plan = Plan(meeting.lengths, len(meeting.sides), len(meeting.logits), replace(reading, relevance=()))
        fixed = (meeting.values, meeting.words, meeting.products, meeting.gram)
        relevance = reading.relevance or [None] * 4
        lists = (*meeting.sides, *meeting.logits, *meeting.decisions, *meeting.shares)
        return plan, [*fixed, *relevance, *lists]

    def split(self, row: Sequence[Any]) -> list[Sequence[Any]]:
        """A row in its parts: the fixed ones, the relevance network, sides, logits, decisions, shares."""
        sizes = (4, 4, self.others, self.branches, self.branches, self.branches)
        ends = list(accumulate(sizes))
        return [row[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def assemble(self, row: Sequence[Any]) -> tuple[Meeting, Reading]:
        """The meeting and its reading."""
        fixed, relevance, *lists = self.split(row)
        network = tuple(each for each in relevance if each is not None)
        return Meeting(self.lengths, *fixed, *lists), replace(self.reading, relevance=network)


class Meet(torch.autograd.Function):
    """Eq. 4 and 5 of every pair, which remembers nothing but its inputs. -> (B,T)"""

    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, plan: Plan, *tensors: Tensor | None) -> Tensor:
        """The scores."""
        ctx.library, ctx.plan = library, plan
        ctx.save_for_backward(*tensors)
        meeting, reading = plan.assemble(tensors)
        scores = torch.empty(meeting.decisions[0].shape[:2])
        run(library.meet, meeting, reading, {**arrays(meeting, reading), "scores": scores})
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        """The gradients of the plan's tensors; every pair is computed again."""
        meeting, reading = ctx.plan.assemble(ctx.saved_tensors)
        given = arrays(meeting, reading)
        wanted = ctx.plan.split(ctx.needs_input_grad[2:])
        every_patch = any(wanted[4])
        found = gradients(given, reading, wanted[0])
        run(
            ctx.library.meet_backward,
            meeting,
            reading,
            {**given, **found, "upstream": upstream.contiguous()},
            every_patch,
        )
        tokens, branches = meeting.logits[0].shape[1], ctx.plan.branches
        relevance: list[Tensor | None] = [None] * 4
        if reading.relevance:
            parts = found["d_relevance"].split([each.numel() for each in reading.relevance])
            relevance = [part.view_as(each) for part, each in zip(parts, reading.relevance, strict=True)]
        vectors = (found["d_values"], found["d_words"])
        return (
            None,
            None,
            *(None if each is None else each[..., : meeting.channels] for each in vectors),
            found["d_products"],
            found["d_gram"],
            *relevance,
            *found["d_sides"],
            *(each[..., :tokens].transpose(1, 2) for each in found["d_logits"]),
            *(found["d_decisions"] if every_patch else [None] * branches),
            *[None] * branches,
        )


def meet(library: ctypes.CDLL, meeting: Meeting, reading: Reading) -> Tensor:
    """Eq. 4 and 5 of every pair; where Gram matrices are given it has a gradient. -> (B,T)"""
    plan, row = Plan.of(meeting, reading)
    return Meet.apply(library, plan, *row)


def gradients(given: Mapping[str, Any], reading: Reading, wanted: Sequence[bool]) -> dict[str, Any]:
    """Room for the gradients of what the kernel was given; of its fixed tensors, of those that are wanted."""
    count = sum(each.numel() for each in reading.relevance)
    fixed = {
        f"d_{name}": torch.zeros(given[name].shape) if want else None
        for name, want in zip(("values", "words", "products", "gram"), wanted, strict=True)
    }
    return {
        **fixed,
        "d_sides": [torch.zeros_like(each) for each in given["sides"]],
        "d_logits": [torch.zeros_like(each) for each in given["logits"]],
        "d_decisions": [torch.zeros_like(each) for each in given["decisions"]],
        "d_relevance": torch.zeros(count) if count else None,
    }


def arrays(meeting: Meeting, reading: Reading) -> dict[str, Any]:
    """The tensors as the kernel wants them: contiguous, with rows of whole vectors, tokens in lanes."""
    line = meeting.logits[0].shape[1] + len(meeting.sides)
    line += -line % _WIDTH
    lifted = [(logits - logits.amax(-1, keepdim=True)).exp() for logits in meeting.logits]
    relevance: Sequence[Tensor | None] = [each.contiguous() for each in reading.relevance] or [None] * 4
    return {
        "values": None if meeting.values is None else widen(meeting.values),
        "words": None if meeting.words is None else widen(meeting.words),
        "products": None if meeting.products is None else meeting.products.contiguous(),
        "gram": None if meeting.gram is None else meeting.gram.contiguous(),
        "sides": [side.contiguous() for side in meeting.sides],
        "offsets": torch.tensor([0, *meeting.lengths]).cumsum(0),
        "logits": [widen(each.transpose(1, 2), line) for each in meeting.logits],
        "lifted": [widen(each.transpose(1, 2), line) for each in lifted],
        "decisions": [decision.contiguous() for decision in meeting.decisions],
        "shares": [share.contiguous() for share in meeting.shares],
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
    images, tokens, patches = meeting.logits[0].shape
    problem = _Problem(
        images=images,
        texts=len(meeting.lengths),
        patches=patches,
        channels=0 if given["words"] is None else given["words"].shape[-1],
        tokens=tokens,
        others=len(meeting.sides),
        branches=len(meeting.logits),
        threads=torch.get_num_threads(),
        every_patch=every_patch,
        leaky=reading.leaky,
        mean=reading.mean,
        top=reading.relevance[0].shape[1] if reading.relevance else 0,
        words_side=reading.words_side,
        tokens_side=reading.tokens_side,
        bound=int(GRADIENT_BOUND),
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
    saliency, keep = saliency.detach(), keep.long().contiguous()
    if saliency.stride(2) != 1:
        saliency = saliency.contiguous()
    decision = torch.empty(saliency.shape)
    rest = torch.empty(saliency.shape) if residual else None
    mask = None if mask is None else mask.contiguous()
    sizes = [*saliency.shape, *saliency.stride()[:2], torch.get_num_threads()]
    pointers = [
        ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
        for tensor in (saliency, keep, mask, decision, rest)
    ]
    library.select_top(*pointers[:3], *map(ctypes.c_int64, sizes), *pointers[3:])
    return decision, rest

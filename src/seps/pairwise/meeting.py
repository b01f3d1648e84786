"""Words meet the tokens of a pair, which are never built (eq. 4, 5): in torch, or in the compiled kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from seps.alignment import Aligner, activate
from seps.pairwise.native import library
from seps.pairwise.native.calls import Meeting, Reading
from seps.pairwise.native.calls import meet as meet_compiled
from seps.pairwise.prepared import Prepared, TokenSet
from seps.pairwise.texts import Words
from seps.slimming import Branch, aggregation_weights, token_weights, total, unit

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Choice:
    """What a branch decided for the pairs of a block: decision and residual weights (b,t,N), and where the
    branch takes part, (b,1), (1,t) or None where everywhere."""

    decision: Tensor
    residual: Tensor
    present: Tensor | None


def compiled(values: Tensor) -> ctypes.CDLL | None:
    """The compiled kernel, if there is one and it can work on such values."""
    return library() if values.device.type == "cpu" and values.dtype == torch.float32 else None


def multiply(words: Tensor, values: Tensor, precision: Precision) -> Tensor:
    """Products of every word with every patch, in the precision itself. (L,C), (B,N,C) -> (L,B,N)"""
    if precision == "bf16":
        words, values = words.bfloat16(), values.bfloat16()
    return (words @ values.flatten(0, 1).T).unflatten(1, values.shape[:2])


class Gram(torch.autograd.Function):
    """Products of vectors with each other; symmetry halves the backward pass. (B,N,C) -> (B,N,N)"""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        """The products."""
        ctx.save_for_backward(values)
        return values @ values.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        """The gradient of the values."""
        (values,) = ctx.saved_tensors
        return (upstream + upstream.transpose(1, 2)) @ values


def multiply_itself(values: Tensor, precision: Precision) -> Tensor:
    """The Gram matrices of the patches, in the precision of the values. (B,N,C) -> (B,N,N)"""
    rounded = values.bfloat16() if precision == "bf16" else values
    return Gram.apply(rounded).to(values.dtype)


def meet(
    images: Prepared,
    gram: Tensor | None,
    logits: Sequence[Tensor],
    choices: Sequence[Choice],
    words: Words,
    aligner: Aligner,
    precision: Precision,
) -> Tensor:
    """Eq. 4 and 5 between the tokens that some branches choose together, and the words. -> (b,t)"""
    kernel = compiled(images.values)
    if kernel is None:
        branches = [
            Branch(
                choice.decision,
                choice.decision,
                aggregation_weights(each, choice.decision),
                choice.residual,
                choice.present,
            )
            for each, choice in zip(logits, choices, strict=True)
        ]
        return meet_plainly(images, gram, token_weights(branches), words, aligner, precision)
    shares = [shares_of(choice) for choice in choices]
    residuals = [
        choice.residual if choice.present is None else choice.residual * share.unsqueeze(2)
        for choice, share in zip(choices, shares, strict=True)
    ]
    residual = residuals[0]
    if len(residuals) > 1:
        residual = total(residuals) / total(shares).clamp(min=1).unsqueeze(2)
    sides = [words.meet(residual @ images.values)]
    if images.cls is not None:
        sides.append(words.features @ unit(images.cls).T)
    # The kernel makes exact products, of the kept patches alone; cheap ones it is given for all patches.
    given = precision == "bf16"
    meeting = Meeting(
        words.lengths,
        None if given else images.values,
        None if given else words.features,
        multiply(words.features, images.values, precision) if given else None,
        gram,
        sides,
        logits,
        [choice.decision for choice in choices],
        shares,
    )
    return meet_compiled(kernel, meeting, read_by(aligner))


def shares_of(choice: Choice) -> Tensor:
    """How much a branch takes part in every pair. -> (b,t)"""
    pairs = choice.decision.shape[:2]
    if choice.present is None:
        return choice.decision.new_ones(pairs)
    return choice.present.to(choice.decision.dtype).expand(pairs)


def read_by(aligner: Aligner) -> Reading:
    """How an aligner reads cosines, for the compiled kernel."""
    recipe = aligner.recipe
    layers: list[Any] = [] if aligner.relevance is None else [aligner.relevance[0], aligner.relevance[2]]
    # The kernel reads fp32, whatever precision the network is kept in.
    return Reading(
        recipe.affinity == "leaky_relu",
        recipe.pooling != "top",
        recipe.directions != "patch_to_word",
        recipe.directions != "word_to_patch",
        tuple(tensor.float() for layer in layers for tensor in (layer.weight, layer.bias)),
    )


def meet_plainly(
    images: Prepared,
    gram: Tensor | None,
    weights: Tensor,
    words: Words,
    aligner: Aligner,
    precision: Precision,
) -> Tensor:
    """Eq. 5 between the tokens that weights (b,t,J,N) make of the patches, and the words. -> (b,t)"""
    found = multiply(words.features, images.values, precision).to(images.values.dtype)
    products = words.pad(found.permute(1, 2, 0)).permute(0, 2, 1, 3)
    if gram is None:
        gram = multiply_itself(images.values, precision)
    squared = ((weights.flatten(1, 2) @ gram).view_as(weights) * weights).sum(-1, keepdim=True)
    real = squared > 1e-24
    length = torch.where(real, squared, torch.ones_like(squared)).sqrt()
    cosines = torch.where(real, (weights @ products) / length, torch.zeros_like(squared))
    if images.cls is not None:
        first = words.pad(unit(images.cls) @ words.features.T)
        cosines = torch.cat([first.unsqueeze(2), cosines], dim=2)
    affinity = activate(cosines.transpose(2, 3), aligner.recipe.affinity)
    return aligner.score(affinity, words.mask.unsqueeze(0))


def meet_set(tokens: TokenSet, words: Words, aligner: Aligner) -> Tensor:
    """Eq. 5 between tokens that are the same for every text, and the words. -> (b,t)"""
    cosines = words.pad(tokens.features @ words.features.T).permute(0, 2, 3, 1)
    mask = None if tokens.mask is None else tokens.mask.unsqueeze(1)
    return aligner.score(activate(cosines, aligner.recipe.affinity), words.mask.unsqueeze(0), mask)

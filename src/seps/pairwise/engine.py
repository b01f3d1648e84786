"""Scores of all pairs, block by block under a memory budget, without ever building a token.

A slim token is ``x @ V`` with weights x over the patches, so its cosine with a word w is
``x @ (V w) / sqrt(x G x)`` with the image's Gram matrix ``G = V Vᵀ``: of the texts only the product
``V w`` is needed. In training every block is computed again in the backward pass, so that memory does not
grow with the number of pairs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from seps.alignment import Aligner, activate
from seps.pairwise.native import library
from seps.pairwise.native.calls import Meeting, Reading, select_top
from seps.pairwise.native.calls import meet as meet_compiled
from seps.pairwise.prepared import Pieces, Prepared, TokenSet, full_precision
from seps.pairwise.texts import TextSide, Words
from seps.slimming import (
    Branch,
    aggregation_weights,
    guidance,
    keep_count,
    min_max,
    residual_weights,
    token_weights,
    total,
    unit,
)
from seps.tokens import Tokens

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Scored:
    """Scores (B,T) of a block and how many patches of its pairs each branch kept."""

    scores: Tensor
    kept: list[Tensor]


def signals(head: Pieces, images: Prepared, texts: TextSide) -> list[Tensor]:
    """What a text's guides say of the patches, as it enters the saliency (eq. 2, 3). Each (b,t,N)

    The first is its words', the second its dense text's, where that hangs on the texts.
    """
    guides = [guide for guide in (texts.guide, texts.dense_guide) if guide is not None]
    found = [guidance(images.values, guide.unsqueeze(0)) for guide in guides]
    if head.recipe.scoring == "sum":
        return found
    return [head.recipe.mixing * min_max(signal, images.mask) for signal in found]


def heard_by(head: Pieces, branch: str, heard: Sequence[Tensor]) -> Sequence[Tensor]:
    """Those of the texts' signals that guide a branch."""
    if head.recipe.dense == "branch" and len(heard) == 2:
        return [heard[branch == "dense"]]
    return heard


@dataclass(frozen=True)
class Choice:
    """What a branch decided for the pairs of a block: decision and residual weights (b,t,N), and where the
    branch takes part, (b,1), (1,t) or None where everywhere."""

    decision: Tensor
    residual: Tensor
    present: Tensor | None


def decide_pairs(
    head: Pieces,
    images: Prepared,
    texts: TextSide,
    name: str,
    heard: Sequence[Tensor],
    rows: Tensor,
    seed: int,
) -> Choice:
    """What a branch decides for every pair of a block; rows (b,) are the images' places in the batch."""
    score = total([images.branches[name].saliency.unsqueeze(1), *heard_by(head, name, heard)])
    patches, present = Tokens(images.values, images.mask), branch_presence(name, images, texts)
    kernel = compiled(images.values)
    hard = head.recipe.selection == "topk" or not head.slimmer.training
    if kernel is not None and hard:
        decision, residual = select_top(
            kernel, score, head.slimmer.keep(patches), images.mask, not score.requires_grad
        )
        if residual is not None:
            return Choice(decision, residual, present)
    else:
        uniform = head.slimmer.uniform(name, rows, texts.index, score.shape[2], seed)
        decision = head.slimmer.decision(patches, name, score, uniform)
    return Choice(decision, residual_weights(score, decision, images.mask), present)


def compiled(values: Tensor) -> ctypes.CDLL | None:
    """The compiled kernel, if there is one and it can work on such values."""
    return library() if values.device.type == "cpu" and values.dtype == torch.float32 else None


def branch_presence(name: str, images: Prepared, texts: TextSide) -> Tensor | None:
    """Where the dense branch takes part. (b,1) or (1,t) boolean, None where everywhere"""
    if name == "sparse":
        return None
    if texts.described is not None:
        return texts.described.unsqueeze(0)
    return None if images.described is None else images.described.unsqueeze(1)


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


def score_block(
    head: Pieces,
    images: Prepared,
    gram: Tensor | None,
    texts: TextSide,
    start: int,
    precision: Precision,
    seed: int,
) -> Scored:
    """Scores of every pair of a block; gram as `gram_of`, start the place of its first image in the batch."""
    names = waiting_here(head, images, texts)
    rows = torch.arange(start, start + len(images), device=images.values.device)
    heard = signals(head, images, texts)
    choices = {name: decide_pairs(head, images, texts, name, heard, rows, seed) for name in names}
    kept = [choice.decision.sum() for choice in choices.values()]
    scores = images.values.new_zeros(len(images), len(texts))
    for group in [[name] for name in names] if head.recipe.dense == "branch" else [list(names)]:
        words = texts.words
        if group == ["dense"] and texts.dense_words is not None:
            words = texts.dense_words
        logits = [images.branches[name].logits for name in group]
        met = meet(images, gram, logits, [choices[name] for name in group], words, head.aligner, precision)
        present = choices[group[0]].present
        scores = scores + (met if present is None else met * present)
    if images.settled is not None:
        met = meet_set(images.settled, texts.words, head.aligner)
        scores = scores + (met if images.described is None else met * images.described.unsqueeze(1))
    return Scored(describe(head, scores, images, texts), kept)


def describe(head: Pieces, patch_scores: Tensor, images: Prepared, texts: TextSide) -> Tensor:
    """The patches' scores and, where the recipe has one, the description's term. -> (b,t)"""
    if head.description is None:
        return patch_scores
    term = head.description.absent(patch_scores)
    if images.evidence is not None:
        met = meet_set(images.evidence, texts.words, head.description.aligner)
        term = met if images.described is None else torch.where(images.described.unsqueeze(1), met, term)
    return patch_scores + head.description.weight * term


def waiting_here(head: Pieces, images: Prepared, texts: TextSide) -> tuple[str, ...]:
    """The branches that take part in a block: the dense one of the texts' side needs their dense text."""
    if head.recipe.dense_side == "text" and texts.dense_guide is None:
        return ("sparse",)
    return tuple(images.branches)


def score(
    head: Pieces,
    prepared: Prepared,
    texts: Tokens,
    dense: Tokens | None = None,
    budget: int | None = None,
    precision: Precision = "fp32",
) -> Tensor:
    """The score of every pair of prepared images and texts.

    dense: the texts' dense text where the recipe's hangs on the texts; budget: bytes that intermediate
    values may take, the device's default if None; precision of the large products -> (B,T)
    """
    with full_precision(prepared.values):
        texts, dense = head.admit_texts(texts, dense, prepared.values.dtype)
        return score_pairs(head, prepared, TextSide.of(texts, dense), budget, precision)[0]


def score_pairs(
    head: Pieces,
    images: Prepared,
    texts: TextSide,
    budget: int | None = None,
    precision: Precision = "fp32",
    seed: int = 0,
) -> tuple[Tensor, list[Tensor]]:
    """Scores of all pairs and the share of patches each branch kept, block by block."""
    if torch.compiler.is_compiling():
        # Blocks, their sizes and the kernel are no matter of a graph. (As a decorator, `disable` would load
        # the whole compiler whenever this module is imported.)
        uncompiled = torch.compiler.disable(score_pairs)
        return uncompiled(head, images, texts, budget, precision, seed)
    if precision not in get_args(Precision):
        raise ValueError(f"precision: expected one of {', '.join(get_args(Precision))}, found {precision!r}")
    height, width = block_size(head, images, texts, budget, precision)
    columns = texts.split(width)
    scores: list[Tensor] = []
    kept: list[list[Tensor]] = []
    for number, block in enumerate(images.split(height)):
        gram = gram_of(head, block, texts, precision)
        found = [
            score_again(head, block, gram, column, number * height, precision, seed) for column in columns
        ]
        scores.append(torch.cat([each.scores for each in found], dim=1))
        kept.append(
            [torch.stack(counts).sum() for counts in zip(*(each.kept for each in found), strict=True)]
        )
    count = len(images) * len(texts) * images.values.shape[1]
    shares = [torch.stack(counts).sum() / count for counts in zip(*kept, strict=True)]
    if images.settled is not None and images.settled.kept is not None:
        shares.append(images.settled.kept.mean())
    return torch.cat(scores)[:, texts.index.argsort()], shares


def gram_of(head: Pieces, images: Prepared, texts: TextSide, precision: Precision) -> Tensor | None:
    """The Gram matrices (b,N,N), or None where the kernel had better build the tokens themselves.

    That is so where an image meets too few texts for its Gram matrix to pay, or texts of many words.
    """
    if precision == "fp32" and compiled(images.values) is not None and not torch.is_grad_enabled():
        patches, channels = images.values.shape[1:]
        tokens, kept = head.slimmer.tokens, keep_count(patches, head.recipe.keep_ratio)
        words = texts.words if texts.dense_words is None else texts.dense_words
        mean = sum(words.lengths) / len(words)
        built = tokens * channels * (kept + mean)
        multiplied = kept * channels * mean + tokens * kept * (kept / 2 + mean)
        if built < multiplied + patches**2 * channels / len(texts):
            return None
    return multiply_itself(images.values, precision)


def score_again(
    head: Pieces,
    images: Prepared,
    gram: Tensor | None,
    texts: TextSide,
    start: int,
    precision: Precision,
    seed: int,
) -> Scored:
    """`score_block`; the backward pass computes the block again instead of remembering it."""
    if not torch.is_grad_enabled():
        return score_block(head, images, gram, texts, start, precision, seed)

    def compute() -> tuple[Tensor, list[Tensor]]:
        found = score_block(head, images, gram, texts, start, precision, seed)
        return found.scores, found.kept

    return Scored(*checkpoint(compute, use_reentrant=False, preserve_rng_state=False))


def default_budget(device: torch.device) -> int:
    """Bytes that the intermediate values of a block may take on a device, if nobody says."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return max(2**26, free // 4)
    # What fits the processor's cache is worked on faster than what does not.
    return 2**26


def block_size(
    head: Pieces, images: Prepared, texts: TextSide, budget: int | None, precision: Precision
) -> tuple[int, int]:
    """Images and texts of a block whose intermediate values fit the budget; one of each at the least."""
    if budget is None:
        budget = default_budget(images.values.device)
    if budget < 1:
        raise ValueError(f"budget: expected a positive number of bytes, found {budget}")
    patches, channels = images.values.shape[1:]
    tokens, branches, training = head.slimmer.tokens + 2, len(images.branches), torch.is_grad_enabled()
    lengths = (*texts.words.lengths, *(texts.dense_words.lengths if texts.dense_words else ()))
    pair = 8 * branches * patches + channels
    if compiled(images.values) is None:
        longest = max(*lengths, 1)
        pair += 3 * tokens * patches * branches + 3 * longest * (patches + 3 * tokens)
    elif precision == "bf16":
        pair += 2 * patches * max(1, sum(lengths) // len(lengths))
    pair *= images.values.element_size() * (4 if training else 1)
    pairs = max(1, budget // pair)
    # Both sides of a block amortise the other's reading; images are the heavier ones.
    width = even(len(texts), min(pairs, max(64, pairs // 16)))
    return even(len(images), max(1, pairs // width)), width


def even(count: int, most: int) -> int:
    """The size of the fewest blocks of at most so many that share a count evenly."""
    return -(-count // -(-count // most))

"""Scores of all pairs, block by block under a memory budget, without ever building a token.

A slim token is ``x @ V`` with weights x over the patches, so its cosine with a word w is
``x @ (V w) / sqrt(x G x)`` with the image's Gram matrix ``G = V Vᵀ``: of the texts only the product
``V w`` is needed. In training every block is computed again in the backward pass, so that memory does not
grow with the number of pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from seps.pairwise.meeting import Choice, Precision, compiled, meet, meet_set, multiply_itself
from seps.pairwise.native.calls import select_top
from seps.pairwise.prepared import Pieces, Prepared, full_precision
from seps.pairwise.texts import TextSide
from seps.slimming import guidance, keep_count, min_max, residual_weights, total
from seps.tokens import Tokens


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


def branch_presence(name: str, images: Prepared, texts: TextSide) -> Tensor | None:
    """Where the dense branch takes part. (b,1) or (1,t) boolean, None where everywhere"""
    if name == "sparse":
        return None
    if texts.described is not None:
        return texts.described.unsqueeze(0)
    return None if images.described is None else images.described.unsqueeze(1)


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

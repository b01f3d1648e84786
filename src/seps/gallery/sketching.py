"""Sketches: the slim tokens a picture has for a typical text, cheap enough to rank every picture by.

What a text changes of a picture's slim tokens is little: it is one guide of several. So the tokens for a
text like any other, met by the words of a query as in eq. 5, rank pictures nearly as the exact score does.
Where it does change much, a text kept a patch that others drop; so the few tokens that differ most for
some other texts are kept too, for words alone to meet.
"""

from __future__ import annotations

import random

import pyarrow as pa
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from seps.alignment import Aligner, activate, align
from seps.data.text import WordTokenizer
from seps.gallery.packing import Precision, cosines, pack
from seps.model import SepsModel, SepsProcessor
from seps.slimming import unit
from seps.tokens import Tokens

EVERYDAY = (
    "a woman in a red dress walks along a street with a dog",
    "two children play football on a green field",
    "a small boat near a house by the sea at sunset",
    "a man sits at a table in front of a plate of food",
    "a group of people stand outside a large building",
    "a close view of a cat lying on a bed next to a window",
)
"""What captions of photographs are like."""
_DRAWN, _DRAWN_WORDS = 16, 12
# So many further tokens a sketch has.
FURTHER = 3


@torch.inference_mode()
def typical_texts(model: SepsModel, processor: SepsProcessor) -> Tokens:
    """One word in place of each of some texts, its mean word: everyday captions, or words that a model
    knows, as often as Zipf's law has them.

    -> (K,1,C)
    """
    texts, tokenizer = list(EVERYDAY), processor.tokenizer
    if isinstance(tokenizer, WordTokenizer):
        known = [tokenizer.vocabulary[number] for number in tokenizer.ordinary]
        weights, draw = [1 / (rank + 1) for rank in range(len(known))], random.Random(0)
        texts = [" ".join(draw.choices(known, weights, k=_DRAWN_WORDS)) for _ in range(_DRAWN)]
    device = next(model.parameters()).device
    read = processor.texts(texts)
    words = model.encode_texts(read["ids"].to(device), read["mask"].to(device))
    return Tokens(words.mean().unsqueeze(1))


@torch.inference_mode()
def sketch(
    model: SepsModel, images: Tokens, dense: Tokens | None, typical: Tokens, precision: Precision
) -> list[bytes | None]:
    """The slim tokens of pictures as bytes, for the mean of typical texts, then the further ones; of each
    alignment, where the recipe has two.

    A dense branch that takes no part leaves tokens of zeros. images (B,N,C), dense (B,D,C), typical (K,1,C)
    """
    seen = model.head.inspect(images, Tokens(typical.features.mean(0, keepdim=True)), dense)
    others = model.head.inspect(images, typical, dense)
    groups: list[Tensor] = []
    for name in alignments(model):
        if name not in seen.tokens:
            groups.append(torch.zeros_like(groups[0]))
            continue
        tokens = with_further(seen.tokens[name][:, 0], others.tokens[name].flatten(1, 2))
        present = seen.branches[name].present
        groups.append(tokens if present is None else tokens * present.unsqueeze(-1))
    return pack(Tokens(torch.cat(groups, 1)), precision)


def with_further(tokens: Tensor, others: Tensor) -> Tensor:
    """Tokens and those of some others that are the farthest from them and from each other, one by one.

    tokens (B,J,C), others (B,L,C), of unit length -> (B,J+FURTHER,C)
    """
    nearest = (others @ tokens.transpose(1, 2)).amax(2)
    for _ in range(FURTHER):
        chosen = others[torch.arange(len(others)), nearest.argmin(1)].unsqueeze(1)
        tokens = torch.cat([tokens, chosen], 1)
        nearest = torch.maximum(nearest, (others @ chosen.transpose(1, 2)).squeeze(2))
    return tokens


def alignments(model: SepsModel) -> tuple[str, ...]:
    """The alignments of a recipe whose tokens do not depend on a text's own dense text."""
    recipe = model.recipe
    both = recipe.dense == "branch" and recipe.dense_side == "image"
    return ("sparse", "dense") if both else ("sparse",)


@torch.inference_mode()
def patch_scores(model: SepsModel, packed: pa.Array, words: Tokens) -> Tensor:
    """About what the patches of pictures add to their scores (eq. 5). words (T,M,C) -> (B,T)"""
    found, _ = cosines(packed, unit(real_words(words)))
    first, *more = found.unflatten(0, (len(packed), -1)).chunk(len(alignments(model)), 1)
    scores = meet(model.head.aligner, first, None, words, FURTHER)
    for others in more:
        # A branch that takes no part is kept as zeros.
        present = others.any(-1).any(-1, keepdim=True)
        scores += meet(model.head.aligner, others, None, words, FURTHER) * present
    return scores


@torch.inference_mode()
def word_scores(model: SepsModel, packed: pa.Array | None, words: Tokens, patches: Tensor) -> Tensor:
    """What the descriptions of pictures add, or what stands in for those that are missing.

    words (T,M,C), patches (B,T) -> (B,T)
    """
    match = model.head.description
    if match is None:
        return torch.zeros_like(patches)
    scores = match.absent(patches)
    if packed is not None and packed.null_count < len(packed):
        found, lengths = cosines(packed, unit(real_words(words)))
        padded = pad_sequence(list(found.split(lengths)), batch_first=True)
        counts = torch.tensor(lengths, device=padded.device).unsqueeze(1)
        there = torch.arange(padded.shape[1], device=padded.device) < counts
        scores = torch.where(counts > 0, meet(match.aligner, padded, there, words), scores)
    return match.weight * scores


def meet(aligner: Aligner, cosines: Tensor, mask: Tensor | None, words: Tokens, further: int = 0) -> Tensor:
    """Eq. 5 of every item with every text; the last, further tokens are met by words and meet none.

    cosines (B,J,S) with the texts' real words, mask (B,J) -> (B,T)
    """
    recipe, scores = aligner.recipe, []
    for own in activate(cosines, recipe.affinity).split(kept_words(words).sum(1).tolist(), -1):
        score = own.new_zeros(len(own))
        for direction in ("word_to_patch", "patch_to_word"):
            if recipe.directions in ("both", direction):
                met = own if direction == "word_to_patch" else own[:, : own.shape[1] - further]
                score = score + align(
                    met.transpose(1, 2),
                    None,
                    mask,
                    recipe.pooling,
                    direction,
                    aligner.relevance,
                    recipe.top_k,
                )
        scores.append(score)
    return torch.stack(scores, 1)


def real_words(words: Tokens) -> Tensor:
    """The words of all texts without padding. (T,M,C) -> (S,C)"""
    return words.features.float()[kept_words(words)]


def kept_words(words: Tokens) -> Tensor:
    """Which words are real. -> (T,M)"""
    return torch.ones(words.features.shape[:2], dtype=torch.bool) if words.mask is None else words.mask

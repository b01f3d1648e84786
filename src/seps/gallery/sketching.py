"""Sketches: the slim tokens a picture has for a typical text, cheap enough to rank every picture by.

What a text changes of a picture's slim tokens is little: it is one guide of several. So the tokens for a
text like any other, met by the words of a query as in eq. 5, rank pictures nearly as the exact score does.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import torch
from torch import Tensor

from seps.alignment import Aligner, activate
from seps.data.text import MOST_WORDS, WordTokenizer
from seps.gallery.packing import Precision, directions, pack, unpack_column
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


@torch.inference_mode()
def typical_text(model: SepsModel, processor: SepsProcessor) -> Tokens:
    """One word in place of a text: the mean word of everyday captions, or of all the words a model knows.

    -> (1,1,C)
    """
    tokenizer = processor.tokenizer
    texts = list(EVERYDAY)
    if isinstance(tokenizer, WordTokenizer):
        texts = [" ".join(tokenizer.vocabulary[number] for number in tokenizer.ordinary[:MOST_WORDS])]
    device = next(model.parameters()).device
    read = processor.texts(texts)
    words = model.encode_texts(read["ids"].to(device), read["mask"].to(device))
    return Tokens(words.mean().mean(0).view(1, 1, -1))


@torch.inference_mode()
def sketch(
    model: SepsModel, images: Tokens, dense: Tokens | None, typical: Tokens, precision: Precision
) -> list[bytes | None]:
    """The slim tokens of pictures as bytes; of each alignment, where the recipe has two.

    A dense branch that takes no part leaves tokens of zeros. images (B,N,C), dense (B,D,C)
    """
    seen = model.head.inspect(images, typical, dense)
    groups: list[Tensor] = []
    for name in alignments(model):
        tokens = seen.tokens.get(name)
        present = None if tokens is None else seen.branches[name].present
        if tokens is None:
            groups.append(torch.zeros_like(groups[0]))
        else:
            groups.append(tokens[:, 0] if present is None else tokens[:, 0] * present.unsqueeze(-1))
    return pack(Tokens(torch.cat(groups, 1)), precision)


def alignments(model: SepsModel) -> tuple[str, ...]:
    """The alignments of a recipe whose tokens do not depend on a text's own dense text."""
    recipe = model.recipe
    both = recipe.dense == "branch" and recipe.dense_side == "image"
    return ("sparse", "dense") if both else ("sparse",)


@torch.inference_mode()
def patch_scores(model: SepsModel, packed: pa.Array, words: Tokens) -> Tensor:
    """About what the patches of pictures add to their scores (eq. 5). words (T,M,C) -> (B,T)"""
    tokens = unpack_column(packed, model.config.channels).features.to(words.features.device)
    groups = (tokens @ unit(real_words(words)).T).chunk(len(alignments(model)), 1)
    scores = meet(model.head.aligner, groups[0], None, words)
    for others in groups[1:]:
        # A branch that takes no part is kept as zeros.
        present = others.any(-1).any(-1, keepdim=True)
        scores += meet(model.head.aligner, others, None, words) * present
    return scores


@torch.inference_mode()
def word_scores(model: SepsModel, packed: Sequence[bytes | None], words: Tokens, patches: Tensor) -> Tensor:
    """What the descriptions of pictures add, or what stands in for those that are missing.

    words (T,M,C), patches (B,T) -> (B,T)
    """
    match = model.head.description
    if match is None:
        return torch.zeros_like(patches)
    scores = match.absent(patches)
    if any(packed):
        vectors, lengths = directions(packed, model.config.channels)
        there = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
        vectors, there = vectors.to(scores.device), there.to(scores.device)
        flat = vectors @ unit(real_words(words)).T / vectors.norm(dim=1, keepdim=True).clamp(min=1e-12)
        cosines = flat.new_zeros(*there.shape, flat.shape[-1])
        cosines[there] = flat
        met = meet(match.aligner, cosines, there, words)
        scores = torch.where(there.any(1, keepdim=True), met, scores)
    return match.weight * scores


def meet(aligner: Aligner, cosines: Tensor, mask: Tensor | None, words: Tokens) -> Tensor:
    """Eq. 5 of every item with every text. cosines (B,J,S) with their real words, mask (B,J) -> (B,T)"""
    lengths = kept_words(words).sum(1).tolist()
    each = activate(cosines, aligner.recipe.affinity).split(lengths, -1)
    return torch.stack([aligner.score(own.transpose(1, 2), None, mask) for own in each], 1)


def real_words(words: Tokens) -> Tensor:
    """The words of all texts without padding. (T,M,C) -> (S,C)"""
    return words.features.float()[kept_words(words)]


def kept_words(words: Tokens) -> Tensor:
    """Which words are real. -> (T,M)"""
    return torch.ones(words.features.shape[:2], dtype=torch.bool) if words.mask is None else words.mask

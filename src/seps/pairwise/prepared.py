"""The image side of a score: what every pair of an image shares, computed once per image."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from seps.alignment import Aligner
from seps.recipe import Recipe
from seps.slimming import Slimmer, guidance, learned_share, min_max, token_weights, total, unit
from seps.tokens import Tokens

Side = TypeVar("Side")


class Description(Protocol):
    """What the engine asks of a description's own term."""

    aligner: Aligner

    def draw_seed(self) -> int:
        """A fresh seed for the noise of one batch, zero where none is drawn."""

    @property
    def weight(self) -> Tensor:
        """The weight of the term, above zero."""

    def evidence(self, images: Tokens, dense: Tokens, seed: int = 0) -> Tokens:
        """The token set that stands for each description. -> (B,D,C)"""

    def absent(self, patch_scores: Tensor) -> Tensor:
        """What stands in for the term where there is no description. (B,T) -> (B,T)"""


class Pieces(Protocol):
    """What the engine asks of a head."""

    recipe: Recipe
    slimmer: Slimmer
    aligner: Aligner
    description: Any

    def admit_images(
        self, images: Tokens, dense: Tokens | None, guides: Mapping[str, Tensor] | None
    ) -> tuple[Tokens, Tokens | None, list[Tensor]]:
        """Check the image side and bring it to the head's precision."""

    def admit_texts(
        self, texts: Tokens, dense: Tokens | None, dtype: torch.dtype
    ) -> tuple[Tokens, Tokens | None]:
        """Check the text side and bring it to the head's precision."""


@dataclass(frozen=True)
class BranchSide:
    """An image's part of a branch that waits for the text.

    saliency (B,N), the part of it in which the text has no say; logits (B,J,N) of the aggregation.
    """

    saliency: Tensor
    logits: Tensor


@dataclass(frozen=True)
class TokenSet:
    """Tokens that are the same for every text, unit length: features (B,J,C), mask (B,J) or None.

    kept (B,) is the share of patches their selection kept, None where nothing was selected.
    """

    features: Tensor
    mask: Tensor | None = None
    kept: Tensor | None = None


@dataclass(frozen=True)
class Prepared:
    """What the engine needs of images, whatever the texts.

    values (B,N,C) with their mask (B,N) and cls (B,C); the branches that wait for a text; described (B,),
    where there is dense text; settled, the dense branch's tokens where the text has no say in them;
    evidence, the description's tokens.
    """

    values: Tensor
    mask: Tensor | None
    cls: Tensor | None
    branches: Mapping[str, BranchSide]
    described: Tensor | None = None
    settled: TokenSet | None = None
    evidence: TokenSet | None = None

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice | Tensor | list[int]) -> Prepared:
        """The same for some of the images."""
        return transform(self, lambda tensor: tensor[rows])

    def split(self, size: int) -> list[Prepared]:
        """Consecutive blocks of size images; one node of the autograd graph splits each tensor."""
        parts = {id(tensor): tensor.split(size) for tensor in tensors(self)}

        def block(number: int) -> Prepared:
            return transform(self, lambda tensor: parts[id(tensor)][number])

        return [block(number) for number in range(-(-len(self) // size))]

    @staticmethod
    def join(parts: Sequence[Prepared]) -> Prepared:
        """The images of all parts, in order."""
        columns = [tensors(part) for part in parts]
        if len({len(column) for column in columns}) != 1:
            raise ValueError("parts: expected image sides of one recipe and kind, found different ones")
        joined = iter([torch.cat(column) for column in zip(*columns, strict=True)])
        return transform(parts[0], lambda _: next(joined))

    def to(self, target: torch.dtype | torch.device | str) -> Prepared:
        """The same in another floating dtype or on another device."""
        if isinstance(target, torch.dtype):
            return transform(self, lambda tensor: tensor.to(target) if tensor.is_floating_point() else tensor)
        return transform(self, lambda tensor: tensor.to(target))


def transform(side: Side, function: Callable[[Tensor], Tensor]) -> Side:
    """The same structure with the function applied to every tensor in it."""

    def visit(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        if isinstance(value, Mapping):
            return {name: visit(each) for name, each in value.items()}
        if value is None or isinstance(value, (int, str)):
            return value
        return replace(value, **{field.name: visit(getattr(value, field.name)) for field in fields(value)})

    return visit(side)


def tensors(side: Any) -> list[Tensor]:
    """All tensors of a structure, in the order `transform` visits them."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    transform(side, note)
    return found


def prepare(
    head: Pieces,
    images: Tokens,
    dense: Tokens | None = None,
    guides: Mapping[str, Tensor] | None = None,
) -> Prepared:
    """Everything of the image side, to be kept: for evaluation and search, where nothing is sampled.

    dense: the images' dense text where the recipe's hangs on the images; guides as for the head.
    """
    with full_precision(images.features):
        return prepare_admitted(head, *head.admit_images(images, dense, guides))


def prepare_admitted(
    head: Pieces, images: Tokens, dense: Tokens | None, guides: Sequence[Tensor], seed: int = 0
) -> Prepared:
    """`prepare` for inputs that were checked; guides each (B,1,C), seed of the pairs' noise."""
    recipe, slimmer, description = head.recipe, head.slimmer, head.description
    patches, anchor = slimmer.prepare(images), images.mean().unsqueeze(1)
    own, settled, evidence = list(guides), None, None
    described = None if dense is None or dense.mask is None else dense.present
    if dense is not None and recipe.dense == "branch":
        settled = settle(head, images, [dense.mean().unsqueeze(1), *guides], seed)
    elif dense is not None:
        own = [dense.mean().unsqueeze(1), *guides]
    if dense is not None and description is not None:
        found = description.evidence(images, dense, description.draw_seed())
        evidence, described = TokenSet(found.features, found.mask), dense.present
    # A missing description's guidance is zero, and still counts among the guides.
    count = len(guides) + (2 if recipe.dense in ("fused", "matched") else 1)
    branches = {
        name: prepare_branch(slimmer, patches, name, [anchor, *own], count)
        for name in waiting_branches(recipe, dense is not None)
    }
    return Prepared(patches.features, patches.mask, images.cls, branches, described, settled, evidence)


def waiting_branches(recipe: Recipe, dense: bool) -> tuple[str, ...]:
    """Branches whose decision waits for the text; dense says whether the images have dense text."""
    settled = recipe.dense == "branch" and recipe.dense_side == "image"
    absent = recipe.dense_side == "image" and not dense
    return ("sparse",) if settled or absent else recipe.branches


def prepare_branch(
    slimmer: Slimmer, patches: Tokens, name: str, own: Sequence[Tensor], count: int
) -> BranchSide:
    """The image's part of a branch. own: the anchor and the image's guides, (B,1,C); count of all guides."""
    predicted = slimmer.predicted(patches, name)
    signals = [guidance(patches.features, guide) for guide in own]
    if predicted is None:
        saliency = total(signals)
    else:
        scaled = [min_max(signal, patches.mask) for signal in signals]
        mixing = slimmer.recipe.mixing
        saliency = learned_share(count, mixing) * predicted + mixing * total([scaled[0], *scaled])
    return BranchSide(saliency.squeeze(1), slimmer.logits(patches, name))


def settle(head: Pieces, images: Tokens, guides: Sequence[Tensor], seed: int) -> TokenSet:
    """The tokens of a dense branch in which the text has no say. guides (B,1,C)"""
    branch = head.slimmer(images, {"dense": guides}, seed=seed)["dense"]
    values = head.slimmer.prepare(images).features
    tokens = (token_weights([branch]) @ values.unsqueeze(1)).squeeze(1)
    if images.cls is not None:
        tokens = torch.cat([images.cls.unsqueeze(1), tokens], dim=1)
    return TokenSet(unit(tokens), kept=branch.decision.mean((1, 2)))


@contextmanager
def full_precision(features: Tensor) -> Iterator[None]:
    """Selection and scores are no place for half precision: autocast is off inside."""
    with torch.autocast(features.device.type, enabled=False):
        yield

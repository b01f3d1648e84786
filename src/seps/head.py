"""SlimHead: slimming and alignment under a recipe, from tokens to an (images, texts) score matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from seps.alignment import Aligner
from seps.pairwise.engine import score_pairs
from seps.pairwise.meeting import Precision
from seps.pairwise.prepared import full_precision, prepare_admitted
from seps.pairwise.texts import TextSide
from seps.recipe import Recipe
from seps.slimming import Branch, Slimmer, token_weights, unit
from seps.tokens import Tokens, describe


@dataclass(frozen=True)
class Inspection:
    """How a score came about. Where the text has no say in a branch, its T axis has length 1.

    scores (B,T); branches: what each branch decided; tokens: the slim tokens each alignment met, unit
    length, CLS first and residual last, (B,T,J+2,C); patch_scores and word_scores: the two terms of a
    description's match, word_scores None where the recipe has none.
    """

    scores: Tensor
    branches: Mapping[str, Branch]
    tokens: Mapping[str, Tensor]
    patch_scores: Tensor
    word_scores: Tensor | None = None

    @property
    def decisions(self) -> list[Tensor]:
        """Decisions of the sparse and, if there is one, the dense branch, for the ratio loss."""
        return [branch.decision for branch in self.branches.values()]


class SlimHead(nn.Module):
    """Scores of images and texts under a recipe.

    patches is the number of patches the encoder yields (it fixes J), channels is C.
    """

    def __init__(self, recipe: Recipe, patches: int, channels: int) -> None:
        super().__init__()
        self.recipe = recipe
        self.channels = channels
        self.slimmer = Slimmer(recipe, patches, channels)
        self.aligner = Aligner(recipe)
        self.description = DescriptionMatch(recipe, channels) if recipe.dense == "matched" else None
        if self.description is not None:
            # Two relevance networks that start apart would tell described images from others by an offset.
            self.description.aligner.load_state_dict(self.aligner.state_dict())

    def forward(
        self,
        images: Tokens,
        texts: Tokens,
        dense: Tokens | None = None,
        guides: Mapping[str, Tensor] | None = None,
        budget: int | None = None,
        precision: Precision = "fp32",
    ) -> Tensor:
        """The score of every pair.

        dense: dense text of the images or of the texts, as the recipe's dense_side says; guides: further
        vectors of the images (B,C) by name, such as sound or another modality; budget: bytes that
        intermediate values may take, the device's default if None; precision of the large products -> (B,T)
        """
        return self._score(images, texts, dense, guides, budget, precision)[0]

    def scores_and_shares(
        self,
        images: Tokens,
        texts: Tokens,
        dense: Tokens | None = None,
        guides: Mapping[str, Tensor] | None = None,
        budget: int | None = None,
        precision: Precision = "fp32",
    ) -> tuple[Tensor, list[Tensor]]:
        """The scores of a call and, for the ratio loss, the share of patches each branch kept."""
        return self._score(images, texts, dense, guides, budget, precision)

    def _score(
        self,
        images: Tokens,
        texts: Tokens,
        dense: Tokens | None,
        guides: Mapping[str, Tensor] | None,
        budget: int | None,
        precision: Precision,
    ) -> tuple[Tensor, list[Tensor]]:
        with full_precision(self.slimmer.scale):
            images, texts, dense, extra = self.admit(images, texts, dense, guides)
            of_images, of_texts = (dense, None) if self.recipe.dense_side == "image" else (None, dense)
            seed = self.draw_seed()
            prepared = prepare_admitted(self, images, of_images, extra, seed)
            return score_pairs(self, prepared, TextSide.of(texts, of_texts), budget, precision, seed)

    def inspect(
        self,
        images: Tokens,
        texts: Tokens,
        dense: Tokens | None = None,
        guides: Mapping[str, Tensor] | None = None,
    ) -> Inspection:
        """The scores together with everything they came from, tokens built one by one."""
        with full_precision(self.slimmer.scale):
            images, texts, dense, extra = self.admit(images, texts, dense, guides)
            seed = self.draw_seed()
            branches = self.slimmer(
                images,
                self.branch_guides(texts, dense, extra),
                self.branch_presence(dense),
                seed=seed,
            )
            return self._align(images, texts, dense, branches)

    def _align(
        self, images: Tokens, texts: Tokens, dense: Tokens | None, branches: dict[str, Branch]
    ) -> Inspection:
        values = self.slimmer.prepare(images).features
        groups = [[name] for name in branches] if self.recipe.dense == "branch" else [list(branches)]
        tokens, patch_scores = {}, torch.zeros((), device=values.device)
        for group in groups:
            name = group[0]
            tokens[name] = slim_tokens([branches[each] for each in group], values, images.cls)
            words = self.branch_words(name, texts, dense)
            met = self.aligner(words.features.unsqueeze(0), tokens[name], word_mask(words))
            present = branches[name].present
            patch_scores = patch_scores + (met if present is None else met * present)
        if self.description is None:
            return Inspection(patch_scores, branches, tokens, patch_scores)
        word_scores = self.description.scores(patch_scores, images, texts, dense)
        return Inspection(patch_scores + word_scores, branches, tokens, patch_scores, word_scores)

    def branch_guides(
        self, texts: Tokens, dense: Tokens | None, extra: Sequence[Tensor]
    ) -> dict[str, list[Tensor]]:
        """The vectors that guide each branch, of images (B,1,C) or of texts (1,T,C)."""
        sparse = texts.mean().unsqueeze(0)
        if self.recipe.dense == "none":
            return {"sparse": [sparse, *extra]}
        names = self.recipe.branches if dense is not None else ("sparse",)
        # A missing guide counts as zero: it stays in the count of guides, as where some images lack theirs.
        described = sparse.new_zeros(1, 1, self.channels)
        if dense is not None:
            described = dense.mean().unsqueeze(1 if self.recipe.dense_side == "image" else 0)
        if self.recipe.dense == "branch":
            return {name: [sparse if name == "sparse" else described, *extra] for name in names}
        return {name: [sparse, described, *extra] for name in names}

    def branch_presence(self, dense: Tokens | None) -> dict[str, Tensor]:
        """Where the dense branch takes part: where there is dense text. (B,1) or (1,T) boolean"""
        if dense is None or dense.mask is None:
            return {}
        return {"dense": dense.present.unsqueeze(1 if self.recipe.dense_side == "image" else 0)}

    def branch_words(self, branch: str, texts: Tokens, dense: Tokens | None) -> Tokens:
        """The words a branch is aligned with: the query's, or in "branch" its own dense text's."""
        own = self.recipe.dense == "branch" and self.recipe.dense_side == "text"
        return dense if own and branch == "dense" and dense is not None else texts

    def draw_seed(self) -> int:
        """A fresh seed for the noise of one batch, zero where none is drawn."""
        return int(torch.randint(0, 2**31 - 1, ())) if self.slimmer.sampling else 0

    def admit(
        self,
        images: Tokens,
        texts: Tokens,
        dense: Tokens | None,
        guides: Mapping[str, Tensor] | None,
    ) -> tuple[Tokens, Tokens, Tokens | None, list[Tensor]]:
        """Check the inputs, bring them to the head's precision, and drop descriptions in training."""
        of_images, of_texts = (dense, None) if self.recipe.dense_side == "image" else (None, dense)
        images, of_images, extra = self.admit_images(images, of_images, guides)
        texts, of_texts = self.admit_texts(texts, of_texts, images.features.dtype)
        return images, texts, of_texts if of_images is None else of_images, extra

    def admit_images(
        self, images: Tokens, dense: Tokens | None, guides: Mapping[str, Tensor] | None
    ) -> tuple[Tokens, Tokens | None, list[Tensor]]:
        """The image side of `admit`."""
        expect_tokens("images", images)
        if guides is not None and not isinstance(guides, Mapping):
            raise ValueError(f"guides: expected vectors by name, found {describe(guides)}")
        dtype = torch.promote_types(images.features.dtype, torch.float32)
        images = self._admit_tokens("images", images, dtype)
        if dense is not None:
            self._expect_dense(dense, len(images), "image")
            dense = self._admit_tokens("dense", dense, dtype)
            if self.description is not None:
                dense = self.description.drop(dense)
        extra = [check_guide(name, guide, images).to(dtype) for name, guide in (guides or {}).items()]
        return images, dense, extra

    def admit_texts(
        self, texts: Tokens, dense: Tokens | None, dtype: torch.dtype
    ) -> tuple[Tokens, Tokens | None]:
        """The text side of `admit`."""
        expect_tokens("texts", texts)
        texts = self._admit_tokens("texts", texts, dtype)
        if dense is None:
            return texts, None
        self._expect_dense(dense, len(texts), "text")
        return texts, self._admit_tokens("dense", dense, dtype)

    def _expect_dense(self, dense: Tokens, count: int, side: str) -> None:
        expect_tokens("dense", dense)
        if self.recipe.dense == "none":
            raise ValueError("dense: expected none, since the recipe has dense='none', found dense text")
        if self.recipe.dense_side != side:
            raise ValueError(
                f"dense: expected with the {self.recipe.dense_side}s, as dense_side says, not the {side}s"
            )
        if len(dense) != count:
            raise ValueError(f"dense: expected one for each of the {count} {side}s, found {len(dense)}")

    def _admit_tokens(self, name: str, tokens: Tokens, dtype: torch.dtype) -> Tokens:
        if tokens.channels != self.channels:
            raise ValueError(f"{name}: expected {self.channels} channels, found {tokens.channels}")
        if not torch.compiler.is_compiling():
            tokens.require_finite(name)
            if name != "dense" and not bool(tokens.present.all()):
                missing = int((~tokens.present).nonzero()[0])
                raise ValueError(
                    f"{name}: expected at least one real token each, found none in item {missing}"
                )
        return tokens.to(dtype).cleaned()


class DescriptionMatch(nn.Module):
    """The description's own term: its words are a second token set of the image, met by the query's words.

    ``S = S_patches + weight * S_words``; where an image has no description, S_words is a learned affine
    function of S_patches, so that it ranks fairly among described ones.
    """

    def __init__(self, recipe: Recipe, channels: int) -> None:
        super().__init__()
        self.dropout = recipe.description_dropout
        self.aligner = Aligner(recipe)
        self.raw_weight = nn.Parameter(torch.tensor(1.0).expm1().log())
        self.absent_scale = nn.Parameter(torch.ones(()))
        self.absent_shift = nn.Parameter(torch.zeros(()))
        slim = replace(recipe, dense="none", description_tokens="words")
        slimmed = recipe.description_tokens == "slimmed"
        self.slimmer = Slimmer(slim, recipe.description_length, channels) if slimmed else None

    @property
    def weight(self) -> Tensor:
        """The learned weight of the description's term, above zero."""
        return functional.softplus(self.raw_weight)

    def drop(self, dense: Tokens) -> Tokens:
        """In training, take the description away from some images at random."""
        if not self.training or self.dropout == 0:
            return dense
        return dense.without(torch.rand(len(dense), device=dense.features.device) < self.dropout)

    def draw_seed(self) -> int:
        """A fresh seed for the noise of one batch, zero where none is drawn."""
        draws = self.slimmer is not None and self.slimmer.sampling
        return int(torch.randint(0, 2**31 - 1, ())) if draws else 0

    def evidence(self, images: Tokens, dense: Tokens, seed: int = 0) -> Tokens:
        """The token set that stands for each description, unit length; needed once per image. -> (B,D,C)"""
        if self.slimmer is None:
            return Tokens(unit(dense.features), dense.mask)
        branches = self.slimmer(dense, {"sparse": [images.mean().unsqueeze(1)]}, seed=seed)
        tokens = slim_tokens(list(branches.values()), self.slimmer.prepare(dense).features, None)[:, 0]
        return Tokens(tokens, dense.present.unsqueeze(1).expand(tokens.shape[:2]))

    def absent(self, patch_scores: Tensor) -> Tensor:
        """What stands in for S_words where there is no description. (B,T) -> (B,T)"""
        return self.absent_scale * patch_scores + self.absent_shift

    def scores(self, patch_scores: Tensor, images: Tokens, texts: Tokens, dense: Tokens | None) -> Tensor:
        """The weighted description term of every pair. -> (B,T)"""
        stand_in = self.absent(patch_scores)
        if dense is None:
            return self.weight * stand_in
        evidence = self.evidence(images, dense, self.draw_seed())
        mask = None if evidence.mask is None else evidence.mask.unsqueeze(1)
        met = self.aligner(
            texts.features.unsqueeze(0), evidence.features.unsqueeze(1), word_mask(texts), mask
        )
        return self.weight * torch.where(dense.present.unsqueeze(1), met, stand_in)


def slim_tokens(branches: Sequence[Branch], values: Tensor, cls: Tensor | None) -> Tensor:
    """CLS if there is one, the aggregated tokens, the residual token; unit length.

    values (B,N,C), cls (B,C) -> (B,T,J+2,C), or J+1 without CLS
    """
    tokens = token_weights(branches) @ values.unsqueeze(1)
    if cls is not None:
        first = cls[:, None, None].expand(-1, tokens.shape[1], -1, -1)
        tokens = torch.cat([first, tokens], dim=2)
    return unit(tokens)


def expect_tokens(name: str, tokens: object) -> None:
    """Refuse anything but `Tokens`, such as a bare tensor, whose padding nobody knows."""
    if not isinstance(tokens, Tokens):
        raise ValueError(f"{name}: expected Tokens, found {describe(tokens)}")


def word_mask(texts: Tokens) -> Tensor | None:
    """The texts' mask, to broadcast over images. -> (1,T,M)"""
    return None if texts.mask is None else texts.mask.unsqueeze(0)


def check_guide(name: str, guide: Tensor, images: Tokens) -> Tensor:
    """A further guide of the images as `guidance` wants it. (B,C) -> (B,1,C)"""
    expected = (len(images), images.channels)
    if not isinstance(guide, Tensor) or guide.shape != expected:
        raise ValueError(f"guides[{name!r}]: expected shape {expected}, found {describe(guide)}")
    if not torch.compiler.is_compiling() and not bool(torch.isfinite(guide).all()):
        raise ValueError(f"guides[{name!r}]: expected finite numbers, found NaN or infinity")
    return guide.unsqueeze(1)

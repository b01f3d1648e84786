"""The ancestors' wholes: heads that compare images with texts, and slimming of three modalities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from seps.compat.checks import (
    admit_words,
    expect_finite,
    expect_patches,
    expect_shape,
    own_settings,
)
from seps.compat.parts import HRPA, DualTokenAggregation, TokenAggregation, TokenSparse
from seps.head import SlimHead
from seps.modalities import RGB_NIR_TIR, MultiModalSlimmer, reidentification
from seps.recipe import Recipe, laps, paper, released
from seps.tokens import Tokens


class _PairHead(nn.Module):
    """A `SlimHead` whose networks are registered under the ancestors' names."""

    def __init__(self, recipe: Recipe, num_patches: int, embed_size: int) -> None:
        super().__init__()
        self.num_patches = num_patches
        head = SlimHead(recipe, num_patches, embed_size)
        # In a tuple, so that its parameters are registered once: under the ancestors' names.
        self._heads: tuple[SlimHead, ...] = (head,)
        learned = recipe.scoring == "mix"
        self.sparse_net_cap = TokenSparse(embed_size, recipe.keep_ratio, learned)
        self.sparse_net_long = TokenSparse(embed_size, recipe.keep_ratio, learned)
        dual = recipe.aggregation == "dual"
        self.aggr_net = (DualTokenAggregation if dual else TokenAggregation)(embed_size, head.slimmer.tokens)

    def _bind(self) -> None:
        """Lend the registered networks to the head; they may have been replaced since the last call."""
        for head in self._heads:
            slimmer = head.train(self.training).slimmer
            slimmer.scale = self.aggr_net.scale
            for name in slimmer.networks:
                slimmer.networks[name] = getattr(
                    self.aggr_net, {"shared": "weight"}.get(name, f"weight_{name}")
                )
            for name in slimmer.predictors:
                owner = self.sparse_net_cap if name == "sparse" else self.sparse_net_long
                slimmer.predictors[name] = owner.score_predictor

    def _compare(
        self,
        head: SlimHead,
        img_embs: Tensor,
        cap_embs: Tensor,
        cap_lens: Tensor | Sequence[int],
        long_cap_embs: Tensor | None,
        long_cap_lens: Tensor | Sequence[int] | None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Scores (B,T) and, in training, the decision of each branch as a mask (T,B,N)."""
        self._bind()
        images = self._images(img_embs)
        texts = admit_words("cap_embs", cap_embs, "cap_lens", cap_lens, head.channels)
        if (long_cap_embs is None) != (long_cap_lens is None):
            raise ValueError("long_cap_embs, long_cap_lens: expected both or neither, found one of them")
        dense = None
        if long_cap_embs is not None and long_cap_lens is not None:
            dense = admit_words(
                "long_cap_embs", long_cap_embs, "long_cap_lens", long_cap_lens, head.channels, least=0
            )
            if len(dense) != len(texts):
                raise ValueError(
                    f"long_cap_embs: expected one for each of {len(texts)} texts, found {len(dense)}"
                )
        if not self.training:
            return head(images, texts, dense), ()
        seen = head.inspect(images, texts, dense)
        shape = (len(images), len(texts), self.num_patches)
        return seen.scores, tuple(each.expand(shape).transpose(0, 1) for each in seen.decisions)

    def _images(self, img_embs: Tensor) -> Tokens:
        """Patches, and CLS where there is one token more than patches. img_embs (B,N,C) or (B,N+1,C)"""
        expect_patches("img_embs", img_embs, self._heads[0].channels)
        extra = img_embs.shape[1] - self.num_patches
        if extra not in (0, 1):
            raise ValueError(
                f"img_embs: expected {self.num_patches} patches, or one token more with CLS first, "
                f"found {img_embs.shape[1]}"
            )
        images = Tokens(img_embs[:, extra:], cls=img_embs[:, 0] if extra else None)
        images.require_finite("img_embs")
        return images


class CrossSparseAggrNet(_PairHead):
    """The switchable whole: the paper's method or its released code's, gradient to the patches included."""

    def __init__(
        self,
        embed_size: int = 512,
        num_patches: int = 196,
        sparse_ratio: float = 0.5,
        aggr_ratio: float = 0.4,
        use_paper_version: bool = False,
        top_k: int = 5,
        use_gumbel_softmax: bool = False,
        gumbel_tau: float = 1.0,
        use_dual_aggr: bool = True,
        beta: float = 0.25,
    ) -> None:
        settings = own_settings(
            sparse_ratio=sparse_ratio, aggr_ratio=aggr_ratio, beta=beta, top_k=top_k, gumbel_tau=gumbel_tau
        )
        settings |= {
            "dense_side": "text",
            "selection": "straight_through" if use_gumbel_softmax else "topk",
        }
        if use_paper_version:
            recipe = paper(aggregation="dual" if use_dual_aggr else "shared", **settings)
        else:
            recipe = released(detach_selection=False, **settings)
        super().__init__(recipe, num_patches, embed_size)
        self.use_paper_version = use_paper_version
        self.hrpa = HRPA(embed_size, top_k, use_paper_version, scan=not use_paper_version)

    def _bind(self) -> None:
        super()._bind()
        self._heads[0].aligner.relevance = self.hrpa.relevance_mlp

    def forward(
        self,
        img_embs: Tensor,
        cap_embs: Tensor,
        cap_lens: Tensor | Sequence[int],
        long_cap_embs: Tensor | None = None,
        long_cap_lens: Tensor | Sequence[int] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | tuple[Tensor, ...]]:
        """Similarity (B,T); in training also the masks: a tuple in the paper's version, else their sum."""
        if not self.use_paper_version and long_cap_embs is not None:
            # The switchable module's plain version aligns the dense words without teaching them.
            long_cap_embs = long_cap_embs.detach()
        scores, masks = self._compare(
            self._heads[0], img_embs, cap_embs, cap_lens, long_cap_embs, long_cap_lens
        )
        if not self.training:
            return scores
        return scores, masks if self.use_paper_version else torch.stack(masks).sum(0)


class Options(Protocol):
    """What `CrossSparseAggrNet_v2` reads from its argument, such as an argparse namespace."""

    embed_size: int
    num_patches: int
    sparse_ratio: float
    aggr_ratio: float


class CrossSparseAggrNet_v2(_PairHead):
    """The released head: selection without gradient; without dense text it is LAPS and does not detach."""

    def __init__(self, opt: Options) -> None:
        missing = [name for name in Options.__annotations__ if not hasattr(opt, name)]
        if missing:
            expected = ", ".join(Options.__annotations__)
            raise ValueError(f"opt: expected {expected}, found no {', '.join(missing)}")
        ratios = own_settings(sparse_ratio=opt.sparse_ratio, aggr_ratio=opt.aggr_ratio)
        super().__init__(released(dense_side="text", **ratios), opt.num_patches, opt.embed_size)
        self._heads = (*self._heads, SlimHead(laps(**ratios), opt.num_patches, opt.embed_size))

    def forward(
        self,
        img_embs: Tensor,
        cap_embs: Tensor,
        cap_lens: Tensor | Sequence[int],
        long_cap_embs: Tensor | None = None,
        long_cap_lens: Tensor | Sequence[int] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Similarity (B,T); in training also the summed mask (T,B,N)."""
        head = self._heads[1 if long_cap_embs is None else 0]
        scores, masks = self._compare(head, img_embs, cap_embs, cap_lens, long_cap_embs, long_cap_lens)
        return (scores, torch.stack(masks).sum(0)) if self.training else scores


def create_seps_model(
    embed_size: int = 512,
    num_patches: int = 196,
    sparse_ratio: float = 0.5,
    aggr_ratio: float = 0.4,
    use_paper_version: bool = False,
    use_gumbel_softmax: bool = False,
    gumbel_tau: float = 1.0,
) -> CrossSparseAggrNet:
    """A `CrossSparseAggrNet` with the other choices at their defaults."""
    return CrossSparseAggrNet(
        embed_size,
        num_patches,
        sparse_ratio,
        aggr_ratio,
        use_paper_version,
        use_gumbel_softmax=use_gumbel_softmax,
        gumbel_tau=gumbel_tau,
    )


class MultiModalSDTPS(nn.Module):
    """Slims RGB, NIR and TIR patches, each guided by its own and the others' global features."""

    MODALITIES = RGB_NIR_TIR

    def __init__(
        self,
        embed_dim: int = 512,
        num_patches: int = 128,
        sparse_ratio: float = 0.6,
        aggr_ratio: float = 0.4,
        use_gumbel: bool = False,
        gumbel_tau: float = 1.0,
        beta: float = 0.25,
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.num_patches = num_patches
        recipe = reidentification(
            selection="straight_through" if use_gumbel else "topk",
            **own_settings(
                sparse_ratio=sparse_ratio, aggr_ratio=aggr_ratio, beta=beta, gumbel_tau=gumbel_tau
            ),
        )
        # In a tuple, so that its parameters are registered once: under the ancestors' names.
        self._slimmers = (MultiModalSlimmer(self.MODALITIES, recipe, num_patches, embed_dim),)
        for name in self.MODALITIES:
            tokens = self._slimmers[0].slimmer(name).tokens
            self.add_module(f"{name}_sparse", TokenSparse(embed_dim, sparse_ratio, use_paper_version=True))
            self.add_module(f"{name}_aggr", TokenAggregation(embed_dim, tokens))
        self._bind()

    def _bind(self) -> None:
        """Lend the registered networks to the slimmer; they may have been replaced since the last call."""
        for name in self.MODALITIES:
            slimmer = self._slimmers[0].train(self.training).slimmer(name)
            sparse = cast(TokenSparse, self.get_submodule(f"{name}_sparse"))
            aggregation = cast(TokenAggregation, self.get_submodule(f"{name}_aggr"))
            slimmer.scale = aggregation.scale
            slimmer.networks["sparse"] = aggregation.weight
            slimmer.predictors["sparse"] = sparse.score_predictor

    def forward(
        self,
        RGB_cash: Tensor,
        NI_cash: Tensor,
        TI_cash: Tensor,
        RGB_global: Tensor,
        NI_global: Tensor,
        TI_global: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Patches (B,N,C) and globals (B,C) -> three enhanced token sets (B,J+1,C), three masks (B,N)"""
        given = {"RGB": (RGB_cash, RGB_global), "NI": (NI_cash, NI_global), "TI": (TI_cash, TI_global)}
        tokens, anchors = {}, {}
        for name, (argument, (patches, anchor)) in zip(self.MODALITIES, given.items(), strict=True):
            expect_patches(f"{argument}_cash", patches, self.embed_dim)
            if len(patches) != len(RGB_cash):
                raise ValueError(
                    f"{argument}_cash: expected {len(RGB_cash)} samples as RGB_cash, found {len(patches)}"
                )
            expect_shape(f"{argument}_global", anchor, (len(patches), self.embed_dim))
            expect_finite(f"{argument}_cash", patches)
            expect_finite(f"{argument}_global", anchor)
            tokens[name], anchors[name] = Tokens(patches), anchor
        self._bind()
        rgb, nir, tir = self._slimmers[0].inspect(tokens, anchors).values()
        return rgb.tokens, nir.tokens, tir.tokens, rgb.decision, nir.decision, tir.decision

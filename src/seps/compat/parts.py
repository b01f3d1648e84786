"""The ancestors' parts: selection and aggregation of ready tokens, and alignment with one text."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from seps.alignment import align, relevance_network
from seps.compat.checks import expect_finite, expect_patches, expect_shape, expect_size, own_settings
from seps.recipe import Selection
from seps.slimming import (
    aggregation_network,
    aggregation_weights,
    decide,
    keep_count,
    min_max,
    mix,
    residual_weights,
    saliency_predictor,
)


class TokenSparse(nn.Module):
    """Selects patches of one image-text pair from ready attention scores."""

    def __init__(
        self, embed_dim: int = 512, sparse_ratio: float = 0.6, use_paper_version: bool = False
    ) -> None:
        super().__init__()
        expect_size("embed_dim", embed_dim, 4 if use_paper_version else 1)
        own_settings(sparse_ratio=sparse_ratio)
        self.embed_dim = embed_dim
        self.sparse_ratio = sparse_ratio
        self.use_paper_version = use_paper_version
        if use_paper_version:
            self.score_predictor = saliency_predictor(embed_dim)

    def forward(
        self,
        tokens: Tensor,
        attention_x: Tensor,
        attention_y: Tensor,
        attention_y_dense: Tensor | None = None,
        beta: float = 0.25,
        use_gumbel: bool = False,
        gumbel_tau: float = 1.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """tokens (B,N,C), attentions (B,N) -> kept (B,K,C), best first, residual (B,1,C), mask (B,N)"""
        expect_patches("tokens", tokens, self.embed_dim)
        expect_finite("tokens", tokens)
        own_settings(gumbel_tau=gumbel_tau)
        given = {"attention_x": attention_x, "attention_y": attention_y}
        given |= {} if attention_y_dense is None else {"attention_y_dense": attention_y_dense}
        for name, signal in given.items():
            expect_shape(name, signal, tokens.shape[:2])
            expect_finite(name, signal)
        own, *guides = (signal.unsqueeze(1) for signal in given.values())
        if self.use_paper_version:
            predicted = self.score_predictor(tokens).transpose(1, 2)
            saliency = mix(predicted, min_max(own), [min_max(guide) for guide in guides], beta)
        else:
            saliency = own + guides[0]
        keep = keep_count(tokens.shape[1], self.sparse_ratio)
        counts = torch.full((len(tokens),), keep, device=tokens.device)
        mode: Selection = "straight_through" if use_gumbel else "topk"
        # In full precision: rounded to half of it, a number could be 1 and its noise infinite.
        drawn = torch.rand(saliency.shape, device=saliency.device) if use_gumbel else None
        uniform = None if drawn is None else drawn.clamp(1e-6, 1 - 1e-6)
        decision = decide(saliency, counts, mode, uniform=uniform, temperature=gumbel_tau)
        ranked = saliency.masked_fill(decision < 0.5, -torch.inf)
        order = ranked.argsort(dim=-1, descending=True, stable=True)
        index = order[:, 0, :keep].unsqueeze(-1).expand(-1, -1, tokens.shape[2])
        # A kept patch passes through its decision (1 in value), so that the noise reaches the score.
        kept = (tokens * decision.transpose(1, 2)).gather(1, index)
        residual = residual_weights(saliency, decision) @ tokens
        return kept, residual, decision.squeeze(1)


class TokenAggregation(nn.Module):
    """Aggregates patches into fewer tokens with one weight network."""

    def __init__(self, dim: int = 512, keeped_patches: int = 64, dim_ratio: float = 0.2) -> None:
        super().__init__()
        self.weight = weigher(dim, keeped_patches, dim_ratio)
        self.scale = nn.Parameter(torch.ones(1, 1, 1))

    def forward(self, x: Tensor, keep_policy: Tensor | None = None) -> Tensor:
        """x (B,N,C), keep_policy (B,N) with 1 = keep -> (B,J,C)"""
        return aggregate(("x", "keep_policy"), x, keep_policy, self.weight, self.scale)


class DualTokenAggregation(nn.Module):
    """Aggregates the patches of two branches, a weight network each, into the same tokens."""

    def __init__(self, dim: int = 512, keeped_patches: int = 64, dim_ratio: float = 0.2) -> None:
        super().__init__()
        self.weight_sparse = weigher(dim, keeped_patches, dim_ratio)
        self.weight_dense = weigher(dim, keeped_patches, dim_ratio)
        self.scale = nn.Parameter(torch.ones(1, 1, 1))

    def forward(
        self,
        tokens_sparse: Tensor,
        tokens_dense: Tensor | None = None,
        mask_sparse: Tensor | None = None,
        mask_dense: Tensor | None = None,
    ) -> Tensor:
        """tokens_* (B,K,C), mask_* (B,K) with 1 = keep -> (B,J,C)"""
        names = ("tokens_sparse", "mask_sparse"), ("tokens_dense", "mask_dense")
        tokens = aggregate(names[0], tokens_sparse, mask_sparse, self.weight_sparse, self.scale)
        if tokens_dense is None:
            return tokens
        return tokens + aggregate(names[1], tokens_dense, mask_dense, self.weight_dense, self.scale)


def weigher(dim: int, keeped_patches: int, dim_ratio: float) -> nn.Sequential:
    """The network of an aggregation, refused where it would have no hidden channel or no token."""
    expect_size("keeped_patches", keeped_patches)
    if int(dim * dim_ratio) < 1:
        raise ValueError(f"dim, dim_ratio: expected a product of at least 1, found {dim} and {dim_ratio}")
    return aggregation_network(dim, keeped_patches, dim_ratio)


def aggregate(
    names: tuple[str, str], tokens: Tensor, decision: Tensor | None, network: nn.Sequential, scale: Tensor
) -> Tensor:
    """Eq. 4 for one branch; names are the caller's. tokens (B,N,C), decision (B,N) -> (B,J,C)"""
    expect_patches(names[0], tokens, cast(nn.LayerNorm, network[0]).normalized_shape[0])
    expect_finite(names[0], tokens)
    if decision is None:
        decision = tokens.new_ones(tokens.shape[:2])
    expect_shape(names[1], decision, tokens.shape[:2])
    logits = (network(tokens) * scale).transpose(1, 2)
    return aggregation_weights(logits, decision.to(tokens.dtype).unsqueeze(1))[:, 0] @ tokens


def mask_xattn_one_text(
    img_embs: Tensor,
    cap_i_expand: Tensor,
    img_mask: Tensor | None = None,
    i2t: bool = True,
    scan: bool = True,
    use_paper_version: bool = False,
    top_k: int = 5,
    relevance_mlp: nn.Module | None = None,
) -> Tensor:
    """Eq. 5 for one text, unit vectors in. img_embs (B,J,C), cap_i_expand (B,M,C), img_mask (B,J) -> (B,1)"""
    channels = img_embs.shape[-1] if isinstance(img_embs, Tensor) and img_embs.dim() else 0
    for name, tokens in (("img_embs", img_embs), ("cap_i_expand", cap_i_expand)):
        expect_patches(name, tokens, channels)
        expect_finite(name, tokens)
    if len(cap_i_expand) != len(img_embs):
        raise ValueError(
            f"cap_i_expand: expected the text once for each of {len(img_embs)} images, "
            f"found {len(cap_i_expand)}"
        )
    if img_mask is not None:
        expect_shape("img_mask", img_mask, img_embs.shape[:2])
    cosines = cap_i_expand @ img_embs.transpose(1, 2)
    learned = use_paper_version and relevance_mlp is not None
    score = align(
        nn.functional.leaky_relu(cosines, 0.1) if scan else cosines,
        token_mask=None if img_mask is None else img_mask > 0.5,
        pooling="mean_and_top" if learned else "mean",
        directions="both" if i2t else "word_to_patch",
        relevance=relevance_mlp,
        top_k=top_k,
    )
    return score.unsqueeze(1)


class HRPA(nn.Module):
    """Eq. 5 with its relevance network."""

    def __init__(
        self,
        embed_dim: int = 512,
        top_k: int = 5,
        use_paper_version: bool = False,
        bidirectional: bool = True,
        scan: bool = True,
    ) -> None:
        super().__init__()
        own_settings(top_k=top_k)
        self.embed_dim = embed_dim
        self.top_k = top_k
        self.use_paper_version = use_paper_version
        self.bidirectional = bidirectional
        self.scan = scan
        self.relevance_mlp = relevance_network(top_k) if use_paper_version else None

    def forward(
        self, patch_features: Tensor, word_features: Tensor, patch_mask: Tensor | None = None
    ) -> Tensor:
        """patch_features (B,J,C) and word_features (B,M,C) of unit length -> (B,1)"""
        return mask_xattn_one_text(
            patch_features,
            word_features,
            patch_mask,
            self.bidirectional,
            self.scan,
            self.use_paper_version,
            self.top_k,
            self.relevance_mlp,
        )

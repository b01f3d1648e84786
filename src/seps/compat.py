"""The ancestors' names, arguments and return values, over this package's own mathematics.

Everything here carries the parameter names of the ancestors, so their state dicts load with strict=True;
`import_state_dict` turns such a state dict into one of a `SlimHead`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from seps.alignment import align, relevance_network
from seps.head import SlimHead
from seps.losses import hinge, ratio
from seps.modalities import RGB_NIR_TIR, MultiModalSlimmer, reidentification
from seps.recipe import Recipe, Selection, laps, paper, released
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
from seps.tokens import Tokens

Masks = Tensor | tuple[Tensor, ...]


class TokenSparse(nn.Module):
    """Selects patches of one image-text pair from ready attention scores."""

    def __init__(
        self, embed_dim: int = 512, sparse_ratio: float = 0.6, use_paper_version: bool = False
    ) -> None:
        super().__init__()
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
        given = {"attention_x": attention_x, "attention_y": attention_y}
        given |= {} if attention_y_dense is None else {"attention_y_dense": attention_y_dense}
        for name, signal in given.items():
            expect_shape(name, signal, tokens.shape[:2])
        own, *guides = (signal.unsqueeze(1) for signal in given.values())
        if self.use_paper_version:
            predicted = self.score_predictor(tokens).transpose(1, 2)
            saliency = mix(predicted, min_max(own), [min_max(guide) for guide in guides], beta)
        else:
            saliency = own + guides[0]
        keep = keep_count(tokens.shape[1], self.sparse_ratio)
        counts = torch.full((len(tokens),), keep, device=tokens.device)
        mode: Selection = "straight_through" if use_gumbel else "topk"
        uniform = torch.rand_like(saliency).clamp(1e-6, 1 - 1e-6)
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
        self.weight = aggregation_network(dim, keeped_patches, dim_ratio)
        self.scale = nn.Parameter(torch.ones(1, 1, 1))

    def forward(self, x: Tensor, keep_policy: Tensor | None = None) -> Tensor:
        """x (B,N,C), keep_policy (B,N) with 1 = keep -> (B,J,C)"""
        return aggregate(("x", "keep_policy"), x, keep_policy, self.weight, self.scale)


class DualTokenAggregation(nn.Module):
    """Aggregates the patches of two branches, a weight network each, into the same tokens."""

    def __init__(self, dim: int = 512, keeped_patches: int = 64, dim_ratio: float = 0.2) -> None:
        super().__init__()
        self.weight_sparse = aggregation_network(dim, keeped_patches, dim_ratio)
        self.weight_dense = aggregation_network(dim, keeped_patches, dim_ratio)
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


def aggregate(
    names: tuple[str, str], tokens: Tensor, decision: Tensor | None, network: nn.Sequential, scale: Tensor
) -> Tensor:
    """Eq. 4 for one branch; names are the caller's. tokens (B,N,C), decision (B,N) -> (B,J,C)"""
    expect_patches(names[0], tokens, cast(nn.LayerNorm, network[0]).normalized_shape[0])
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
    expect_patches("img_embs", img_embs, img_embs.shape[-1])
    expect_patches("cap_i_expand", cap_i_expand, img_embs.shape[-1])
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
        cap_lens: Tensor,
        long_cap_embs: Tensor | None,
        long_cap_lens: Tensor | None,
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
        shared = {
            "dense_side": "text",
            "keep_ratio": sparse_ratio,
            "aggregate_ratio": aggr_ratio,
            "mixing": beta,
            "top_k": top_k,
            "temperature": gumbel_tau,
            "selection": "straight_through" if use_gumbel_softmax else "topk",
        }
        if use_paper_version:
            recipe = paper(aggregation="dual" if use_dual_aggr else "shared", **shared)
        else:
            recipe = released(detach_selection=False, **shared)
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
        cap_lens: Tensor,
        long_cap_embs: Tensor | None = None,
        long_cap_lens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Masks]:
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
        ratios = {"keep_ratio": opt.sparse_ratio, "aggregate_ratio": opt.aggr_ratio}
        super().__init__(released(dense_side="text", **ratios), opt.num_patches, opt.embed_size)
        self._heads = (*self._heads, SlimHead(laps(**ratios), opt.num_patches, opt.embed_size))

    def forward(
        self,
        img_embs: Tensor,
        cap_embs: Tensor,
        cap_lens: Tensor,
        long_cap_embs: Tensor | None = None,
        long_cap_lens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Similarity (B,T); in training also the summed mask (T,B,N)."""
        head = self._heads[1 if long_cap_embs is None else 0]
        scores, masks = self._compare(head, img_embs, cap_embs, cap_lens, long_cap_embs, long_cap_lens)
        return (scores, torch.stack(masks).sum(0)) if self.training else scores


class ContrastiveLoss(nn.Module):
    """The bidirectional hinge, all negatives until max_violation_on()."""

    def __init__(self, margin: float = 0.2, max_violation: bool = False) -> None:
        super().__init__()
        self.margin = margin
        self.max_violation = max_violation

    def max_violation_on(self) -> None:
        """Count the hardest negative only."""
        self.max_violation = True

    def max_violation_off(self) -> None:
        """Count all negatives."""
        self.max_violation = False

    def forward(self, scores: Tensor, img_ids: Tensor | None = None) -> Tensor:
        """scores (B,B), img_ids (B,) -> the sum over the batch"""
        return hinge(scores, img_ids, "hardest" if self.max_violation else "all", self.margin)


class RatioLoss(nn.Module):
    """Per-branch ratio loss for a tuple of masks, of the sum for one mask."""

    def __init__(
        self, target_ratio: float = 0.5, lambda_sparse: float = 1.0, lambda_dense: float = 1.0
    ) -> None:
        super().__init__()
        self.target_ratio = target_ratio
        self.lambda_sparse = lambda_sparse
        self.lambda_dense = lambda_dense

    def forward(self, score_mask: Masks | list[Tensor]) -> Tensor:
        """One mask, or the sparse branch's and the dense's, each (T,B,N)."""
        if isinstance(score_mask, Tensor):
            return ratio([score_mask.float()], self.target_ratio)
        masks = [mask.float() for mask in score_mask]
        return ratio(masks, self.target_ratio, "per_branch", self.lambda_sparse, self.lambda_dense)


class SEPSLoss(nn.Module):
    """Hinge plus weighted ratio loss."""

    def __init__(
        self,
        margin: float = 0.2,
        target_ratio: float = 0.5,
        ratio_weight: float = 2.0,
        max_violation: bool = False,
        lambda_sparse: float = 1.0,
        lambda_dense: float = 1.0,
    ) -> None:
        super().__init__()
        self.contrastive_loss = ContrastiveLoss(margin, max_violation)
        self.ratio_loss = RatioLoss(target_ratio, lambda_sparse, lambda_dense)
        self.ratio_weight = ratio_weight

    def set_max_violation(self, max_violation: bool = True) -> None:
        """Count the hardest negative only, or all."""
        self.contrastive_loss.max_violation = max_violation

    def forward(
        self, similarity_matrix: Tensor, score_mask: Masks, img_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> total, alignment and ratio loss"""
        align_loss = self.contrastive_loss(similarity_matrix, img_ids)
        ratio_loss = self.ratio_loss(score_mask)
        return align_loss + self.ratio_weight * ratio_loss, align_loss, ratio_loss


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
            keep_ratio=sparse_ratio,
            aggregate_ratio=aggr_ratio,
            mixing=beta,
            temperature=gumbel_tau,
            selection="straight_through" if use_gumbel else "topk",
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
            expect_shape(f"{argument}_global", anchor, (len(patches), self.embed_dim))
            tokens[name], anchors[name] = Tokens(patches), anchor
            tokens[name].require_finite(f"{argument}_cash")
            Tokens(anchor.unsqueeze(1)).require_finite(f"{argument}_global")
        self._bind()
        rgb, nir, tir = self._slimmers[0].inspect(tokens, anchors).values()
        return rgb.tokens, nir.tokens, tir.tokens, rgb.decision, nir.decision, tir.decision


def admit_words(
    name: str, words: Tensor, lengths_name: str, lengths: Tensor, channels: int, least: int = 1
) -> Tokens:
    """Words of texts under the caller's names, checked. words (T,M,C), lengths (T,)"""
    expect_patches(name, words, channels)
    counts = torch.as_tensor(lengths).reshape(-1)
    if len(counts) != len(words):
        raise ValueError(f"{lengths_name}: expected one for each of {len(words)} texts, found {len(counts)}")
    if counts.min() < least or counts.max() > words.shape[1]:
        raise ValueError(
            f"{lengths_name}: expected {least} to {words.shape[1]}, "
            f"found {int(counts.min())} to {int(counts.max())}"
        )
    texts = Tokens.padded(words, counts)
    texts.require_finite(name)
    return texts


def expect_shape(name: str, values: Tensor, expected: Sequence[int]) -> None:
    """Refuse a tensor of another shape."""
    if values.shape != tuple(expected):
        raise ValueError(f"{name}: expected shape {tuple(expected)}, found {tuple(values.shape)}")


def expect_patches(name: str, tokens: Tensor, channels: int) -> None:
    """Refuse anything but a non-empty (batch, tokens, channels)."""
    if tokens.dim() != 3 or 0 in tokens.shape or tokens.shape[-1] != channels:
        raise ValueError(f"{name}: expected shape (batch, tokens, {channels}), found {tuple(tokens.shape)}")


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


SDTPS = CrossSparseAggrNet
HRPA_function = mask_xattn_one_text

_NAMES = (
    (r"^sparse_net(?:_cap)?\.score_predictor\.", "slimmer.predictors.sparse."),
    (r"^sparse_net_long\.score_predictor\.", "slimmer.predictors.dense."),
    (r"^aggr_net\.scale$", "slimmer.scale"),
    (r"^aggr_net\.weight\.", "slimmer.networks.shared."),
    (r"^aggr_net\.weight_(sparse|dense)\.", r"slimmer.networks.\1."),
    (r"^hrpa\.relevance_mlp\.", "aligner.relevance."),
)


def import_state_dict(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An ancestor's head state dict under the names of a `SlimHead`.

    With one aggregation network the ancestors keep a second predictor that scores nothing: it is left out.
    """
    result = {}
    spare = "aggr_net.weight.0.weight" in state
    for name, value in state.items():
        if spare and name.startswith("sparse_net_long."):
            continue
        for pattern, replacement in _NAMES:
            renamed, found = re.subn(pattern, replacement, name)
            if found:
                result[renamed] = value
                break
        else:
            known = "sparse_net_cap, sparse_net_long, aggr_net, hrpa"
            raise ValueError(f"state: expected names that begin with {known}, found {name!r}")
    return result

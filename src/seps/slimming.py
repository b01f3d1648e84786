"""Equations 1 to 4: score the patches, keep the useful ones, aggregate them into a few tokens.

Pure functions hold the mathematics; `Slimmer` holds the weights. Everything a slim token is made of is a
row of weights over the patches, so a token is always ``weights @ patches``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from seps.noise import gumbel, logistic, pair_uniform
from seps.recipe import Recipe, Selection, expect_one_of
from seps.tokens import Tokens

# A dropped patch's logit may lie far above every kept one; no decision receives more than this many times
# the gradient of the tokens.
GRADIENT_BOUND = 100.0
# The saliency of padding in a softmax: nothing, but finite where an item is nothing but padding.
_NEVER = -1e30


def unit(vectors: Tensor) -> Tensor:
    """Vectors of length one; a zero vector stays zero and receives no gradient. (...,C) -> (...,C)"""
    return vectors * inverse_length(vectors)


def inverse_length(vectors: Tensor) -> Tensor:
    """One divided by the length, zero for a zero vector, without gradient there. (...,C) -> (...,1)"""
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    real = length > 1e-12
    return torch.where(real, torch.where(real, length, 1).reciprocal(), 0)


def keep_count(patches: int, ratio: float) -> int:
    """K, the number of kept patches."""
    return max(1, math.ceil(patches * ratio))


def aggregate_count(patches: int, aggregate_ratio: float, keep_ratio: float) -> int:
    """J, the number of aggregated tokens."""
    return max(1, int(patches * aggregate_ratio * keep_ratio))


@torch.no_grad()
def guidance(patches: Tensor, guide: Tensor) -> Tensor:
    """Cosine of every patch with a guide; it guides and does not teach, so it has no gradient.

    patches (B,N,C), guide (B,1,C) of the image itself or (1,T,C) of texts -> (B,1,N) or (B,T,N)
    """
    if len(guide) == 1:
        # One product for all images, laid out as it comes.
        products = (unit(guide[0]) @ patches.flatten(0, 1).T).unflatten(1, patches.shape[:2]).transpose(0, 1)
    else:
        products = unit(guide) @ patches.transpose(1, 2)
    return products * inverse_length(patches).transpose(1, 2)


def min_max(signal: Tensor, mask: Tensor | None = None) -> Tensor:
    """Scale a signal to 0..1 over the real patches of each image (eq. 2). signal (B,T,N), mask (B,N)"""
    if mask is None:
        low, high = signal.amin(-1, keepdim=True), signal.amax(-1, keepdim=True)
        return (signal - low) / (high - low + 1e-8)
    real = mask.unsqueeze(1)
    low = signal.masked_fill(~real, math.inf).amin(-1, keepdim=True)
    high = signal.masked_fill(~real, -math.inf).amax(-1, keepdim=True)
    return ((signal - low) / (high - low + 1e-8)).masked_fill(~real, 0)


def mix(predicted: Tensor, anchor: Tensor, guides: Sequence[Tensor], mixing: float) -> Tensor:
    """The learned mix of eq. 3 for any number of guides; a missing guide counts as zero.

    predicted (B,1,N), anchor (B,1,N), guides each (B,1,N) or (B,T,N) -> (B,T,N)
    """
    return learned_share(len(guides), mixing) * predicted + mixing * sum(guides, start=2 * anchor)


def learned_share(guides: int, mixing: float) -> float:
    """What so many guides leave to the learned score (eq. 3); refused where they would turn its sign."""
    most = 1 / max(2, guides)
    if mixing > most + 1e-9:
        raise ValueError(
            f"mixing: expected at most {most:.3g} with {guides} guides, so that the learned score keeps its "
            f"sign (eq. 3), found {mixing}"
        )
    return 1 - max(2, guides) * mixing


def top_mask(saliency: Tensor, keep: Tensor) -> Tensor:
    """1 for the keep[b] most salient patches, 0 for the others; ties go to the earlier patch.

    saliency (B,T,N), keep (B,) -> (B,T,N)
    """
    order = saliency.sort(dim=-1, descending=True, stable=True).indices
    within = torch.arange(saliency.shape[-1], device=saliency.device) < keep.view(-1, 1, 1)
    return torch.zeros_like(saliency).scatter(-1, order, within.to(saliency.dtype).expand_as(order))


def decide(
    saliency: Tensor,
    keep: Tensor,
    mode: Selection,
    mask: Tensor | None = None,
    uniform: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """The decision which patches stay: hard in value, but for "soft"; its gradient is the mode's.

    saliency (B,T,N), log-odds of keeping for "gates"; keep (B,) is K of each image; mask (B,N);
    uniform (B,T,N) in (0,1) feeds the noise of the sampling modes -> (B,T,N)
    """
    real = None if mask is None else mask.unsqueeze(1)
    ranked = saliency if real is None else saliency.masked_fill(~real, _NEVER)
    expect_one_of("selection", mode, Selection)
    if mode == "topk":
        return top_mask(ranked.detach(), keep)
    if mode == "soft":
        return (keep.view(-1, 1, 1) * (ranked / temperature).softmax(-1)).clamp(max=1)
    if uniform is None:
        raise ValueError(f"uniform: expected numbers for the noise of selection {mode!r}, found none")
    if mode == "gates":
        odds = (ranked + logistic(uniform).to(ranked.dtype)) / temperature
        soft = odds.sigmoid()
        # An image that lost every patch would have no token, so its best patch always stays.
        hard = torch.maximum((odds > 0).to(odds.dtype), top_mask(ranked.detach(), torch.ones_like(keep)))
    else:
        noisy = ranked + gumbel(uniform).to(ranked.dtype)
        soft = (noisy / temperature).softmax(-1)
        hard = top_mask((noisy if mode == "gumbel_topk" else ranked).detach(), keep)
    return hard + (soft - soft.detach())


def aggregation_weights(logits: Tensor, decision: Tensor) -> Tensor:
    """Softmax over patches in which the decision is a factor: a hard one equals gathering first (eq. 4).

    logits (B,J,N), decision (B,T,N) -> (B,T,J,N), rows sum to 1, or are zero where nothing was kept
    """
    kept = (decision.detach() > 0).unsqueeze(2)
    top = logits.detach().unsqueeze(1).masked_fill(~kept, -math.inf).amax(-1, keepdim=True)
    lifted = (logits.unsqueeze(1) - top).clamp(max=math.log(GRADIENT_BOUND)).exp()
    raw = decision.unsqueeze(2) * lifted
    mass = raw.sum(-1, keepdim=True)
    return raw / torch.where(mass.detach() > 0, mass, 1)


def residual_weights(saliency: Tensor, decision: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax of the saliency over what was dropped; all zero where nothing was.

    saliency (B,T,N), decision (B,T,N), mask (B,N) -> (B,T,N)
    """
    dropped = 1 - decision
    if mask is not None:
        dropped = dropped * mask.unsqueeze(1)
    raw = dropped * (saliency - saliency.detach().amax(-1, keepdim=True)).exp()
    mass = raw.sum(-1, keepdim=True)
    some = mass.detach() > 0
    return torch.where(some, raw / torch.where(some, mass, 1), 0)


@dataclass(frozen=True)
class Branch:
    """What one branch decided: saliency, decision (B,T,N), aggregation (B,T,J,N), residual (B,T,N).

    present (B,1) or (1,T) says where the branch takes part; T is 1 where the text has no say.
    """

    saliency: Tensor
    decision: Tensor
    aggregation: Tensor
    residual: Tensor
    present: Tensor | None = None

    @property
    def kept(self) -> Tensor:
        """Which patches stay. -> (B,T,N) boolean"""
        return self.decision.detach() > 0.5

    def taking_part(self, rows: Tensor) -> Tensor:
        """Rows (B,T,...) of the branch, zero where it takes no part."""
        if self.present is None:
            return rows
        return rows * self.present.to(rows.dtype).view(*self.present.shape, *[1] * (rows.dim() - 2))

    def indices(self, image: int, text: int = 0) -> Tensor:
        """Kept patches of a pair, the most salient first. -> (K,)"""
        kept = self.kept[image, min(text, self.kept.shape[1] - 1)].nonzero().squeeze(1)
        saliency = self.saliency[image, min(text, self.saliency.shape[1] - 1)]
        return kept[saliency[kept].argsort(descending=True, stable=True)]


def token_weights(branches: Sequence[Branch]) -> Tensor:
    """Weights over the patches of the aggregated tokens and, last, the residual token (eq. 4).

    The branches' aggregations add up, their residual tokens are averaged over the branches that take part.
    -> (B,T,J+1,N)
    """
    aggregated = total([branch.taking_part(branch.aggregation) for branch in branches])
    residual = total([branch.taking_part(branch.residual) for branch in branches])
    one = residual.new_ones(1, 1, 1)
    # Where no branch takes part the weights are zero, not undefined.
    count = total([branch.taking_part(one) for branch in branches]).clamp(min=1)
    return torch.cat([aggregated, (residual / count).unsqueeze(2)], dim=2)


def total(terms: Sequence[Tensor]) -> Tensor:
    """The sum of one tensor or more that broadcast to each other."""
    return sum(terms[1:], start=terms[0])


def saliency_predictor(channels: int) -> nn.Sequential:
    """The learned score of a patch (eq. 1). (B,N,C) -> (B,N,1)"""
    return nn.Sequential(
        nn.Linear(channels, channels // 4), nn.GELU(), nn.Linear(channels // 4, 1), nn.Sigmoid()
    )


def aggregation_network(channels: int, tokens: int, hidden_ratio: float = 0.2) -> nn.Sequential:
    """The network whose output, over the patches, weighs each aggregated token. (B,N,C) -> (B,N,J)"""
    hidden = int(channels * hidden_ratio)
    return nn.Sequential(
        nn.LayerNorm(channels), nn.Linear(channels, hidden), nn.GELU(), nn.Linear(hidden, tokens)
    )


def apply(network: nn.Module, values: Tensor) -> Tensor:
    """Run a network in the precision of its own weights; the result keeps that of values."""
    return network(values.to(next(network.parameters()).dtype)).to(values.dtype)


class Gate(nn.Module):
    """Turns a saliency into log-odds of keeping; the ratio loss moves its threshold."""

    def __init__(self, threshold: float, slope: float = 8.0) -> None:
        super().__init__()
        self.threshold = nn.Parameter(torch.tensor(threshold))
        self.log_slope = nn.Parameter(torch.tensor(math.log(slope)))

    def forward(self, saliency: Tensor) -> Tensor:
        """Log-odds of keeping. (B,T,N) -> (B,T,N)"""
        return self.log_slope.exp() * (saliency - self.threshold)


class Slimmer(nn.Module):
    """Patches and guides in, weights of the slim tokens out (eq. 1 to 4)."""

    def __init__(self, recipe: Recipe, patches: int, channels: int) -> None:
        super().__init__()
        if not isinstance(recipe, Recipe):
            raise ValueError(f"recipe: expected a Recipe, found {recipe!r}")
        if not (isinstance(patches, int) and isinstance(channels, int)) or patches < 1 or channels < 5:
            raise ValueError(
                f"patches, channels: expected at least 1 patch and 5 channels, found {patches} and {channels}"
            )
        self.recipe = recipe
        self.tokens = aggregate_count(patches, recipe.aggregate_ratio, recipe.keep_ratio)
        learned = recipe.branches if recipe.scoring == "mix" else ()
        self.predictors = nn.ModuleDict({name: saliency_predictor(channels) for name in learned})
        weighers = recipe.branches if recipe.aggregation == "dual" else ("shared",)
        self.networks = nn.ModuleDict({name: aggregation_network(channels, self.tokens) for name in weighers})
        self.scale = nn.Parameter(torch.full((1, 1, 1), float(recipe.sharpness)))
        gated = recipe.branches if recipe.selection == "gates" else ()
        middle = 0.75 if recipe.scoring == "mix" else 0.0
        self.gates = nn.ModuleDict({name: Gate(middle) for name in gated})

    def prepare(self, images: Tokens) -> Tokens:
        """The patches as the slimmer sees them: padding zeroed, detached if the recipe says so."""
        return (images.detach() if self.recipe.detach_selection else images).cleaned()

    def logits(self, images: Tokens, branch: str) -> Tensor:
        """Aggregation logits of a branch; they depend on the image alone. -> (B,J,N)"""
        network = self.networks[branch if self.recipe.aggregation == "dual" else "shared"]
        return (apply(network, images.features) * self.scale).transpose(1, 2)

    def predicted(self, images: Tokens, branch: str) -> Tensor | None:
        """The learned score of every patch, None where the recipe has none (eq. 1). -> (B,1,N)"""
        if self.recipe.scoring == "sum":
            return None
        return apply(self.predictors[branch], images.features).transpose(1, 2)

    def saliency(self, images: Tokens, branch: str, anchor: Tensor, guides: Sequence[Tensor]) -> Tensor:
        """The score of every patch from its signals (eq. 2, 3). anchor, guides as in `guidance` -> (B,T,N)"""
        predicted = self.predicted(images, branch)
        signals = [guidance(images.features, guide) for guide in guides]
        own = guidance(images.features, anchor)
        if predicted is None:
            return sum(signals, start=own)
        scaled = [min_max(signal, images.mask) for signal in signals]
        return mix(predicted, min_max(own, images.mask), scaled, self.recipe.mixing)

    def decision(self, images: Tokens, branch: str, saliency: Tensor, uniform: Tensor | None) -> Tensor:
        """The decision of a branch: the recipe's in training, the top K otherwise. -> (B,T,N)"""
        mode = self.recipe.selection if self.training else "topk"
        score = self.gates[branch](saliency) if mode == "gates" else saliency
        return decide(score, self.keep(images), mode, images.mask, uniform, self.recipe.temperature)

    def keep(self, images: Tokens) -> Tensor:
        """K of every image, from its real patches. -> (B,)"""
        counts = [keep_count(int(real), self.recipe.keep_ratio) for real in images.lengths.tolist()]
        return torch.tensor(counts, device=images.features.device)

    @property
    def sampling(self) -> bool:
        """Whether the decision draws noise now."""
        return self.training and self.recipe.selection in ("straight_through", "gumbel_topk", "gates")

    def uniform(self, branch: str, images: Tensor, texts: Tensor, patches: int, seed: int) -> Tensor | None:
        """The numbers behind the noise of some pairs, None where none is drawn. -> (B,T,N)

        images (B,), texts (T,) are the pairs' indices in the whole batch, so that chunks agree with it.
        """
        if not self.sampling:
            return None
        return pair_uniform(2 * seed + self.recipe.branches.index(branch), images, texts, patches)

    def forward(
        self,
        images: Tokens,
        guides: Mapping[str, Sequence[Tensor]],
        present: Mapping[str, Tensor] | None = None,
        anchor: Tensor | None = None,
        seed: int = 0,
    ) -> dict[str, Branch]:
        """Select and aggregate in every branch that has an entry in guides.

        guides: the guiding vectors of each branch, (B,1,C) or (1,T,C); present: where a branch takes
        part, (B,1) or (1,T); anchor (B,C), the mean patch if None; seed of the noise.
        """
        own = (images.mean() if anchor is None else anchor).unsqueeze(1)
        images = self.prepare(images)
        result = {}
        for name, vectors in guides.items():
            saliency = self.saliency(images, name, own, vectors)
            rows, columns = (torch.arange(n, device=saliency.device) for n in saliency.shape[:2])
            uniform = self.uniform(name, rows, columns, saliency.shape[2], seed)
            decision = self.decision(images, name, saliency, uniform)
            result[name] = Branch(
                saliency,
                decision,
                aggregation_weights(self.logits(images, name), decision),
                residual_weights(saliency, decision, images.mask),
                (present or {}).get(name),
            )
        return result

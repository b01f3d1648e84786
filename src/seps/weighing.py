"""`seps weigh`: how much each term of a score counts, fitted on scores alone while everything else stays.

In training a few hundred steps move the weights of the terms little, and pictures without a description
outnumber the others. Here the terms of all pairs are computed once. The weights of the global term and of the
descriptions, and the scale of what stands in for a missing description, are fitted to a gallery that is
described and one that is not; then the stand-in's shift lets both kinds share the first places.
Training may go on with these weights: where descriptions count for what they are worth, it teaches them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from seps.data.records import folder_beside, require_vacant
from seps.evaluation import Corpus, encode, score_all, score_globally
from seps.features import Features
from seps.head import DescriptionMatch
from seps.model import SepsModel, load, save
from seps.sources import ReadOptions, open_source

logger = logging.getLogger(__name__)

ROUNDS = 60
"""Steps of the fit, each over all pairs."""
PRIOR = 0.002
"""How strongly the weights' logarithms are drawn to zero: what ranks equally well stays near one."""
PLACES, HALVINGS = 10, 30
"""The first places that are shared fairly, and the halvings of the search for what shares them so."""


@dataclass(frozen=True)
class WeighOptions:
    """Fit how much patches, descriptions and global vectors count, on pictures that all have a description.

    Nothing but these few numbers and the temperature they need changes. Take a split that was not trained on.
    """

    model: str
    """A model folder, whose recipe matches descriptions and whose score has a global term."""
    data: str
    """A data folder with descriptions."""
    out: str
    """The folder to write the model to."""
    split: str = "dev"
    """The split to fit on; never a test split."""
    cache: str | None = None
    """Folder of kept features."""
    read: ReadOptions = field(default_factory=ReadOptions)
    """How the data is read."""

    def __post_init__(self) -> None:
        if "test" in self.split.lower():
            raise ValueError(f"split: expected one that is no test split, found {self.split!r}")


@dataclass(frozen=True)
class Terms:
    """The terms of every pair (B,T), and the row of each text's image (T,)."""

    patches: Tensor
    words: Tensor
    cosines: Tensor
    owners: Tensor


def run(options: WeighOptions) -> int:
    """`seps weigh`."""
    out = Path(options.out)
    require_vacant("out", out)
    model, processor = load(options.model)
    source = open_source(options.data, options.read, options.split)
    features = None if options.cache is None else Features.open(options.cache, model, processor)
    weighed_parts(model)
    terms = measure_terms(model, encode(model, processor, source, features))
    weigh(model, terms)
    with folder_beside(out) as folder:
        save(model, processor, folder)
    logger.info("%s: %s", out, describe(model))
    return 0


def weighed_parts(model: SepsModel) -> tuple[DescriptionMatch, nn.Parameter, Tensor]:
    """The match of descriptions, the raw weight of the global term and its weight; refused without them."""
    match, term = model.head.description, model.global_term
    if match is None or term is None or term.raw_weight is None or term.weight is None:
        raise ValueError(
            "model: expected a recipe with dense='matched' and global_term='score', found "
            f"dense={model.recipe.dense!r} and global_term={model.config.global_term!r}"
        )
    return match, term.raw_weight, term.weight


@torch.no_grad()
def measure_terms(model: SepsModel, corpus: Corpus) -> Terms:
    """What every term says of every pair: the score with and without descriptions, taken apart."""
    match, _, pull = weighed_parts(model)
    if corpus.dense is None:
        raise ValueError("data: expected pictures with descriptions, found none")
    if not bool(corpus.dense.present.all()):
        raise ValueError("data: expected a description of every picture, found some without")
    cosines = score_globally(model, corpus)
    added = (pull * cosines.to(pull.device)).cpu()
    bare = score_all(model, replace(corpus, dense=None)) - added
    full = score_all(model, corpus) - added
    weight, scale, shift = (float(each) for each in (match.weight, match.absent_scale, match.absent_shift))
    patches = (bare - weight * shift) / (1 + weight * scale)
    return Terms(patches, (full - patches) / weight, cosines, corpus.owners.cpu())


def weigh(model: SepsModel, terms: Terms) -> None:
    """Set the model's four numbers to what ranks the right pairs first and puts nobody behind for silence.

    The temperature becomes that of the described gallery's scores, so that training can go on from here.
    """
    match, raw, pull = weighed_parts(model)
    weights = nn.Parameter(torch.stack([match.weight, pull]).detach().log().cpu())
    scale = nn.Parameter(match.absent_scale.detach().clone().cpu())
    log_temperatures = nn.Parameter(torch.full((2,), 0.05).log())
    fitted = [weights, scale, log_temperatures]
    optimiser = torch.optim.LBFGS(fitted, max_iter=ROUNDS, line_search_fn="strong_wolfe")
    everyone = torch.ones(len(terms.patches), dtype=torch.bool)

    def loss() -> Tensor:
        optimiser.zero_grad()
        total = PRIOR * weights.square().sum()
        for described, log_temperature in zip((everyone, ~everyone), log_temperatures, strict=True):
            scores = put_together(terms, described, weights.exp(), scale, torch.zeros(()))
            total = total + contrast(scores / log_temperature.exp(), terms.owners)
        total.backward()
        return total

    optimiser.step(loss)
    with torch.no_grad():
        match.raw_weight.copy_(weights[0].exp().expm1().log())
        raw.copy_(weights[1].exp().expm1().log())
        match.absent_scale.copy_(scale)
        match.absent_shift.copy_(fair_shift(terms, weights.exp(), scale))
        model.log_temperature.copy_(log_temperatures[0])


@torch.no_grad()
def fair_shift(terms: Terms, weights: Tensor, scale: Tensor) -> Tensor:
    """The shift of the stand-in with which described pictures, half of all, hold half of the first places."""
    half = torch.arange(len(terms.patches)) % 2 == 0
    low = terms.words.min() - (scale * terms.patches).max()
    high = terms.words.max() - (scale * terms.patches).min()
    for _ in range(HALVINGS):
        shift = (low + high) / 2
        held = [
            described[scores.topk(min(PLACES, len(scores)), dim=0).indices].float().mean()
            for described in (half, ~half)
            for scores in (put_together(terms, described, weights, scale, shift),)
        ]
        low, high = (shift, high) if sum(held) > 1 else (low, shift)
    return (low + high) / 2


def put_together(terms: Terms, described: Tensor, weights: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """The score of every pair of a gallery in which some pictures (B,) have a description. -> (B,T)

    weights: of the descriptions' words and of the global vectors; scale and shift of what stands in for words
    """
    words = torch.where(described.unsqueeze(1), terms.words, scale * terms.patches + shift)
    return terms.patches + weights[0] * words + weights[1] * terms.cosines


def contrast(logits: Tensor, owners: Tensor) -> Tensor:
    """Cross-entropy of each text's picture, and of each text among those of other pictures. logits (B,T)"""
    texts = torch.arange(logits.shape[1])
    right = logits[owners, texts]
    others = owners.unsqueeze(0) != torch.arange(len(logits)).unsqueeze(1)
    wrong = logits.masked_fill(~others, -torch.inf).logsumexp(1)[owners]
    return functional.cross_entropy(logits.T, owners) + functional.softplus(wrong - right).mean()


def describe(model: SepsModel) -> str:
    """The four numbers as text."""
    match, _, pull = weighed_parts(model)
    own = (match.weight, pull, match.absent_scale, match.absent_shift)
    words, vectors, scale, shift = (float(each.detach()) for each in own)
    return (
        f"patches 1, words of descriptions {words:.3f}, global vectors {vectors:.3f}, "
        f"a missing description {scale:.3f} x patches {shift:+.3f}"
    )

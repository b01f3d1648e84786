"""What a batch of images and texts is trained for: equations 6 and 7, and the global term beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from seps.distributed import gather, gather_tokens
from seps.losses import Negatives, hinge, info_nce, ratio_of
from seps.model import SepsModel
from seps.tokens import Tokens

Scored = Literal["alignment", "global"]


@dataclass(frozen=True)
class ObjectiveSettings:
    """The loss of a batch."""

    scored: Scored = "alignment"
    """What is trained: slimming and alignment, or the cosine of the global vectors alone, a baseline."""
    loss: Literal["hinge", "info_nce"] = "hinge"
    """Eq. 6, or cross-entropy with a learned temperature, which learns well from scratch."""
    margin: float = 0.2
    """Of the hinge."""
    all_negatives_epochs: int = 1
    """Epochs in which the hinge sums over all negatives; the hardest alone afterwards."""
    global_weight: float = 1.0
    """Weight of the loss of the global vectors, where the model has a global term."""

    def __post_init__(self) -> None:
        for name, known in (("loss", ("hinge", "info_nce")), ("scored", get_args(Scored))):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"objective.{name}: expected {' or '.join(known)}, found {getattr(self, name)!r}"
                )
        for name in ("margin", "all_negatives_epochs", "global_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"objective.{name}: expected at least 0, found {getattr(self, name)}")


def match(
    scores: Tensor, image_ids: Tensor, settings: ObjectiveSettings, temperature: Tensor, epoch: int
) -> Tensor:
    """The alignment loss of a square score matrix. scores (B,B), image_ids (B,)"""
    if settings.loss == "info_nce":
        return info_nce(scores, image_ids, temperature)
    negatives: Negatives = "all" if epoch < settings.all_negatives_epochs else "hardest"
    return hinge(scores, image_ids, negatives, settings.margin)


def retrieval_loss(
    model: SepsModel,
    images: Tokens,
    texts: Tokens,
    dense: Tokens | None,
    image_ids: Tensor,
    settings: ObjectiveSettings,
    epoch: int,
) -> dict[str, Tensor]:
    """The losses of the joint batch of all processes, under "total" what is minimised.

    Every process scores its own images against all texts; the rows are gathered with their gradients.
    images, texts and their dense text: this process's part, text i belonging to image i; image_ids (B,)
    """
    joint_ids = gather(image_ids)

    def match_vectors() -> Tensor:
        cosines = gather(model.global_images(images)) @ gather(model.global_texts(texts)).T
        return match(cosines, joint_ids, settings, model.global_temperature, epoch)

    if settings.scored == "global":
        return {"total": match_vectors()}
    recipe = model.recipe
    joint_texts = gather_tokens(texts)
    if dense is not None and recipe.dense_side == "text":
        dense = gather_tokens(dense)
    own, shares = model.head.scores_and_shares(images, joint_texts, dense)
    scores = gather(model.with_global(own, images, joint_texts))
    alignment = match(scores, joint_ids, settings, model.temperature, epoch)
    ratio = ratio_of(recipe, [gather(share.reshape(1)).mean() for share in shares])
    losses = {"total": alignment + ratio, "alignment": alignment, "ratio": ratio}
    if model.global_term is not None and settings.global_weight > 0:
        losses["global"] = match_vectors()
        losses["total"] = losses["total"] + settings.global_weight * losses["global"]
    return losses


def encode_in_parts(encode: Callable[..., Tokens], inputs: tuple[Tensor, ...], size: int | None) -> Tokens:
    """Tokens of a batch, encoded size items at a time; the backward pass encodes each part again.

    The embeddings of all parts meet in one score matrix, so in-batch negatives are those of the whole batch,
    and the memory for activations is that of one part.
    """
    count = len(inputs[0])
    if size is None or size >= count or not torch.is_grad_enabled():
        return encode(*inputs)
    parts = [
        checkpoint(encode, *(each[start : start + size] for each in inputs), use_reentrant=False)
        for start in range(0, count, size)
    ]
    return concatenate(parts)


def concatenate(parts: list[Tokens]) -> Tokens:
    """The items of all parts, in order; parts of one length and kind."""
    mask, cls = parts[0].mask, parts[0].cls
    return Tokens(
        torch.cat([part.features for part in parts]),
        None if mask is None else torch.cat([part.mask for part in parts if part.mask is not None]),
        None if cls is None else torch.cat([part.cls for part in parts if part.cls is not None]),
    )

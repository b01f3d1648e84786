"""Regularised linear canonical correlation of pooled images and texts: a closed-form baseline, and a start.

Both sides are whitened, with a ridge, and turned to where they correlate most; every direction is weighed by
its correlation. All of it in double precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from seps.slimming import unit

RIDGE = 0.1
"""What is added to the variances unless more is said, as a share of their mean."""


@dataclass(frozen=True)
class LinearMap:
    """An affine map to k shared directions: ``(x - mean) @ weight``. mean (P,), weight (P,k)"""

    mean: Tensor
    weight: Tensor

    def __call__(self, values: Tensor) -> Tensor:
        """(...,P) -> (...,k)"""
        return (values.to(self.weight.dtype) - self.mean) @ self.weight


@dataclass(frozen=True)
class Correlation:
    """The maps of both sides and, descending, the correlations (k,) that their directions are weighed by."""

    images: LinearMap
    texts: LinearMap
    strengths: Tensor

    def scores(self, images: Tensor, texts: Tensor) -> Tensor:
        """Cosines of mapped images (B,P) and texts (T,Q). -> (B,T)"""
        return unit(self.images(images)) @ unit(self.texts(texts)).T


def correlate(images: Tensor, texts: Tensor, owners: Tensor, count: int, ridge: float = RIDGE) -> Correlation:
    """The count directions in which images (B,P) and their texts (T,Q) correlate most, in closed form.

    owners (T,) is the row of each text's image; an image counts once, however many texts it has; ridge, a
    share of each side's mean variance, is added to all its variances.
    """
    check(images, texts, owners, count, ridge)
    images, texts = images.double(), texts.double()
    pairs = torch.bincount(owners, minlength=len(images)).double()
    shares = (1 / pairs)[owners].unsqueeze(1) / len(images)
    image_mean, text_mean = images.mean(0), (shares * texts).sum(0)
    images, texts = images - image_mean, texts - text_mean
    own = torch.zeros(len(images), texts.shape[1], dtype=torch.double)
    own.index_add_(0, owners, shares * texts)
    image_root = inverse_root(images.T @ images / len(images), ridge)
    text_root = inverse_root(texts.T @ (shares * texts), ridge)
    left, strengths, right = torch.linalg.svd(image_root @ (images.T @ own) @ text_root, full_matrices=False)
    strengths = strengths[:count]
    return Correlation(
        LinearMap(image_mean, image_root @ left[:, :count] * strengths),
        LinearMap(text_mean, text_root @ right[:count].T * strengths),
        strengths,
    )


def inverse_root(covariance: Tensor, ridge: float) -> Tensor:
    """The inverse square root of a covariance with a ridge. (P,P) -> (P,P)"""
    values, vectors = torch.linalg.eigh(covariance)
    raised = values.clamp(min=0) + ridge * values.mean().clamp(min=torch.finfo(values.dtype).tiny)
    return (vectors * raised.rsqrt()) @ vectors.T


def check(images: Tensor, texts: Tensor, owners: Tensor, count: int, ridge: float) -> None:
    """One sentence for sides that do not fit together."""
    if images.dim() != 2 or texts.dim() != 2 or owners.shape != texts.shape[:1]:
        raise ValueError(
            f"images, texts, owners: expected (B, P), (T, Q) and (T,), found {tuple(images.shape)}, "
            f"{tuple(texts.shape)} and {tuple(owners.shape)}"
        )
    if len(images) < 2 or not torch.equal(owners.unique(), torch.arange(len(images))):
        raise ValueError(f"owners: expected a text or more for each of 2 images or more, found {len(images)} "
                         f"images and texts of {len(owners.unique())}")  # fmt: skip
    most = min(images.shape[1], texts.shape[1])
    if not 1 <= count <= most:
        raise ValueError(f"count: expected 1 to {most} directions, found {count}")
    if not ridge > 0:
        raise ValueError(f"ridge: expected above 0, found {ridge}")


def principal(values: Tensor, count: int, energy: float) -> LinearMap:
    """The count directions that hold most of some vectors (B,P), about zero, so that cosines stay.

    energy: the mean squared length that the mapped vectors get.
    """
    values = values.double()
    moments, vectors = torch.linalg.eigh(values.T @ values / len(values))
    kept = moments[-count:].flip(0)
    weight = vectors[:, -count:].flip(1) * (energy / kept.sum()).sqrt()
    return LinearMap(torch.zeros(len(weight), dtype=weight.dtype), weight)


@torch.no_grad()
def start_projection(projection: nn.Linear, *found: LinearMap) -> None:
    """Start a projection at maps, one behind the other, at the size of the random weights it has.

    At its own size a step of training means the same; channels that no map fills start at zero.
    """
    size = projection.weight.square().mean().sqrt()
    weight = torch.cat([each.weight for each in found], 1).T.to(projection.weight.dtype)
    shift = -torch.cat([each.mean @ each.weight for each in found]).to(projection.weight.dtype)
    factor = size / weight.square().mean().sqrt()
    projection.weight.zero_()[: len(weight)] = factor * weight
    projection.bias.zero_()[: len(weight)] = factor * shift

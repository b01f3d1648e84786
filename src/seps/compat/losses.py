"""The ancestors' losses, with their switches and return values."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from seps.losses import hinge, ratio

Masks = Tensor | Sequence[Tensor]


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

    def forward(self, scores: Tensor, img_ids: Tensor | Sequence[int] | None = None) -> Tensor:
        """scores (B,B), img_ids (B,) -> the sum over the batch"""
        if img_ids is not None and len(img_ids) != len(scores):
            raise ValueError(f"img_ids: expected {len(scores)} of them, found {len(img_ids)}")
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

    def forward(self, score_mask: Masks) -> Tensor:
        """One mask, or the sparse branch's and the dense's, each (T,B,N)."""
        masks = (score_mask,) if isinstance(score_mask, Tensor) else tuple(score_mask or ())
        if not 1 <= len(masks) <= 2:
            raise ValueError(f"score_mask: expected one mask, or one of each branch, found {len(masks)}")
        weights = (1.0, 1.0) if isinstance(score_mask, Tensor) else (self.lambda_sparse, self.lambda_dense)
        return ratio([mask.float() for mask in masks], self.target_ratio, "per_branch", *weights)


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
        self, similarity_matrix: Tensor, score_mask: Masks, img_ids: Tensor | Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> total, alignment and ratio loss"""
        align_loss = self.contrastive_loss(similarity_matrix, img_ids)
        ratio_loss = self.ratio_loss(score_mask)
        return align_loss + self.ratio_weight * ratio_loss, align_loss, ratio_loss

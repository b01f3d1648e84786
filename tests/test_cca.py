"""Canonical correlation: hand-made data whose answer is known."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from making import refusal
from seps.cca import correlate, inverse_root, principal, start_projection
from seps.options import DataOptions, ModelOptions, RecipeOptions, TrainOptions
from seps.retrieval import make_task
from seps.slimming import unit
from seps.sources import SceneOptions
from seps.tokens import Tokens
from seps.training import FitSettings

OWNERS = torch.arange(400)


def hidden(correlation: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of 5 channels and texts of 4 that share one hidden direction, under large noise elsewhere."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(400, generator=generator)
    other = correlation * shared + (1 - correlation**2) ** 0.5 * torch.randn(400, generator=generator)
    images, texts = (
        10 * torch.randn(400, 5, generator=generator),
        10 * torch.randn(400, 4, generator=generator),
    )
    images[:, 2], texts[:, 1] = shared + 3, other - 7
    return images, texts


def test_the_shared_direction_is_found_however_small_it_is() -> None:
    images, texts = hidden()
    found = correlate(images, texts, OWNERS, 1, ridge=1e-9)
    assert found.strengths[0] == pytest.approx(1, abs=1e-6)
    weights = found.images.weight[:, 0].abs(), found.texts.weight[:, 0].abs()
    assert weights[0].argmax() == 2 and weights[1].argmax() == 1
    assert weights[0][[0, 1, 3, 4]].max() < 1e-3 * weights[0][2]


def test_the_strength_is_the_correlation() -> None:
    images, texts = hidden(0.6)
    own = torch.corrcoef(torch.stack([images[:, 2], texts[:, 1]]))[0, 1]
    found = correlate(images[:, 2:3], texts[:, 1:2], OWNERS, 1, ridge=1e-12)
    assert found.strengths[0] == pytest.approx(own.item(), abs=1e-6)


def test_mapped_features_are_centred_and_white_before_they_are_weighed() -> None:
    images, texts = hidden(0.8)
    found = correlate(images, texts, OWNERS, 4, ridge=1e-12)
    for mapped in (found.images(images), found.texts(texts)):
        torch.testing.assert_close(mapped.mean(0), torch.zeros(4).double(), atol=1e-5, rtol=0)
        covariance = mapped.T @ mapped / len(mapped)
        torch.testing.assert_close(covariance, torch.diag(found.strengths**2), atol=1e-5, rtol=0)


def test_an_image_counts_once_however_many_texts_it_has() -> None:
    images, texts = hidden(0.9)
    again = torch.cat([OWNERS, torch.zeros(300, dtype=torch.long)])
    once, often = correlate(images, texts, OWNERS, 3), correlate(images, texts[again], again, 3)
    torch.testing.assert_close(often.strengths, once.strengths)
    torch.testing.assert_close(often.scores(images, texts), once.scores(images, texts))


def test_own_pairs_score_highest_where_the_sides_are_one_rotation_apart() -> None:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(200, 6, generator=generator)
    rotation = torch.linalg.qr(torch.randn(6, 6, generator=generator)).Q
    scores = correlate(images, images @ rotation + 5, OWNERS[:200], 6, ridge=1e-9).scores(
        images, images @ rotation + 5
    )
    torch.testing.assert_close(scores.diagonal(), torch.ones(200).double())
    assert torch.equal(scores.argmax(1), OWNERS[:200]) and scores.max() <= 1 + 1e-9


def test_the_ridge_holds_directions_without_variance() -> None:
    images, texts = hidden()
    flat = torch.cat([images, images[:, :1], torch.zeros(400, 1)], 1)  # one column twice, one without content
    found = correlate(flat, texts, OWNERS, 4)
    assert torch.isfinite(found.images.weight).all() and found.strengths.max() <= 1
    torch.testing.assert_close(
        inverse_root(torch.diag(torch.tensor([4.0, 0.0])), 0.5), torch.diag(torch.tensor([5.0, 1.0]).rsqrt())
    )


def test_a_projection_starts_at_the_map_at_its_own_size() -> None:
    images, texts = hidden(0.9)
    found = correlate(images, texts, OWNERS, 3)
    projection = nn.Linear(5, 8)
    size = projection.weight.square().mean().sqrt()
    start_projection(projection, found.images)
    mapped, own = projection(images).detach().double(), found.images(images)
    assert mapped[:, 3:].abs().max() == 0
    factor = mapped[0, 0] / own[0, 0]
    assert factor > 0
    torch.testing.assert_close(mapped[:, :3], factor * own, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(projection.weight[:3].square().mean().sqrt(), size)


def test_all_principal_directions_keep_every_cosine() -> None:
    values = torch.randn(50, 6, generator=torch.Generator().manual_seed(2)).double() + 2
    mapped = principal(values, 6, energy=3.0)(values)
    torch.testing.assert_close(unit(mapped) @ unit(mapped).T, unit(values) @ unit(values).T)
    assert mapped.square().sum(1).mean() == pytest.approx(3.0)
    largest = principal(values, 1, energy=1.0).weight[:, 0]
    assert (unit(largest) @ unit(values.mean(0))).abs() > 0.95


def test_maps_stand_one_behind_the_other() -> None:
    images, texts = hidden(0.9)
    found, rest = correlate(images, texts, OWNERS, 3).texts, principal(texts, 2, 1.0)
    projection = nn.Linear(4, 6)
    start_projection(projection, found, rest)
    mapped = projection(texts).detach().double()
    expected = torch.cat([found(texts), rest(texts), torch.zeros(400, 1)], 1)
    torch.testing.assert_close(unit(mapped), unit(expected), atol=1e-4, rtol=0)


def test_sides_that_do_not_fit_are_refused() -> None:
    images, texts = hidden()
    assert "expected 1 to 4 directions, found 5" in refusal(lambda: correlate(images, texts, OWNERS, 5))
    assert "expected (B, P), (T, Q) and (T,)" in refusal(lambda: correlate(images, texts, OWNERS[:9], 1))
    assert "a text or more for each" in refusal(lambda: correlate(images, texts, OWNERS * 0, 1))
    assert "above 0, found 0" in refusal(lambda: correlate(images, texts, OWNERS, 1, ridge=0))


def test_training_starts_at_cca_of_kept_features_or_of_computed_ones(tmp_path: Path) -> None:
    options = TrainOptions(
        run=FitSettings(folder=str(tmp_path)),
        data=DataOptions(scenes=SceneOptions(train=4, dev=2, size=64), batch_size=2),
        model=ModelOptions(channels=16, projections="cca"),
        recipe=RecipeOptions(preset="laps"),
    )
    frozen = {"kind": "light", "tuning": "frozen", "width": 16}
    options = replace(
        options,
        model=replace(options.model, image_encoder=frozen | {"size": 64}, text_encoder=frozen),
    )
    computed = make_task(options)
    options = replace(options, data=replace(options.data, cache=str(tmp_path / "kept")))
    task = make_task(options)
    for side in ("image_encoder", "text_encoder"):
        starts = [getattr(each.model, side).neck.projection.weight for each in (computed, task)]
        torch.testing.assert_close(*starts, atol=1e-3, rtol=1e-3)
    images, texts, owners = task.features.pooled(task.train, 90)
    found = correlate(images, texts, owners, 16)
    for neck, values, expected in (
        (task.model.image_encoder.neck, images, found.images(images)),
        (task.model.text_encoder.neck, texts, found.texts(texts)),
    ):
        mapped = neck(Tokens(values.unsqueeze(1))).features[:, 0].detach().double()
        torch.testing.assert_close(unit(mapped), unit(expected), atol=1e-4, rtol=0)

    described = make_task(replace(options, recipe=RecipeOptions(preset="described")))
    images, texts = described.model.image_encoder.neck, described.model.text_encoder.neck
    assert (
        images.projection.weight[8:].abs().max() == 0
        and texts.projection.weight[8:].abs().min(1).values.sum() > 0
    )

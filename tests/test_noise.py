import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seps.noise import between_zero_and_one, gumbel, logistic, pair_uniform


def numbers(seed=3, images=6, texts=7, patches=5):
    return pair_uniform(seed, torch.arange(images), torch.arange(texts), patches)


@given(st.integers(0, 2**31), st.integers(0, 4), st.integers(1, 5), st.integers(0, 5), st.integers(1, 6))
def test_a_chunk_draws_what_the_whole_batch_draws(seed, first_image, last_image, first_text, last_text):
    rows, columns = slice(first_image, first_image + last_image), slice(first_text, first_text + last_text)
    chunk = pair_uniform(seed, torch.arange(6)[rows], torch.arange(7)[columns], 5)
    assert torch.equal(chunk, numbers(seed)[rows, columns])


def test_fewer_patches_draw_the_same_numbers():
    assert torch.equal(numbers(patches=3), numbers(patches=5)[..., :3])


def test_numbers_are_uniform_and_differ_between_pairs_and_seeds():
    drawn = numbers(images=40, texts=50, patches=60)
    assert drawn.min() > 0
    assert drawn.max() < 1
    assert drawn.mean() == pytest.approx(0.5, abs=5e-3)
    assert drawn.var() == pytest.approx(1 / 12, abs=2e-3)
    # Single numbers meet now and then, rows of them never do.
    assert len(drawn.flatten(0, 1).unique(dim=0)) == 40 * 50
    assert not torch.isclose(numbers(seed=1), numbers(seed=2)).any()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_neighbours_tell_nothing_about_each_other(axis):
    drawn = numbers(images=40, texts=50, patches=60).transpose(0, axis)
    pairs = torch.stack([drawn[1:].flatten(), drawn[:-1].flatten()])
    assert abs(torch.corrcoef(pairs)[0, 1]) < 0.02


def test_noise_has_the_moments_of_its_distribution():
    uniform = numbers(images=40, texts=50, patches=60).double()
    assert gumbel(uniform).mean() == pytest.approx(0.5772, abs=0.02)
    assert gumbel(uniform).var() == pytest.approx(math.pi**2 / 6, abs=0.05)
    assert logistic(uniform).mean() == pytest.approx(0, abs=0.03)
    assert logistic(uniform).var() == pytest.approx(math.pi**2 / 3, abs=0.08)


def test_noise_is_finite_for_every_number_that_can_be_drawn():
    ends = between_zero_and_one(torch.tensor([0, 0xFFFFFFFF]))
    assert ends[0] > 0
    assert ends[1] < 1
    assert torch.isfinite(gumbel(ends)).all()
    assert torch.isfinite(logistic(ends)).all()

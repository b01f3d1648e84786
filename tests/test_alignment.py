import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from making import refusal
from seps.alignment import Aligner, activate, affinities, align, largest, masked_max, pool, relevance_network
from seps.recipe import laps, paper

# Two words by three tokens, worked by hand below.
AFFINITY = torch.tensor([[0.5, -0.2, 0.1], [0.3, 0.9, -0.6]])


class Sum(nn.Module):
    """A relevance that can be worked by hand: the sum of its inputs, in the order they come."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, values):
        return (values * self.weight).sum(-1, keepdim=True)


def test_affinities_are_cosines_through_a_leaky_relu_or_not():
    words, tokens = torch.tensor([[3.0, 4.0], [-1.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(affinities(words, tokens), torch.tensor([[0.6, 0.0], [-1.0, 0.0]]))
    torch.testing.assert_close(
        affinities(words, tokens, "leaky_relu"), torch.tensor([[0.6, 0.0], [-0.1, 0.0]])
    )
    assert torch.equal(activate(AFFINITY, "cosine"), AFFINITY)


def test_the_mean_of_maxima_in_each_direction():
    word_to_patch = (0.5 + 0.9) / 2
    patch_to_word = (0.5 + 0.9 + 0.1) / 3
    assert align(AFFINITY, directions="word_to_patch").item() == pytest.approx(word_to_patch)
    assert align(AFFINITY, directions="patch_to_word").item() == pytest.approx(patch_to_word)
    assert align(AFFINITY).item() == pytest.approx(word_to_patch + patch_to_word)


def test_masked_words_and_tokens_take_no_part():
    words, tokens = torch.tensor([True, False]), torch.tensor([False, True, True])
    assert align(AFFINITY, words).item() == pytest.approx(0.5 + (0.5 - 0.2 + 0.1) / 3)
    assert align(AFFINITY, None, tokens).item() == pytest.approx((0.1 + 0.9) / 2 + (0.9 + 0.1) / 2)
    assert align(AFFINITY, words, tokens).item() == pytest.approx(0.1 + (-0.2 + 0.1) / 2)


def test_negative_scores_are_no_less_real_than_padding():
    # A maximum below zero must not lose to a padded zero.
    affinity = torch.tensor([[-0.5, -0.4]])
    assert align(affinity, directions="word_to_patch").item() == pytest.approx(-0.4)
    mask = torch.tensor([True, False])
    assert align(affinity, None, mask, directions="word_to_patch").item() == pytest.approx(-0.5)
    assert align(affinity, None, mask, "top", "word_to_patch", Sum(), 3).item() == pytest.approx(-0.5)


def test_no_words_at_all_score_zero():
    assert align(AFFINITY, torch.tensor([False, False])).item() == 0
    assert align(AFFINITY, None, torch.tensor([False] * 3), "mean_and_top", relevance=Sum()).item() == 0


def test_masked_max_by_hand():
    mask = torch.tensor([[True, False, True], [False, False, False]])
    torch.testing.assert_close(masked_max(AFFINITY, mask, -1), torch.tensor([0.5, 0.0]))
    torch.testing.assert_close(masked_max(AFFINITY, None, -2), torch.tensor([0.5, 0.9, 0.1]))


def test_the_largest_come_in_descending_order_then_zeros():
    values = torch.tensor([0.1, -0.3, 0.7])
    torch.testing.assert_close(largest(values, None, 2), torch.tensor([0.7, 0.1]))
    torch.testing.assert_close(largest(values, None, 5), torch.tensor([0.7, 0.1, -0.3, 0.0, 0.0]))
    mask = torch.tensor([True, True, False])
    torch.testing.assert_close(largest(values, mask, 3), torch.tensor([0.1, -0.3, 0.0]))


def test_mean_top_or_both():
    maxima, relevance = torch.tensor([0.1, -0.3, 0.7]), Sum()
    mean, top = 0.5 / 3, 0.8
    assert pool(maxima, None, "mean", None, 2).item() == pytest.approx(mean)
    assert pool(maxima, None, "top", relevance, 2).item() == pytest.approx(top)
    assert pool(maxima, None, "mean_and_top", relevance, 2).item() == pytest.approx(mean + top)
    assert refusal(lambda: pool(maxima, None, "top", None, 2)) == (
        "relevance: expected a network for pooling 'top', found none"
    )


def test_the_relevance_network_is_as_wide_as_the_equation_says():
    network = relevance_network(5)
    assert [tuple(each.shape) for each in network.parameters()] == [(10, 5), (10,), (1, 10), (1,)]
    assert Aligner(paper(top_k=7)).relevance[0].in_features == 7
    assert Aligner(laps()).relevance is None


@given(st.integers(1, 6), st.integers(1, 7), st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_padding_changes_nothing(words, tokens, top_k, padding, learned):
    aligner = Aligner(paper(top_k=top_k) if learned else laps())
    real_words, real_tokens = torch.randn(2, 3, words, 8), torch.randn(2, 3, tokens, 8)
    plain = aligner(real_words, real_tokens, None)
    padded_words = torch.cat([real_words, torch.randn(2, 3, padding, 8)], 2)
    padded_tokens = torch.cat([real_tokens, torch.randn(2, 3, padding, 8)], 2)
    word_mask = torch.arange(words + padding) < words
    token_mask = torch.arange(tokens + padding) < tokens
    torch.testing.assert_close(aligner(padded_words, padded_tokens, word_mask, token_mask), plain)


@given(st.integers(1, 6), st.integers(1, 7))
def test_the_order_of_words_and_tokens_does_not_matter(words, tokens):
    aligner = Aligner(paper())
    affinity = torch.randn(words, tokens)
    shuffled = affinity[torch.randperm(words)][:, torch.randperm(tokens)]
    torch.testing.assert_close(aligner.score(shuffled, None), aligner.score(affinity, None))


def test_swapping_words_and_tokens_swaps_the_directions():
    relevance = relevance_network(5)
    for pooling in ("mean", "mean_and_top", "top"):
        there = align(AFFINITY, None, None, pooling, "word_to_patch", relevance)
        back = align(AFFINITY.T, None, None, pooling, "patch_to_word", relevance)
        torch.testing.assert_close(there, back)
        both = align(AFFINITY, None, None, pooling, "both", relevance)
        torch.testing.assert_close(
            both, there + align(AFFINITY, None, None, pooling, "patch_to_word", relevance)
        )


def test_gradients_are_finite_where_everything_is_padding():
    affinity = AFFINITY.clone().requires_grad_()
    none = torch.tensor([False, False])
    align(affinity, none, None, "mean_and_top", relevance=relevance_network(5)).backward()
    assert torch.isfinite(affinity.grad).all()


def test_what_does_not_fit_an_alignment_is_refused_with_a_sentence():
    names = {"pooling": "mean, mean_and_top, top", "directions": "both, word_to_patch, patch_to_word"}
    for name, allowed in names.items():
        sentence = f"{name}: expected one of {allowed}, found 'best'"
        assert refusal(lambda name=name: align(AFFINITY, **{name: "best"})) == sentence
    assert refusal(lambda: affinities(torch.ones(2, 3), torch.ones(2, 3), "relu")) == (
        "kind: expected one of cosine, leaky_relu, found 'relu'"
    )
    assert refusal(lambda: affinities(torch.ones(2, 3), torch.ones(2, 4))) == (
        "tokens: expected 3 channels as words, found 4"
    )

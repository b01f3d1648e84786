import pytest
import torch

from making import refusal
from seps.tokens import Tokens

NAN = float("nan")


def test_padded_marks_the_first_tokens_of_each_row_as_real():
    tokens = Tokens.padded(torch.zeros(3, 4, 2), [2, 0, 4])
    assert tokens.mask.tolist() == [[True, True, False, False], [False] * 4, [True] * 4]
    assert tokens.lengths.tolist() == [2, 0, 4]
    assert tokens.present.tolist() == [True, False, True]


@pytest.mark.parametrize("lengths", [torch.tensor([2, 1]), [2, 1], torch.tensor([[2], [1]])])
def test_lengths_come_as_a_tensor_or_a_list(lengths):
    assert Tokens.padded(torch.zeros(2, 3, 1), lengths).lengths.tolist() == [2, 1]


def test_ragged_pads_rows_of_any_length_even_of_none():
    tokens = Tokens.ragged([torch.ones(2, 3), torch.ones(0, 3), torch.ones(1, 3)])
    assert tokens.features.shape == (3, 2, 3)
    assert tokens.lengths.tolist() == [2, 0, 1]
    assert Tokens.ragged([torch.ones(0, 3)] * 2).present.tolist() == [False, False]


def test_without_a_mask_every_token_is_real():
    tokens = Tokens(torch.zeros(2, 3, 4))
    assert len(tokens) == 2
    assert tokens.channels == 4
    assert tokens.lengths.tolist() == [3, 3]
    assert tokens.present.all()
    assert tokens.cleaned() is tokens


def test_the_mean_counts_real_tokens_only():
    features = torch.tensor([[[1.0, 2], [3, 4]], [[5, 6], [NAN, NAN]], [[NAN, NAN], [NAN, NAN]]])
    assert Tokens.padded(features, [2, 1, 0]).mean().tolist() == [[2, 3], [5, 6], [0, 0]]
    assert Tokens(features[:1]).mean().tolist() == [[2, 3]]


def test_cleaned_zeroes_the_padding_and_keeps_its_gradient_away():
    features = torch.full((1, 2, 1), NAN).requires_grad_()
    tokens = Tokens.padded(features, [0]).cleaned()
    tokens.features.sum().backward()
    assert tokens.features.tolist() == [[[0], [0]]]
    assert features.grad.tolist() == [[[0], [0]]]


def test_rows_of_a_batch_keep_their_mask_and_cls():
    tokens = Tokens(torch.arange(6.0).view(3, 2, 1), torch.eye(3, 2).bool(), torch.arange(3.0).view(3, 1))
    for rows in ([2, 0], torch.tensor([2, 0])):
        some = tokens[rows]
        assert some.features[:, 0, 0].tolist() == [4, 0]
        assert some.mask.tolist() == [[False, False], [True, False]]
        assert some.cls.tolist() == [[2], [0]]
    assert len(tokens[1:]) == 2


def test_without_takes_tokens_from_the_chosen_rows_only():
    tokens = Tokens.padded(torch.zeros(3, 2, 1), [2, 1, 2])
    assert tokens.without(torch.tensor([True, False, False])).lengths.tolist() == [0, 1, 2]
    assert Tokens(torch.zeros(2, 3, 1)).without(torch.tensor([False, True])).lengths.tolist() == [3, 0]


def test_to_changes_the_numbers_and_not_the_mask():
    tokens = Tokens(torch.zeros(1, 2, 1), torch.tensor([[True, False]]), torch.zeros(1, 1))
    half = tokens.to(torch.float16)
    assert (half.features.dtype, half.mask.dtype, half.cls.dtype) == (
        torch.float16,
        torch.bool,
        torch.float16,
    )
    moved = tokens.to("meta")
    assert {moved.features.device.type, moved.mask.device.type, moved.cls.device.type} == {"meta"}


def test_detach_cuts_the_gradient_of_features_and_cls():
    tokens = Tokens(torch.zeros(1, 2, 1).requires_grad_(), cls=torch.zeros(1, 1).requires_grad_()).detach()
    assert not tokens.features.requires_grad
    assert not tokens.cls.requires_grad


def test_finite_is_required_of_real_tokens_alone():
    features = torch.zeros(3, 2, 1)
    features[1, 1] = NAN
    Tokens.padded(features, [2, 1, 2]).require_finite("images")
    message = "images: expected finite features, found NaN or infinity in item 1"
    with pytest.raises(ValueError, match=message):
        Tokens(features).require_finite("images")
    with pytest.raises(ValueError, match="item 0"):
        Tokens(torch.zeros(1, 1, 1), cls=torch.tensor([[float("inf")]])).require_finite("images")


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (
            lambda: Tokens(torch.zeros(2, 3)),
            "features: expected (batch, tokens, channels), found shape (2, 3)",
        ),
        (
            lambda: Tokens(torch.zeros(2, 3, 1, dtype=torch.long)),
            "features: expected floating-point numbers, found torch.int64",
        ),
        (
            lambda: Tokens(torch.zeros(0, 3, 1)),
            "features: expected at least one item, token and channel, found shape (0, 3, 1)",
        ),
        (
            lambda: Tokens(torch.zeros(2, 3, 1), torch.ones(2, 3)),
            "mask: expected booleans (True = real), found torch.float32",
        ),
        (
            lambda: Tokens(torch.zeros(2, 3, 1), torch.ones(2, 2).bool()),
            "mask: expected shape (2, 3), found (2, 2)",
        ),
        (
            lambda: Tokens(torch.zeros(2, 3, 1), cls=torch.zeros(2, 2)),
            "cls: expected shape (2, 1), found (2, 2)",
        ),
        (
            lambda: Tokens.padded(torch.zeros(2, 3, 1), [1, 4]),
            "lengths: expected 0 to 3, found 1 to 4",
        ),
        (
            lambda: Tokens.padded(torch.zeros(2, 3, 1), [-1, 3]),
            "lengths: expected 0 to 3, found -1 to 3",
        ),
        (
            lambda: Tokens.padded(torch.zeros(2, 3, 1), [1, 2, 3]),
            "lengths: expected one for each of 2 rows, found 3",
        ),
        (lambda: Tokens([[1.0]]), "features: expected a tensor, found list"),
        (
            lambda: Tokens(torch.zeros(1, 2, 3), [[True, True]]),
            "mask: expected a tensor, found list",
        ),
        (
            lambda: Tokens(torch.zeros(1, 2, 3), cls=torch.zeros(1, 3).long()),
            "cls: expected floating-point numbers, found torch.int64",
        ),
        (
            lambda: Tokens.padded(torch.zeros(2, 3), [1, 2]),
            "features: expected (batch, tokens, channels), found shape (2, 3)",
        ),
        (
            lambda: Tokens.padded(torch.zeros(2, 3, 1), [1, 2.5]),
            "lengths: expected whole numbers, found [1.0, 2.5]",
        ),
        (
            lambda: Tokens.padded(torch.zeros(1, 3, 1), [NAN]),
            "lengths: expected whole numbers, found [nan]",
        ),
        (
            lambda: Tokens.padded(torch.zeros(2, 3, 1), torch.tensor([True, False])),
            "lengths: expected whole numbers, found [True, False]",
        ),
        (
            lambda: Tokens.padded(torch.zeros(2, 3, 1), None),
            "lengths: expected a whole number for each row, found None",
        ),
        (lambda: Tokens.ragged([]), "rows: expected at least one, found none"),
        (
            lambda: Tokens.ragged([torch.zeros(2, 3), torch.zeros(1, 4)]),
            "rows: expected (length, 3) each, found shape (1, 4) in row 1",
        ),
        (
            lambda: Tokens.ragged([torch.zeros(1, 2, 3)]),
            "rows: expected (length, channels) each, found shape (1, 2, 3) in row 0",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(build, sentence):
    assert refusal(build) == sentence

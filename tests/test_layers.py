"""The neck's own dropout."""

import torch

from making import refusal
from seps.encoders.layers import Neck, NeckOptions
from seps.tokens import Tokens


def test_hidden_channels_are_hidden_from_all_tokens_of_an_item() -> None:
    torch.manual_seed(0)
    neck = Neck(400, 8, NeckOptions(channel_dropout=0.25))
    features = torch.randn(6, 5, 400) + 3
    hidden = neck.hide(features) - features.mean((0, 1))
    gone = hidden == 0
    assert torch.equal(gone, gone[:, :1].expand_as(gone))
    assert 0.2 < gone.float().mean() < 0.3
    assert not torch.equal(gone[0], gone[1])
    torch.testing.assert_close(hidden[~gone], ((features - features.mean((0, 1))) / 0.75)[~gone])


def test_nothing_is_hidden_in_evaluation() -> None:
    torch.manual_seed(0)
    neck = Neck(40, 8, NeckOptions(channel_dropout=0.5)).eval()
    raw = Tokens(torch.randn(3, 2, 40))
    torch.testing.assert_close(neck(raw).features, neck.projection(raw.features))
    neck.train()
    assert not torch.allclose(neck(raw).features, neck.projection(raw.features))


def test_a_share_that_hides_everything_is_refused() -> None:
    assert refusal(lambda: Neck(4, 8, NeckOptions(channel_dropout=1.0))) == (
        "channel_dropout: expected 0 to below 1, found 1.0"
    )

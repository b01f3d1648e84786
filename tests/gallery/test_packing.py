"""Tokens as bytes and back."""

import pyarrow as pa
import pytest
import torch

from seps.gallery.packing import cosines, pack, unpack
from seps.slimming import unit
from seps.tokens import Tokens


def test_eight_bits_are_right_to_half_a_step():
    tokens = Tokens(torch.randn(3, 5, 8), cls=torch.randn(3, 8))
    read = unpack(pack(tokens), 8)
    step = tokens.features.abs().amax(-1, keepdim=True) / 127
    assert ((read.features - tokens.features).abs() <= step / 2 + 1e-6).all()
    assert read.mask is None
    assert (read.cls - tokens.cls).abs().max() <= tokens.cls.abs().max() / 254 + 1e-6


def test_half_precision_is_half_precision():
    tokens = Tokens(torch.randn(2, 4, 8))
    assert torch.equal(unpack(pack(tokens, "fp16"), 8).features, tokens.features.half().float())


def test_the_size_is_what_the_documentation_says():
    tokens = Tokens(torch.randn(1, 64, 128))
    assert len(pack(tokens)[0]) == 6 + 64 * (128 + 4)
    assert len(pack(tokens, "fp16")[0]) == 6 + 64 * 128 * 2


def test_ragged_and_absent_token_sets_come_back():
    tokens = Tokens.padded(torch.randn(4, 6, 8), [6, 2, 0, 3])
    packed = pack(tokens)
    assert packed[2] is None
    read = unpack(packed, 8)
    assert read.lengths.tolist() == [6, 2, 0, 3]
    assert torch.allclose(read.features[1, :2], tokens.features[1, :2], atol=0.02)
    assert read.features[1, 2:].abs().max() == 0
    assert unpack([None, None], 8).lengths.tolist() == [0, 0]


def test_mixed_precisions_and_lengths_may_stand_together():
    one, other = torch.randn(1, 3, 8), torch.randn(1, 5, 8)
    read = unpack([pack(Tokens(one))[0], pack(Tokens(other), "fp16")[0]], 8)
    assert read.lengths.tolist() == [3, 5]
    assert torch.allclose(read.features[1], other[0], atol=2e-3)


def test_a_token_of_zeros_stays_zero():
    assert unpack(pack(Tokens(torch.zeros(1, 2, 8))), 8).features.abs().max() == 0


@pytest.mark.parametrize("cut", [1, 40])
def test_torn_bytes_are_refused(cut):
    packed = pack(Tokens(torch.randn(1, 3, 8)))[0]
    torn = packed[:-cut] if cut == 1 else packed + b"x"
    with pytest.raises(ValueError, match="packed tokens: expected 42 bytes"):
        unpack([torn], 8)
    with pytest.raises(ValueError, match="packed tokens: expected items of one length"):
        unpack([torn, packed], 8)


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="expected int8 or fp16, found 'int4'"):
        pack(Tokens(torch.randn(1, 3, 8)), "int4")


@pytest.mark.parametrize("precision", ["int8", "fp16"])
@pytest.mark.parametrize("lengths", [[5, 0, 2], [3, 3, 3], [0, 0, 0]])
def test_cosines_of_a_column_are_those_of_its_tokens(precision, lengths):
    """Read where it lies, whether its items are of one shape or not."""
    tokens, units = Tokens.padded(torch.randn(3, 5, 16), lengths), unit(torch.randn(4, 16))
    packed = pack(tokens, precision)
    found, counts = cosines(pa.array([b"before", *packed], pa.binary()).slice(1), units)
    expected = unpack(packed, 16)
    assert counts == lengths
    tokens = torch.cat([each[:count] for each, count in zip(expected.features, lengths, strict=True)])
    assert torch.allclose(found, unit(tokens) @ units.T, atol=1e-2)


def test_many_items_are_read_in_blocks():
    packed = pack(Tokens(torch.randn(700, 7, 16)))
    units = unit(torch.randn(2, 16))
    for items in (packed, [None, *packed]):
        found, counts = cosines(pa.array(items, pa.binary()), units)
        assert sum(counts) == len(found) == 4900
        assert torch.allclose(found[-7:], cosines(pa.array(packed[-1:], pa.binary()), units)[0], atol=1e-6)

"""The example of a sound as one more guide: real WAV files, the three-guide mix, and what it does."""

import importlib.util
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from seps import SlimHead, Tokens, paper
from seps.slimming import guidance, min_max

EXAMPLE = Path(__file__).parents[1] / "examples" / "audio_guide.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("audio_guide", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["audio_guide"] = module  # a dataclass looks itself up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["audio_guide"]


def test_a_sound_survives_its_file(example, tmp_path):
    path = tmp_path / "tone.wav"
    example.write_sound(path, "star", np.random.default_rng(0))
    samples = example.read_sound(path)
    assert samples.shape == (4000,) and 0.02 < float(samples.abs().max()) <= 1
    spectrum = torch.fft.rfft(samples).abs()
    loudest = float(spectrum.argmax()) * example.RATE / len(samples)
    assert abs(loudest / example.PITCHES["star"] - 1) < 0.05


def test_a_file_that_is_no_such_sound_meets_one_sentence(example, tmp_path):
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="broken.wav: not a WAV file"):
        example.read_sound(broken)
    stereo = tmp_path / "stereo.wav"
    with wave.open(str(stereo), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(8))
    with pytest.raises(ValueError, match="stereo.wav: expected mono"):
        example.read_sound(stereo)


def test_mel_filters_are_triangles_that_cover_the_band(example):
    filters = example.mel_filters(20, 257, 8000)
    assert filters.shape == (20, 257) and bool((filters >= 0).all()) and float(filters.max()) <= 1
    middles = filters.argmax(1)
    assert bool((middles[1:] > middles[:-1]).all())
    # Neighbours hand over to each other: between the first and the last top they add up to one.
    inside = filters[:, int(middles[0]) + 1 : int(middles[-1])].sum(0)
    torch.testing.assert_close(inside, torch.ones_like(inside))


def test_sounds_of_different_pitch_differ_whatever_their_loudness(example):
    encoder = example.SoundEncoder(16).eval()
    time = torch.arange(4000) / example.RATE
    low, high = (torch.sin(6.2832 * pitch * time) for pitch in (300, 900))
    found = encoder(torch.stack([low, 0.5 * low, high]))
    assert (found[0] - found[1]).norm() < 0.1 * (found[0] - found[2]).norm()


def test_three_guides_are_mixed_as_in_equation_3():
    head = SlimHead(paper(), patches=12, channels=16).eval()
    images, texts, dense = (Tokens(torch.randn(2, count, 16)) for count in (12, 5, 7))
    audio = torch.randn(2, 16)
    branch = head.inspect(images, texts, dense, guides={"audio": audio}).branches["sparse"]
    patches, predicted = images.features, head.slimmer.predictors["sparse"](images.features)
    sparse = min_max(guidance(patches, texts.mean().unsqueeze(0)))
    own, described, heard = (
        min_max(guidance(patches, each.unsqueeze(1))) for each in (images.mean(), dense.mean(), audio)
    )
    expected = 0.25 * predicted.transpose(1, 2) + 0.25 * (sparse + described + heard + 2 * own)
    torch.testing.assert_close(branch.saliency, expected)


def test_the_sound_moves_the_selection_to_what_sounds(example, tmp_path):
    found = example.run(tmp_path, scenes=160, tests=64, steps=160)
    assert len(list(tmp_path.glob("*.wav"))) == 160 + 64
    assert found["with the sound"] > found["without the sound"] > found["chance"]
    assert found["with the sound"] > found["with another's sound"]

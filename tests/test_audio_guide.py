"""The example of a sound as one more guide: real WAV files, the three-guide mix, and what it does."""

import importlib.util
import re
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


def put(path: Path, samples: bytes, width: int, channels: int = 1, rate: int = 8000) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(samples)
    return path


@pytest.mark.parametrize(
    ("width", "samples"),
    [
        (1, bytes([0, 128, 192])),  # the only one without a sign
        (2, bytes([0, 0x80, 0, 0, 0, 0x40])),
        (3, bytes([0, 0, 0x80, 0, 0, 0, 0, 0, 0x40])),
        (4, bytes([0, 0, 0, 0x80, 0, 0, 0, 0, 0, 0, 0, 0x40])),
    ],
)
def test_samples_of_any_width_by_hand(example, tmp_path, width, samples):
    expected = torch.tensor([-1.0, 0.0, 0.5])
    assert torch.equal(example.read_sound(put(tmp_path / "mono.wav", samples, width)), expected)
    frames = np.frombuffer(samples, np.uint8).reshape(3, width)
    silent = np.broadcast_to(frames[1], frames.shape)
    stereo = np.stack([frames, silent], 1).tobytes()  # averaged with a silent channel
    assert torch.equal(example.read_sound(put(tmp_path / "two.wav", stereo, width, 2)), expected / 2)


def test_a_file_that_is_no_such_sound_meets_one_sentence(example, tmp_path):
    whole = put(tmp_path / "whole.wav", bytes(range(40)), 2)
    real = bytearray(whole.read_bytes())
    real[20] = 3  # the format's number: floating point
    cases = {
        "nothing.wav": (b"", "expected a PCM WAV file, found its end"),
        "text.wav": (b"no sound at all", "expected a PCM WAV file, found file does not start with RIFF id"),
        "header.wav": (whole.read_bytes()[:30], "expected a PCM WAV file, found its end"),
        "float.wav": (bytes(real), "expected a PCM WAV file, found unknown format: 3"),
        "cut.wav": (whole.read_bytes()[:-5], "expected 20 frames, found 17"),
        "silent.wav": (put(tmp_path / "silent.wav", b"", 2).read_bytes(), "expected sound, found no sample"),
        "fast.wav": (
            put(tmp_path / "fast.wav", bytes(8), 2, rate=44100).read_bytes(),
            "expected 8000 samples a second, found 44100",
        ),
    }
    for name, (content, sentence) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path / name))}: {sentence}$"):
            example.read_sound(tmp_path / name)


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

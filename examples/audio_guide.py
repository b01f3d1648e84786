"""A sound as one more guide: which of the things in a picture is heard, and does slimming keep its patches?

Every shape has a pitch. A picture shows several things, a WAV file beside it lets one of them sound. A small
encoder turns the sound into one vector, which enters the head through its mapping of guides: that entry, and
no line of the library, is what the new modality takes. With query, description and sound the saliency is the
three-guide mix, (1 - 3 beta) of the learned score and beta of each guide.

    python examples/audio_guide.py
"""

from __future__ import annotations

import argparse
import math
import tempfile
import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from seps import SlimHead, Tokens, paper
from seps.data import Scenes, View, evaluate_image
from seps.data.things import SHAPES
from seps.encoders import build_image_encoder

KEPT = 0.1
"""The share of the patches that stay."""
RATE = 8000
SECONDS = 0.5
PITCHES = {shape: 220.0 * 2 ** (place / 3) for place, shape in enumerate(SHAPES)}


def write_sound(path: Path, shape: str, generator: np.random.Generator) -> None:
    """A tone with two overtones, an envelope and noise, as 16-bit mono WAV."""
    time = np.arange(int(RATE * SECONDS)) / RATE
    pitch = PITCHES[shape] * generator.uniform(0.98, 1.02)
    loudness = generator.uniform(0.2, 0.6)
    tone = sum(np.sin(2 * np.pi * pitch * part * time + generator.uniform(0, 6)) / part for part in (1, 2, 3))
    signal = loudness * tone * np.exp(-3 * time) + generator.normal(0, 0.02, time.shape)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((np.clip(signal / 2, -1, 1) * 32767).astype("<i2").tobytes())


def read_sound(path: Path) -> Tensor:
    """The samples of a WAV file of the expected rate, its channels averaged, -1 to 1. -> (samples,)

    Whole-numbered samples of 8, 16, 24 or 32 bits; ValueError says in one sentence what else was found.
    """
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, rate, frames = file.getparams()[:4]
            raw = np.frombuffer(file.readframes(frames), dtype=np.uint8)
    except (wave.Error, EOFError) as error:
        raise ValueError(f"{path}: expected a PCM WAV file, found {str(error) or 'its end'}") from None
    if rate != RATE:
        raise ValueError(f"{path}: expected {RATE} samples a second, found {rate}")
    if frames == 0:
        raise ValueError(f"{path}: expected sound, found no sample")
    if len(raw) != frames * channels * width:
        raise ValueError(f"{path}: expected {frames} frames, found {len(raw) // (channels * width)}")
    if width == 1:
        raw = raw ^ 0x80  # eight bits alone are stored without a sign
    # Every width becomes the upper bytes of 32 bits.
    whole = np.zeros((frames * channels, 4), dtype=np.uint8)
    whole[:, 4 - width :] = raw.reshape(-1, width)
    samples = whole.view("<i4").reshape(frames, channels).mean(1) / 2**31
    return torch.from_numpy(samples.astype(np.float32))


def mel_filters(bands: int, bins: int, rate: int) -> Tensor:
    """Triangles that overlap by half, equally wide in mel. -> (bands, bins)"""
    top = 2595 * math.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, top, bands + 2) / 2595) - 1)
    frequencies = torch.linspace(0, rate / 2, bins)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    return torch.minimum(rising, falling).clamp(min=0)


class SoundEncoder(nn.Module):
    """Samples -> log-mel frames -> one vector. (B,samples) -> (B,C)"""

    def __init__(self, channels: int, bands: int = 48, window: int = 512) -> None:
        super().__init__()
        self.window = window
        self.register_buffer("filters", mel_filters(bands, window // 2 + 1, RATE))
        self.layers = nn.Sequential(
            nn.Conv1d(bands, channels, 3, padding=1), nn.GELU(), nn.Conv1d(channels, channels, 3, padding=1)
        )

    def forward(self, samples: Tensor) -> Tensor:
        frame = torch.hann_window(self.window, device=samples.device)
        spectrum = torch.stft(samples, self.window, self.window // 2, window=frame, return_complex=True)
        mel = (self.filters @ spectrum.abs().square() + 1e-6).log()
        mel = (mel - mel.mean((1, 2), keepdim=True)) / (mel.std((1, 2), keepdim=True) + 1e-5)
        return self.layers(mel).mean(2)


@dataclass(frozen=True)
class Heard:
    """Pictures, what they are called, the sound of one thing in each, and which patches show what.

    pixels (B,3,H,W), names (B,S) 1 where a shape is in the picture, sounds (B,samples); shown and heard
    (B,N): the share of a patch that any thing covers, and the sounding one.
    """

    pixels: Tensor
    names: Tensor
    sounds: Tensor
    shown: Tensor
    heard: Tensor


def make_data(folder: Path, scenes: Scenes, view: View, grid: tuple[int, int]) -> Heard:
    """Draw the scenes and write a WAV file beside each; read both back."""
    rows = []
    for index in range(len(scenes)):
        generator = np.random.default_rng([index, len(scenes)])
        truth = scenes.truth(index)
        shapes = [thing.shape for thing in truth.scene.things]
        sounding = shapes[int(generator.integers(len(shapes)))]
        path = folder / f"{scenes.split}-{index:05d}.wav"
        write_sound(path, sounding, generator)
        coverage = torch.from_numpy(truth.coverage(*grid)).float().flatten(1)
        alike = torch.tensor([shape == sounding for shape in shapes])
        names = torch.tensor([float(shape in shapes) for shape in SHAPES])
        picture = evaluate_image(scenes.open(index), view)
        rows.append((picture, names, read_sound(path), coverage.sum(0), coverage[alike].sum(0)))
    return Heard(*(torch.stack(column) for column in zip(*rows, strict=True)))


class Encoders(nn.Module):
    """Pictures, names and sounds in the same C channels."""

    def __init__(self, size: int, channels: int) -> None:
        super().__init__()
        light = {"kind": "light", "size": size, "width": 64, "layers": 1}
        self.pictures = build_image_encoder(light, channels)
        self.names = nn.Linear(len(SHAPES), channels, bias=False)
        self.sounds = SoundEncoder(channels)


def pointing(patches: Tensor, vectors: Tensor, shown: Tensor) -> Tensor:
    """Cross-entropy of a vector's softmax over the patches against what they show. -> ()"""
    cosines = torch.cosine_similarity(patches, vectors.unsqueeze(1), dim=2)
    target = shown / shown.sum(1, keepdim=True).clamp(min=1e-6)
    return -(target * (cosines / 0.1).log_softmax(1)).sum(1).mean()


def train(encoders: Encoders, data: Heard, steps: int, batch: int = 32) -> None:
    """A picture's mean and its names point to all things in it, a sound to the thing that sounds."""
    optimiser = torch.optim.AdamW(encoders.parameters(), lr=2e-3, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=2e-3, total_steps=steps)
    for _ in range(steps):
        rows = torch.randint(len(data.pixels), (batch,))
        patches = encoders.pictures(data.pixels[rows]).features
        loss = (
            pointing(patches, patches.mean(1), data.shown[rows])
            + pointing(patches, encoders.names(data.names[rows]), data.shown[rows])
            + pointing(patches, encoders.sounds(data.sounds[rows]), data.heard[rows])
        )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()


@torch.no_grad()
def kept_share(head: SlimHead, images: Tokens, text: Tensor, data: Heard, guides: dict[str, Tensor]) -> float:
    """How much of what the sounding things cover lies in kept patches."""
    words = Tokens(text.unsqueeze(1))
    branch = head.eval().inspect(images, words, words, guides=guides).branches["sparse"]
    kept = branch.kept.diagonal(dim1=0, dim2=1).T.float()  # of every picture under its own text
    return float(((kept * data.heard).sum(1) / data.heard.sum(1).clamp(min=1e-6)).mean())


def run(
    folder: Path, scenes: int = 600, tests: int = 150, steps: int = 500, seed: int = 0
) -> dict[str, float]:
    """The share of the sounding things that is kept: without the sound, with it, with another picture's."""
    torch.manual_seed(seed)
    size, channels = 128, 64
    encoders = Encoders(size, channels)
    view, grid = encoders.pictures.view, encoders.pictures.grid
    train(encoders, make_data(folder, Scenes(scenes, seed, "train", size), view, grid), steps)
    data = make_data(folder, Scenes(tests, seed, "test", size), view, grid)
    head = SlimHead(paper(keep_ratio=KEPT), encoders.pictures.patches, channels)
    with torch.no_grad():
        images = encoders.eval().pictures(data.pixels)
        text, sound = encoders.names(data.names), encoders.sounds(data.sounds)
    return {
        "chance": KEPT,
        "without the sound": kept_share(head, images, text, data, {}),
        "with the sound": kept_share(head, images, text, data, {"audio": sound}),
        "with another's sound": kept_share(head, images, text, data, {"audio": sound.roll(1, 0)}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a run for each (0 1 2)")
    parser.add_argument("--scenes", type=int, default=600, help="pictures to train on (600)")
    parser.add_argument("--tests", type=int, default=150, help="pictures to measure on (150)")
    parser.add_argument("--steps", type=int, default=500, help="training steps of 32 pictures (500)")
    parser.add_argument(
        "--folder", type=Path, help="where the WAV files stay; they are thrown away otherwise"
    )
    given = parser.parse_args()
    for seed in given.seeds:
        with tempfile.TemporaryDirectory() as passing:
            folder = Path(passing) if given.folder is None else given.folder / str(seed)
            folder.mkdir(parents=True, exist_ok=True)
            figures = run(folder, given.scenes, given.tests, given.steps, seed)
        print(f"seed {seed}: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()

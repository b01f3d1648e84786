"""Small pictures, a small model, and galleries of both."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from seps.gallery import Gallery
from seps.model import SepsConfig, SepsModel, SepsProcessor, create
from seps.recipe import Recipe

WORDS = [
    *("a", "the", "two", "red", "green", "blue", "yellow", "small", "large", "bright", "dark"),
    *("dog", "cat", "boat", "tree", "house", "sea", "sky", "on", "under", "near"),
]


def sentence(seed: int, length: int = 7) -> str:
    generator = np.random.default_rng(seed)
    return " ".join(generator.choice(WORDS, length))


def make_model(
    recipe: Recipe | str = "described", seed: int = 0, **changes: object
) -> tuple[SepsModel, SepsProcessor]:
    import torch

    torch.manual_seed(seed)
    config = SepsConfig(
        recipe=recipe,
        channels=32,
        image_encoder={"kind": "light", "size": 64, "width": 32, "layers": 1, "heads": 2},
        text_encoder={"kind": "light", "width": 32, "layers": 1, "heads": 2},
        **changes,
    )
    model, processor = create(config, [" ".join(WORDS)])
    return model.eval(), processor


def make_picture(seed: int, size: tuple[int, int] = (48, 40)) -> Image.Image:
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BILINEAR)


def picture_bytes(seed: int, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    make_picture(seed).save(file, form)
    return file.getvalue()


def make_folder(folder: Path, count: int, described: bool = True) -> list[Path]:
    """count pictures, two of three with a description beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(count):
        path = folder / f"{number:04d}.png"
        make_picture(number).save(path)
        if described and number % 3:
            path.with_suffix(".txt").write_text(sentence(number), encoding="utf-8")
        paths.append(path)
    return paths


def make_gallery(place: Path, count: int, recipe: str = "described") -> Gallery:
    model, processor = make_model(recipe)
    gallery = Gallery.create(place / "gallery", model, processor)
    gallery.add(make_folder(place / "photos", count))
    return gallery

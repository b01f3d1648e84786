"""From opened pictures to rows of the table: encode, pack, and the model's identity."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from seps.gallery.descriptions import Said
from seps.gallery.packing import Precision, pack
from seps.gallery.pictures import Picture, absolute
from seps.gallery.sketching import sketch
from seps.gallery.store import row_schema
from seps.model import SepsModel, SepsProcessor
from seps.slimming import unit
from seps.tokens import Tokens


def identify(model: SepsModel, processor: SepsProcessor) -> str:
    """The identity of what makes the rows: weights, encoders, view, and how much of a description is read.

    What only training or scoring reads stays out of it, and so does what is zero, off or empty: an entry
    that a later version adds in that state changes nothing.
    """
    view = processor.view
    seen = [view.height, view.width, view.mean, view.std, view.fit, view.crop_share]
    encoders = [essence(model.image_encoder.spec), essence(model.text_encoder.spec)]
    made = [seen, encoders, model.config.channels, model.recipe.description_length]
    digest = hashlib.blake2b(json.dumps(made, sort_keys=True, default=str).encode(), digest_size=16)
    for name, weights in sorted(model.state_dict().items()):
        digest.update(f"{name} {weights.dtype} {tuple(weights.shape)}".encode())
        digest.update(weights.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def essence(value: Any) -> Any:
    """A specification without what only training reads and without what is zero, off or empty."""
    if not isinstance(value, Mapping):
        return value
    inner = {key: essence(each) for key, each in value.items() if "dropout" not in key and key != "tuning"}
    return {key: each for key, each in inner.items() if each}


def device_of(model: SepsModel) -> torch.device:
    """Where a model's weights are."""
    return next(model.parameters()).device


def uses_descriptions(model: SepsModel) -> bool:
    """Whether the description of a picture has a say in its score."""
    return model.recipe.dense != "none" and model.recipe.dense_side == "image"


@torch.inference_mode()
def encode_texts(
    model: SepsModel, processor: SepsProcessor, texts: Sequence[str | None], limit: int | None = None
) -> Tokens:
    """Words of texts; an absent text has none. -> (T,M,C)"""
    read = processor.texts(list(texts)) if limit is None else processor.texts(list(texts), limit)
    device = device_of(model)
    return model.encode_texts(read["ids"].to(device), read["mask"].to(device))


@torch.inference_mode()
def encode_pixels(model: SepsModel, pixels: Tensor) -> Tokens:
    """Patches of pictures. pixels (B,3,H,W) -> (B,N,C)"""
    return model.encode_images(pixels.to(device_of(model)))


@dataclass(frozen=True)
class Ready:
    """A picture decoded down to what the encoder and the table need. pixels (3,H,W)"""

    picture: Picture
    digest: str
    pixels: Tensor
    thumbnail: bytes
    size: int
    width: int
    height: int
    taken: datetime
    modified: datetime
    said: Said


@torch.inference_mode()
def make_rows(
    model: SepsModel,
    processor: SepsProcessor,
    ready: Sequence[Ready],
    typical: Tokens,
    precision: Precision,
) -> pa.Table:
    """The rows of some pictures; typical as `typical_texts` gives it."""
    images = encode_pixels(model, torch.stack([each.pixels for each in ready]))
    images.require_finite("picture")
    texts = [each.said.description for each in ready]
    dense = None
    if any(texts):
        spoken = [text or None for text in texts]
        dense = encode_texts(model, processor, spoken, model.recipe.description_length)
    schema = row_schema(images.channels)
    now = datetime.now().replace(microsecond=0)
    columns = {
        "id": [each.picture.id for each in ready],
        "path": [place_of(each.picture) for each in ready],
        "folder": [folder_of(each.picture) for each in ready],
        "name": [name_of(each.picture) for each in ready],
        "hash": [each.digest for each in ready],
        "size": [each.size for each in ready],
        "width": [each.width for each in ready],
        "height": [each.height for each in ready],
        "taken": [each.taken for each in ready],
        "modified": [each.modified for each in ready],
        "indexed": [now] * len(ready),
        "tags": [list(each.said.tags) for each in ready],
        "description": texts,
        "thumbnail": [each.thumbnail for each in ready],
        "original": [
            each.picture.source if isinstance(each.picture.source, bytes) else None for each in ready
        ],
        **kept_tokens(model, images, dense, typical, precision),
    }
    return pa.table(
        [pa.array(columns[field.name], field.type) for field in schema],
        schema=schema,
    )


@torch.inference_mode()
def kept_tokens(
    model: SepsModel, images: Tokens, dense: Tokens | None, typical: Tokens, precision: Precision
) -> dict[str, list[Any]]:
    """What the table keeps of the tokens of some pictures. images (B,N,C), dense (B,D,C)"""
    words: list[bytes | None] = [None] * len(images)
    means: list[np.ndarray | None] = [None] * len(images)
    pooled: list[np.ndarray | None] = [None] * len(images)
    if dense is not None:
        words = pack(dense, precision)
        all_means, all_pooled = halves(mean_word(dense)), halves(model.global_texts(dense))
        for place in dense.present.nonzero().flatten().tolist():
            means[place], pooled[place] = all_means[place], all_pooled[place]
    return {
        "patches": pack(images, precision),
        "words": words,
        "described": [each is not None for each in words],
        "sketch": sketch(model, images, dense if uses_descriptions(model) else None, typical, precision),
        "pixel_vector": list(halves(model.global_images(images))),
        "description_vector": means,
        "text_vector": pooled,
    }


def mean_word(texts: Tokens) -> Tensor:
    """Where texts compare with texts: the unit mean of their unit words. (T,M,C) -> (T,C)"""
    return unit(Tokens(unit(texts.features), texts.mask).mean())


def halves(vectors: Tensor) -> np.ndarray:
    """Vectors in half precision, as the table keeps them."""
    return vectors.float().cpu().numpy().astype(np.float16)


def place_of(picture: Picture) -> str | None:
    """Where a picture's file stands, None where there is only bytes."""
    return absolute(picture.source).as_posix() if isinstance(picture.source, Path) else None


def folder_of(picture: Picture) -> str | None:
    """The folder a picture's file stands in."""
    return absolute(picture.source).parent.as_posix() if isinstance(picture.source, Path) else None


def name_of(picture: Picture) -> str:
    """What a picture is called."""
    return picture.source.name if isinstance(picture.source, Path) else picture.name

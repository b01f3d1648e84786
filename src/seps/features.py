"""Features of frozen backbones, computed once: an append-only store on disk, and what fills and reads it.

A store is one folder: `data.f16`, the rows of all items one after the other, and `index.jsonl`, a line an
item, written after its rows are on disk. A line that is there is true; what a kill left behind it is cut off.
Processes that fill one store take turns, and an item that another has written meanwhile is not written again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ImageOps
from torch import Tensor, nn

from seps.cca import RIDGE, correlate, principal, start_projection
from seps.data.images import evaluate_image, names_side
from seps.data.loader import Part, readable
from seps.data.records import Problems, Record, Source
from seps.encoders import ImageEncoder, TextEncoder
from seps.model import SepsModel, SepsProcessor
from seps.progress import progress_bar
from seps.tokens import Tokens

logger = logging.getLogger(__name__)

DATA, INDEX, ABOUT, LOCK = "data.f16", "index.jsonl", "about.json", ".lock"
Pooled = tuple[Tensor, Tensor, Tensor]
"""Mean patches (B,P), mean words (T,Q), and the row of each text's image (T,)."""
LARGEST = 65504.0
"""The largest number of half precision."""


class FeatureStore:
    """Rows of half-precision features by key: every item is a block of rows, all of the same channels."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        described = folder / ABOUT
        if not described.exists():
            beside = described.with_name(f".{ABOUT}.part")
            beside.write_text(json.dumps(dict(about)), encoding="utf-8")
            beside.replace(described)
        found = json.loads(described.read_text(encoding="utf-8"))
        if found != dict(about):
            raise ValueError(
                f"{folder}: holds features of {found}, not of {dict(about)}; choose another folder"
            )
        self.channels: int = found["channels"]
        self.blocks: dict[str, tuple[int, int]] = {}
        self.end = 0
        self._read = 0
        self._rows: np.memmap | None = None
        with self._alone():
            self._read_index()

    def __len__(self) -> int:
        return len(self.blocks)

    def __contains__(self, key: str) -> bool:
        return key in self.blocks

    def __getitem__(self, key: str) -> Tensor:
        """The rows of an item. -> (length,C) in single precision"""
        start, length = self.blocks[key]
        if self._rows is None or len(self._rows) < start + length:
            shape = (self.end, self.channels)
            self._rows = np.memmap(self.folder / DATA, dtype=np.float16, mode="r", shape=shape)
        return torch.from_numpy(np.array(self._rows[start : start + length])).float()

    def extend(self, keys: Sequence[str], rows: Sequence[Tensor]) -> None:
        """Append items, each (length,C), but those that are there; on disk when this returns."""
        for key, block in zip(keys, rows, strict=True):
            if not bool((block.abs() <= LARGEST).all()):
                raise ValueError(f"{key}: expected features that half precision holds, found larger or none")
        with self._alone():
            self._read_index()
            fresh = {key: block for key, block in zip(keys, rows, strict=True) if key not in self.blocks}
            lines, start = [], self.end
            with (self.folder / DATA).open("ab") as data:
                for key, block in fresh.items():
                    data.write(block.detach().cpu().to(torch.float16).numpy().tobytes())
                    lines.append(json.dumps([key, start, len(block)]) + "\n")
                    start += len(block)
                data.flush()
                os.fsync(data.fileno())
            with (self.folder / INDEX).open("a", encoding="utf-8") as index:
                index.writelines(lines)
                index.flush()
                os.fsync(index.fileno())
            self._read_index()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One process at a time; a killed one's lock falls with it."""
        import fcntl

        with (self.folder / LOCK).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _read_index(self) -> None:
        """Take in the whole lines that are new, and cut off what was being written when a run was killed."""
        index, data = self.folder / INDEX, self.folder / DATA
        data.touch()
        index.touch()
        with index.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                key, start, length = json.loads(line)
                self.blocks[key] = (start, length)
                self.end = max(self.end, start + length)
                self._read += len(line)
        os.truncate(index, self._read)
        size = self.end * self.channels * 2
        if data.stat().st_size < size:
            raise ValueError(f"{data}: expected {size} bytes, found {data.stat().st_size}; remove the folder")
        os.truncate(data, size)


def digest(*parts: bytes | str) -> str:
    """A short fingerprint."""
    total = hashlib.blake2b(digest_size=16)
    for part in parts:
        total.update(part.encode() if isinstance(part, str) else part)
        total.update(b"\0")
    return total.hexdigest()


def identity(backbone: nn.Module, *settings: Any) -> str:
    """What a backbone's features depend on: every weight and buffer, and the settings given."""
    total = hashlib.blake2b(digest_size=12)
    for name, tensor in sorted(backbone.state_dict().items()):
        total.update(name.encode())
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    total.update(repr(settings).encode())
    return total.hexdigest()


def image_key(record: Record, mirrored: bool = False) -> str:
    """The fingerprint of a picture: of its file's content, or of where a drawn one comes from."""
    content: bytes | str = f"{record.source}:{record.image}"
    if record.image.is_file():
        content = record.image.read_bytes()
    return digest(content, "mirrored" if mirrored else "")


@dataclass
class Features:
    """Kept features of a model's frozen backbones: either store is None where its backbone learns."""

    images: FeatureStore | None
    texts: FeatureStore | None
    model: SepsModel
    processor: SepsProcessor

    def __post_init__(self) -> None:
        self._keys: dict[tuple[str, str, bool], str] = {}

    @classmethod
    def open(cls, folder: str | Path, model: SepsModel, processor: SepsProcessor) -> Features:
        """The stores of a model in a folder; a model's features never meet another's."""
        place = Path(folder)
        images, texts = model.image_encoder, model.text_encoder
        opened: list[FeatureStore | None] = []
        for name, encoder, settings in (
            ("images", images, (processor.view.height, processor.view.width, processor.view.fit,
                                processor.view.crop_share, processor.view.mean, processor.view.std)),
            ("texts", texts, (texts.keep_special, type(processor.tokenizer).__name__,
                              len(processor.tokenizer))),
        ):  # fmt: skip
            if not frozen(encoder):
                opened.append(None)
                continue
            mark = identity(encoder.body, *settings)
            about = {"kind": encoder.kind, "identity": mark, "channels": encoder.body.channels}
            opened.append(FeatureStore(place / f"{name}-{encoder.kind}-{mark}", about))
        if not any(store is not None for store in opened):
            raise ValueError(
                "cache: expected a frozen backbone, whose features do not change; found both learning "
                "(set model.image_encoder.tuning or model.text_encoder.tuning to frozen)"
            )
        return cls(opened[0], opened[1], model, processor)

    def key(self, record: Record, mirrored: bool = False) -> str:
        """`image_key`, computed once a picture."""
        known = (record.source, str(record.image), mirrored)
        if known not in self._keys:
            self._keys[known] = image_key(record, mirrored)
        return self._keys[known]

    def readable(self, source: Source, problems: Problems) -> Part:
        """The records of a source whose pictures are kept or can be read, where broken ones are skipped."""
        store = self.images
        if store is None:
            return Part(source, tuple(range(len(source))))
        return readable(source, problems, lambda record: self.key(record) in store)

    def image_tokens(self, records: Sequence[Record], mirrored: Sequence[bool] | None = None) -> Tokens:
        """Raw features of pictures, for the neck. -> (B,N,Cin)"""
        store = self.images
        if store is None:
            raise ValueError("images: expected kept features, found a backbone that learns")
        sides = [False] * len(records) if mirrored is None else mirrored
        rows = torch.stack([store[self.key(r, side)] for r, side in zip(records, sides, strict=True)])
        if self.model.image_encoder.body.has_cls:
            return Tokens(rows[:, 1:], None, rows[:, 0])
        return Tokens(rows)

    def text_tokens(self, texts: Sequence[str | None], limit: int) -> Tokens:
        """Raw word features of texts, for the neck; None is an absent text. -> (T,M,Cin)"""
        store = self.texts
        if store is None:
            raise ValueError("texts: expected kept features, found a backbone that learns")
        empty = torch.zeros(0, store.channels)
        rows = [empty if text is None else store[text_key(text, limit)] for text in texts]
        if any(len(row) for row in rows):
            return Tokens.ragged(rows)
        # The layers above look for a word behind the ends, be it padding.
        longest = self.model.text_encoder.context + 1
        mask = torch.zeros(len(rows), longest, dtype=torch.bool)
        return Tokens(torch.zeros(len(rows), longest, store.channels), mask)

    @torch.no_grad()
    def pooled(self, source: Source, limit: int) -> Pooled:
        """Mean patches, mean words, and the row of each text's image, of a source. -> (B,P), (T,Q), (T,)"""
        self.model.eval()
        records = [source[index] for index in range(len(source))]
        captions = [caption for record in records for caption in record.captions]
        images = [
            self.model.image_encoder.lift(self.image_tokens(part)).mean() for part in batches(records, 8)
        ]
        order = sorted(range(len(captions)), key=lambda place: len(captions[place]))
        texts = [
            self.model.text_encoder.lift(self.text_tokens([captions[place] for place in part], limit)).mean()
            for part in batches(order, 256)
        ]
        owners = [row for row, record in enumerate(records) for _ in record.captions]
        return torch.cat(images), torch.cat(texts)[torch.tensor(order).argsort()], torch.tensor(owners)

    def fill_images(self, source: Source, mirrored: bool = False, batch_size: int = 64) -> int:
        """Compute what is missing of a source's pictures; mirrored ones too if wanted. -> how many were"""
        if self.images is None:
            return 0
        wanted = self._missing_images(source, mirrored)
        places = [(index, side) for _, index, side in wanted]
        raws = encode_pictures(self.model, self.processor, source, places, batch_size)
        for part, raw in zip(batches(wanted, batch_size), raws, strict=True):
            rows = raw.features if raw.cls is None else torch.cat([raw.cls.unsqueeze(1), raw.features], 1)
            self.images.extend([key for key, _, _ in part], list(rows))
        return len(wanted)

    def _missing_images(self, source: Source, mirrored: bool) -> list[tuple[str, int, bool]]:
        if self.images is None:
            return []
        wanted: dict[str, tuple[int, bool]] = {}
        for index in range(len(source)):
            record = source[index]
            for side in (False, True) if mirrored and may_mirror(record) else (False,):
                key = self.key(record, side)
                if key not in self.images:
                    wanted.setdefault(key, (index, side))
        return [(key, index, side) for key, (index, side) in wanted.items()]

    def fill_texts(self, texts: Iterable[str], limit: int, batch_size: int = 128) -> int:
        """Compute what is missing of some texts. -> how many were"""
        if self.texts is None:
            return 0
        wanted: dict[str, str] = {}
        for text in texts:
            key = text_key(text, limit)
            if key not in self.texts:
                wanted.setdefault(key, text)
        order = sorted(wanted.items(), key=lambda pair: len(pair[1]))
        raws = encode_sentences(self.model, self.processor, [text for _, text in order], limit, batch_size)
        for part, raw in zip(batches(order, batch_size), raws, strict=True):
            mask = torch.ones(raw.features.shape[:2], dtype=torch.bool) if raw.mask is None else raw.mask
            rows = [features[real] for features, real in zip(raw.features, mask, strict=True)]
            self.texts.extend([key for key, _ in part], rows)
        return len(order)

    def fill(self, source: Source, description_length: int | None, mirrored: bool, words: int) -> None:
        """Everything that training or evaluation on a source will ask for; None leaves dense text out."""
        self.fill_images(source, mirrored)
        records = [source[index] for index in range(len(source))]
        self.fill_texts((caption for record in records for caption in record.captions), words)
        if description_length is not None:
            described = (record.dense for record in records if record.dense is not None)
            self.fill_texts(described, description_length)


@torch.no_grad()
def encode_pictures(
    model: SepsModel,
    processor: SepsProcessor,
    source: Source,
    wanted: Sequence[tuple[int, bool]],
    batch_size: int = 64,
) -> Iterator[Tokens]:
    """Raw features of a source's pictures, given by index and whether mirrored, a batch at a time."""
    encoder, view = model.image_encoder.eval(), processor.view
    device = next(encoder.parameters()).device
    with progress_bar("image features", len(wanted)) as advance:
        for part in batches(wanted, batch_size):
            pictures = [(source.open(index), mirrored) for index, mirrored in part]
            pixels = [
                evaluate_image(ImageOps.mirror(image) if mirrored else image, view)
                for image, mirrored in pictures
            ]
            yield encoder.backbone(torch.stack(pixels).to(device))
            advance(len(part))


@torch.no_grad()
def encode_sentences(
    model: SepsModel, processor: SepsProcessor, texts: Sequence[str], limit: int, batch_size: int = 128
) -> Iterator[Tokens]:
    """Raw word features of texts, a batch at a time; texts of one length side by side make less work."""
    encoder = model.text_encoder.eval()
    device = next(encoder.parameters()).device
    with progress_bar("text features", len(texts)) as advance:
        for part in batches(texts, batch_size):
            read = processor.texts(list(part), limit)
            yield encoder.backbone(read["ids"].to(device), read["mask"].to(device))
            advance(len(part))


def pool(model: SepsModel, processor: SepsProcessor, source: Source, limit: int) -> Pooled:
    """`Features.pooled` of backbones whose features are not kept, because they are about to learn."""
    records = [source[index] for index in range(len(source))]
    captions = [caption for record in records for caption in record.captions]
    owners = torch.tensor([row for row, record in enumerate(records) for _ in record.captions])
    order = sorted(range(len(captions)), key=lambda place: len(captions[place]))
    wanted = [(index, False) for index in range(len(records))]
    images = [
        model.image_encoder.lift(raw).mean().cpu()
        for raw in encode_pictures(model, processor, source, wanted)
    ]
    ordered = [captions[place] for place in order]
    texts = torch.cat(
        [
            model.text_encoder.lift(raw).mean().cpu()
            for raw in encode_sentences(model, processor, ordered, limit)
        ]
    )
    return torch.cat(images), texts, owners[torch.tensor(order)]


def start_projections(model: SepsModel, pooled: Pooled, ridge: float = RIDGE) -> None:
    """Start both necks' projections at the linear maps under which pooled pictures and captions correlate."""
    pictures, captions, owners = pooled
    images, texts = model.image_encoder.neck.projection, model.text_encoder.neck.projection
    matched = model.recipe.dense == "matched"
    count = min(images.out_features, images.in_features, texts.in_features) // (2 if matched else 1)
    found = correlate(pictures, captions, owners, count, ridge)
    start_projection(images, found.images)
    if not matched:
        start_projection(texts, found.texts)
        return
    # Where words also meet a description's words, half of the channels keep what words are to each other.
    rest = min(texts.out_features - count, texts.in_features)
    start_projection(texts, found.texts, principal(captions, rest, float(found.strengths.square().sum())))


def frozen(encoder: ImageEncoder | TextEncoder) -> bool:
    """Whether an encoder's backbone stays as it is."""
    return encoder.tuning == "frozen"


def may_mirror(record: Record) -> bool:
    """Whether a picture may be mirrored: not where a text of it speaks of left or right."""
    texts = record.captions if record.dense is None else (*record.captions, record.dense)
    return not any(names_side(text) for text in texts)


def text_key(text: str, limit: int) -> str:
    """The fingerprint of a text read up to so many words."""
    return digest(text, str(limit))


def batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Consecutive parts of at most size items."""
    return (items[start : start + size] for start in range(0, len(items), size))

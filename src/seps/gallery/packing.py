"""Token sets as bytes: eight bits a number with one scale a token, or half precision."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
import torch

from seps.tokens import Tokens

Precision = Literal["int8", "fp16"]

# precision, whether the last row is the CLS token, rows, channels; little-endian
_HEADER = struct.Struct("<BBHH")
_CODES: dict[Precision, int] = {"int8": 8, "fp16": 16}
_NAMES = {code: name for name, code in _CODES.items()}


def pack(tokens: Tokens, precision: Precision = "int8") -> list[bytes | None]:
    """The real tokens of each item as bytes, None where an item has none. tokens (B,N,C)"""
    if precision not in _CODES:
        raise ValueError(f"precision: expected int8 or fp16, found {precision!r}")
    features = tokens.features.detach().float().cpu()
    mask = None if tokens.mask is None else tokens.mask.cpu()
    cls = None if tokens.cls is None else tokens.cls.detach().float().cpu()
    packed: list[bytes | None] = []
    for index in range(len(tokens)):
        rows = features[index] if mask is None else features[index][mask[index]]
        if not len(rows):
            packed.append(None)
            continue
        if cls is not None:
            rows = torch.cat([rows, cls[index : index + 1]])
        packed.append(_pack_rows(rows.numpy(), cls is not None, precision))
    return packed


def _pack_rows(rows: np.ndarray, has_cls: bool, precision: Precision) -> bytes:
    header = _HEADER.pack(_CODES[precision], has_cls, *rows.shape)
    if precision == "fp16":
        return header + rows.astype("<f2").tobytes()
    largest = np.abs(rows).max(axis=1, keepdims=True)
    scales = np.where(largest > 0, largest / 127, 1).astype("<f4")
    return header + scales.tobytes() + np.rint(rows / scales).astype(np.int8).tobytes()


def unpack(packed: Sequence[bytes | None], channels: int) -> Tokens:
    """The token sets behind the bytes; an item without bytes has no real token. -> (B,N,C)"""
    if not packed:
        raise ValueError("packed: expected at least one token set, found none")
    groups: dict[bytes, list[int]] = {}
    for place, item in enumerate(packed):
        if item is not None:
            groups.setdefault(item[: _HEADER.size], []).append(place)
    decoded = {
        header: _unpack_alike([item for place in places if (item := packed[place]) is not None])
        for header, places in groups.items()
    }
    if len(decoded) == 1 and None not in packed:
        return next(iter(decoded.values()))
    longest = max((each.features.shape[1] for each in decoded.values()), default=1)
    features = torch.zeros(len(packed), longest, channels)
    lengths = torch.zeros(len(packed), dtype=torch.long)
    with_cls = any(each.cls is not None for each in decoded.values())
    cls = torch.zeros(len(packed), channels) if with_cls else None
    for header, places in groups.items():
        alike = decoded[header]
        features[places, : alike.features.shape[1]] = alike.features
        lengths[places] = alike.features.shape[1]
        if cls is not None and alike.cls is not None:
            cls[places] = alike.cls
    return Tokens(features, torch.arange(longest) < lengths.unsqueeze(1), cls)


def unpack_column(column: pa.Array, channels: int) -> Tokens:
    """The token sets of a column, read where they lie if they are all of one shape. -> (B,N,C)"""
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    sizes = np.diff(offsets)
    if column.null_count or not len(sizes) or (sizes != sizes[0]).any():
        return unpack(column.to_pylist(), channels)
    table = np.frombuffer(column.buffers()[2], np.uint8)[offsets[0] : offsets[-1]].reshape(len(sizes), -1)
    if (table[:, : _HEADER.size] != table[0, : _HEADER.size]).any():
        return unpack(column.to_pylist(), channels)
    return _decode(table)


def directions(packed: Sequence[bytes | None], channels: int) -> tuple[torch.Tensor, list[int]]:
    """Every token up to its scale, one after another, and how many each set has; for cosines. -> (S,C)"""
    rows: list[np.ndarray] = []
    lengths = []
    for item in packed:
        code, _, count, width = (0, 0, 0, channels) if item is None else _HEADER.unpack_from(item)
        lengths.append(count)
        if item is not None:
            exact = _NAMES[code] == "fp16"
            start = _HEADER.size + (0 if exact else 4 * count)
            values = np.frombuffer(item, "<f2" if exact else np.int8, count * width, start)
            rows.append(values.reshape(count, width))
    flat = np.concatenate(rows) if rows else np.zeros((0, channels), np.int8)
    return torch.from_numpy(flat).float(), lengths


def _unpack_alike(packed: Sequence[bytes]) -> Tokens:
    """Token sets of one shape and precision, decoded at once."""
    sizes = {len(item) for item in packed}
    if len(sizes) > 1:
        raise ValueError(f"packed tokens: expected items of one length, found {sorted(sizes)}")
    return _decode(np.frombuffer(b"".join(packed), np.uint8).reshape(len(packed), -1))


def _decode(table: np.ndarray) -> Tokens:
    """Token sets of one shape and precision, one a row of bytes."""
    code, has_cls, rows, channels = _HEADER.unpack_from(table[0])
    body = rows * (channels + 4) if code == _CODES["int8"] else rows * channels * 2
    if code not in _NAMES or table.shape[1] != _HEADER.size + body:
        raise ValueError(
            f"packed tokens: expected {_HEADER.size + body} bytes of {rows} tokens with {channels} channels, "
            f"found {table.shape[1]}"
        )
    table = table[:, _HEADER.size :]
    if _NAMES[code] == "fp16":
        halves = np.ascontiguousarray(table).view("<f2").reshape(-1, rows, channels)
        values = torch.from_numpy(halves.astype(np.float32))
    else:
        split = rows * 4
        scales = np.ascontiguousarray(table[:, :split]).view("<f4").reshape(-1, rows, 1)
        numbers = table[:, split:].view(np.int8).reshape(-1, rows, channels)
        values = torch.from_numpy(numbers * scales)
    if has_cls:
        return Tokens(values[:, :-1], None, values[:, -1])
    return Tokens(values)

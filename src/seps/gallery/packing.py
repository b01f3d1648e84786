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

# So many tokens at a time fit the processor's cache as fp32.
_TOKENS_AT_ONCE = 2048

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


def cosines(column: pa.Array, units: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Cosines of all tokens of a column with unit vectors, and how many tokens each item has.

    Eight bits are multiplied as bf16, which holds them exactly. units (S,C) -> (L,S)
    """
    numbers, lengths = _every_token(column, units.shape[1])
    kind = torch.bfloat16 if numbers.dtype == np.int8 else torch.float32
    # Products of one shape whatever is asked: the processor's kernels are made and kept for each shape.
    vectors = units.new_zeros(units.shape[1], -(-len(units) // 16) * 16, dtype=kind)
    vectors[:, : len(units)] = units.T
    tokens = units.new_zeros(_TOKENS_AT_ONCE, units.shape[1], dtype=kind)
    found = units.new_empty(len(numbers), len(units), dtype=torch.float32)
    for start in range(0, len(numbers), _TOKENS_AT_ONCE):
        block = torch.from_numpy(numbers[start : start + _TOKENS_AT_ONCE])
        tokens[: len(block)] = block
        length = torch.linalg.vector_norm(tokens, dim=1, keepdim=True, dtype=torch.float32)
        products = (tokens @ vectors)[: len(block), : len(units)]
        found[start : start + len(block)] = products / length[: len(block)].clamp(min=1e-12)
    return found, lengths


def _every_token(column: pa.Array, channels: int) -> tuple[np.ndarray, list[int]]:
    """All tokens of a column up to their scales, one after another, and how many each item has. -> (L,C)"""
    table = _table(column)
    if table is not None:
        numbers, _ = _numbers(table)
        return np.array(numbers).reshape(-1, channels), [numbers.shape[1]] * len(numbers)
    items = [
        _numbers(np.frombuffer(item, np.uint8)[None])[0][0] if item else np.zeros((0, channels), np.int8)
        for item in column.to_pylist()
    ]
    kinds = {each.dtype for each in items if len(each)}
    kind = kinds.pop() if len(kinds) == 1 else np.float32
    joined = [each.astype(kind, copy=False) for each in items]
    return np.concatenate([np.zeros((0, channels), kind), *joined]), [len(each) for each in items]


def _table(column: pa.Array) -> np.ndarray | None:
    """The items of a column as rows of bytes where they lie, None where they differ in shape."""
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    sizes = np.diff(offsets)
    if column.null_count or not len(sizes) or (sizes != sizes[0]).any():
        return None
    table = np.frombuffer(column.buffers()[2], np.uint8)[offsets[0] : offsets[-1]].reshape(len(sizes), -1)
    return table if (table[:, : _HEADER.size] == table[0, : _HEADER.size]).all() else None


def _unpack_alike(packed: Sequence[bytes]) -> Tokens:
    """Token sets of one shape and precision, decoded at once."""
    sizes = {len(item) for item in packed}
    if len(sizes) > 1:
        raise ValueError(f"packed tokens: expected items of one length, found {sorted(sizes)}")
    return _decode(np.frombuffer(b"".join(packed), np.uint8).reshape(len(packed), -1))


def _decode(table: np.ndarray) -> Tokens:
    """Token sets of one shape and precision, one a row of bytes."""
    numbers, scales = _numbers(table)
    values = torch.from_numpy(numbers.astype(np.float32))
    if scales is not None:
        values *= torch.from_numpy(scales)
    if _HEADER.unpack_from(table[0])[1]:
        return Tokens(values[:, :-1], None, values[:, -1])
    return Tokens(values)


def _numbers(table: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """What the bytes of items of one shape hold: numbers (B,N,C), and scales (B,N,1) of eight bits."""
    code, _, rows, channels = _HEADER.unpack_from(table[0])
    body = rows * (channels + 4) if code == _CODES["int8"] else rows * channels * 2
    if code not in _NAMES or table.shape[1] != _HEADER.size + body:
        raise ValueError(
            f"packed tokens: expected {_HEADER.size + body} bytes of {rows} tokens with {channels} channels, "
            f"found {table.shape[1]}"
        )
    table = table[:, _HEADER.size :]
    if _NAMES[code] == "fp16":
        return table.copy().view("<f2").reshape(-1, rows, channels), None
    scales = table[:, : rows * 4].copy().view("<f4").reshape(-1, rows, 1)
    return table[:, rows * 4 :].view(np.int8).reshape(-1, rows, channels), scales

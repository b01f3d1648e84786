"""A prepared image in few bytes, to be stored beside others and ranked again later."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seps.pairwise.prepared import BranchSide, Prepared, TokenSet, transform

Form = Literal["fp32", "fp16", "int8"]
Arrays = dict[str, NDArray[np.generic]]


def pack(prepared: Prepared, form: Form = "fp16") -> list[bytes]:
    """Each image by itself: its features in the form, what selects patches in fp32.

    "fp32" gives the same scores; "fp16" rounds features and logits; "int8" keeps each vector's features
    as whole numbers of its largest one's 127th part.
    """
    if form not in get_args(Form):
        raise ValueError(f"form: expected one of {', '.join(get_args(Form))}, found {form!r}")
    constant = transform(prepared, lambda tensor: tensor.detach().cpu())
    return [_pack_one(constant[slice(row, row + 1)], form) for row in range(len(constant))]


def unpack(packed: Sequence[bytes]) -> Prepared:
    """The images of `pack`, side by side; patches and descriptions of different lengths are padded."""
    if not packed:
        raise ValueError("packed: expected at least one image, found none")
    return Prepared.join(align([_unpack_one(each) for each in packed]))


def align(parts: Sequence[Prepared]) -> list[Prepared]:
    """The same images with masks, descriptions and lengths in one shape, so that they can be joined."""
    longest = max(part.values.shape[1] for part in parts)
    masked = any(part.mask is not None or part.values.shape[1] < longest for part in parts)
    dense = any(part.described is not None for part in parts)
    sets = [part.evidence for part in parts if part.evidence is not None]
    size = max((each.features.shape[1] for each in sets), default=0)
    aligned = []
    for part in parts:
        described = part.described
        if dense and described is None:
            # Where the others' descriptions are told apart, one without any mark of it has its own.
            given = part.evidence is not None or part.settled is not None
            described = torch.full((len(part),), given)
        evidence = part.evidence
        if size:
            empty = part.values.new_zeros(len(part), 1, part.values.shape[2])
            plain = evidence or TokenSet(empty, torch.zeros(empty.shape[:2], dtype=torch.bool))
            evidence = TokenSet(_widen(plain.features, 1, size), _widen(_real(plain), 1, size), plain.kept)
        branches = {
            name: BranchSide(_widen(side.saliency, 1, longest), _widen(side.logits, 2, longest))
            for name, side in part.branches.items()
        }
        mask = part.mask
        if masked:
            mask = part.values.new_ones(part.values.shape[:2], dtype=torch.bool) if mask is None else mask
            mask = _widen(mask, 1, longest)
        values = _widen(part.values, 1, longest)
        aligned.append(
            replace(part, values=values, mask=mask, branches=branches, described=described, evidence=evidence)
        )
    return aligned


def _real(tokens: TokenSet) -> Tensor:
    """Which tokens of a set are real. -> (B,J) boolean"""
    if tokens.mask is not None:
        return tokens.mask
    return torch.ones(tokens.features.shape[:2], dtype=torch.bool)


def _widen(tensor: Tensor, axis: int, size: int) -> Tensor:
    """The tensor with zeros appended along an axis."""
    shape = list(tensor.shape)
    shape[axis] = size - shape[axis]
    return tensor if shape[axis] == 0 else torch.cat([tensor, tensor.new_zeros(shape)], dim=axis)


def _pack_one(part: Prepared, form: Form) -> bytes:
    """One image as an uncompressed archive of arrays."""
    real = slice(None) if part.mask is None else part.mask[0]
    arrays: Arrays = {}
    _write(arrays, "values", part.values[0][real], form)
    if part.cls is not None:
        _write(arrays, "cls", part.cls, form)
    for name, side in part.branches.items():
        arrays[f"saliency.{name}"] = side.saliency[0][real].numpy()
        _write(arrays, f"logits.{name}", side.logits[0][:, real], "fp32" if form == "fp32" else "fp16")
    if part.described is not None:
        arrays["described"] = part.described.numpy()
    for name, tokens in (("settled", part.settled), ("evidence", part.evidence)):
        if tokens is not None:
            _write(arrays, name, tokens.features[0][_real(tokens)[0]], form)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def _unpack_one(packed: bytes) -> Prepared:
    """One image from its archive."""
    with np.load(io.BytesIO(packed), allow_pickle=False) as archive:
        arrays = dict(archive)
    names = [key.removeprefix("saliency.") for key in arrays if key.startswith("saliency.")]
    branches = {
        name: BranchSide(
            torch.from_numpy(arrays[f"saliency.{name}"])[None], _read(arrays, f"logits.{name}")[None]
        )
        for name in names
    }
    sets = {
        name: TokenSet(_read(arrays, name)[None]) if name in arrays else None
        for name in ("settled", "evidence")
    }
    return Prepared(
        _read(arrays, "values")[None],
        None,
        _read(arrays, "cls") if "cls" in arrays else None,
        branches,
        torch.from_numpy(arrays["described"]) if "described" in arrays else None,
        **sets,
    )


def _write(arrays: Arrays, name: str, vectors: Tensor, form: Form) -> None:
    """Put vectors among the arrays in a form; int8 has a scale for each vector."""
    if form == "int8":
        scale = vectors.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        arrays[f"{name}.scale"] = scale.numpy()
        arrays[name] = (vectors / scale).round().to(torch.int8).numpy()
    else:
        arrays[name] = vectors.to(torch.float32 if form == "fp32" else torch.float16).numpy()


def _read(arrays: Arrays, name: str) -> Tensor:
    """Vectors from among the arrays, in fp32."""
    vectors = torch.from_numpy(arrays[name]).float()
    scale = arrays.get(f"{name}.scale")
    return vectors if scale is None else vectors * torch.from_numpy(scale)

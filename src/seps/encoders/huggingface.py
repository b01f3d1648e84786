"""Any pre-trained backbone of a known family: what is CLS, what is a register, and where the grid lies.

Nothing is guessed from the number of tokens: a family says how many tokens stand before the patches and how
its grid follows from the size of the image.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from seps.data.images import View
from seps.naming import reason
from seps.tokens import Tokens

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
Normalisation = tuple[tuple[float, float, float], tuple[float, float, float]]


def patch_grid(config: Any, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of a plain vision transformer: whole patches only."""
    patch = config.patch_size
    rows, columns = (patch, patch) if isinstance(patch, int) else tuple(patch)
    return height // rows, width // columns


def shifted_grid(config: Any, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of the last stage of a Swin transformer: it pads, then halves at every merge."""
    stages = len(config.depths) - 1

    def cells(length: int) -> int:
        count = math.ceil(length / config.patch_size)
        for _ in range(stages):
            count = math.ceil(count / 2)
        return count

    return cells(height), cells(width)


@dataclass(frozen=True)
class Family:
    """What is known of a family of vision backbones.

    cls: whether a CLS token comes first; extra: the number of further tokens before the patches, or the
    name of its entry in the configuration; interpolates: whether the class takes `interpolate_pos_encoding`
    (the others take any size by themselves); pooler: whether a pooler can be left out at construction;
    idle: a submodule that only a pooled vector passes through.
    """

    cls: bool = True
    extra: int | str = 0
    grid: Callable[[Any, int, int], tuple[int, int]] = patch_grid
    interpolates: bool = False
    pooler: bool = False
    idle: str | None = None
    normalisation: Normalisation = IMAGENET


FAMILIES = {
    "vit": Family(interpolates=True, pooler=True, normalisation=HALF),
    "deit": Family(extra=1, interpolates=True, pooler=True),
    "dinov2": Family(),
    "dinov2_with_registers": Family(extra="num_register_tokens"),
    "dinov3_vit": Family(extra="num_register_tokens"),
    "siglip_vision_model": Family(cls=False, interpolates=True, normalisation=HALF),
    "clip_vision_model": Family(interpolates=True, idle="post_layernorm", normalisation=CLIP),
    "swin": Family(cls=False, grid=shifted_grid, interpolates=True, pooler=True),
    "swinv2": Family(cls=False, grid=shifted_grid, interpolates=True, pooler=True),
}
# model_type -> whether a pooler can be left out at construction.
TEXT_FAMILIES = {
    "albert": True,
    "bert": True,
    "camembert": True,
    "deberta": False,
    "deberta-v2": False,
    "distilbert": False,
    "electra": False,
    "modernbert": False,
    "mpnet": True,
    "roberta": True,
    "xlm-roberta": True,
}


class HuggingFaceVision(nn.Module):
    """A vision backbone by name or folder, or with random weights from a configuration.

    name: hub name or folder; config: its configuration as a dict (then no weights are read); size, mean,
    std, fit, crop_share: how images become pixels, by default what the backbone's own processor says.
    """

    scratch = False

    def __init__(
        self,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        size: int | Sequence[int] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        fit: Literal["squash", "crop"] | None = None,
        crop_share: float | None = None,
    ) -> None:
        super().__init__()
        settings = read_config("image_encoder", name, config)
        settings = getattr(settings, "vision_config", settings)
        if settings.model_type not in FAMILIES:
            raise ValueError(
                f"image_encoder: expected a backbone of a known family ({', '.join(FAMILIES)}), "
                f"found {settings.model_type!r}"
            )
        self.family = FAMILIES[settings.model_type]
        if settings.model_type == "siglip_vision_model":
            settings.vision_use_head = False
        told = {} if name is None or config is not None else read_preprocessor(name)
        own = view_of(told, settings, self.family)
        height, width = side_lengths(size, (own.height, own.width))
        self.view = View(
            height,
            width,
            triple("mean", mean, own.mean),
            triple("std", std, own.std),
            fit or own.fit,
            own.crop_share if crop_share is None else crop_share,
        )
        self.grid = self.family.grid(settings, height, width)
        if 0 in self.grid:
            raise ValueError(
                f"size: expected at least one patch of {settings.patch_size} pixels, found {height}x{width}"
            )
        self.has_cls = self.family.cls
        extra = self.family.extra
        self.before = int(self.has_cls) + (getattr(settings, extra) if isinstance(extra, str) else extra)
        self.channels = int(settings.hidden_size)
        arguments = {"add_pooling_layer": False} if self.family.pooler else {}
        self.network = read_network("image_encoder", name if config is None else None, settings, arguments)
        leave_out_idle(self.network, self.family)
        trained = side_lengths(settings.image_size, (height, width))
        self.interpolating = self.family.interpolates and trained != (height, width)
        self.spec = {
            "name": name,
            "config": plain(settings),
            "size": [height, width],
            "mean": list(self.view.mean),
            "std": list(self.view.std),
            "fit": self.view.fit,
            "crop_share": self.view.crop_share,
        }

    def forward(self, pixels: Tensor) -> Tokens:
        """(B,3,H,W) -> (B,N,Cin)"""
        further = {"interpolate_pos_encoding": True} if self.interpolating else {}
        hidden = self.network(pixel_values=pixels, **further).last_hidden_state
        patches = hidden[:, self.before :]
        if patches.shape[1] != self.grid[0] * self.grid[1]:
            raise ValueError(
                f"image_encoder: expected {self.grid[0]}x{self.grid[1]} patches after {self.before} other "
                f"tokens, found {hidden.shape[1]} tokens in all"
            )
        return Tokens(patches, cls=hidden[:, 0] if self.has_cls else None)


class HuggingFaceText(nn.Module):
    """A BERT-like text backbone by name or folder, or with random weights from a configuration.

    special: ids that are no words, by default those of the backbone's own tokenizer or configuration.
    """

    scratch = False

    def __init__(
        self,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        special: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        settings = read_config("text_encoder", name, config)
        if settings.model_type not in TEXT_FAMILIES:
            raise ValueError(
                f"text_encoder: expected a backbone of a known family ({', '.join(TEXT_FAMILIES)}), "
                f"found {settings.model_type!r}"
            )
        if special is None:
            special = read_special(name) if name is not None and config is None else special_of(settings)
        arguments = {"add_pooling_layer": False} if TEXT_FAMILIES[settings.model_type] else {}
        self.network = read_network("text_encoder", name if config is None else None, settings, arguments)
        self.special = tuple(special)
        self.vocabulary = int(settings.vocab_size)
        self.channels = int(settings.hidden_size)
        self.limit = reach(settings)
        self.spec = {"name": name, "config": plain(settings), "special": list(special)}

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """ids, mask (T,L) -> (T,L,Cin)"""
        return self.network(input_ids=ids, attention_mask=mask.long()).last_hidden_state


def read_config(place: str, name: str | None, config: Mapping[str, Any] | None) -> Any:
    """The configuration object of a backbone, from a dict or else from its folder or the hub."""
    from transformers import AutoConfig

    if config is not None:
        rest = dict(config)
        model_type = rest.pop("model_type", None)
        try:
            return AutoConfig.for_model(model_type, **rest)
        except Exception as error:
            raise ValueError(
                f"{place}.config: expected a configuration of transformers, found model_type "
                f"{model_type!r} ({reason(error)})"
            ) from error
    if name is None:
        raise ValueError(f"{place}: expected a 'name' (hub name or folder) or a 'config', found neither")
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise unreadable(place, name, "configuration", error) from error


def read_network(place: str, name: str | None, settings: Any, arguments: Mapping[str, Any]) -> nn.Module:
    """The backbone with the weights of name, or with random ones where there is no name."""
    from transformers import AutoModel

    if name is None:
        return AutoModel.from_config(settings, **arguments)
    try:
        return AutoModel.from_pretrained(name, config=settings, **arguments)
    except (OSError, ValueError, RuntimeError) as error:
        raise unreadable(place, name, "weights", error) from error


def leave_out_idle(network: nn.Module, family: Family) -> None:
    """Drop weights that no token passes through: processes that train together wait for every weight."""
    if family.idle is not None:
        setattr(network, family.idle, nn.Identity())
    for module in network.modules():
        if isinstance(getattr(module, "mask_token", None), nn.Parameter):
            module.register_parameter("mask_token", None)


def read_preprocessor(name: str) -> dict[str, Any]:
    """What the backbone's own image processor is configured with; empty if nothing is said."""
    from transformers.utils.hub import cached_file

    quiet = ("gated_repo", "missing_entries", "connection_errors")
    try:
        found = cached_file(
            name, "preprocessor_config.json", **{f"_raise_exceptions_for_{case}": False for case in quiet}
        )
        return {} if found is None else dict(json.loads(Path(found).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise unreadable("image_encoder", name, "preprocessor_config.json", error) from error


def read_special(name: str) -> list[int]:
    """Ids of the backbone's own tokenizer that stand for no word."""
    from transformers import AutoTokenizer

    try:
        return special_ids(AutoTokenizer.from_pretrained(name))
    except (OSError, ValueError) as error:
        raise unreadable("text_encoder", name, "tokenizer", error) from error


def special_ids(tokenizer: Any) -> list[int]:
    """Padding, start and end; not the mask nor the unknown word, which stand where a word stood."""
    names = ("pad_token_id", "cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id")
    return sorted({number for name in names if (number := getattr(tokenizer, name, None)) is not None})


def special_of(settings: Any) -> list[int]:
    """The same from a configuration, as far as it knows."""
    return special_ids(settings)


def reach(settings: Any) -> int | None:
    """The longest row of token ids; families that number positions from the padding lose two."""
    longest = getattr(settings, "max_position_embeddings", None)
    if longest is None or settings.model_type in ("deberta", "deberta-v2"):
        return None if not getattr(settings, "position_biased_input", False) else longest
    offset = settings.model_type in ("camembert", "mpnet", "roberta", "xlm-roberta")
    return int(longest) - (int(settings.pad_token_id) + 1 if offset else 0)


def view_of(told: Mapping[str, Any], settings: Any, family: Family) -> View:
    """The view an image processor's configuration describes; the family's usual one where it is silent."""
    trained = getattr(settings, "image_size", None) or 224
    mean, std = family.normalisation
    if told.get("do_normalize", True) is False:
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    mean, std = triple("mean", told.get("image_mean"), mean), triple("std", told.get("image_std"), std)
    resized = told.get("size", trained)
    cropped = told.get("crop_size", resized) if told.get("do_center_crop") else resized
    height, width = side_lengths(cropped, side_lengths(trained, (224, 224)))
    if not told.get("do_center_crop"):
        return View(height, width, mean, std)
    shortest = min(side_lengths(resized, (height, width)))
    return View(height, width, mean, std, "crop", min(1.0, min(height, width) / shortest))


def side_lengths(size: Any, otherwise: tuple[int, int]) -> tuple[int, int]:
    """Height and width from an integer, a pair, or a processor's dict of them."""
    if size is None:
        return otherwise
    if isinstance(size, Mapping):
        if "shortest_edge" in size:
            return int(size["shortest_edge"]), int(size["shortest_edge"])
        size = (size.get("height", otherwise[0]), size.get("width", otherwise[1]))
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or any(not isinstance(side, int) or side < 1 for side in pair):
        raise ValueError(f"size: expected a positive integer or (height, width), found {size!r}")
    return pair


def triple(
    name: str, values: Sequence[float] | None, otherwise: tuple[float, float, float]
) -> tuple[float, float, float]:
    """One number for each colour."""
    if values is None:
        return otherwise
    if len(values) != 3:
        raise ValueError(f"{name}: expected three numbers, found {list(values)}")
    red, green, blue = (float(value) for value in values)
    return red, green, blue


def plain(settings: Any) -> dict[str, Any]:
    """A configuration as a dict that JSON can hold."""
    result = dict(json.loads(settings.to_json_string(use_diff=True)))
    for passing in ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"):
        result.pop(passing, None)
    return {"model_type": settings.model_type, **result}


def unreadable(place: str, name: str, what: str, error: Exception) -> ValueError:
    """One sentence for everything that can go wrong on the way to a folder or the hub."""
    return ValueError(
        f"{place}: expected a folder or hub name with a readable {what}, found {name!r} ({reason(error)})"
    )

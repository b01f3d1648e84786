"""Import of an official LAPS or SEPS checkpoint: from one pickle file to a model folder.

Such a file holds a state dict and the namespace of arguments it was trained with. It is read with
`weights_only`, so that nothing in it is executed. What the namespace does not say of the backbones follows
from the shapes of their weights.
"""

from __future__ import annotations

import argparse
import logging
import math
import pickle
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from seps.compat import import_state_dict
from seps.data.records import folder_beside, require_vacant
from seps.encoders.huggingface import IMAGENET, special_ids
from seps.model import SepsConfig, SepsModel, SepsProcessor, save
from seps.naming import reason
from seps.processor import read_pieces
from seps.recipe import PRESETS, Recipe, Side

logger = logging.getLogger(__name__)

Ancestor = Literal["auto", "laps", "released", "paper"]
State = dict[str, Tensor]

IMAGE_BACKBONE = "img_enc.visual_encoder."
IMAGE_PROJECTION = "img_enc.vision_proj."
TEXT_BACKBONE = "txt_enc.bert."
TEXT_PROJECTION = "txt_enc.fc."
HEAD = "cross_net."
PARTS = (IMAGE_BACKBONE, IMAGE_PROJECTION, TEXT_BACKBONE, TEXT_PROJECTION, HEAD)
# Weights of the ancestors' backbones that nothing reads: their poolers, and a table of consecutive numbers.
IDLE = re.compile(r"^pooler\.|position_ids$|relative_position_index$|mask_token$")
# A head of attention has so many channels in every published ViT and BERT.
HEAD_WIDTH = 64


@dataclass(frozen=True)
class ImportOptions:
    """Turn an official LAPS or SEPS checkpoint into a model folder: `seps import model_best.pth seps`."""

    checkpoint: str
    """The model_best.pth: a state dict and the arguments of its training."""
    output: str
    """The folder to write, new or empty."""
    tokenizer: str = "bert-base-uncased"
    """Hub name or folder of the text backbone's tokenizer."""
    recipe: Ancestor = "auto"
    """Which ancestor trained it; "auto" tells by its weights and arguments."""
    dense_side: Side = "text"
    """Where dense text hangs from now on; "text" is the published protocol."""


def run(options: ImportOptions) -> int:
    """Import a checkpoint and save the model folder."""
    output = Path(options.output)
    require_vacant("output", output)
    model, processor = import_checkpoint(
        options.checkpoint, options.tokenizer, options.recipe, options.dense_side
    )
    with folder_beside(output) as folder:
        save(model, processor, folder)
    logger.info("%s: wrote a model folder with recipe %s", output, model.recipe)
    return 0


def import_checkpoint(
    path: str | Path,
    tokenizer: str = "bert-base-uncased",
    recipe: Ancestor = "auto",
    dense_side: Side = "text",
) -> tuple[SepsModel, SepsProcessor]:
    """The model of an official checkpoint, in evaluation mode, and its processor."""
    state, arguments = read_checkpoint(path)
    parts = divide(path, state)
    pieces = read_pieces(tokenizer)
    size = int(arguments.get("img_res", 224))
    image, text = vision_config(parts[IMAGE_BACKBONE], size), bert_config(parts[TEXT_BACKBONE])
    channels = int(arguments.get("embed_size", image_width(parts)))
    config = SepsConfig(
        recipe=recipe_for(parts[HEAD], arguments, recipe, dense_side),
        channels=channels,
        image_encoder={
            "kind": "huggingface",
            "config": image,
            "size": int(image["image_size"]),
            "mean": IMAGENET[0],
            "std": IMAGENET[1],
        },
        text_encoder={
            "kind": "huggingface",
            "config": text,
            "special": special_ids(pieces.tokenizer),
            "keep_special": True,
        },
    )
    model = SepsModel(config)
    fill(path, model, parts)
    if len(pieces) > int(text["vocab_size"]):
        raise ValueError(
            f"tokenizer: expected at most the {text['vocab_size']} entries that the checkpoint's text "
            f"encoder knows, found {len(pieces)} in {tokenizer!r}"
        )
    reach = int(text["max_position_embeddings"])
    pieces.limit = reach if pieces.limit is None else min(reach, pieces.limit)
    return model.eval(), SepsProcessor(model.image_encoder.view, pieces)


def read_checkpoint(path: str | Path) -> tuple[State, dict[str, Any]]:
    """State dict and arguments of a checkpoint file; nothing but tensors, numbers and a namespace is read."""
    scalar = np.float64(0).__reduce__()[0]
    harmless: list[Any] = [argparse.Namespace, np.dtype, np.dtypes.Float64DType, scalar]
    harmless += [(scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    try:
        with torch.serialization.safe_globals(harmless):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such checkpoint") from None
    except (pickle.UnpicklingError, EOFError, RuntimeError, OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"{path}: expected a checkpoint of tensors and an argparse namespace, found what cannot be read "
            f"safely ({reason(error)})"
        ) from error
    state = content.get("model") if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path}: expected a checkpoint with a state dict under 'model', found none")
    arguments = content.get("opt", {})
    arguments = vars(arguments) if isinstance(arguments, argparse.Namespace) else arguments
    if not isinstance(arguments, dict):
        raise ValueError(f"{path}: expected the arguments of training under 'opt', found {type(arguments)}")
    return {str(name).removeprefix("module."): value for name, value in state.items()}, arguments


def divide(path: str | Path, state: Mapping[str, Tensor]) -> dict[str, State]:
    """The state dict by part, each under its own names."""
    parts: dict[str, State] = {prefix: {} for prefix in PARTS}
    for name, value in state.items():
        prefix = next((prefix for prefix in PARTS if name.startswith(prefix)), None)
        if prefix is None:
            raise ValueError(
                f"{path}: expected weights of {', '.join(part.rstrip('.') for part in PARTS)}, found {name!r}"
            )
        parts[prefix][name.removeprefix(prefix)] = value
    for prefix in (IMAGE_BACKBONE, TEXT_BACKBONE, HEAD):
        if not parts[prefix]:
            raise ValueError(f"{path}: expected weights of {prefix.rstrip('.')}, found none")
    return parts


def recipe_for(head: State, arguments: Mapping[str, Any], ancestor: Ancestor, dense_side: Side) -> Recipe:
    """The recipe a checkpoint was trained under, told by its head's weights and its arguments."""
    learned = any("score_predictor" in name for name in head)
    if ancestor == "auto":
        dense = any(word in name for name in arguments for word in ("long", "dense"))
        ancestor = "paper" if learned else "released" if dense else "laps"
        logger.info("the checkpoint looks like recipe %s", ancestor)
    if ancestor not in PRESETS:
        raise ValueError(f"recipe: expected auto, laps, released or paper, found {ancestor!r}")
    changes: dict[str, Any] = {} if ancestor == "laps" else {"dense_side": dense_side}
    if ancestor == "paper":
        changes["aggregation"] = "dual" if "aggr_net.weight_sparse.0.weight" in head else "shared"
    ratios = {"keep_ratio": ("sparse_ratio", 0.5), "aggregate_ratio": ("aggr_ratio", 0.4)}
    changes |= {ours: float(arguments.get(name, usual)) for ours, (name, usual) in ratios.items()}
    return PRESETS[ancestor](**changes)


def fill(path: str | Path, model: SepsModel, parts: Mapping[str, State]) -> None:
    """Put the weights of a checkpoint into a model built for them; every one must find its place."""
    for encoder, backbone, projection in (
        (model.image_encoder, IMAGE_BACKBONE, IMAGE_PROJECTION),
        (model.text_encoder, TEXT_BACKBONE, TEXT_PROJECTION),
    ):
        weights = modern_weights(path, backbone, encoder.body.network, parts[backbone])
        place(path, backbone, encoder.body.network, weights)
        width = encoder.neck.width
        # With as many channels as the backbone the ancestors project nothing.
        identity = {"weight": torch.eye(width), "bias": torch.zeros(width)}
        place(path, projection, encoder.neck.projection, parts[projection] or identity)
    place(path, HEAD, model.head, import_state_dict(parts[HEAD]))


def place(path: str | Path, part: str, module: torch.nn.Module, weights: State) -> None:
    """Load weights strictly, with one sentence for what does not fit."""
    try:
        module.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        misfits = "; ".join(line.strip() for line in str(error).splitlines()[1:]) or reason(error)
        raise ValueError(
            f"{path}: expected weights of {part.rstrip('.')} that fit, found {misfits}"
        ) from error


def modern_weights(path: str | Path, part: str, network: Any, weights: State) -> State:
    """A backbone's weights under today's names, as transformers itself renames them."""
    from safetensors.torch import save_file

    used = {name: value.contiguous() for name, value in weights.items() if not IDLE.search(name)}
    with tempfile.TemporaryDirectory() as folder:
        network.config.save_pretrained(folder)
        save_file(used, str(Path(folder) / "model.safetensors"), {"format": "pt"})
        fresh = type(network).from_pretrained(
            folder,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            use_safetensors=True,
            add_pooling_layer=False,
        )
        read, found = fresh
        for kind in ("missing", "unexpected", "mismatched"):
            for key in sorted(found[f"{kind}_keys"]):
                raise ValueError(
                    f"{path}: expected the weights of a {network.config.model_type} under "
                    f"{part.rstrip('.')}, found {kind} {key} ({len(found[f'{kind}_keys'])} in all)"
                )
        return dict(read.state_dict())


def vision_config(weights: State, size: int) -> dict[str, Any]:
    """The configuration of a ViT or Swin backbone from the shapes of its weights."""
    patches = weights.get("embeddings.patch_embeddings.projection.weight")
    if patches is None:
        raise ValueError(
            f"{IMAGE_BACKBONE.rstrip('.')}: expected a ViT or Swin backbone, found no patch embedding"
        )
    width, patch = patches.shape[0], patches.shape[-1]
    if "embeddings.cls_token" not in weights:
        return swin_config(weights, width, patch, size)
    grid = math.isqrt(weights["embeddings.position_embeddings"].shape[1] - 1)
    return {
        "model_type": "vit",
        "hidden_size": width,
        "num_hidden_layers": count_layers(weights, r"encoder\.layer\.(\d+)\."),
        "num_attention_heads": max(1, width // HEAD_WIDTH),
        "intermediate_size": weights["encoder.layer.0.intermediate.dense.weight"].shape[0],
        "patch_size": patch,
        "image_size": grid * patch,
    }


def swin_config(weights: State, width: int, patch: int, size: int) -> dict[str, Any]:
    """The configuration of a Swin backbone; its windows and heads are the shape of its bias tables."""
    stages = count_layers(weights, r"encoder\.layers\.(\d+)\.")
    tables = [
        weights[f"encoder.layers.{stage}.blocks.0.attention.self.relative_position_bias_table"]
        for stage in range(stages)
    ]
    expanded = weights["encoder.layers.0.blocks.0.intermediate.dense.weight"].shape[0]
    return {
        "model_type": "swin",
        "embed_dim": width,
        "depths": [
            count_layers(weights, rf"encoder\.layers\.{stage}\.blocks\.(\d+)\.") for stage in range(stages)
        ],
        "num_heads": [table.shape[1] for table in tables],
        "window_size": (math.isqrt(tables[0].shape[0]) + 1) // 2,
        "mlp_ratio": expanded / width,
        "patch_size": patch,
        "image_size": size,
    }


def bert_config(weights: State) -> dict[str, Any]:
    """The configuration of a BERT backbone from the shapes of its weights."""
    words = weights.get("embeddings.word_embeddings.weight")
    if words is None or "encoder.layer.0.intermediate.dense.weight" not in weights:
        raise ValueError(f"{TEXT_BACKBONE.rstrip('.')}: expected a BERT backbone, found other weights")
    return {
        "model_type": "bert",
        "vocab_size": words.shape[0],
        "hidden_size": words.shape[1],
        "num_hidden_layers": count_layers(weights, r"encoder\.layer\.(\d+)\."),
        "num_attention_heads": max(1, words.shape[1] // HEAD_WIDTH),
        "intermediate_size": weights["encoder.layer.0.intermediate.dense.weight"].shape[0],
        "max_position_embeddings": weights["embeddings.position_embeddings.weight"].shape[0],
        "type_vocab_size": weights["embeddings.token_type_embeddings.weight"].shape[0],
    }


def count_layers(weights: State, pattern: str) -> int:
    """How many layers the names count."""
    numbers = {int(found.group(1)) for name in weights if (found := re.match(pattern, name))}
    return len(numbers)


def image_width(parts: Mapping[str, State]) -> int:
    """C, from the projection or, without one, from the text backbone's width."""
    projection = parts[IMAGE_PROJECTION] or parts[TEXT_PROJECTION]
    if projection:
        return int(projection["weight"].shape[0])
    return int(parts[TEXT_BACKBONE]["embeddings.word_embeddings.weight"].shape[1])

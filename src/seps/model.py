"""The whole model in the ecosystem's form: encoders, head and global term; save, load, hub."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoProcessor, PreTrainedModel
from transformers.utils import CONFIG_NAME

from seps.configuration import SepsConfig, recipe_of
from seps.data.text import WordTokenizer
from seps.eightbit import fill_shrunk, write_shrunk
from seps.encoders import build_image_encoder, build_text_encoder
from seps.global_term import GlobalTerm, temperature_of
from seps.head import SlimHead
from seps.naming import reason
from seps.pairwise.prepared import full_precision
from seps.processor import PieceTokenizer, SepsProcessor, read_pieces
from seps.recipe import Recipe
from seps.slimming import unit
from seps.tokens import Tokens

__all__ = ["SepsConfig", "SepsModel", "SepsProcessor", "create", "load", "save_small"]

SHIPPED = Path(__file__).parent / "shipped"
"""Folders of the models that come with this package."""
DEFAULT = "seps-mini"
"""The model that is used where none is named."""
SMALL = "model.int8.safetensors"


class SepsModel(PreTrainedModel):
    """Encoders, slim head and global term: pixels and ids in, scores (images, texts) out."""

    config_class = SepsConfig
    config: SepsConfig
    base_model_prefix = "seps"
    main_input_name = "pixels"
    supports_gradient_checkpointing = True
    _supports_sdpa = True

    def __init__(self, config: SepsConfig) -> None:
        config = copy.deepcopy(config)
        super().__init__(config)
        self.image_encoder = build_image_encoder(config.image_encoder, config.channels)
        self.text_encoder = build_text_encoder(config.text_encoder, config.channels)
        # Once built, an encoder is its configuration: no name is read again, only this folder's weights.
        config.image_encoder = self.image_encoder.spec
        config.text_encoder = self.text_encoder.spec
        self.head = SlimHead(recipe_of(config.recipe), self.image_encoder.patches, config.channels)
        scored = config.global_term == "score"
        self.global_term = (
            None
            if config.global_term == "none"
            else GlobalTerm(config.channels, config.global_weight, scored, config.initial_temperature)
        )
        self.log_temperature = nn.Parameter(torch.tensor(math.log(config.initial_temperature)))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Every module of ours initialises itself when it is built; backbones do so in their own class."""

    @property
    def recipe(self) -> Recipe:
        """The recipe of the head."""
        return self.head.recipe

    @property
    def temperature(self) -> Tensor:
        """Of InfoNCE between scores: learned, and never below a hundredth."""
        return temperature_of(self.log_temperature)

    @property
    def global_temperature(self) -> Tensor:
        """Of InfoNCE between the global vectors."""
        return self.temperature if self.global_term is None else self.global_term.temperature

    def encode_images(self, pixels: Tensor) -> Tokens:
        """(B,3,H,W) -> patches (B,N,C), and CLS if the backbone has one"""
        return self.image_encoder(pixels)

    def encode_texts(self, ids: Tensor, mask: Tensor) -> Tokens:
        """ids, mask (T,L) -> words (T,L,C)"""
        return self.text_encoder(ids, mask)

    def project_images(self, raw: Tokens) -> Tokens:
        """Kept features of the image backbone -> patches (B,N,C)"""
        return self.image_encoder.project(raw)

    def project_texts(self, raw: Tokens) -> Tokens:
        """Kept features of the text backbone -> words (T,L,C)"""
        return self.text_encoder.project(raw)

    def global_images(self, images: Tokens) -> Tensor:
        """One unit vector an image, its mean patch where there is no global term. -> (B,C)"""
        with full_precision(images.features):
            images = images.to(torch.float32)
            return unit(images.mean()) if self.global_term is None else self.global_term.images(images)

    def global_texts(self, texts: Tokens) -> Tensor:
        """One unit vector a text, its mean word where there is no global term. -> (T,C)"""
        with full_precision(texts.features):
            texts = texts.to(torch.float32)
            return unit(texts.mean()) if self.global_term is None else self.global_term.texts(texts)

    def global_scores(self, images: Tokens, texts: Tokens) -> Tensor:
        """Cosines of the global vectors, without a weight. -> (B,T)"""
        with full_precision(images.features):
            return self.global_images(images) @ self.global_texts(texts).T

    def score(
        self,
        images: Tokens,
        texts: Tokens,
        dense: Tokens | None = None,
        guides: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The score of every pair, the global term included where it is scored. -> (B,T)"""
        return self.with_global(self.head(images, texts, dense, guides), images, texts)

    def with_global(self, scores: Tensor, images: Tokens, texts: Tokens) -> Tensor:
        """The head's scores with what the global term adds to them, which may be nothing. (B,T) -> (B,T)"""
        weight = None if self.global_term is None else self.global_term.weight
        return scores if weight is None else scores + weight * self.global_scores(images, texts)

    def forward(
        self,
        pixels: Tensor,
        ids: Tensor,
        mask: Tensor,
        dense_ids: Tensor | None = None,
        dense_mask: Tensor | None = None,
    ) -> Tensor:
        """pixels (B,3,H,W), ids and mask (T,L), dense text of the recipe's side -> scores (B,T)"""
        if (dense_ids is None) != (dense_mask is None):
            raise ValueError("dense_ids, dense_mask: expected both or neither, found one of them")
        dense = None if dense_ids is None or dense_mask is None else self.encode_texts(dense_ids, dense_mask)
        return self.score(self.encode_images(pixels), self.encode_texts(ids, mask), dense)

    def backbones(self) -> list[nn.Module]:
        """The parts that did not start from nothing, which learn at a rate of their own."""
        return [*self.image_encoder.pretrained(), *self.text_encoder.pretrained()]

    def tune(self, tuning: str) -> None:
        """Freeze both backbones ("frozen") or let them learn ("full")."""
        for encoder in (self.image_encoder, self.text_encoder):
            encoder.tune(tuning)
        self.config.image_encoder = self.image_encoder.spec
        self.config.text_encoder = self.text_encoder.spec

    def packaged(self) -> set[str]:
        """Names of weights that every machine has from an installed package: no folder holds them."""
        encoders = {"image_encoder": self.image_encoder, "text_encoder": self.text_encoder}
        return {
            f"{name}.body.{key}"
            for name, encoder in encoders.items()
            if encoder.refill is not None
            for key in encoder.body.state_dict()
        }

    def save_pretrained(self, save_directory: str | PathLike[str], *inputs: Any, **kwargs: Any) -> None:
        """Write configuration and weights into a folder, weights of installed packages left out."""
        self._keys_to_ignore_on_save = self.packaged()
        super().save_pretrained(save_directory, *inputs, **kwargs)
        open_to_readers(Path(save_directory))

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: str | PathLike[str], *inputs: Any, **kwargs: Any
    ) -> Any:
        """Read what `save_pretrained` wrote; every weight must be there and fit, and no pickle is read."""
        name = str(pretrained_model_name_or_path)
        informs = kwargs.pop("output_loading_info", False)
        kwargs |= {"output_loading_info": True, "use_safetensors": True, "ignore_mismatched_sizes": True}
        try:
            with unreported():
                read: Any = super().from_pretrained(name, *inputs, **kwargs)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise ValueError(
                f"{name}: expected a folder or hub name with a config.json and safetensors weights of a "
                f"seps model ({reason(error)})"
            ) from error
        model, found = read
        refuse_misfits(name, found | {"missing_keys": set(found["missing_keys"]) - model.packaged()})
        for encoder in (model.image_encoder, model.text_encoder):
            if encoder.refill is not None:
                encoder.refill()
        for encoder in (model.image_encoder, model.text_encoder):
            encoder.tune(encoder.tuning)  # weights that are read come back as weights that learn
        return (model, found) if informs else model


def open_to_readers(folder: Path) -> None:
    """Let whoever may read a folder's configuration read its weights: their writer keeps them to itself."""
    config = folder / CONFIG_NAME
    for weights in folder.glob("*.safetensors") if config.is_file() else ():
        weights.chmod(config.stat().st_mode)


@contextmanager
def unreported() -> Iterator[None]:
    """Without the ecosystem's tables: what does not fit is refused in one sentence."""
    names = ("transformers.modeling_utils", "transformers.distributed.tensor_parallel")
    reporters = [logging.getLogger(name) for name in names]
    levels = [reporter.level for reporter in reporters]
    for reporter in reporters:
        reporter.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for reporter, level in zip(reporters, levels, strict=True):
            reporter.setLevel(level)


def refuse_misfits(name: str, found: Mapping[str, Any]) -> None:
    """One sentence for weights of another shape, weights that are missing, weights too many."""
    for key, have, want in sorted(found["mismatched_keys"]):
        raise ValueError(
            f"{name}: expected weights as config.json describes them, found {key} of shape {tuple(have)} "
            f"instead of {tuple(want)} ({len(found['mismatched_keys'])} misfits in all)"
        )
    for kind, word in (("missing_keys", "lacks"), ("unexpected_keys", "has no place for")):
        for key in sorted(found[kind]):
            raise ValueError(
                f"{name}: expected the weights that config.json describes, found that it {word} {key} "
                f"({len(found[kind])} in all)"
            )


def create(
    config: SepsConfig, texts: Iterable[str] | None = None, tokenizer: str | None = None
) -> tuple[SepsModel, SepsProcessor]:
    """A new model with its processor.

    Backbones with a name start from its weights. texts: where the words of the light text encoder come
    from; tokenizer: hub name or folder for a text backbone that brings none.
    """
    config = copy.deepcopy(config)
    words: WordTokenizer | PieceTokenizer
    if config.text_encoder.get("kind") == "light":
        if texts is None:
            raise ValueError("texts: expected the texts that the light text encoder takes its words from")
        words = WordTokenizer.build(texts)
        config.text_encoder["vocabulary"] = len(words)
        model = SepsModel(config)
    else:
        named = tokenizer if tokenizer is not None else config.text_encoder.get("name")
        if tokenizer is not None and config.text_encoder.get("special") is None:
            from seps.encoders.huggingface import special_ids

            config.text_encoder["special"] = special_ids(read_pieces(tokenizer).tokenizer)
        model = SepsModel(config)
        named = named if named is not None else getattr(model.text_encoder.body, "tokenizer_name", None)
        if named is None:
            raise ValueError("tokenizer: expected a hub name or folder, since text_encoder has no 'name'")
        words = read_pieces(named)
        words.limit = least(words.limit, model.text_encoder.limit)
    if len(words) > model.text_encoder.body.vocabulary:
        raise ValueError(
            f"tokenizer: expected at most {model.text_encoder.body.vocabulary} entries, as many as the text "
            f"encoder knows, found {len(words)}"
        )
    return model, SepsProcessor(model.image_encoder.view, words)


def least(*limits: int | None) -> int | None:
    """The smallest of the limits there are."""
    return min((limit for limit in limits if limit is not None), default=None)


def load(name: str | PathLike[str]) -> tuple[SepsModel, SepsProcessor]:
    """A saved model, ready for evaluation, and its processor: from a folder, the hub, or this package."""
    name = str(located(name))
    if not (Path(name) / SMALL).is_file():
        model: SepsModel = SepsModel.from_pretrained(name)
        return model, SepsProcessor.from_pretrained(name)
    model = SepsModel(SepsConfig.from_pretrained(name))
    fill_shrunk(model, Path(name) / SMALL, model.packaged())
    return model.eval(), SepsProcessor.from_pretrained(name)


def located(name: str | PathLike[str]) -> str | Path:
    """Where a model is: a folder, this package for a model that comes with it, or else a hub name."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / CONFIG_NAME).is_file():
            inner = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG_NAME}"))
            hint = f"; there is one in {folder / inner[0]}" if inner else ""
            raise ValueError(f"{name}: expected a model folder, found no {CONFIG_NAME} in it{hint}")
        return folder
    if (SHIPPED / str(name)).is_dir():
        return SHIPPED / str(name)
    beside_others = len(folder.parts) > 1 and folder.parent.is_dir()
    if beside_others or Path(name).is_absolute() or str(name).startswith((".", "~")) or len(folder.parts) > 2:
        raise ValueError(f"{name}: expected a model folder, found none")
    if len(folder.parts) < 2:
        raise ValueError(
            f"{name}: expected a model folder, {DEFAULT} or a hub name (owner/name), "
            f"found no such folder in {Path.cwd()}"
        )
    return str(name)


def save(model: SepsModel, processor: SepsProcessor, folder: Path) -> None:
    """Write both into one folder, without a progress bar of the ecosystem's between ours."""
    from transformers.utils import logging as ecosystem

    shown = ecosystem.is_progress_bar_enabled()
    ecosystem.disable_progress_bar()
    try:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
    finally:
        if shown:
            ecosystem.enable_progress_bar()


def save_small(model: SepsModel, processor: SepsProcessor, folder: str | PathLike[str]) -> Path:
    """A model folder with its matrices in eight bits; `load` reads it like any other. -> the weights' file"""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(place)
    processor.save_pretrained(place)
    packaged = model.packaged()
    write_shrunk(
        {name: each for name, each in model.state_dict().items() if name not in packaged}, place / SMALL
    )
    open_to_readers(place)
    return place / SMALL


AutoConfig.register(SepsConfig.model_type, SepsConfig, exist_ok=True)
AutoModel.register(SepsConfig, SepsModel, exist_ok=True)
AutoProcessor.register(SepsConfig, SepsProcessor, exist_ok=True)

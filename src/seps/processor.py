"""From pictures and sentences to what the encoders take: pixels and token ids, saved beside the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import PushToHubMixin, cached_file

from seps.data.images import View, evaluate_image, to_rgb
from seps.data.text import MOST_WORDS, Encoded, WordTokenizer, cap_words, pad_rows
from seps.naming import reason

SETTINGS = "processor_config.json"
VOCABULARY = "vocabulary.json"
PIECES = "tokenizer"


class PieceTokenizer:
    """A tokenizer of transformers: words in pieces, cut to whole words."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                "tokenizer: expected a fast one, which knows the word of every piece, "
                f"found {type(tokenizer).__name__}"
            )
        if tokenizer.pad_token_id is None:
            raise ValueError("tokenizer: expected one with a padding token, found none")
        self.tokenizer = tokenizer
        self.pad_id = int(tokenizer.pad_token_id)
        mask = tokenizer.mask_token_id if tokenizer.mask_token_id is not None else tokenizer.unk_token_id
        self.mask_id = self.pad_id if mask is None else int(mask)
        longest = int(tokenizer.model_max_length)
        self.limit = longest if longest < 10**6 else None

    def __len__(self) -> int:
        return len(self.tokenizer)

    @property
    def ordinary(self) -> list[int]:
        """The ids that are no special tokens: what a random replacement is drawn from."""
        special = set(self.tokenizer.all_special_ids)
        return [number for number in range(len(self.tokenizer)) if number not in special]

    def __call__(self, texts: Sequence[str], most_words: int | None = None) -> Encoded:
        """Texts -> ids, mask and words, each (T,M)."""
        if isinstance(texts, str):
            raise ValueError("the tokenizer takes a sequence of texts, found a single string")
        if not texts:
            return pad_rows([], self.pad_id)
        read = self.tokenizer(list(texts), add_special_tokens=True, verbose=False)
        rows = []
        for row, ids in enumerate(read["input_ids"]):
            words = read.word_ids(row)
            rows.append(cap_words(ids, words, len(ids) if most_words is None else most_words, self.limit))
        return pad_rows(rows, self.pad_id)


class SepsProcessor(PushToHubMixin):
    """Images to pixels and texts to ids, as one model's encoders want them."""

    def __init__(self, view: View, tokenizer: WordTokenizer | PieceTokenizer) -> None:
        self.view = view
        self.tokenizer = tokenizer

    def images(self, images: Sequence[Image.Image]) -> Tensor:
        """Pictures of any mode and size -> pixels (B,3,H,W)."""
        if isinstance(images, Image.Image):
            raise ValueError("images: expected a list of pictures, found a single one")
        for place, image in enumerate(images):
            if not isinstance(image, Image.Image):
                raise ValueError(
                    f"images: expected PIL pictures, found {type(image).__name__} at place {place}"
                )
        if not images:
            raise ValueError("images: expected at least one picture, found none")
        return torch.stack([evaluate_image(to_rgb(image), self.view) for image in images])

    def texts(self, texts: Sequence[str | None], limit: int | None = MOST_WORDS) -> dict[str, Tensor]:
        """Texts, at most limit words of each -> ids, mask, words, each (T,M); None is an absent text."""
        if isinstance(texts, str):
            raise ValueError("texts: expected a list of texts, found a single string")
        if not texts:
            raise ValueError("texts: expected at least one text, found none")
        for place, text in enumerate(texts):
            if text is not None and not isinstance(text, str):
                raise ValueError(f"texts: expected strings, found {type(text).__name__} at place {place}")
        encoded = self.tokenizer([text or "" for text in texts], limit)
        there = torch.tensor([text is not None for text in texts]).unsqueeze(1)
        return {
            "ids": encoded.ids,
            "mask": encoded.mask & there,
            "words": encoded.words.masked_fill(~there, -1),
        }

    def __call__(
        self, images: Sequence[Image.Image] | None = None, texts: Sequence[str | None] | None = None
    ) -> dict[str, Tensor]:
        """What the model's `forward` takes, for whichever of the two is given."""
        result = {} if images is None else {"pixels": self.images(images)}
        if texts is not None:
            read = self.texts(texts)
            result |= {"ids": read["ids"], "mask": read["mask"]}
        return result

    def save_pretrained(self, save_directory: str | PathLike[str], **_: Any) -> None:
        """Write the settings and the vocabulary into a folder; further arguments are the hub's."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        words = isinstance(self.tokenizer, WordTokenizer)
        if isinstance(self.tokenizer, WordTokenizer):
            self.tokenizer.save(folder / VOCABULARY)
        else:
            self.tokenizer.tokenizer.save_pretrained(folder / PIECES)
        settings = {
            "processor_class": type(self).__name__,
            "tokenizer": "words" if words else "pieces",
            "view": asdict(self.view),
        }
        beside = folder / f"{SETTINGS}.part"
        beside.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        beside.replace(folder / SETTINGS)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | PathLike[str], **kwargs: Any
    ) -> SepsProcessor:
        """Read what `save_pretrained` wrote, from a folder or the hub."""
        name = str(pretrained_model_name_or_path)
        known = ("cache_dir", "revision", "token", "local_files_only")
        hub = {key: kwargs[key] for key in known if key in kwargs}
        try:
            settings = json.loads(locate(name, SETTINGS, hub).read_text(encoding="utf-8"))
            view = View(**{key: _tuple(value) for key, value in settings["view"].items()})
            kind = settings["tokenizer"]
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{name}/{SETTINGS}: expected JSON with a 'view' and a 'tokenizer', found something else "
                f"({error})"
            ) from error
        if kind == "words":
            return cls(view, WordTokenizer.load(locate(name, VOCABULARY, hub)))
        if kind == "pieces":
            return cls(view, read_pieces(name, subfolder=PIECES, **hub))
        raise ValueError(f"{name}/{SETTINGS}: expected tokenizer 'words' or 'pieces', found {kind!r}")


def locate(name: str, file: str, hub: dict[str, Any]) -> Path:
    """A file of a folder or of a hub name."""
    try:
        found = cached_file(name, file, **hub)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: expected a folder or hub name that holds {file}, found none") from error
    if found is None:
        raise ValueError(f"{name}: expected a folder or hub name that holds {file}, found none")
    return Path(found)


def read_pieces(name: str, subfolder: str = "", **hub: Any) -> PieceTokenizer:
    """The tokenizer of a folder or hub name."""
    try:
        return PieceTokenizer(AutoTokenizer.from_pretrained(name, subfolder=subfolder, **hub))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer: expected a folder or hub name with a fast tokenizer, found {name!r} "
            f"({reason(error)})"
        ) from error


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

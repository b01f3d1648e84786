"""Words: splitting, the training noise of the specification, caps on length, and a word tokenizer."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from seps.data.records import written_beside

WORD = re.compile(r"[^\W_]+|[^\w\s]|_")
NO_WORD = -1
SPECIALS = ("[PAD]", "[UNK]", "[MASK]", "[CLS]", "[SEP]")
MOST_WORDS = 90
"""Words of a text that evaluation reads at most."""


def split_words(text: str) -> list[tuple[str, int, int]]:
    """Lower-case words and punctuation marks with their spans: "A cat." -> a 0-1, cat 2-5, . 5-6."""
    return [(found.group().lower(), found.start(), found.end()) for found in WORD.finditer(text)]


def words_in_span(text: str, start: int, end: int) -> list[int]:
    """Indices of the words of a text that lie inside the characters [start, end)."""
    return [i for i, (_, first, last) in enumerate(split_words(text)) if first >= start and last <= end]


@dataclass(frozen=True)
class WordNoise:
    """Share of the words that training disturbs; of these, the shares masked and replaced; the rest go."""

    rate: float = 0.2
    mask: float = 0.5
    random: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ValueError(f"rate must lie in [0, 1], not {self.rate}")
        if min(self.mask, self.random) < 0 or self.mask + self.random > 1:
            raise ValueError(f"mask and random must be shares of one, not {self.mask} and {self.random}")


def augment_words(
    ids: Sequence[int],
    words: Sequence[int | None],
    noise: WordNoise,
    mask_id: int,
    ordinary: Sequence[int] | np.ndarray,
    generator: np.random.Generator,
) -> tuple[list[int], list[int]]:
    """Masks, replaces or deletes whole words with all their pieces; special tokens (word None or -1) stay.

    `ordinary` are the token ids a replacement is drawn from. Words keep their numbers, deleted ones are
    missing from the result, and one word always stays: a text is never emptied.
    """
    if len(ids) != len(words):
        raise ValueError(f"ids and words must be equally long, found {len(ids)} and {len(words)}")
    owners = [NO_WORD if word is None else int(word) for word in words]
    distinct = sorted(set(owners) - {NO_WORD})
    fates = dict(zip(distinct, generator.random(len(distinct)), strict=True))
    masked, replaced = noise.rate * noise.mask, noise.rate * (noise.mask + noise.random)
    deleted = {word for word, fate in fates.items() if replaced <= fate < noise.rate}
    if distinct and len(deleted) == len(distinct):
        deleted.discard(distinct[int(generator.integers(len(distinct)))])
    kept_ids, kept_words = [], []
    for token, word in zip(ids, owners, strict=True):
        if word in deleted:
            continue
        fate = fates.get(word, 1.0)
        if fate < masked:
            token = mask_id
        elif fate < replaced:
            token = int(ordinary[int(generator.integers(len(ordinary)))])
        kept_ids.append(int(token))
        kept_words.append(word)
    return kept_ids, kept_words


def cap_words(
    ids: Sequence[int],
    words: Sequence[int | None],
    most_words: int = MOST_WORDS,
    most_tokens: int | None = None,
) -> tuple[list[int], list[int]]:
    """Keeps the first words whole, up to a number of words and of tokens; special tokens always stay."""
    owners = [NO_WORD if word is None else int(word) for word in words]
    room = len(ids) if most_tokens is None else most_tokens - owners.count(NO_WORD)
    allowed: set[int] = set()
    pieces = Counter(owner for owner in owners if owner != NO_WORD)
    for word in dict.fromkeys(owner for owner in owners if owner != NO_WORD):
        room -= pieces[word]
        if len(allowed) == most_words or room < 0:
            break
        allowed.add(word)
    kept = [i for i, owner in enumerate(owners) if owner == NO_WORD or owner in allowed]
    return [int(ids[i]) for i in kept], [owners[i] for i in kept]


@dataclass(frozen=True)
class Encoded:
    """Padded texts (T,M): ids, mask (True = real), words (the word of a token, -1 special or padding)."""

    ids: Tensor
    mask: Tensor
    words: Tensor

    @property
    def content(self) -> Tensor:
        """(T,M) True where a token belongs to a word of the text."""
        return self.words != NO_WORD


def pad_rows(rows: Iterable[tuple[Sequence[int], Sequence[int | None]]], pad_id: int) -> Encoded:
    """Rows of (ids, words) as rectangles; at least one column."""
    pairs = [(list(ids), [NO_WORD if word is None else int(word) for word in words]) for ids, words in rows]
    longest = max((len(ids) for ids, _ in pairs), default=1) or 1
    ids = torch.full((len(pairs), longest), pad_id, dtype=torch.long)
    owners = torch.full((len(pairs), longest), NO_WORD, dtype=torch.long)
    mask = torch.zeros((len(pairs), longest), dtype=torch.bool)
    for row, (tokens, words) in enumerate(pairs):
        ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        owners[row, : len(tokens)] = torch.tensor(words, dtype=torch.long)
        mask[row, : len(tokens)] = True
    return Encoded(ids, mask, owners)


def augment_encoded(
    encoded: Encoded,
    noise: WordNoise,
    mask_id: int,
    pad_id: int,
    ordinary: Sequence[int] | np.ndarray,
    generators: Sequence[np.random.Generator],
) -> Encoded:
    """`augment_words` on every row with its own generator: no text's noise depends on its batch."""
    if len(generators) != len(encoded.ids):
        raise ValueError(f"{len(encoded.ids)} texts need a generator each, found {len(generators)}")
    rows = []
    for ids, mask, words, generator in zip(encoded.ids, encoded.mask, encoded.words, generators, strict=True):
        rows.append(
            augment_words(ids[mask].tolist(), words[mask].tolist(), noise, mask_id, ordinary, generator)
        )
    return pad_rows(rows, pad_id)


class WordTokenizer:
    """A token a word, for text encoders that learn from scratch: lower case, punctuation apart."""

    def __init__(self, vocabulary: Iterable[str]) -> None:
        entries = [word for word in dict.fromkeys(vocabulary) if word not in SPECIALS]
        wrong = [word for word in entries if not isinstance(word, str) or not word]
        if wrong:
            raise ValueError(f"a vocabulary holds non-empty words, not {wrong[0]!r}")
        self.vocabulary: tuple[str, ...] = (*SPECIALS, *entries)
        self._ids = {word: number for number, word in enumerate(self.vocabulary)}
        self.pad_id, self.unknown_id, self.mask_id, self.start_id, self.end_id = range(len(SPECIALS))

    @classmethod
    def build(cls, texts: Iterable[str], most: int | None = None, least_count: int = 1) -> WordTokenizer:
        """The vocabulary of some texts: the most frequent words first, equals in alphabetical order."""
        counts = Counter(word for text in texts for word, _, _ in split_words(text))
        if not counts:
            raise ValueError("a vocabulary needs texts with at least one word, found none")
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return cls([word for word in ranked if counts[word] >= least_count][:most])

    def __len__(self) -> int:
        return len(self.vocabulary)

    @property
    def ordinary(self) -> range:
        """The ids that are words: what a random replacement is drawn from."""
        return range(len(SPECIALS), len(self.vocabulary))

    def encode(self, text: str, most_words: int | None = None) -> tuple[list[int], list[int]]:
        """[CLS] words [SEP] of one text: ids, and the word index of each token (-1 for the two specials)."""
        words = split_words(text)[:most_words]
        ids = [self._ids.get(word, self.unknown_id) for word, _, _ in words]
        return [self.start_id, *ids, self.end_id], [NO_WORD, *range(len(ids)), NO_WORD]

    def __call__(self, texts: Sequence[str], most_words: int | None = None) -> Encoded:
        """Texts -> ids, mask and words, each (T,M)."""
        if isinstance(texts, str):
            raise ValueError("the tokenizer takes a sequence of texts, found a single string")
        return pad_rows((self.encode(text, most_words) for text in texts), self.pad_id)

    def decode(self, ids: Iterable[int]) -> list[str]:
        """The words of ids, padding left out."""
        return [self.vocabulary[int(number)] for number in ids if int(number) != self.pad_id]

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the vocabulary as JSON."""
        with written_beside(Path(path)) as file:
            json.dump({"vocabulary": self.vocabulary}, file, ensure_ascii=False, indent=0)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> WordTokenizer:
        """Reads what `save` wrote."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"{path}: there is no such vocabulary file") from None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: not a vocabulary in JSON ({error})") from None
        words = content.get("vocabulary") if isinstance(content, dict) else None
        if not isinstance(words, list) or tuple(words[: len(SPECIALS)]) != SPECIALS:
            raise ValueError(f"{path}: expected a 'vocabulary' list that starts with {' '.join(SPECIALS)}")
        return cls(words)

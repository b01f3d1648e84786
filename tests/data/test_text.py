"""Words: how they are split, disturbed in training, capped, and numbered."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seps.data.text import (
    NO_WORD,
    WordNoise,
    WordTokenizer,
    augment_encoded,
    augment_words,
    cap_words,
    split_words,
    words_in_span,
)

MASK = 2
ORDINARY = range(1000, 1100)


def _pieces(words: int, seed: int) -> tuple[list[int], list[int | None]]:
    """[CLS], words of one to three pieces, [SEP]."""
    generator = np.random.default_rng(seed)
    owners = [word for word in range(words) for _ in range(int(generator.integers(1, 4)))]
    return [3, *range(10, 10 + len(owners)), 4], [None, *owners, None]


def test_words_and_their_spans_by_hand() -> None:
    assert split_words("A cat's_toy.") == [
        ("a", 0, 1),
        ("cat", 2, 5),
        ("'", 5, 6),
        ("s", 6, 7),
        ("_", 7, 8),
        ("toy", 8, 11),
        (".", 11, 12),
    ]
    assert words_in_span("the small red star.", 4, 18) == [1, 2, 3]


@given(st.integers(1, 12), st.integers(0, 2**32), st.floats(0, 1), st.floats(0, 0.5), st.floats(0, 0.5))
def test_noise_treats_words_whole_and_never_empties(
    words: int, seed: int, rate: float, mask: float, random: float
) -> None:
    ids, owners = _pieces(words, seed)
    noise = WordNoise(rate, mask, random)
    kept_ids, kept = augment_words(ids, owners, noise, MASK, ORDINARY, np.random.default_rng(seed))
    assert kept_ids[0] == 3
    assert kept_ids[-1] == 4
    assert len(kept_ids) > 2
    for word in range(words):
        before = [token for token, owner in zip(ids, owners, strict=True) if owner == word]
        after = [token for token, owner in zip(kept_ids, kept, strict=True) if owner == word]
        assert after in ([], before, [MASK] * len(before)) or all(token in ORDINARY for token in after)
        assert not after or len(after) == len(before)


def test_noise_shares_are_those_of_the_specification() -> None:
    words = 40_000
    kept_ids, kept = augment_words(
        [10] * words, list(range(words)), WordNoise(), MASK, ORDINARY, np.random.default_rng(0)
    )
    shares = {
        "masked": sum(token == MASK for token in kept_ids) / words,
        "replaced": sum(token in ORDINARY for token in kept_ids) / words,
        "deleted": 1 - len(kept) / words,
    }
    # Four standard deviations of a share of 0.1 over 40,000 words are 0.006.
    assert shares == pytest.approx({"masked": 0.10, "replaced": 0.02, "deleted": 0.08}, abs=0.006)


def test_noise_without_rate_changes_nothing_and_of_full_deletion_one_word_stays() -> None:
    ids, owners = _pieces(6, 0)
    untouched = augment_words(ids, owners, WordNoise(0.0), MASK, ORDINARY, np.random.default_rng(0))
    assert untouched[0] == ids
    for seed in range(10):
        kept = augment_words(
            ids, owners, WordNoise(1.0, 0.0, 0.0), MASK, ORDINARY, np.random.default_rng(seed)
        )
        assert len(set(kept[1]) - {NO_WORD}) == 1
    assert augment_words([3, 4], [None, None], WordNoise(1.0), MASK, ORDINARY, np.random.default_rng(0)) == (
        [3, 4],
        [NO_WORD, NO_WORD],
    )


def test_noise_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rate must lie in \[0, 1\], not 1\.5"):
        WordNoise(1.5)
    with pytest.raises(ValueError, match="shares of one"):
        WordNoise(0.2, 0.8, 0.4)
    with pytest.raises(ValueError, match="equally long, found 1 and 2"):
        augment_words([1], [0, 1], WordNoise(), MASK, ORDINARY, np.random.default_rng(0))


def test_caps_keep_whole_words_and_specials() -> None:
    ids, owners = [3, 10, 11, 12, 13, 14, 4], [None, 0, 0, 1, 2, 2, None]
    assert cap_words(ids, owners, most_words=2) == ([3, 10, 11, 12, 4], [-1, 0, 0, 1, -1])
    assert cap_words(ids, owners, most_words=9, most_tokens=6)[0] == [3, 10, 11, 12, 4]
    assert cap_words(ids, owners, most_words=9, most_tokens=7)[0] == ids
    long = list(range(200))
    assert len(cap_words(long, long)[0]) == 90


def test_tokenizer_by_hand() -> None:
    tokenizer = WordTokenizer.build(["A red star.", "a blue star"])
    assert tokenizer.vocabulary[5:] == ("a", "star", ".", "blue", "red")
    encoded = tokenizer(["A RED moon", "star"])
    assert encoded.ids.tolist() == [[3, 5, 9, 1, 4], [3, 6, 4, 0, 0]]
    assert encoded.mask.tolist() == [[True] * 5, [True, True, True, False, False]]
    assert encoded.words.tolist() == [[-1, 0, 1, 2, -1], [-1, 0, -1, -1, -1]]
    assert encoded.content.sum().item() == 4
    assert tokenizer.decode(encoded.ids[1]) == ["[CLS]", "star", "[SEP]"]
    assert tokenizer(["a red star"], most_words=1).ids.tolist() == [[3, 5, 4]]
    assert tokenizer([""]).ids.tolist() == [[3, 4]]
    assert tokenizer([]).ids.shape == (0, 1)
    assert len(WordTokenizer.build(["a a b b c"], most=2)) == 7
    assert WordTokenizer.build(["a a b"], least_count=2).vocabulary[5:] == ("a",)


def test_tokenizer_word_numbers_are_those_of_split_words() -> None:
    text = "The man's red-striped hat, on the left."
    tokenizer = WordTokenizer.build([text])
    encoded = tokenizer([text])
    spoken = [tokenizer.vocabulary[i] for i in encoded.ids[0, encoded.content[0]].tolist()]
    assert spoken == [word for word, _, _ in split_words(text)]


def test_tokenizer_travels_through_a_file(tmp_path: Path) -> None:
    tokenizer = WordTokenizer.build(["ein grüner Stern"])
    tokenizer.save(tmp_path / "words.json")
    assert WordTokenizer.load(tmp_path / "words.json").vocabulary == tokenizer.vocabulary
    assert [path.name for path in tmp_path.iterdir()] == ["words.json"]


def test_tokenizer_refuses_what_is_no_vocabulary(tmp_path: Path) -> None:
    file = tmp_path / "words.json"
    with pytest.raises(ValueError, match="no such vocabulary file"):
        WordTokenizer.load(file)
    file.write_text("{")
    with pytest.raises(ValueError, match="not a vocabulary in JSON"):
        WordTokenizer.load(file)
    file.write_text(json.dumps({"vocabulary": ["a"]}))
    with pytest.raises(ValueError, match=r"list that starts with \[PAD\] \[UNK\]"):
        WordTokenizer.load(file)
    with pytest.raises(ValueError, match="at least one word"):
        WordTokenizer.build([" "])
    with pytest.raises(ValueError, match="found a single string"):
        WordTokenizer(["a"])("a")
    with pytest.raises(ValueError, match="non-empty words, not ''"):
        WordTokenizer(["a", ""])


def test_the_noise_of_a_text_does_not_depend_on_its_batch() -> None:
    tokenizer = WordTokenizer.build(["a b c d e f g h"])
    texts = ["a b c d e f g h", "h g f e d c b a b c d e"]
    noise = WordNoise(0.6)

    def disturb(chosen: list[int]) -> list[list[int]]:
        encoded = augment_encoded(
            tokenizer([texts[i] for i in chosen]),
            noise,
            tokenizer.mask_id,
            tokenizer.pad_id,
            tokenizer.ordinary,
            [np.random.default_rng(i) for i in chosen],
        )
        assert torch.equal(encoded.mask, encoded.ids != tokenizer.pad_id)
        return [row[mask].tolist() for row, mask in zip(encoded.ids, encoded.mask, strict=True)]

    both = disturb([0, 1])
    assert both == disturb([0]) + disturb([1])
    assert both != [row for text in texts for row in [tokenizer.encode(text)[0]]]
    with pytest.raises(ValueError, match="2 texts need a generator each, found 1"):
        augment_encoded(tokenizer(texts), noise, 2, 0, tokenizer.ordinary, [np.random.default_rng(0)])

"""The first stage: what proposes, what narrows, and that few candidates are enough where it is right."""

import pytest
import torch
from gallery_making import make_gallery, make_model

from seps.gallery import searching
from seps.gallery.rows import mean_word
from seps.gallery.searching import narrow, propose, tokens_of
from seps.slimming import unit
from seps.tokens import Tokens

TEXT = "a small red boat near the sea"


@pytest.fixture(scope="module")
def gallery(tmp_path_factory):
    return make_gallery(tmp_path_factory.mktemp("matched"), 40)


def test_narrowing_ranks_by_the_descriptions_own_term(gallery):
    """The same numbers as the head's, all but for the pictures that have no description."""
    words = gallery.encode_texts([TEXT])
    rows = gallery.store.fetch(
        [row["id"] for batch in gallery.store.scan(["id"]) for row in batch.to_pylist()],
        ["patches", "words", "description"],
    )
    images, dense = tokens_of(gallery.model, rows)
    with torch.no_grad():
        terms = gallery.model.head.inspect(images, words, dense).word_scores[:, 0]
    described = [
        (term, row["id"]) for term, row in zip(terms.tolist(), rows.to_pylist(), strict=True) if row["words"]
    ]
    expected = [item for _, item in sorted(described, key=lambda pair: -pair[0])]
    found = narrow(gallery.store, gallery.model, words, [item for _, item in described], 10)
    assert found == expected[:10]


def test_candidates_are_few_unique_and_of_both_kinds(gallery):
    words = gallery.encode_texts([TEXT])
    with torch.inference_mode():
        found = propose(gallery.store, gallery.model, TEXT, words, 12, None)
        pixel = gallery.model.global_texts(words)[0].tolist()
    assert len(found) == len(set(found)) == 12
    by_pixels = [item for item, _ in gallery.store.nearest("pixel_vector", pixel, 3)]
    assert found[:3] == by_pixels


def test_a_narrow_filter_loses_nothing(gallery):
    words = gallery.encode_texts([TEXT])
    with torch.inference_mode():
        found = propose(gallery.store, gallery.model, TEXT, words, 12, "name < '0005.png'")
    assert len(found) == 5


def test_few_candidates_still_find_the_best(gallery, monkeypatch):
    exact = [hit.id for hit in gallery.search(TEXT, k=1, exact=True)]
    monkeypatch.setattr(searching, "CANDIDATES", 12)
    monkeypatch.setattr(searching, "PROPOSALS", 20)
    assert [hit.id for hit in gallery.search(TEXT, k=1)] == exact


def test_narrowing_needs_a_recipe_that_matches():
    model, _ = make_model("laps")
    with pytest.raises(ValueError, match="expected a recipe that matches descriptions"):
        narrow(None, model, Tokens(torch.randn(1, 2, 32)), ["a"], 1)


def test_the_mean_word_is_the_unit_mean_of_unit_words():
    texts = Tokens.padded(torch.tensor([[[3.0, 0.0], [0.0, 5.0], [9.0, 9.0]]]), [2])
    assert torch.allclose(mean_word(texts), unit(torch.tensor([[1.0, 1.0]])))

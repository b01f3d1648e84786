"""The first stage: what proposes, what ranks the proposals, and that few candidates are enough."""

import pyarrow as pa
import pytest
import torch
from gallery_making import make_folder, make_gallery, make_model, sentence

from seps.gallery import Gallery, indexing, proposing
from seps.gallery.proposing import by_sketches, fuse, propose, scored_roughly
from seps.gallery.rows import mean_word
from seps.gallery.searching import tokens_of
from seps.gallery.sketching import meet, sketch, typical_texts, with_further, word_scores
from seps.gallery.store import ROW
from seps.slimming import unit
from seps.tokens import Tokens

TEXT = "a small red boat near the sea"
COUNT = 40


@pytest.fixture(scope="module", params=["described", "paper", "released", "laps"])
def gallery(request, tmp_path_factory):
    return make_gallery(tmp_path_factory.mktemp(request.param), COUNT, request.param)


@pytest.fixture(scope="module")
def matched(tmp_path_factory):
    return make_gallery(tmp_path_factory.mktemp("matched"), COUNT)


def all_rows(gallery):
    ids = [row["id"] for batch in gallery.store.scan(["id"]) for row in batch.to_pylist()]
    return gallery.store.fetch(ids, [ROW, "patches", "words", "sketch", "pixel_vector", "description"])


def proposed(gallery, text, k, where=None):
    """The names of the pictures that are proposed."""
    still, words = gallery.store.still(), gallery.encode_texts([text])
    rows = propose(still, gallery.model, [text], words, k, where)[0]
    return still.take(rows, ["id"]).column("id").to_pylist()


def test_a_sketch_is_exact_for_the_text_it_was_made_with(gallery):
    """With one guide, nothing is left to differ but sixteen bits: further tokens are met already."""
    model, rows = gallery.model, all_rows(gallery)
    images, dense = tokens_of(model, rows)
    typical = typical_texts(model, gallery.processor)[:1]
    with torch.no_grad():
        expected = model.score(images, typical, dense)[:, 0].tolist()
    packed = pa.array(sketch(model, images, dense, typical, "fp16"), pa.binary())
    rows = rows.set_column(rows.schema.get_field_index("sketch"), "sketch", packed)
    scored = scored_roughly(model, rows.to_batches(), typical)[0]
    assert [scored[row] for row in rows.column(ROW).to_pylist()] == pytest.approx(expected, abs=5e-3)


def test_a_sketch_ranks_a_query_nearly_as_the_exact_score_does(gallery, monkeypatch):
    monkeypatch.setattr(proposing, "SKETCHED_A_RESULT", 2)
    exact = [hit.id for hit in gallery.search(TEXT, k=5, exact=True)]
    found = proposed(gallery, TEXT, 5)
    assert len(found) == 20
    assert set(exact) <= set(found)


def test_rough_scores_carry_the_global_term_and_the_global_weight(tmp_path, monkeypatch):
    model, processor = make_model(global_term="score", global_weight=3.0)
    monkeypatch.setattr(indexing, "typical_texts", lambda *given: typical_texts(*given)[:1])
    gallery = Gallery.create(tmp_path / "g", model, processor)
    gallery.add(make_folder(tmp_path / "photos", 9))
    rows = all_rows(gallery)
    images, dense = tokens_of(model, rows)
    typical = typical_texts(model, processor)[:1]
    with torch.no_grad():
        expected = model.score(images, typical, dense)[:, 0].tolist()
    scored = scored_roughly(model, rows.to_batches(), typical)[0]
    assert [scored[row] for row in rows.column(ROW).to_pylist()] == pytest.approx(expected, abs=0.05)


def test_the_words_term_is_the_heads(matched):
    """The same numbers as the head's, for pictures with and without a description."""
    words = matched.encode_texts([TEXT, sentence(3)])
    rows = all_rows(matched)
    images, dense = tokens_of(matched.model, rows)
    with torch.no_grad():
        seen = matched.model.head.inspect(images, words, dense)
    packed = rows.column("words").combine_chunks()
    found = word_scores(matched.model, packed, words, seen.patch_scores)
    assert torch.allclose(found, seen.word_scores, atol=5e-3)


def test_candidates_are_few_and_unique(matched, monkeypatch):
    monkeypatch.setattr(proposing, "SKETCHED_A_RESULT", 2)
    monkeypatch.setattr(proposing, "DESCRIBED_A_RESULT", 1)
    for where, count in ((None, 20), ("described", 10), ("NOT described", 14)):
        found = proposed(matched, TEXT, 3, where)
        assert len(found) == len(set(found)) == count


def test_a_narrow_filter_loses_nothing(matched):
    assert len(proposed(matched, TEXT, 12, "name < '0005.png'")) == 5
    assert proposed(matched, TEXT, 12, "width = 1") == []


def test_few_candidates_still_find_the_best(matched, monkeypatch):
    exact = [hit.id for hit in matched.search(TEXT, k=1, exact=True)]
    monkeypatch.setattr(proposing, "SKETCHED_A_RESULT", 1)
    monkeypatch.setattr(proposing, "LEAST_DESCRIBED", 20)
    assert [hit.id for hit in matched.search(TEXT, k=1)] == exact


def test_many_results_are_not_cut_to_the_proposals(matched, monkeypatch):
    monkeypatch.setattr(proposing, "LEAST_DESCRIBED", 4)
    monkeypatch.setattr(proposing, "MOST_DESCRIBED", 4)
    assert len(matched.search(TEXT, k=22, where="described")) == 22


def test_a_larger_gallery_proposes_more_up_to_a_bound():
    sizes = (0, 20_000, 60_000, 100_000, 10**9)
    assert [proposing.proposals(rows) for rows in sizes] == [400, 400, 1200, 1600, 1600]


def test_with_and_without_a_description_compete(matched, monkeypatch):
    """Candidates of both kinds are ranked by one score: none has seats of its own."""
    monkeypatch.setattr(proposing, "SKETCHED_A_RESULT", 1)
    everything = matched.search(TEXT, k=COUNT, exact=True)
    third = {
        kind: [hit for hit in everything if (hit.entry.description is not None) is kind][2]
        for kind in (True, False)
    }
    # The third of either kind now has the same score.
    match = matched.model.head.description
    shift = match.absent_shift + (third[True].score - third[False].score) / match.weight
    monkeypatch.setattr(match.absent_shift, "data", shift.detach())
    exact = matched.search(TEXT, k=6, exact=True)
    assert {hit.entry.description is None for hit in exact} == {True, False}
    assert [hit.id for hit in matched.search(TEXT, k=6)] == [hit.id for hit in exact]


def test_beyond_what_is_scanned_the_nearest_pixels_are_sketched(matched, monkeypatch):
    words = matched.encode_texts([TEXT, "dog"])
    still = matched.store.still()
    scanned = by_sketches(still, matched.model, words, COUNT, None)
    monkeypatch.setattr(proposing, "SCANNED", 5)
    assert by_sketches(still, matched.model, words, COUNT, None) == [
        pytest.approx(each, abs=1e-5) for each in scanned
    ]
    monkeypatch.setattr(proposing, "NEAREST", 7)
    near = by_sketches(still, matched.model, words, COUNT, None)
    assert [len(each) for each in near] == [7, 7]


def test_only_half_of_the_branches_may_take_part():
    """A picture without dense text has no second set of tokens, and no score from it."""
    model, processor = make_model("released")
    images = Tokens(torch.randn(2, 16, 32))
    dense = Tokens.padded(torch.randn(2, 4, 32), [4, 0])
    packed = sketch(model, images, dense, typical_texts(model, processor), "fp16")
    alone = sketch(model, images, None, typical_texts(model, processor), "fp16")
    assert packed[0] != alone[0]
    assert packed[1] == alone[1]


def test_further_tokens_are_the_farthest():
    """From the tokens that are there and from each other: what is there already comes last."""
    axes = torch.eye(5)
    tokens = with_further(axes[None, :1], torch.stack([axes[0], axes[1], axes[1], axes[2], axes[3]])[None])
    assert torch.equal(tokens[0], axes[[0, 1, 2, 3]])


def test_further_tokens_are_met_by_words_and_meet_none(gallery):
    """A token that repeats another changes nothing; one that fits the words better changes the score."""
    aligner, words = gallery.model.head.aligner, gallery.encode_texts([TEXT])
    cosines = torch.rand(6, 8, words.lengths.sum()) / 2
    alone = meet(aligner, cosines, None, words)
    again = meet(aligner, torch.cat([cosines, cosines[:, :3]], 1), None, words, 3)
    better = meet(aligner, torch.cat([cosines, cosines[:, :3] + 0.5], 1), None, words, 3)
    assert torch.allclose(again, alone)
    assert (better != alone).all()


def test_fusion_prefers_what_several_rankings_agree_on():
    assert fuse([[1, 2, 3], [2, 4]], 3) == [2, 1, 4]
    assert fuse([[], []], 3) == []


def test_the_mean_word_is_the_unit_mean_of_unit_words():
    texts = Tokens.padded(torch.tensor([[[3.0, 0.0], [0.0, 5.0], [9.0, 9.0]]]), [2])
    assert torch.allclose(mean_word(texts), unit(torch.tensor([[1.0, 1.0]])))

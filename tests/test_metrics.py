"""Recall, ranks, mAP and CMC: hand-worked values, ties, folds, the ancestors' numbers, bad input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seps import metrics
from seps.metrics import measure_folds, measure_ranking, measure_retrieval, rank_queries


def random_retrieval(images: int, texts: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(images, texts, generator=generator),
        torch.randint(images, (texts,), generator=generator),
    )


def test_ranks_worked_by_hand():
    scores = torch.tensor([[0.9, 0.8, 0.7], [0.1, 0.2, 0.95]])
    image_ranks, text_ranks = rank_queries(scores, [0, 1, 1])
    assert image_ranks.tolist() == [1, 1]
    assert text_ranks.tolist() == [1, 2, 1]


def test_recall_worked_by_hand():
    """Ten images, one text each, the right one at rank i + 1 of image i."""
    scores = torch.zeros(10, 10)
    for image in range(10):
        others = [text for text in range(10) if text != image]
        for place, text in enumerate([*others[:image], image, *others[image:]]):
            scores[image, text] = 1 - place / 10
    recall = measure_retrieval(scores, range(10)).image_to_text
    assert (recall.r1, recall.r5, recall.r10) == pytest.approx((10, 50, 100))
    assert (recall.median_rank, recall.mean_rank) == (5, 5.5)
    assert (recall.queries, recall.unmatched) == (10, 0)


def test_the_median_of_an_even_count_is_rounded_down():
    """Ranks 1 and 4: halfway lies 2.5."""
    scores = torch.tensor([[0.9, 0.0, 0.1, 0.2], [0.5, 0.1, 0.6, 0.7]])
    images = measure_retrieval(scores, [0, 1, 0, 0]).image_to_text
    assert (images.median_rank, images.mean_rank) == (2, 2.5)


def test_rsum_adds_both_directions():
    result = measure_retrieval(torch.eye(3), range(3))
    assert result.rsum == pytest.approx(600)
    assert measure_retrieval(-torch.eye(12), range(12)).rsum == 0


def test_golden_retrieval(golden):
    meta, arrays = golden("retrieval_metrics")
    scores = arrays["in.sims"]
    owners = torch.arange(scores.shape[1]) // meta["captions_per_image"]
    result = measure_retrieval(scores, owners)
    for side, expected in ((result.image_to_text, "out.i2t"), (result.text_to_image, "out.t2i")):
        found = (side.r1, side.r5, side.r10, side.median_rank, side.mean_rank)
        assert found == pytest.approx(arrays[expected].tolist(), rel=1e-12)


@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 10_000))
def test_ranks_equal_a_sorted_list(images, texts, seed):
    """Against the plain reading: sort every query's candidates, look for the first right one."""
    scores, owners = random_retrieval(images, texts, seed)
    image_ranks, text_ranks = rank_queries(scores, owners)
    for image in range(images):
        order = scores[image].argsort(descending=True)
        right = [place for place, text in enumerate(order.tolist(), 1) if owners[text] == image]
        assert image_ranks[image] == (right[0] if right else 0)
    for text in range(texts):
        order = scores[:, text].argsort(descending=True).tolist()
        assert text_ranks[text] == order.index(int(owners[text])) + 1


@given(st.integers(2, 12), st.integers(2, 30), st.integers(0, 10_000))
def test_order_of_images_and_texts_does_not_matter(images, texts, seed):
    scores, owners = random_retrieval(images, texts, seed)
    scores = (scores * 2).round()  # ties included
    generator = torch.Generator().manual_seed(seed + 1)
    rows, columns = torch.randperm(images, generator=generator), torch.randperm(texts, generator=generator)
    assert measure_retrieval(scores, owners) == measure_retrieval(
        scores[rows][:, columns], rows.argsort()[owners[columns]]
    )


@given(st.integers(1, 9), st.integers(1, 20), st.integers(1, 50))
def test_chunks_do_not_matter(images, texts, elements):
    scores, owners = random_retrieval(images, texts, elements)
    whole = measure_retrieval(scores, owners)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "CHUNK_ELEMENTS", elements)
        assert measure_retrieval(scores, owners) == whole


def test_constant_scores_are_the_worst_ranking():
    result = measure_retrieval(torch.zeros(20, 100), torch.arange(100) // 5)
    assert result.rsum == 0
    assert result.image_to_text.mean_rank == 96  # behind all 95 wrong texts
    assert result.text_to_image.mean_rank == 20


def test_a_tie_counts_against_the_right_answer_but_not_among_right_answers():
    scores = torch.tensor([[0.5, 0.5, 0.5], [0.0, 0.1, 0.2]])
    image_ranks, text_ranks = rank_queries(scores, [0, 0, 1])
    assert image_ranks.tolist() == [2, 1]
    assert text_ranks.tolist() == [1, 1, 2]


def test_an_image_without_texts_is_reported_and_stays_a_distractor():
    scores = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.0, 1.0]])
    result = measure_retrieval(scores, [0, 1])
    assert (result.image_to_text.queries, result.image_to_text.unmatched) == (3, 1)
    assert result.image_to_text.r1 == 100
    assert result.text_to_image.mean_rank == 1.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_give_the_ranks_of_their_own_numbers(dtype):
    scores, owners = random_retrieval(8, 24, 3)
    scores = scores.to(dtype)
    for found, expected in zip(
        rank_queries(scores, owners), rank_queries(scores.double(), owners), strict=True
    ):
        assert found.tolist() == expected.tolist()


def test_scores_that_carry_a_gradient_are_only_read():
    scores, owners = random_retrieval(4, 8, 0)
    image_ranks, text_ranks = rank_queries(scores.requires_grad_(), owners)
    assert not image_ranks.requires_grad
    assert not text_ranks.requires_grad


def test_folds_are_the_mean_of_their_blocks():
    scores, owners = random_retrieval(10, 60, 5)
    folds = measure_folds(scores, owners, folds=2)
    blocks = []
    for rows in (slice(0, 5), slice(5, 10)):
        texts = [text for text in range(60) if rows.start <= owners[text] < rows.stop]
        blocks.append(measure_retrieval(scores[rows, texts], owners[texts] - rows.start))
    assert folds.rsum == pytest.approx(sum(block.rsum for block in blocks) / 2)
    assert folds.text_to_image.queries == 60
    assert folds.image_to_text.median_rank == sum(block.image_to_text.median_rank for block in blocks) / 2


def test_one_fold_is_the_whole():
    scores, owners = random_retrieval(6, 18, 1)
    assert measure_folds(scores, owners, folds=1) == measure_retrieval(scores, owners)


def test_golden_ranking(golden):
    _, arrays = golden("reid_metrics")
    for protocol, group in (("camera", "cam"), ("scene", "scene")):
        result = measure_ranking(
            arrays["in.dist"],
            arrays["in.q_pid"],
            arrays["in.g_pid"],
            arrays[f"in.q_{group}"],
            arrays[f"in.g_{group}"],
        )
        assert result.mean_average_precision == pytest.approx(
            100 * float(arrays[f"out.map_{protocol}"]), rel=1e-6
        )
        assert result.cmc == pytest.approx((100 * arrays[f"out.cmc_{protocol}"]).tolist(), rel=1e-5)


def test_ranking_worked_by_hand():
    """Right, wrong, right for the first query, whose own copy is removed; right at once for the second."""
    distances = torch.tensor([[0.0, 0.1, 0.2, 0.3], [0.3, 0.2, 0.1, 0.9]])
    result = measure_ranking(distances, [7, 8], [7, 7, 8, 7], [0, 0], [0, 1, 1, 1], depth=3)
    assert result.mean_average_precision == pytest.approx(100 * ((1 + 2 / 3) / 2 + 1) / 2)
    assert result.cmc == pytest.approx((100, 100, 100))
    swapped = measure_ranking(distances, [8, 7], [7, 7, 8, 7], [0, 0], [0, 1, 1, 1], depth=3)
    assert swapped.cmc == pytest.approx((0, 50, 100))
    assert swapped.at(2) == pytest.approx(50)


def test_removed_entries_change_nothing():
    """A gallery entry of the query's own identity and group weighs as much as one that is not there."""
    distances = torch.rand(6, 9)
    ids, groups = torch.arange(9) % 3, torch.arange(9) // 3
    arguments = ([0] * 6, ids, [0] * 6, groups)
    kept = [column for column in range(9) if not (ids[column] == 0 and groups[column] == 0)]
    without = measure_ranking(distances[:, kept], [0] * 6, ids[kept], [0] * 6, groups[kept])
    assert measure_ranking(distances, *arguments) == without


def test_equal_distances_are_the_worst_ranking():
    result = measure_ranking(torch.zeros(1, 4), [0], [0, 1, 2, 0], [9], [0, 0, 0, 0], depth=4)
    assert result.cmc == (0, 0, 100, 100)
    assert result.mean_average_precision == pytest.approx(100 * (1 / 3 + 2 / 4) / 2)


def test_queries_without_a_match_are_counted():
    distances = torch.tensor([[0.1, 0.2], [0.1, 0.2], [0.2, 0.1]])
    result = measure_ranking(distances, [0, 5, 1], [0, 1], [1, 1, 0], [0, 0])
    assert (result.queries, result.unmatched) == (
        3,
        2,
    )  # one of no identity here, one with its own camera only
    assert result.mean_average_precision == 100


def test_ranking_chunks_do_not_matter(monkeypatch):
    distances = torch.rand(7, 30)
    labels = torch.randint(4, (7,)), torch.randint(4, (30,)), torch.randint(2, (7,)), torch.randint(2, (30,))
    whole = measure_ranking(distances, *labels)
    monkeypatch.setattr(metrics, "CHUNK_ELEMENTS", 31)
    assert measure_ranking(distances, *labels) == whole


@pytest.mark.parametrize(
    ("scores", "owners", "sentence"),
    [
        ([[1.0]], [0], "scores: expected a tensor"),
        (torch.zeros(3), [0], "scores: expected a non-empty matrix"),
        (torch.zeros(0, 3), [0, 0, 0], "scores: expected a non-empty matrix"),
        (torch.zeros(2, 2, dtype=torch.long), [0, 1], "scores: expected floating point"),
        (torch.tensor([[1.0, math.nan]]), [0, 0], "scores: expected numbers, found NaN"),
        (torch.zeros(2, 3), [0, 1], "text_images: expected 3 values, found shape"),
        (torch.zeros(2, 2), [0, 2], "text_images: expected rows 0 to 1, found 2"),
        (torch.zeros(2, 2), [-1, 1], "text_images: expected rows 0 to 1, found -1"),
        (torch.zeros(2, 2), [0.0, 1.0], "text_images: expected whole numbers"),
        (torch.zeros(2, 2), ["a", "b"], "text_images: expected 2 whole numbers, found list"),
    ],
)
def test_bad_scores_meet_one_sentence(scores, owners, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        measure_retrieval(scores, owners)


def test_bad_folds_meet_one_sentence():
    with pytest.raises(ValueError, match="^folds: expected a divisor of the 4 images, found 3"):
        measure_folds(torch.zeros(4, 4), range(4), folds=3)
    with pytest.raises(ValueError, match="found none of rows 2 to 3"):
        measure_folds(torch.zeros(4, 2), [0, 1], folds=2)


def test_bad_rankings_meet_one_sentence():
    good = {"query_ids": [0], "gallery_ids": [0, 1], "query_groups": [0], "gallery_groups": [1, 1]}
    with pytest.raises(ValueError, match="^gallery_groups: expected 2 values"):
        measure_ranking(torch.zeros(1, 2), **{**good, "gallery_groups": [1]})
    with pytest.raises(ValueError, match="^distances: expected finite numbers"):
        measure_ranking(torch.tensor([[0.0, math.inf]]), **good)
    with pytest.raises(ValueError, match="^depth: expected at least 1, found 0"):
        measure_ranking(torch.zeros(1, 2), **good, depth=0)
    with pytest.raises(ValueError, match="^gallery_ids: expected a right answer for at least one"):
        measure_ranking(torch.zeros(1, 2), **{**good, "query_ids": [5]})
    with pytest.raises(ValueError, match="^rank: expected 1 to 50, found 51"):
        measure_ranking(torch.zeros(1, 2), **good).at(51)

"""Batches: what is drawn when, exact resumption, shares of processes, and broken images."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from seps.data.images import View
from seps.data.loader import (
    Batch,
    EpochSampler,
    Held,
    caption_counts,
    distinct_batches,
    evaluation_batches,
    training_batches,
)
from seps.data.records import Problems, Record
from seps.data.scenes import Scenes

VIEW = View(16, 16)


@dataclass(frozen=True)
class Shelf:
    """Seven images of one grey each, some of which cannot be read."""

    torn: tuple[int, ...] = ()
    opened: list[int] = field(default_factory=list, compare=False)

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int, /) -> Record:
        return Record(
            Path(f"{index}.png"), (f"grey {index}", "other"), None, "all", f"id{index}", f"list:{index}"
        )

    def open(self, index: int) -> Image.Image:
        """A grey picture, or the sentence of an unreadable one."""
        self.opened.append(index)
        if index in self.torn:
            raise ValueError(f"{index}.png: not a readable image (torn)")
        return Image.new("RGB", (16, 16), (30 * index,) * 3)


def _same(one: list[Batch], other: list[Batch]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.pixels, b.pixels) and a.captions == b.captions and torch.equal(a.indices, b.indices)
        for a, b in zip(one, other, strict=True)
    )


COUNTS = st.lists(st.integers(1, 5), min_size=6, max_size=40)


@given(
    COUNTS, st.integers(1, 3), st.integers(1, 2), st.integers(0, 99), st.sampled_from(["image", "caption"])
)
def test_no_image_stands_twice_in_a_batch_whatever_the_processes(
    counts: list[int], size: int, world: int, seed: int, draws: str
) -> None:
    ranks = [
        list(EpochSampler(counts, size, seed, rank=rank, world_size=world, draws=draws))  # type: ignore[arg-type]
        for rank in range(world)
    ]
    joint = [[draw for part in step for draw in part] for step in zip(*ranks, strict=True)]
    for batch in joint:
        assert len(batch) == size * world
        assert len({draw.record for draw in batch}) == len(batch)
    drawn = [(draw.record, draw.caption) for batch in joint for draw in batch]
    assert all(caption < counts[record] for record, caption in drawn)
    if draws == "image":
        assert (
            len({record for record, _ in drawn}) == len(drawn) == len(counts) // (size * world) * size * world
        )
    whole = list(EpochSampler(counts, size * world, seed, draws=draws))  # type: ignore[arg-type]
    assert whole == joint


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 30), st.integers(0, 999))
def test_with_equal_counts_every_caption_is_drawn_once(images: int, count: int, size: int, seed: int) -> None:
    size = min(size, images)
    sampler = EpochSampler([count] * images, size, seed, draws="caption")
    drawn = [(draw.record, draw.caption) for batch in sampler for draw in batch]
    assert len(set(drawn)) == len(drawn) == images * count // size * size


@given(COUNTS, st.integers(1, 6), st.sampled_from(["image", "caption"]))
def test_epochs_are_equally_long(counts: list[int], size: int, draws: str) -> None:
    sampler = EpochSampler(counts, size, draws=draws)  # type: ignore[arg-type]
    assert len({sampler.at(epoch).steps for epoch in range(5)}) == 1


@given(st.integers(0, 20), st.integers(0, 5))
def test_a_sampler_resumes_at_any_step(step: int, epoch: int) -> None:
    sampler = EpochSampler([2] * 20, 3, seed=7, epoch=epoch)
    whole = list(sampler)
    rest = sampler.at(epoch, step)
    assert list(rest) == whole[step:]
    assert len(rest) == len(whole[step:])
    assert sampler.steps == len(whole) == 6
    assert list(sampler.at(epoch + 1)) != whole


@given(st.integers(0, 99), st.integers(1, 2), st.sampled_from(["image", "caption"]))
def test_groups_fill_batches_of_their_own_in_mixed_order(seed: int, world: int, draws: str) -> None:
    groups = [0] * 13 + [1] * 9
    ranks = [
        list(EpochSampler([2] * 22, 2, seed, rank=rank, world_size=world, draws=draws, groups=groups))  # type: ignore[arg-type]
        for rank in range(world)
    ]
    joint = [[draw.record for part in step for draw in part] for step in zip(*ranks, strict=True)]
    found = [{groups[record] for record in batch} for batch in joint]
    assert all(len(each) == 1 for each in found)
    counts = [sum(each == {group} for each in found) for group in (0, 1)]
    rounds = 1 if draws == "image" else 2
    assert counts == [rounds * groups.count(group) // (2 * world) for group in (0, 1)]
    assert all(len(set(batch)) == len(batch) for batch in joint)


def test_groups_take_turns_at_random() -> None:
    sampler = EpochSampler([1] * 80, 2, seed=1, groups=[0] * 40 + [1] * 40)
    turns = [batch[0].record // 40 for batch in sampler]
    assert turns != sorted(turns)
    assert [batch[0].record // 40 for batch in sampler.at(1)] != turns
    assert list(sampler.at(0, 7)) == list(sampler)[7:]


def test_captions_of_one_image_wait_for_batches_of_their_own() -> None:
    order = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (3, 0), (4, 0)]
    assert list(distinct_batches(order, 2)) == [[(0, 0), (1, 0)], [(0, 1), (2, 0)], [(0, 2), (3, 0)]]


def test_repeats_fill_a_batch_with_captions_of_one_image() -> None:
    sampler = EpochSampler([5], 4, draws="caption", repeats=True)
    assert [[draw.record for draw in batch] for batch in sampler] == [[0, 0, 0, 0]]
    with pytest.raises(ValueError, match="1 images do not fill a batch of 4 different ones"):
        EpochSampler([5], 4, draws="caption")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"batch_size": 0}, "batch size 0 and world size 1 must be positive"),
        ({"rank": 2, "world_size": 2}, "rank must lie in 0 to 1, not 2"),
        ({"epoch": -1}, "must not be negative"),
        ({"draws": "word"}, "draws must be 'image' or 'caption', not 'word'"),
        ({"captions": [1, 0]}, "at least one caption"),
        ({"captions": [1], "batch_size": 2, "repeats": True}, "1 draws an epoch do not fill a batch of 2"),
    ],
)
def test_a_sampler_that_cannot_be_is_refused(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        EpochSampler(**{"captions": [1, 1], "batch_size": 1, **settings})  # type: ignore[arg-type]


def test_training_batches_resume_exactly_and_leave_the_global_random_state_alone() -> None:
    scenes = Scenes(8, size=32)
    sampler = EpochSampler(caption_counts(scenes), 2, seed=3)
    torch.manual_seed(0)
    whole = list(training_batches(scenes, sampler, VIEW))
    after = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(1))
    assert _same(whole[2:], list(training_batches(scenes, sampler.at(0, 2), VIEW)))
    assert not _same(whole, list(training_batches(scenes, sampler.at(1), VIEW)))
    assert whole[0].pixels.shape == (2, 3, 16, 16)
    assert whole[0].owners.tolist() == [0, 1]
    assert whole[0].captions[0] in scenes[int(whole[0].indices[0])].captions
    assert whole[0].dense[1] == scenes[int(whole[0].indices[1])].dense
    words = [[float(g.random()) for g in batch.word_generators(5)] for batch in whole[:2]]
    assert words == [[float(g.random()) for g in batch.word_generators(5)] for batch in whole[:2]]
    assert len({number for row in words for number in row}) == 4


def test_workers_change_nothing() -> None:
    scenes = Scenes(6, size=32)
    sampler = EpochSampler(caption_counts(scenes), 2, seed=3)
    assert _same(
        list(training_batches(scenes, sampler, VIEW)),
        list(training_batches(scenes, sampler, VIEW, workers=2)),
    )


def test_evaluation_batches_hold_every_image_with_all_its_captions() -> None:
    batches = list(evaluation_batches(Shelf(), VIEW, 3))
    assert [batch.indices.tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6]]
    assert batches[1].captions == ("grey 3", "other", "grey 4", "other", "grey 5", "other")
    assert batches[1].owners.tolist() == [0, 0, 1, 1, 2, 2]
    assert batches[1].image_ids == ("id3", "id4", "id5")
    torch.testing.assert_close(batches[0].pixels[1, 0, 0, 0], torch.tensor((30 / 255 - 0.5) / 0.5))
    with pytest.raises(ValueError, match="batch size must be positive, not 0"):
        next(evaluation_batches(Shelf(), VIEW, 0))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_refused_with_one_sentence(workers: int) -> None:
    shelf = Shelf(torn=(4,))
    sampler = EpochSampler(caption_counts(shelf), 7)
    for batches in (
        training_batches(shelf, sampler, VIEW, workers),
        evaluation_batches(shelf, VIEW, 7, workers),
    ):
        with pytest.raises(ValueError, match=r"^list:4: 4\.png: not a readable image \(torn\)$"):
            list(batches)


def test_a_broken_image_is_left_out_of_evaluation_and_counted() -> None:
    problems = Problems("skip")
    batches = list(evaluation_batches(Shelf(torn=(0, 3, 4, 5)), VIEW, 3, problems=problems))
    assert [batch.indices.tolist() for batch in batches] == [[1, 2], [6]]
    assert [problem.where for problem in problems] == ["list:0", "list:3", "list:4", "list:5"]


def test_a_broken_image_is_replaced_in_training_and_counted() -> None:
    shelf, problems = Shelf(torn=(5, 6)), Problems("skip")
    sampler = EpochSampler(caption_counts(shelf), 7)
    [batch] = training_batches(shelf, sampler, VIEW, problems=problems)
    assert sorted(batch.indices.tolist()) == [0, 0, 0, 1, 2, 3, 4]
    # 5 gives way to 6, that to 0; and 6 meets its own turn, but is one problem in this epoch and the next.
    list(training_batches(shelf, sampler.at(1), VIEW, problems=problems))
    assert sorted(problem.where for problem in problems) == ["list:5", "list:6"]
    everything = Shelf(torn=tuple(range(7)))
    with pytest.raises(
        ValueError, match=r"too many broken images in a row: .* nor can the 6 records after it"
    ):
        list(training_batches(everything, sampler, VIEW, problems=Problems("skip")))


def test_a_sampler_of_another_source_is_refused() -> None:
    with pytest.raises(ValueError, match="the sampler counts 3 records, the source 7"):
        next(training_batches(Shelf(), EpochSampler([1] * 3, 1), VIEW))


def test_held_opens_every_image_once() -> None:
    shelf = Shelf()
    held = Held(shelf)
    for _ in range(2):
        assert len(list(evaluation_batches(held, VIEW, 7))) == 1
    assert shelf.opened == list(range(7))
    assert held[3] is held[3]

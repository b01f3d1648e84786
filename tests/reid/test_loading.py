"""P x K batches, resumption, and variation that is the same in every modality."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seps.data.images import View
from seps.data.records import Problems
from seps.reid.data import FilePicture, Sighting
from seps.reid.loading import Examples, IdentitySampler, batches, in_order
from seps.reid.rendered import render_dataset
from seps.reid.views import Variation, rectangle, vary

VIEW = View(32, 16)


@given(
    counts=st.lists(st.integers(2, 9), min_size=4, max_size=9),
    people=st.integers(2, 4),
    each=st.integers(2, 4),
    epoch=st.integers(0, 3),
)
def test_every_batch_holds_p_identities_with_k_pictures(counts, people, each, epoch):
    identities = [place for place, count in enumerate(counts) for _ in range(count)]
    sampler = IdentitySampler(identities, people, each, epoch=epoch)
    found = list(sampler)
    for batch in found:
        owners = Counter(identities[index] for index in batch)
        assert len(owners) == people and set(owners.values()) == {each}
    assert len(found) == sampler.steps == sampler.at(epoch + 5).steps
    once = [index for batch in found for index in batch]
    for index, count in Counter(once).items():
        assert count == 1 or counts[identities[index]] < each


def test_an_epoch_goes_on_where_it_stopped():
    sampler = IdentitySampler([i // 8 for i in range(48)], 3, 4, seed=5)
    whole = list(sampler)
    assert list(sampler.at(0, 2)) == whole[2:] and len(sampler.at(0, 2)) == len(whole) - 2
    assert list(sampler.at(1)) != whole


def test_processes_share_the_batches_out():
    parts = [list(IdentitySampler([i // 8 for i in range(48)], 3, 4, rank=r, world_size=2)) for r in (0, 1)]
    whole = list(IdentitySampler([i // 8 for i in range(48)], 3, 4))
    assert len(parts[0]) == len(parts[1]) == 2
    assert sorted(map(sorted, parts[0] + parts[1])) == sorted(map(sorted, whole))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"people": 5}, "at most the 4 identities"),
        ({"people": 1}, "at least 2 of both"),
        ({"people": 2, "each": 1}, "at least 2 of both"),
        ({"people": 2, "rank": 1}, "rank below world_size"),
    ],
)
def test_a_sampler_refuses_what_cannot_be(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        IdentitySampler([0, 0, 1, 1, 2, 2, 3, 3], **arguments)


def test_aligned_pictures_vary_alike():
    """Coordinates painted into the pictures come out the same in every modality."""
    place = torch.arange(32 * 16, dtype=torch.float32).view(1, 32, 16).expand(3, -1, -1) + 1
    tensors = {"rgb": place, "nir": place + 0, "tir": place + 0}
    for seed in range(20):
        varied = vary(tensors, Variation(0.5, 4, 0.5), np.random.default_rng(seed))
        assert torch.equal(varied["rgb"], varied["nir"]) and torch.equal(varied["rgb"], varied["tir"])


def test_what_is_drawn_does_not_depend_on_the_modalities_there():
    tensors = {"rgb": torch.randn(3, 32, 16), "nir": torch.randn(3, 32, 16)}
    for seed in range(10):
        both = vary(tensors, Variation(), np.random.default_rng(seed))
        alone = vary({"nir": tensors["nir"]}, Variation(), np.random.default_rng(seed))
        assert torch.equal(both["nir"], alone["nir"])


def test_each_variation_does_what_it_says():
    picture = {"rgb": torch.randn(3, 32, 16).add(10)}
    chance = np.random.default_rng
    assert torch.equal(vary(picture, Variation(0, 0, 0), chance(0))["rgb"], picture["rgb"])
    assert torch.equal(vary(picture, Variation(1, 0, 0), chance(0))["rgb"], picture["rgb"].flip(2))
    erased = vary(picture, Variation(0, 0, 1), chance(0))["rgb"] == 0
    share = float(erased.float().mean())
    assert 0.01 < share < 0.5 and torch.equal(erased[0], erased[2])
    moved = [vary(picture, Variation(0, 3, 0), chance(seed))["rgb"] for seed in range(20)]
    assert len({float(each.sum()) for each in moved}) > 5


@given(st.lists(st.floats(0, 0.999), min_size=4, max_size=4), st.integers(8, 64), st.integers(8, 64))
def test_the_erased_rectangle_lies_inside(chances, height, width):
    top, left, bottom, right = rectangle(height, width, chances)
    assert 0 <= top < bottom <= height and 0 <= left < right <= width


def test_an_absent_modality_is_zeros_and_marked():
    whole = render_dataset(4, 2, 2).train[:3]
    lame = Sighting(
        0, 0, 0, "lame", {name: each for name, each in whole[0].pictures.items() if name != "tir"}
    )
    examples = Examples([*whole, lame], ("rgb", "nir", "tir"), VIEW)
    batch = next(batches(examples, in_order(4, 4)))
    assert batch.present["tir"].tolist() == [True, True, True, False]
    assert batch.present["rgb"].all() and not batch.pixels["tir"][3].any()
    assert batch.pixels["nir"].shape == (4, 3, 32, 16) and batch.names[3] == "lame"


def test_an_unreadable_picture_is_refused_or_counted(tmp_path):
    (tmp_path / "bad.jpg").write_bytes(b"nothing")
    pictures = dict(render_dataset(4, 2, 2).train[0].pictures) | {"nir": FilePicture(tmp_path / "bad.jpg")}
    examples = Examples([Sighting(0, 0, 0, "one", pictures)], ("rgb", "nir", "tir"), VIEW)
    with pytest.raises(ValueError, match="bad.jpg: not a readable image"):
        next(batches(examples, [[0]]))
    problems = Problems("skip")
    batch = next(batches(examples, [[0]], problems=problems))
    assert not batch.present["nir"].any() and batch.present["tir"].all()
    assert [each.what.rpartition("; ")[2] for each in problems] == ["that modality counts as absent"]


def test_an_example_is_a_function_of_seed_epoch_and_index():
    sightings = render_dataset(4, 2, 2).train

    def picture(seed, epoch):
        return Examples(sightings, ("rgb",), VIEW, Variation(), seed, epoch)[3][1]["rgb"]

    assert torch.equal(picture(0, 1), picture(0, 1))
    assert not torch.equal(picture(0, 1), picture(0, 2)) and not torch.equal(picture(0, 1), picture(1, 1))

"""The built-in people: the same from the same seed, alike in visible light where they should be."""

import numpy as np
import pytest

from seps.reid.data import without_match
from seps.reid.rendered import CAMERAS, NIGHT, TWINS, compose_person, render_dataset


def pixels(picture) -> np.ndarray:
    return np.asarray(picture.open(), dtype=np.float32)


def test_the_same_seed_draws_the_same():
    one, other = render_dataset(4, 2, 2, seed=5), render_dataset(4, 2, 2, seed=5)
    assert one == other
    assert np.array_equal(pixels(one.train[7].pictures["tir"]), pixels(other.train[7].pictures["tir"]))
    assert render_dataset(4, 2, 2, seed=6).train[0] != one.train[0]


def test_more_people_leave_the_others_as_they_were():
    assert render_dataset(8, 2, 2).train[: 4 * CAMERAS * 2] == render_dataset(4, 2, 2).train


def test_sizes_splits_and_counts():
    dataset = render_dataset(6, 3, 3, size=(96, 48))
    assert len(dataset.train) == 6 * CAMERAS * 3 and len(dataset.query) == 3 * CAMERAS
    assert len(dataset.gallery) == 3 * CAMERAS * 2
    assert {each.identity for each in dataset.query} == {each.identity for each in dataset.gallery}
    assert not {each.identity for each in dataset.train} & {each.identity for each in dataset.query}
    assert {picture.open().size for picture in dataset.train[0].pictures.values()} == {(48, 96)}
    for protocol in ("camera", "scene"):
        assert not without_match(dataset.query, dataset.gallery, protocol)


def test_some_people_differ_in_infrared_only():
    people = [compose_person(0, 0, number) for number in range(60)]
    for start in range(0, 60, TWINS):
        group = people[start : start + TWINS]
        looks = {(each.shirt, each.trousers, each.build) for each in group}
        infrared = {(each.mark, each.mark_place, each.warmth, each.warm_place) for each in group}
        assert len(looks) == (1 if start // TWINS % 2 == 0 else TWINS)
        assert len(infrared) == TWINS


def test_near_infrared_shows_the_mark_and_visible_light_does_not():
    """Two who look alike, from the same camera at the same visit: only the infrared pictures differ."""
    from seps.reid.rendered import DrawnPicture, compose_visit

    one, other = compose_person(0, 0, 0), compose_person(0, 0, 1)
    visit = compose_visit(0, 0, 1, 0)

    def difference(modality):
        first, second = (DrawnPicture(person, visit, modality, (128, 64)) for person in (one, other))
        return np.abs(pixels(first) - pixels(second)).max()

    assert difference("rgb") == 0 and difference("nir") > 50 and difference("tir") > 50


def test_the_night_camera_is_dark_in_visible_light_only():
    dataset = render_dataset(4, 2, 2)
    night = next(each for each in dataset.train if each.camera == NIGHT)
    day = next(each for each in dataset.train if each.camera == 0)
    assert pixels(night.pictures["rgb"]).mean() < 0.4 * pixels(day.pictures["rgb"]).mean()
    assert pixels(night.pictures["nir"]).mean() > 0.7 * pixels(day.pictures["nir"]).mean()


@pytest.mark.parametrize("arguments", [{"people": 3}, {"test_people": 1}, {"visits": 1}, {"size": (16, 64)}])
def test_bad_settings_meet_one_sentence(arguments):
    with pytest.raises(ValueError, match="expected at least"):
        render_dataset(**{"people": 4, "test_people": 2, "visits": 2, **arguments})

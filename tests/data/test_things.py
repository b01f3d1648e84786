"""Scenes as words: reproducible from a seed, and twins of which one caption is untrue."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seps.data.things import RADII, ROOM, Phrase, Scene, compose, twin
from seps.data.wording import captions, relation

SEEDS = st.integers(0, 2**31)
INDICES = st.integers(0, 2_999_999)


def _holds(scene: Scene, first: dict[str, str], stands: str, second: dict[str, str]) -> bool:
    """Whether any two things of a scene fit two descriptions and stand so: what makes a caption true."""
    return any(
        scene.things[i].fits(first) and scene.things[j].fits(second) and relation(scene, i, j) == stands
        for i, j in itertools.permutations(range(len(scene.things)), 2)
    )


def _said(scene: Scene, phrase: Phrase) -> tuple[dict[str, str], str, dict[str, str]]:
    one, other = scene.things[phrase.first], scene.things[phrase.second]
    return (
        {name: getattr(one, name) for name in ("shape", *phrase.first_attributes)},
        relation(scene, phrase.first, phrase.second),
        {name: getattr(other, name) for name in ("shape", *phrase.second_attributes)},
    )


@given(SEEDS, INDICES)
def test_a_scene_keeps_its_promises(seed: int, index: int) -> None:
    scene = compose(seed, index)
    assert scene == compose(seed, index)
    assert 3 <= len(scene.things) <= 6
    looks = [(thing.shape, thing.colour) for thing in scene.things]
    assert len(set(looks)) == len(looks)
    for i, j in itertools.combinations(range(len(scene.things)), 2):
        one, other = scene.things[i], scene.things[j]
        if scene.overlap != (i, j):
            assert math.hypot(one.x - other.x, one.y - other.y) >= 2 * ROOM - 1e-3
    assert all(ROOM - 1e-3 <= place <= 1 - ROOM + 1e-3 for t in scene.things for place in (t.x, t.y))
    assert len({(phrase.first, phrase.second) for phrase in scene.phrases}) == 5
    for phrase in scene.phrases:
        first, _, second = _said(scene, phrase)
        assert sum(thing.fits(first) for thing in scene.things) == 1
        assert sum(thing.fits(second) for thing in scene.things) == 1


@given(SEEDS, st.integers(0, 4))
def test_the_caption_is_true_of_the_scene_and_untrue_of_its_twin(seed: int, caption: int) -> None:
    scene = compose(seed, 0)
    found = twin(scene, caption, np.random.default_rng(seed))
    phrase = scene.phrases[caption]
    assert _holds(scene, *_said(scene, phrase))
    assert not _holds(found.scene, *_said(scene, phrase))
    assert _holds(found.scene, *_said(found.scene, phrase))
    assert captions(found.scene)[caption].text != captions(scene)[caption].text


@given(SEEDS, st.integers(0, 4))
def test_a_twin_differs_in_one_thing_only(seed: int, caption: int) -> None:
    scene = compose(seed, 0)
    found = twin(scene, caption, np.random.default_rng(seed))
    changed = [i for i, (a, b) in enumerate(zip(scene.things, found.scene.things, strict=True)) if a != b]
    assert found.scene.backdrop == scene.backdrop
    assert found.scene.phrases == scene.phrases
    if found.change == "relation":
        pair = {scene.phrases[caption].first, scene.phrases[caption].second}
        assert set(changed) in (pair, set())
        assert (found.scene.order != scene.order) == (not changed)
    else:
        assert changed == [found.thing]
        one, other = scene.things[found.thing], found.scene.things[found.thing]
        assert getattr(one, found.change) != getattr(other, found.change)
        kept = {"shape", "colour", "texture", "size", "x", "y", "turn"} - {found.change}
        assert all(getattr(one, name) == getattr(other, name) for name in kept)
        if found.change == "size":
            grown = RADII[other.size] / RADII[one.size]
            assert other.radius / one.radius == pytest.approx(grown, rel=2e-3)


def test_twins_of_many_scenes_keep_what_holds_for_scenes() -> None:
    for index in range(300):
        found = twin(compose(1, index), index % 5, np.random.default_rng(index))
        things = found.scene.things
        assert len({(thing.shape, thing.colour) for thing in things}) == len(things)
        assert found.change != "texture" or things[found.thing].texture != "plain"
        for i, j in itertools.combinations(range(len(things)), 2):
            near = math.hypot(things[i].x - things[j].x, things[i].y - things[j].y) < 2 * ROOM - 1e-3
            assert near == (found.scene.overlap is not None and {i, j} == set(found.scene.overlap))


def test_every_kind_of_change_occurs_and_can_be_asked_for() -> None:
    kinds = {
        twin(compose(0, i), k, np.random.default_rng([i, k])).change for i in range(20) for k in range(5)
    }
    assert kinds == {"shape", "colour", "texture", "size", "relation"}
    assert twin(compose(0, 0), 0, np.random.default_rng(0), "shape").change == "shape"
    silent = next(
        (scene, k)
        for scene in (compose(0, i) for i in range(20))
        for k, p in enumerate(scene.phrases)
        if "size" not in p.first_attributes + p.second_attributes
    )
    with pytest.raises(ValueError, match="says nothing of the size"):
        twin(*silent, np.random.default_rng(0), "size")
    with pytest.raises(ValueError, match="caption must lie in 0 to 4, not 5"):
        twin(compose(0, 0), 5, np.random.default_rng(0))


def test_seeds_and_indices_differ() -> None:
    scenes = {compose(seed, index) for seed in range(5) for index in range(5)}
    assert len(scenes) == 25


@given(SEEDS)
def test_a_scene_travels_through_json(seed: int) -> None:
    scene = compose(seed, 1)
    assert Scene.from_dict(json.loads(json.dumps(scene.to_dict()))) == scene


def test_what_is_no_scene_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative, found -1 and 0"):
        compose(-1, 0)
    with pytest.raises(ValueError, match="2 to 6 things, not 3 to 7"):
        compose(0, 0, 3, 7)
    with pytest.raises(ValueError, match="not the values of a scene: KeyError 'things'"):
        Scene.from_dict({})

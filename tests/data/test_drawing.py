"""Drawing: the truth of what is where is exact, and the picture shows it."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seps.data.drawing import FORMS, INKS, PATTERNS, coverage, draw, pool, visible
from seps.data.things import BACKDROPS, COLOURS, SHAPES, TEXTURES, Backdrop, Scene, Thing, compose

GROUND = Backdrop("cloud", 0.5, 0.7, 0)


def _square(x: float, y: float, side: float) -> Thing:
    # A square reaches 0.8 of its radius each way.
    return Thing("square", "red", "plain", "large", x, y, side / 1.6, 0.0)


def _scene(*things: Thing) -> Scene:
    return Scene(things, tuple(range(len(things))), None, (), GROUND)


def test_coverage_of_a_rectangle_by_hand() -> None:
    # From pixel 16 to 48 across and from 32 to 64 down, in a picture of 128 cut into cells of 32.
    found = coverage(_scene(_square(32 / 128, 48 / 128, 32 / 128)), 4, 4)
    expected = np.zeros((1, 4, 4))
    expected[0, 1, 0] = 0.5
    expected[0, 1, 1] = 0.5
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_what_stands_in_front_hides_what_is_behind() -> None:
    behind, before = _square(0.25, 0.25, 0.25), _square(0.375, 0.25, 0.25)
    found = coverage(_scene(behind, before), 1, 1)[:, 0, 0]
    np.testing.assert_allclose(found, [0.25 * 0.125, 0.25 * 0.25], atol=1e-6)
    turned = coverage(replace(_scene(behind, before), order=(1, 0)), 1, 1)[:, 0, 0]
    np.testing.assert_allclose(turned, [0.25 * 0.25, 0.25 * 0.125], atol=1e-6)


def test_areas_of_round_and_pointed_forms() -> None:
    def area(shape: str) -> float:
        thing = Thing(shape, "red", "plain", "large", 0.5, 0.5, 0.25, 0.1)
        return float(coverage(_scene(thing), 1, 1, size=256)[0, 0, 0]) / 0.25**2

    assert area("circle") == pytest.approx(0.88 * math.pi, rel=2e-3)
    assert area("ring") == pytest.approx((0.9 - 0.24) * math.pi, rel=2e-3)
    assert area("triangle") == pytest.approx(3 * math.sqrt(3) / 4, rel=3e-3)
    assert area("hexagon") == pytest.approx(3 * math.sqrt(3) / 2, rel=2e-3)
    assert area("diamond") == pytest.approx(2 * 0.8 * 1, rel=3e-3)


def test_pooling_is_exact_where_cells_end_inside_pixels() -> None:
    shown = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    np.testing.assert_allclose(
        pool(shown, 1, 2), [[[(1.5 + 0.5 * 2.5) / 1.5, (3.5 + 0.5 * 2.5) / 1.5]]], rtol=1e-6
    )
    np.testing.assert_allclose(pool(shown, 4, 3)[0], np.repeat(shown[0], 2, axis=0))


@given(st.integers(0, 2**31), st.integers(1, 20), st.integers(1, 20))
def test_coverage_is_a_share_and_no_grid_changes_the_whole(seed: int, rows: int, cols: int) -> None:
    scene = compose(seed, 0)
    found = coverage(scene, rows, cols, size=64)
    assert found.shape == (len(scene.things), rows, cols)
    assert found.min() >= 0
    assert found.sum(0).max() <= 1 + 1e-5
    np.testing.assert_allclose(found.mean((1, 2)), visible(scene, 64).mean((1, 2)), rtol=1e-4)


def test_the_picture_shows_a_thing_where_the_truth_says() -> None:
    for index in range(10):
        scene = compose(0, index)
        picture = np.asarray(draw(scene, 128), dtype=float)
        for thing, shown in zip(scene.things, visible(scene, 128), strict=True):
            inside = picture[shown > 0.99]
            if thing.texture == "plain" and len(inside) > 30:
                # Light and shine move the ink, but never nearer to another colour.
                near = {name: np.abs(inside.mean(0) - ink).sum() for name, ink in INKS.items()}
                assert min(near, key=lambda name: near[name]) == thing.colour


def test_removing_a_thing_changes_the_picture_only_near_it() -> None:
    scene = _scene(_square(0.25, 0.25, 0.25), _square(0.75, 0.75, 0.25))
    alone = _scene(scene.things[0])
    difference = np.abs(np.asarray(draw(scene), dtype=int) - np.asarray(draw(alone), dtype=int)).sum(-1)
    assert difference[:70, :].max() == 0
    assert difference[96, 96] > 50


def test_pictures_are_reproducible_at_any_size_and_all_forms_are_drawn() -> None:
    scene = compose(3, 4)
    assert draw(scene, 48).tobytes() == draw(scene, 48).tobytes()
    assert draw(scene, 200).size == (200, 200)
    assert set(FORMS) == set(SHAPES)
    assert set(INKS) == set(COLOURS)
    assert set(PATTERNS) | {"plain"} == set(TEXTURES)
    grounds = {
        draw(replace(scene, things=(), order=(), backdrop=replace(GROUND, pattern=p))).tobytes()
        for p in BACKDROPS
    }
    assert len(grounds) == len(BACKDROPS)
    with pytest.raises(ValueError, match="at least one row and one column, not 0x4"):
        coverage(scene, 0, 4)

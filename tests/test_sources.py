"""Sources joined one behind the other."""

import pytest

from making import refusal
from seps.data.scenes import Scenes
from seps.sources import Joined, ReadOptions, SceneOptions, open_source


def test_joined_sources_keep_their_order_and_their_pictures() -> None:
    parts = (Scenes(3, 0, "train", 64), Scenes(2, 1, "train", 64))
    joined = Joined(parts)
    assert len(joined) == 5
    expected = [(part, place) for part in parts for place in range(len(part))]
    for index, (part, place) in enumerate(expected):
        assert joined[index] == part[place]
        assert joined.open(index).tobytes() == part.open(place).tobytes()
    for outside in (5, -1):
        with pytest.raises(IndexError, match=f"expected 0 to 4, found {outside}"):
            joined[outside]


@pytest.mark.parametrize(("name", "least"), [("train", 1), ("dev", 1), ("seed", 0), ("size", 16)])
def test_scenes_that_cannot_be_drawn_are_refused(name: str, least: int) -> None:
    sentence = refusal(lambda: SceneOptions(**{name: least - 1}))
    assert sentence == f"scenes.{name}: expected at least {least}, found {least - 1}"


@pytest.mark.parametrize("name", ["limit", "captions_per_image"])
def test_nothing_is_no_count_of_what_to_read(name: str) -> None:
    assert refusal(lambda: ReadOptions(**{name: 0})) == f"{name}: expected at least 1, found 0"


@pytest.mark.parametrize(
    ("name", "value"), [("dense", "d.jsonl"), ("images", "pictures"), ("captions_per_image", 2)]
)
def test_what_scenes_would_not_heed_is_refused(name: str, value: object) -> None:
    sentence = refusal(lambda: open_source("scenes", ReadOptions(**{name: value}), "test"))
    assert sentence == f"{name}: expected none, since scenes are drawn with their texts, found {value!r}"

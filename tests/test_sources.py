"""Sources joined one behind the other."""

import pytest

from seps.data.scenes import Scenes
from seps.sources import Joined


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

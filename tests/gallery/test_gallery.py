"""A gallery from the first picture to the last: add, search, change, remove, compact."""

import io
import json
import os
import shutil
from datetime import datetime
from pathlib import Path

import pytest
import torch
from gallery_making import make_folder, make_gallery, make_model, make_picture, picture_bytes, sentence
from PIL import Image

from seps.data.records import Problems
from seps.gallery import Gallery, MissingPictureError, Pace, Picture, Said
from seps.gallery.rows import essence, identify
from seps.gallery.store import FORMAT, Store
from seps.model import load
from seps.recipe import described

COUNT = 60
QUERIES = ["a red dog", "small boat near the sea", sentence(7), "unknownword", "🐕 כלב אדום"]


@pytest.fixture(scope="module", params=["described", "paper", "released", "laps"])
def gallery(request, tmp_path_factory):
    return make_gallery(tmp_path_factory.mktemp(request.param), COUNT, request.param)


@pytest.fixture
def small(tmp_path):
    return make_gallery(tmp_path, 6)


def direct_scores(gallery, text):
    """Scores of the pictures themselves, nothing stored in between."""
    model, processor = gallery.model, gallery.processor
    scores = {}
    for number in range(COUNT):
        images = gallery.encode_images([make_picture(number)])
        dense = None
        if number % 3 and model.recipe.dense != "none":
            read = processor.texts([sentence(number)], model.recipe.description_length)
            dense = model.encode_texts(read["ids"], read["mask"])
        with torch.no_grad():
            scores[f"{number:04d}.png"] = model.score(images, gallery.encode_texts([text]), dense)[
                0, 0
            ].item()
    return scores


def test_stored_scores_are_the_models(gallery):
    """All but for the eight bits, in the same order where the scores are further apart than those."""
    expected = direct_scores(gallery, "a red dog under a tree")
    found = gallery.search("a red dog under a tree", k=COUNT, exact=True)
    assert len(found) == COUNT
    assert [hit.score for hit in found] == sorted((hit.score for hit in found), reverse=True)
    for hit in found:
        assert hit.score == pytest.approx(expected[hit.entry.name], abs=0.02)


@pytest.mark.parametrize("text", QUERIES)
def test_two_stages_find_what_the_full_scan_finds(gallery, text):
    """With more candidates than pictures, nothing can be missed."""
    exact = gallery.search(text, k=10, exact=True)
    assert [hit.id for hit in gallery.search(text, k=10)] == [hit.id for hit in exact]


def test_a_batch_gives_what_single_queries_give(gallery):
    batch = gallery.search(QUERIES * 3, k=5)
    for place, text in enumerate(QUERIES * 3):
        single = gallery.search(text, k=5)
        assert [hit.id for hit in batch[place]] == [hit.id for hit in single]
        assert [hit.score for hit in batch[place]] == pytest.approx([hit.score for hit in single], abs=1e-4)
    assert gallery.search([], k=3) == []


def test_a_picture_finds_itself(gallery):
    found = gallery.search(make_picture(7), k=3)
    assert found[0].entry.name == "0007.png"
    assert found[0].score == pytest.approx(1, abs=2e-3)
    mixed = gallery.search(["a red dog", make_picture(7)], k=3)
    assert [hit.id for hit in mixed[1]] == [hit.id for hit in found]


def test_texts_are_found_by_picture(gallery):
    found = gallery.search_texts(make_picture(4), k=5)
    assert len(found) == 5
    assert [hit.score for hit in found] == sorted((hit.score for hit in found), reverse=True)
    assert all(gallery.entry(hit.id).description == hit.text for hit in found)
    given = gallery.search_texts(make_picture(4), ["a dog", "a cat", "a house"], k=2)
    assert len(given) == 2
    assert {hit.text for hit in given} < {"a dog", "a cat", "a house"}
    with pytest.raises(ValueError, match="texts: expected at least one"):
        gallery.search_texts(make_picture(4), [])


def test_filters_hold_in_both_stages(gallery):
    for exact in (False, True):
        found = gallery.search("a red dog", k=20, where="name >= '0050.png'", exact=exact)
        assert {hit.entry.name for hit in found} == {f"{number:04d}.png" for number in range(50, 60)}
        assert gallery.search("a red dog", where="width = 1", exact=exact) == []
    folder = gallery.entry(gallery.search("dog", k=1)[0].id).folder
    assert len(gallery.search("dog", where=f"folder = '{folder}' AND taken > date '2000-01-01'")) == 10
    assert gallery.search("dog", where="array_has(tags, 'sea')") == []


@pytest.mark.parametrize(
    "where",
    [
        *("nope = 1", "name LIKE", "name", "1; DROP TABLE images", "path = 3", "'", " "),
        # What the engine would pass over in silence.
        *("width > 3 width < 2", "1 = 1; DROP TABLE images", "width > 3 LIMIT 1", "width > 3 ORDER BY name"),
    ],
)
@pytest.mark.parametrize("exact", [False, True])
def test_a_broken_filter_is_one_sentence(gallery, where, exact):
    with pytest.raises(ValueError, match="filter: expected a condition over id, path, .*, found ") as caught:
        gallery.search("a red dog", where=where, exact=exact)
    assert "\n" not in str(caught.value)
    assert ".rs" not in str(caught.value)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("", "query: expected a text, found an empty one"),
        (" \n\t ", "query: expected a text, found an empty one"),
        ("dog " * 10_000, "query: expected at most 90 words, found 10000"),
        ("half \ud83d", "query: expected valid Unicode"),
        (["a", 3], "query: expected a text or a picture, found int at 1"),
    ],
)
def test_a_bad_query_is_one_sentence(small, query, message):
    with pytest.raises(ValueError, match=message):
        small.search(query)


@pytest.mark.parametrize("k", [0, -1, 1001, 2.0, True])
def test_a_bad_count_is_one_sentence(small, k):
    with pytest.raises(ValueError, match="k: expected 1 to 1000 results, found"):
        small.search("dog", k=k)


def test_what_did_not_change_is_left_alone(small, tmp_path):
    paths = sorted((tmp_path / "photos").glob("*.png"))
    version = small.store._table.version
    os.utime(paths[0])
    report = small.add(paths)
    assert (report.added, report.replaced, report.unchanged) == (0, 0, 6)
    assert small.store._table.version == version


def test_what_changed_is_replaced(small, tmp_path):
    paths = sorted((tmp_path / "photos").glob("*.png"))
    make_picture(99, (10, 90)).save(paths[0])
    paths[1].with_suffix(".txt").write_text("a yellow house")
    report = small.add(paths)
    assert (report.added, report.replaced, report.unchanged) == (0, 2, 4)
    assert len(small) == 6
    changed = small.entry(Picture(paths[0]).id)
    assert (changed.width, changed.height) == (10, 90)
    assert small.entry(Picture(paths[1]).id).description == "a yellow house"
    assert small.search("yellow", k=1, where="description = 'a yellow house'")[0].entry.name == "0001.png"


def test_a_description_is_never_taken_away(small, tmp_path):
    paths = sorted((tmp_path / "photos").glob("*.png"))
    before = small.entry(Picture(paths[1]).id).description
    paths[1].with_suffix(".txt").unlink()
    assert small.add(paths).unchanged == 6
    make_picture(98).save(paths[1])
    assert small.add(paths).replaced == 1
    assert small.entry(Picture(paths[1]).id).description == before


def test_pictures_may_come_as_bytes(small):
    content = picture_bytes(55, "WEBP")
    picture = Picture(content, name="upload.webp", description="a blue boat", tags=("sea", "boat"))
    assert small.add([picture, picture]).added == 1
    entry = small.entry(picture.id)
    assert (entry.path, entry.folder, entry.name, entry.tags) == (None, None, "upload.webp", ("sea", "boat"))
    assert small.search("boat", where="array_has(tags, 'sea')")[0].id == picture.id
    assert small.picture(picture.id).size == (48, 40)
    with pytest.raises(ValueError, match=r"broken\.png: not a readable image"):
        small.add([Picture(b"\x89PNG nothing", name="broken.png")])
    assert len(small) == 7


def test_a_picture_whose_file_is_gone_still_shows_its_thumbnail(small, tmp_path):
    found = small.search("dog", k=1)[0]
    Path(found.entry.path).unlink()
    assert small.picture(found.id).size == (48, 40)
    with Image.open(io.BytesIO(small.thumbnail(found.id))) as image:
        assert (image.format, image.size) == ("JPEG", (48, 40))


def test_vanished_pictures_go_only_when_asked(small, tmp_path):
    paths = sorted((tmp_path / "photos").glob("*.png"))
    other = make_folder(tmp_path / "photos2", 2)
    small.add(other)
    paths[0].unlink()
    other[0].unlink()
    small.add(paths[1:])
    assert len(small) == 8
    assert small.prune(tmp_path / "photos") == 1
    assert len(small) == 7
    with pytest.raises(ValueError, match="expected a folder, found none; nothing was removed"):
        small.prune(tmp_path / "photos3")


def test_removing(small):
    ids = [hit.id for hit in small.search("dog", k=2)]
    assert small.remove(ids) == 2
    assert small.remove(ids) == 0
    assert small.remove(where="name = '0000.png' OR name = '0001.png' OR name = '0002.png'") > 0
    with pytest.raises(MissingPictureError, match=f"found '{ids[0]}'"):
        small.entry(ids[0])
    with pytest.raises(ValueError, match="found neither"):
        small.remove()
    for where in ("nope", "name = '0003.png' name = '0004.png'"):
        with pytest.raises(ValueError, match="filter: expected a condition"):
            small.remove(where=where)
    assert small.search("dog", where="width > 3 -- and so on")


def test_an_identity_cannot_carry_a_condition(small):
    with pytest.raises(MissingPictureError):
        small.entry("' OR 1=1 --")
    assert small.remove(["' OR 1=1 --"]) == 0
    assert len(small) == 6


def test_compacting_changes_no_answer(small, tmp_path):
    for number in range(4):
        small.add([Picture(picture_bytes(200 + number), description=sentence(number))])
    small.remove(where="name = '0000.png'")
    before = small.search(QUERIES[:3], k=9)
    fragments = small.stats()["fragments"]
    small.compact()
    after = Gallery.open(small.location, small.model, small.processor).search(QUERIES[:3], k=9)
    assert small.stats()["fragments"] < fragments
    assert [[hit.id for hit in hits] for hits in after] == [[hit.id for hit in hits] for hits in before]


def test_the_statistics_count(small):
    stats = small.stats()
    assert (stats["images"], stats["described"]) == (6, 4)
    assert stats["bytes"] > 6 * 16 * (32 + 4)
    assert stats["indexes"] == {"id": "BTree", "description": "FTS"}


def test_another_model_is_refused(small):
    other = make_model(seed=1)
    with pytest.raises(ValueError, match="expected the model it was indexed with"):
        Gallery.open(small.location, *other)
    again = Gallery.open(small.location, *make_model())
    assert [hit.id for hit in again.search("dog")] == [hit.id for hit in small.search("dog")]
    with pytest.raises(ValueError, match="expected both or neither"):
        Gallery.open(small.location, other[0])


def test_the_identity_is_that_of_what_makes_the_rows(tmp_path):
    from dataclasses import replace

    model, processor = make_model()
    known = identify(model, processor)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    assert identify(*load(tmp_path)) == known
    assert identify(*make_model(seed=1)) != known
    # Options of training and of scoring make no other rows.
    assert identify(*make_model(recipe=described(mixing=0.1, description_dropout=0.0))) == known
    assert identify(*make_model(recipe=described(description_length=99))) != known
    processor.view = replace(processor.view, mean=(0.4, 0.5, 0.5))
    assert identify(model, processor) != known
    spec = {"kind": "light", "heads": 4, "neck": {"layers": 0, "heads": 2, "dropout": 0.1}, "tuning": "full"}
    assert essence(spec) == {"kind": "light", "heads": 4, "neck": {"heads": 2}}


def test_without_a_model_a_gallery_can_be_read_but_not_searched(small):
    bare = Gallery.open(small.location)
    assert len(bare) == 6
    with pytest.raises(ValueError, match="expected a model for this"):
        bare.search("dog")


def test_a_wrong_place_is_one_sentence(tmp_path, small):
    with pytest.raises(ValueError, match=r"nowhere: expected a gallery, found nothing"):
        Gallery.open(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(ValueError, match="found a folder without one"):
        Gallery.open(tmp_path / "photos")
    with pytest.raises(
        ValueError, match=r"expected an empty folder for a new gallery, found 0000\.png in it"
    ):
        Gallery.create(tmp_path / "photos", small.model, small.processor)
    with pytest.raises(ValueError, match="expected no gallery to be there yet"):
        Gallery.create(small.location, small.model, small.processor)
    (tmp_path / "file").write_text("x")
    for make in (Gallery.open, lambda place: Gallery.create(place, small.model, small.processor)):
        with pytest.raises(ValueError, match="found a file"):
            make(tmp_path / "file")


def test_a_gallery_may_be_moved(small, tmp_path):
    shutil.move(small.location, tmp_path / "elsewhere")
    moved = Gallery.open(tmp_path / "elsewhere", small.model, small.processor)
    assert len(moved.search("dog", k=6)) == 6


def test_descriptions_are_written_for_those_that_have_none(tmp_path):
    model, processor = make_model()
    gallery = Gallery.create(tmp_path / "g", model, processor)
    paths = make_folder(tmp_path / "photos", 6)
    asked = []

    def describe(pictures):
        asked.extend(pictures)
        return [f"a {picture.width} house" for picture in pictures]

    gallery.add(paths, describe=describe)
    assert len(asked) == 2
    assert gallery.entry(Picture(paths[0]).id).description == "a 48 house"
    assert gallery.add(paths, describe=describe).unchanged == 6
    assert len(asked) == 2


def test_commits_and_batches_change_nothing(tmp_path):
    model, processor = make_model()
    paths = make_folder(tmp_path / "photos", 9)
    answers = []
    for number, pace in enumerate((Pace(), Pace(batch=2, commit=4, threads=1))):
        gallery = Gallery.create(tmp_path / str(number), model, processor)
        counted = []
        gallery.add(paths, pace, advance=counted.append)
        assert sum(counted) == 9
        answers.append([(hit.id, round(hit.score, 4)) for hit in gallery.search("dog", k=9)])
    assert answers[0] == answers[1]


def test_dates_and_tags_can_be_filtered(tmp_path):
    exif = Image.Exif()
    exif.get_ifd(0x8769)[36867] = "2001:02:03 04:05:06"
    make_picture(1).save(tmp_path / "a.jpg", exif=exif)
    model, processor = make_model()
    gallery = Gallery.create(tmp_path / "g", model, processor)
    gallery.add([tmp_path / "a.jpg"], said=lambda _: Said(None, ("old",)))
    entry = gallery.search("dog", where="taken < date '2002-01-01' AND array_has(tags, 'old')")[0].entry
    assert entry.taken == datetime(2001, 2, 3, 4, 5, 6)
    assert gallery.search("dog", where="taken < timestamp '2001-02-03 04:05:06'") == []


def test_what_the_table_says_of_itself_is_checked(small):
    about = small.store.about
    assert about.grid == (4, 4)
    assert json.loads(about.to_bytes())["format"] == FORMAT
    assert Store.exists(small.location)
    assert not Store.exists(small.location + "x")


def test_skipped_pictures_are_listed(tmp_path):
    model, processor = make_model()
    gallery = Gallery.create(tmp_path / "g", model, processor)
    paths = make_folder(tmp_path / "photos", 3)
    paths[1].write_bytes(paths[1].read_bytes()[:60])
    report = gallery.add(paths, broken=Problems("skip"))
    assert (report.added, len(report.skipped)) == (2, 1)
    assert "0001.png" in report.skipped.summary()
    assert str(report) == "2 added, 1 skipped"

"""Readers of the three layouts on files written here, and what they say about broken ones."""

import shutil

import pytest
from PIL import Image

from seps.reid.data import NO_SCENE, Sighting, groups_of, hold_out, opening, read, without_match

FOLDERS = {"rgb": "RGB", "nir": "NI", "tir": "TI"}
COLOURS = {"rgb": (200, 10, 10), "nir": (10, 200, 10), "tir": (10, 10, 200)}


def write(path, size=(32, 64), colour=(90, 90, 90)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path, quality=95)


@pytest.fixture
def rgbnt201(tmp_path):
    for split, identities in (("train_171", (1, 2, 3, 4)), ("test", (258, 259))):
        for identity in identities:
            for camera in (1, 2):
                for modality, folder in FOLDERS.items():
                    name = f"{identity:06d}_cam{camera}_0_0{camera}.jpg"
                    write(tmp_path / split / folder / name, colour=COLOURS[modality])
    return tmp_path


@pytest.fixture
def rgbnt100(tmp_path):
    for split, identities in (
        ("bounding_box_train", (501, 503)),
        ("query", (2,)),
        ("bounding_box_test", (2, 4)),
    ):
        for identity in identities:
            for camera in (1, 8):
                sheet = Image.new("RGB", (768, 128))
                for place, colour in enumerate(COLOURS.values()):
                    sheet.paste(colour, (256 * place, 0, 256 * (place + 1), 128))
                path = tmp_path / "rgbir" / split / f"{identity:04d}_c{camera:04d}_001.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                sheet.save(path, quality=95)
    return tmp_path


@pytest.fixture
def msvr310(tmp_path):
    for split, identities in (
        ("bounding_box_train", (1, 2)),
        ("query3", (7,)),
        ("bounding_box_test", (7, 9)),
    ):
        for identity in identities:
            for scene in (0, 1):
                for view in (0, 3):
                    name = f"{identity:04d}_s{scene:03d}_v{view}_000.jpg"
                    for folder in ("vis", "ni", "th"):
                        write(tmp_path / split / f"{identity:04d}" / folder / name, (64, 32))
    return tmp_path


def close(pixel, colour) -> bool:
    return all(abs(a - b) < 12 for a, b in zip(pixel, colour, strict=True))


def test_rgbnt201(rgbnt201):
    dataset = read(rgbnt201)
    assert (dataset.name, dataset.protocol, dataset.size) == ("RGBNT201", "camera", (256, 128))
    assert [(each.identity, each.camera, each.scene) for each in dataset.query] == [
        (258, 1, NO_SCENE),
        (258, 2, NO_SCENE),
        (259, 1, NO_SCENE),
        (259, 2, NO_SCENE),
    ]
    assert dataset.query == dataset.gallery and len(dataset.train) == 8 and not dataset.problems
    for modality, picture in dataset.train[0].pictures.items():
        assert close(picture.open().getpixel((5, 5)), COLOURS[modality])


def test_rgbnt100_cuts_its_tiles(rgbnt100):
    dataset = read(rgbnt100)
    assert (dataset.name, dataset.protocol, dataset.size) == ("RGBNT100", "camera", (128, 256))
    assert {(each.identity, each.camera) for each in dataset.gallery} == {(2, 1), (2, 8), (4, 1), (4, 8)}
    for modality, picture in dataset.query[0].pictures.items():
        tile = picture.open()
        assert tile.size == (256, 128)
        assert all(close(tile.getpixel(place), COLOURS[modality]) for place in ((8, 8), (247, 120)))


def test_junk_of_rgbnt100_is_left_out(rgbnt100):
    base = rgbnt100 / "rgbir" / "bounding_box_test"
    write(base / "-1_c0001_001.jpg", (768, 128))
    assert len(read(rgbnt100).gallery) == 4


def test_msvr310(msvr310):
    dataset = read(msvr310)
    assert (dataset.name, dataset.protocol) == ("MSVR310", "scene")
    assert {(each.identity, each.camera, each.scene) for each in dataset.query} == {
        (7, 0, 0),
        (7, 3, 0),
        (7, 0, 1),
        (7, 3, 1),
    }
    assert len(dataset.train) == 8 and set(dataset.train[0].pictures) == set(FOLDERS)


def test_a_missing_modality_file(rgbnt201):
    lost = rgbnt201 / "train_171" / "TI" / "000002_cam1_0_01.jpg"
    lost.unlink()
    with pytest.raises(ValueError, match=r"000002_cam1_0_01.jpg: expected its tir picture .* no such file"):
        read(rgbnt201)
    absent = read(rgbnt201, broken="absent")
    assert [each.what.rpartition("; ")[2] for each in absent.problems] == ["that modality counts as absent"]
    incomplete = [each for each in absent.train if len(each.pictures) < 3]
    assert [each.name for each in incomplete] == [lost.name] and set(incomplete[0].pictures) == {"rgb", "nir"}
    skipped = read(rgbnt201, broken="skip")
    # Its identity has one picture left, which is then left out too: both are counted.
    assert len(skipped.train) == 6 and len(skipped.problems) == 2
    assert "identity 2, found one" in str(skipped.problems.items[1])


def test_a_modality_without_its_rgb_file_is_found_too(rgbnt201):
    (rgbnt201 / "test" / "RGB" / "000258_cam1_0_01.jpg").unlink()
    with pytest.raises(ValueError, match="expected its rgb picture"):
        read(rgbnt201)
    found = read(rgbnt201, broken="absent").query[0]
    assert found.identity == 258 and set(found.pictures) == {"nir", "tir"}


def test_tiles_of_the_wrong_size(rgbnt100):
    write(rgbnt100 / "rgbir" / "query" / "0002_c0002_001.jpg", (512, 128))
    with pytest.raises(ValueError, match=r"0002_c0002_001.jpg: .* 768x128, found 512x128"):
        read(rgbnt100)
    dataset = read(rgbnt100, broken="skip")
    assert len(dataset.query) == 2 and len(dataset.problems) == 1


def test_a_file_that_is_no_picture(rgbnt100):
    (rgbnt100 / "rgbir" / "query" / "0002_c0002_001.jpg").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"0002_c0002_001.jpg: .* no readable image"):
        read(rgbnt100)


def test_an_identity_with_one_picture(rgbnt100):
    write(rgbnt100 / "rgbir" / "bounding_box_train" / "0777_c0001_001.jpg", (768, 128))
    with pytest.raises(ValueError, match="at least two pictures of identity 777, found one"):
        read(rgbnt100)
    dataset = read(rgbnt100, broken="skip")
    assert {each.identity for each in dataset.train} == {501, 503} and len(dataset.problems) == 1


def test_a_name_that_does_not_fit(msvr310):
    write(msvr310 / "query3" / "0007" / "vis" / "seven.jpg")
    with pytest.raises(ValueError, match="expected a name such as 0268_s000_v0_000.jpg"):
        read(msvr310)


def test_a_refusal_counts_the_others_and_says_how_to_go_on(rgbnt201):
    for name in ("000258_cam1_0_01.jpg", "000258_cam2_0_02.jpg", "000259_cam1_0_01.jpg"):
        (rgbnt201 / "test" / "NI" / name).unlink()
    with pytest.raises(
        ValueError, match=r"000258_cam1_0_01.jpg: .*, and 2 more; broken \"skip\" .*\"absent\""
    ):
        read(rgbnt201)
    dataset = read(rgbnt201, broken="skip")
    assert len(dataset.problems) == 3 and len(dataset.query) == 1


def test_pictures_of_other_formats_are_read_and_other_files_are_not(rgbnt100):
    base = rgbnt100 / "rgbir" / "query"
    write(base / "0004_c0001_001.PNG", (768, 128))
    write(base / "0004_c0008_001.jpeg", (768, 128))
    (base / "._0004_c0001_001.jpg").write_bytes(b"what another system leaves beside a file")
    (base / "Thumbs.db").write_bytes(b"and another")
    assert [each.name for each in read(rgbnt100).query] == [
        "0002_c0001_001.jpg",
        "0002_c0008_001.jpg",
        "0004_c0001_001.PNG",
        "0004_c0008_001.jpeg",
    ]


def test_what_turns_out_unreadable_later_is_refused_or_noted_in_the_same_account(rgbnt201):
    dataset = read(rgbnt201)
    with pytest.raises(ValueError, match="one: broken"):
        opening(dataset, "refuse").meet("one", "broken")
    for broken in ("skip", "absent"):
        opening(dataset, broken).meet("one", "broken")
    assert [str(each) for each in dataset.problems] == ["one: broken"]


def test_a_folder_of_no_known_layout(tmp_path):
    with pytest.raises(ValueError, match="expected one of the folders train_171/"):
        read(tmp_path)
    with pytest.raises(ValueError, match="there is no such folder"):
        read(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="broken: expected one of"):
        read(tmp_path, layout="RGBNT201", broken="ignore")
    with pytest.raises(
        ValueError, match="train_171: expected pictures in the layout of RGBNT201, found none"
    ):
        read(tmp_path, layout="RGBNT201")


def test_only_the_splits_that_are_asked_for_are_read(rgbnt100):
    """A test set is measured whatever is wrong with the training set, and the other way round."""
    write(rgbnt100 / "rgbir" / "bounding_box_train" / "0777_c0001_001.jpg", (512, 128))
    tested = read(rgbnt100, splits=("query", "gallery"))
    assert not tested.train and len(tested.query) == 2 and len(tested.gallery) == 4
    for split in ("query", "bounding_box_test"):
        shutil.rmtree(rgbnt100 / "rgbir" / split)
    trained = read(rgbnt100, broken="skip", splits=("train",))
    assert len(trained.train) == 4 and not trained.query and not trained.gallery
    with pytest.raises(ValueError, match="query: expected pictures in the layout of RGBNT100, found none"):
        read(rgbnt100, broken="skip")


def sighting(identity, camera, scene=0, name="") -> Sighting:
    return Sighting(identity, camera, scene, name or f"{identity}-{camera}-{scene}", {})


def test_queries_without_a_match_by_protocol():
    gallery = [sighting(1, 1, 0), sighting(1, 2, 0), sighting(2, 1, 0), sighting(2, 1, 1)]
    query = [sighting(1, 1, 0), sighting(2, 1, 0), sighting(3, 1, 0)]
    assert without_match(query, gallery, "camera") == [1, 2]
    assert without_match(query, gallery, "scene") == [0, 2]


def test_the_scene_protocol_needs_scenes():
    with pytest.raises(ValueError, match="expected scenes in the data"):
        groups_of([sighting(1, 1, NO_SCENE)], "scene")


def test_holding_out_divides_identities_and_leaves_the_test_set_alone(rgbnt201):
    dataset = read(rgbnt201)
    divided = hold_out(dataset, 0.5, seed=3)
    trained = {each.identity for each in divided.train}
    held = {each.identity for each in divided.gallery}
    assert len(trained) == len(held) == 2 and not trained & held
    assert not {each.identity for each in dataset.query} & (trained | held)
    assert hold_out(dataset, 0.5, seed=3) == divided
    assert any(hold_out(dataset, 0.5, seed=seed) != divided for seed in range(4, 10))
    with pytest.raises(ValueError, match="share"):
        hold_out(dataset, 1.0)
    whole = hold_out(dataset, 0)
    assert whole.train == dataset.train and not whole.query and not whole.gallery

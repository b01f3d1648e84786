"""Readers: each layout gives the same records, each fault its own sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from seps.data.layouts import read
from seps.data.records import Collection, Problems, divide


def _pictures(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), "teal").save(folder / name)


def _jsonl(path: Path, lines: list[Any]) -> None:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Three images: two of train, one of dev."""
    _pictures(tmp_path, ["images/a.png", "images/b.png", "images/c.png"])
    _jsonl(
        tmp_path / "captions.jsonl",
        [
            {"image": "images/a.png", "captions": ["one", "two"], "dense": "all of it", "split": "train"},
            {"image": "images/b.png", "captions": ["three"], "split": "train"},
            {"image": "images/c.png", "captions": ["four"], "split": "dev"},
        ],
    )
    return tmp_path


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """Two images of a test split in files of lines, with descriptions in image order."""
    _pictures(tmp_path / "flickr30k-images", ["x.png", "y.png"])
    inner = tmp_path / "precomp"
    inner.mkdir()
    (inner / "test_caps.txt").write_text("".join(f"caption {i}\n" for i in range(10)))
    (inner / "test_ids.txt").write_text("7\n3\n")
    (tmp_path / "id_mapping.json").write_text(json.dumps({"3": "x.png", "7": "y.png"}))
    _jsonl(tmp_path / "f30k_test.jsonl", [{"text": "dense of seven"}, {"text": "dense of three"}])
    return tmp_path


@pytest.fixture
def karpathy(tmp_path: Path) -> Path:
    """One image each of train, restval and test, as COCO has them."""
    _pictures(tmp_path / "images", ["train2014/t.png", "val2014/r.png", "val2014/e.png"])
    images = [
        {
            "filepath": path,
            "filename": name,
            "split": split,
            "cocoid": number,
            "sentences": [{"raw": f"{split} {i}"} for i in range(6)],
        }
        for number, (path, name, split) in enumerate(
            [("train2014", "t.png", "train"), ("val2014", "r.png", "restval"), ("val2014", "e.png", "test")]
        )
    ]
    (tmp_path / "dataset_coco.json").write_text(json.dumps({"images": images}))
    return tmp_path


def test_plain_folder_gives_its_splits_with_file_and_line(plain: Path) -> None:
    train = read(plain, "train")
    assert [record.image for record in train] == [plain / "images/a.png", plain / "images/b.png"]
    assert train[0].captions == ("one", "two")
    assert (train[0].dense, train[1].dense, train.described) == ("all of it", None, 1)
    assert train[1].source == f"{plain / 'captions.jsonl'}:2"
    assert read(plain, "val")[0].source.endswith(":3")
    assert len(read(plain)) == 3
    assert len(read(plain / "captions.jsonl", limit=2)) == 2
    assert train.open(0).size == (8, 8)


def test_a_line_ends_at_line_feeds_only(tmp_path: Path) -> None:
    _pictures(tmp_path, ["a.png"])
    line = json.dumps({"image": "a.png", "captions": ["odd \u2028 and \x85 inside"]}, ensure_ascii=False)
    (tmp_path / "captions.jsonl").write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\r\n\n")
    assert read(tmp_path)[0].captions == ("odd \u2028 and \x85 inside",)


def test_lines_with_an_id_an_image_or_an_id_a_caption_read_alike(lines: Path) -> None:
    once = read(lines, "test")
    (lines / "precomp" / "test_ids.txt").write_text("7\n" * 5 + "3\n" * 5)
    assert read(lines, "test") == once
    assert [record.image.name for record in once] == ["y.png", "x.png"]
    assert once[1].captions == tuple(f"caption {i}" for i in range(5, 10))
    assert once[1].dense == "dense of three"
    assert once[1].source == f"{lines / 'precomp' / 'test_caps.txt'}:6"
    assert [record.split for record in read(lines)] == ["test", "test"]


def test_karpathy_counts_restval_as_train_by_choice(karpathy: Path) -> None:
    assert [record.image.name for record in read(karpathy, "train")] == ["t.png", "r.png"]
    assert len(read(karpathy, "train", restval_trains=False)) == 1
    test = read(karpathy, "test", captions_per_image=5)
    assert test[0].captions == tuple(f"test {i}" for i in range(5))
    assert test[0].image == karpathy / "images" / "val2014" / "e.png"
    assert test[0].image_id == "2"
    assert test[0].source.endswith("dataset_coco.json:images[2]")


def test_descriptions_join_by_name_and_else_by_order(plain: Path, karpathy: Path, tmp_path: Path) -> None:
    _jsonl(tmp_path / "named.jsonl", [{"image": "c.png", "text": "of c"}, {"image": "b.png", "text": "of b"}])
    found = read(plain / "captions.jsonl", dense=tmp_path / "named.jsonl", broken="skip")
    assert [record.dense for record in found] == ["all of it", "of b", "of c"]
    assert [problem.what for problem in found.problems] == ["image a.png has no description in named.jsonl"]
    _jsonl(tmp_path / "ordered.jsonl", [{"text": "of t"}, {"text": "of r"}])
    found = read(karpathy / "dataset_coco.json", "train", dense=tmp_path / "ordered.jsonl")
    assert [record.dense for record in found] == ["of t", "of r"]


def test_pictures_of_one_name_in_two_folders_keep_their_own_descriptions(tmp_path: Path) -> None:
    names = ["cats/1.png", "dogs/1.png", "2.png"]
    _pictures(tmp_path, names)
    _jsonl(tmp_path / "captions.jsonl", [{"image": name, "captions": ["x"]} for name in names])
    written = [{"image": name, "text": f"of {name}"} for name in names]
    _jsonl(tmp_path / "dense.jsonl", written)
    assert [record.dense for record in read(tmp_path, dense=tmp_path / "dense.jsonl")] == [
        "of cats/1.png",
        "of dogs/1.png",
        "of 2.png",
    ]
    elsewhere = [{"image": f"photos/{name}", "text": "?"} for name in names]
    _jsonl(tmp_path / "dense.jsonl", elsewhere)
    found = read(tmp_path, dense=tmp_path / "dense.jsonl", broken="skip")
    assert [record.dense for record in found] == [None, None, "?"]


Damage = Callable[[Path], Any]


def _break_line(folder: Path) -> None:
    file = folder / "captions.jsonl"
    file.write_text(file.read_text().replace('{"image": "images/b.png"', '{"image": images/b.png'))


def _replace(folder: Path, old: str, new: str) -> None:
    file = folder / "captions.jsonl"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_break_line, r"captions\.jsonl:2: not valid JSON \(Expecting value at column 11\)"),
        (lambda p: (p / "images/b.png").unlink(), r"captions\.jsonl:2: image .*b\.png is missing"),
        (
            lambda p: _replace(p, '["three"]', "[]"),
            r":2: expected 'captions' as a non-empty list .*found \[\]",
        ),
        (lambda p: _replace(p, '["three"]', '"three"'), r":2: expected 'captions' .*found \"three\""),
        (lambda p: _replace(p, '["three"]', '["three", " "]'), r":2: caption 2 of 2 is empty"),
        (lambda p: _replace(p, '{"image": "images/b.png", ', "{"), r":2: expected 'image' .*found nothing"),
        (lambda p: _replace(p, "images/b.png", "images/a.png"), r":2: image a\.png stands already at .*:1"),
        (
            lambda p: _replace(p, '"dense": "all of it"', '"dense": 3'),
            r":1: expected 'dense' as a text, found 3",
        ),
    ],
)
def test_a_broken_line_is_refused_or_skipped_and_counted(plain: Path, damage: Damage, sentence: str) -> None:
    damage(plain)
    with pytest.raises(ValueError, match=sentence):
        read(plain, "train")
    found = read(plain, "train", broken="skip")
    assert len(found) == 1
    assert len(found.problems) == 1
    assert found.problems.summary().startswith("1 skipped: ")


def test_not_utf8_is_named_with_its_line(plain: Path) -> None:
    file = plain / "captions.jsonl"
    file.write_bytes(file.read_bytes().replace(b"three", b"thr\xe9e"))
    with pytest.raises(ValueError, match=r"captions\.jsonl:2: not UTF-8 text"):
        read(plain)
    assert len(read(plain, broken="skip")) == 2


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            lambda p: (p / "precomp/test_caps.txt").write_text("only\nthree\nlines\n"),
            r"test_caps\.txt: 3 captions are not a multiple of 5",
        ),
        (
            lambda p: (p / "precomp/test_ids.txt").write_text("7\n3\n4\n"),
            r"test_ids\.txt: 3 ids fit neither the 2 images nor the 10 captions of test_caps\.txt",
        ),
        (
            lambda p: (p / "precomp/test_ids.txt").write_text("7\n" * 4 + "3\n" * 6),
            r"test_ids\.txt:1: with a line a caption, five lines in a row .* one image id, found 7, 3",
        ),
        (lambda p: (p / "precomp/test_ids.txt").unlink(), r"test_ids\.txt: missing, split 'test' needs it"),
        (lambda p: (p / "id_mapping.json").unlink(), r"image ids but no id_mapping\.json"),
        (lambda p: (p / "id_mapping.json").write_text("[1]"), r"expected an object that maps image ids"),
        (lambda p: (p / "id_mapping.json").write_text("{"), r"id_mapping\.json: not valid JSON"),
        (
            lambda p: _jsonl(p / "f30k_test.jsonl", [{"text": "x"}] * 3),
            r"f30k_test\.jsonl: 3 descriptions for 2 images",
        ),
    ],
)
def test_lines_that_do_not_fit_together_are_refused_even_when_skipping(
    lines: Path, damage: Damage, sentence: str
) -> None:
    damage(lines)
    for broken in ("refuse", "skip"):
        with pytest.raises(ValueError, match=sentence):
            read(lines, "test", broken=broken)


def test_an_id_without_image_is_refused_or_skipped(lines: Path) -> None:
    (lines / "id_mapping.json").write_text(json.dumps({"7": "y.png"}))
    with pytest.raises(ValueError, match=r"test_ids\.txt:2: image id 3 is not in id_mapping\.json"):
        read(lines, "test")
    assert [record.image_id for record in read(lines, "test", broken="skip")] == ["7"]


def test_too_few_descriptions_are_refused_or_leave_the_last_images_bare(lines: Path) -> None:
    _jsonl(lines / "f30k_test.jsonl", [{"text": "dense of seven"}])
    with pytest.raises(
        ValueError, match=r"f30k_test\.jsonl:2: 1 descriptions for 2 images, expected one line an image"
    ):
        read(lines, "test")
    assert [record.dense for record in read(lines, "test", broken="skip")] == ["dense of seven", None]


def test_a_broken_description_keeps_the_others_in_place(lines: Path) -> None:
    _jsonl(lines / "f30k_test.jsonl", ['{"text": ', {"text": "dense of three"}])
    with pytest.raises(ValueError, match=r"f30k_test\.jsonl:1: not valid JSON"):
        read(lines, "test")
    assert [record.dense for record in read(lines, "test", broken="skip")] == [None, "dense of three"]


def test_an_empty_caption_line_is_refused_or_dropped(lines: Path) -> None:
    (lines / "precomp/test_caps.txt").write_text("a\nb\n\nd\ne\n" + "f\n" * 5)
    with pytest.raises(ValueError, match=r"test_caps\.txt:3: the caption is empty"):
        read(lines, "test")
    assert read(lines, "test", broken="skip")[0].captions == ("a", "b", "d", "e")


def test_nameless_descriptions_cannot_join_once_a_record_was_skipped(plain: Path) -> None:
    _break_line(plain)
    _jsonl(plain / "dense.jsonl", [{"text": "x"}] * 3)
    with pytest.raises(ValueError, match=r"dense\.jsonl: its lines name no 'image', and their order is lost"):
        read(plain, broken="skip", dense=plain / "dense.jsonl")


def test_what_is_no_data_says_what_was_looked_for(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: there is no such data folder"):
        read(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"split 'test' is empty; its splits: dev, train"):
        read(plain, "test")
    with pytest.raises(ValueError, match=r"limit must be at least 1, not 0"):
        read(plain, limit=0)
    with pytest.raises(
        ValueError, match=r"no known layout; looked for captions\.jsonl, dataset\*\.json, and SPLIT"
    ):
        read(tmp_path / "images")
    with pytest.raises(ValueError, match=r"a\.png: expected a folder, a captions \.jsonl or"):
        read(tmp_path / "images" / "a.png")
    (plain / "captions.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"split 'all' is empty"):
        read(plain)
    (plain / "captions.jsonl").unlink()
    for name in ("dataset_a.json", "dataset_b.json"):
        (plain / name).write_text("{}")
    with pytest.raises(ValueError, match=r"several Karpathy files \(dataset_a\.json, dataset_b\.json\)"):
        read(plain)
    with pytest.raises(
        ValueError, match=r"dataset_a\.json: expected an object with a non-empty list 'images'"
    ):
        read(plain / "dataset_a.json")


def test_all_broken_is_empty_with_the_reasons(plain: Path) -> None:
    (plain / "images/c.png").unlink()
    with pytest.raises(ValueError, match=r"split 'dev' is empty, 1 skipped: .*:3: image .*c\.png is missing"):
        read(plain, "dev", broken="skip")


def test_divide_keeps_an_image_in_its_split_when_others_come(plain: Path) -> None:
    whole = read(plain)
    records = tuple(
        type(whole[0])(Path(f"{i}.png"), ("text",), None, "all", str(i), f"file:{i}") for i in range(400)
    )
    shares = {"train": 0.8, "dev": 0.1, "test": 0.1}
    parts = divide(Collection(records), shares)
    assert sum(len(part) for part in parts.values()) == 400
    assert 280 < len(parts["train"]) < 360
    assert all(record.split == "dev" for record in parts["dev"])
    fewer = divide(Collection(records[:200]), shares)
    for name, part in fewer.items():
        assert {record.image_id for record in part} <= {record.image_id for record in parts[name]}
    with pytest.raises(ValueError, match="add up to 1"):
        divide(Collection(records), {"train": 0.5})


def test_problems_knows_two_ways_only() -> None:
    with pytest.raises(ValueError, match="broken must be 'refuse' or 'skip', not 'ignore'"):
        Problems("ignore")  # type: ignore[arg-type]

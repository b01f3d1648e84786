"""Descriptions out of a JSONL, files beside a picture, and the picture file."""

import json

import pytest
from gallery_making import make_picture
from PIL import Image, PngImagePlugin

from seps.data.records import Problems
from seps.gallery.descriptions import Said, beside, compose, embedded, from_xmp, read_descriptions
from seps.gallery.pictures import moment

XMP = """<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
<rdf:Description xmlns:dc="http://purl.org/dc/elements/1.1/">
<dc:title><rdf:Alt><rdf:li xml:lang="x-default">Regatta</rdf:li></rdf:Alt></dc:title>
<dc:description><rdf:Alt><rdf:li xml:lang="x-default">Two boats at sea</rdf:li></rdf:Alt></dc:description>
<dc:subject><rdf:Bag><rdf:li>sea</rdf:li><rdf:li>boat</rdf:li></rdf:Bag></dc:subject>
</rdf:Description></rdf:RDF></x:xmpmeta>"""


def iptc_block(number, text):
    return b"\x1c\x02" + bytes([number]) + len(text).to_bytes(2) + text


def reopen(path):
    with Image.open(path) as image:
        return embedded(image)


def test_exif_speaks(tmp_path):
    exif = Image.Exif()
    exif[270] = "A dog on the beach"
    exif[40094] = "dog;beach\0".encode("utf-16-le")
    make_picture(0).save(tmp_path / "a.jpg", exif=exif)
    assert reopen(tmp_path / "a.jpg") == Said("A dog on the beach", ("dog", "beach"))


def test_what_every_camera_writes_says_nothing(tmp_path):
    exif = Image.Exif()
    exif[270] = "OLYMPUS DIGITAL CAMERA         "
    make_picture(0).save(tmp_path / "a.jpg", exif=exif)
    assert reopen(tmp_path / "a.jpg") == Said()


def test_xmp_speaks(tmp_path):
    make_picture(0).save(tmp_path / "a.jpg", xmp=XMP.encode())
    assert reopen(tmp_path / "a.jpg") == Said("Regatta. Two boats at sea", ("sea", "boat"))


def test_iptc_speaks(tmp_path):
    records = (
        iptc_block(5, b"Harbour") + iptc_block(120, "Boote im Hafen, früh".encode()) + iptc_block(25, b"boat")
    )
    resource = b"8BIM\x04\x04\0\0" + len(records).to_bytes(4) + records + b"\0" * (len(records) % 2)
    content = b"Photoshop 3.0\0" + resource
    make_picture(0).save(tmp_path / "a.jpg")
    plain = (tmp_path / "a.jpg").read_bytes()
    marked = plain[:2] + b"\xff\xed" + (len(content) + 2).to_bytes(2) + content + plain[2:]
    (tmp_path / "a.jpg").write_bytes(marked)
    assert reopen(tmp_path / "a.jpg") == Said("Harbour. Boote im Hafen, früh", ("boat",))


def test_the_chunks_of_a_png_speak(tmp_path):
    info = PngImagePlugin.PngInfo()
    info.add_text("Description", "A house  in\nthe dark")
    make_picture(0).save(tmp_path / "a.png", pnginfo=info)
    assert reopen(tmp_path / "a.png") == Said("A house in the dark")


def test_files_beside_a_picture_speak(tmp_path):
    picture = tmp_path / "a.jpg"
    (tmp_path / "a.txt").write_text("\ufeffA red cat\n", encoding="utf-8")
    (tmp_path / "a.jpg.json").write_text(json.dumps({"title": "x", "tags": ["pet", "pet", "red"]}))
    (tmp_path / "a.xmp").write_text(XMP)
    assert beside(picture) == Said("x", ("pet", "red", "sea", "boat"))
    (tmp_path / "a.jpg.json").unlink()
    assert beside(picture).description == "A red cat"


@pytest.mark.parametrize("content", ["{", "[1]", '"text"', "[" * 100_000, ""])
def test_a_broken_file_beside_a_picture_says_nothing(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    assert beside(tmp_path / "a.jpg") == Said()


def test_xmp_with_entities_is_not_read():
    bomb = b'<!DOCTYPE x [<!ENTITY a "aaaa">]><x:xmpmeta xmlns:x="adobe:ns:meta/">&a;</x:xmpmeta>'
    assert from_xmp(bomb) == Said()
    assert from_xmp(b"<x:xmpmeta") == Said()


def test_repetition_is_said_once():
    assert compose(["A dog", "a dog on grass.", "A dog on grass."]) == "A dog. a dog on grass."
    assert compose([None, " ", b"caf\xe9"]) == "café"
    assert compose([]) is None


def test_a_jsonl_is_found_by_path(tmp_path):
    (tmp_path / "photos").mkdir()
    for name in ("a.png", "b.png"):
        make_picture(0).save(tmp_path / "photos" / name)
    lines = [
        {"image": "a.png", "dense": "a dense text", "captions": ["unused"]},
        {"image": "photos/b.png", "captions": ["one", "two"], "tags": "x, y"},
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    said = read_descriptions(tmp_path / "d.jsonl", tmp_path / "photos", Problems())
    assert said == {
        tmp_path / "photos/a.png": Said("a dense text"),
        tmp_path / "photos/b.png": Said("one. two", ("x", "y")),
    }


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"image": "a.png", "text": "x"}\n{"text": "y"}\n')
    with pytest.raises(
        ValueError, match=r"d\.jsonl:2: expected 'image' as the name of a picture, found None"
    ):
        read_descriptions(tmp_path / "d.jsonl", tmp_path, Problems())
    with pytest.raises(ValueError, match="expected a JSONL of descriptions, found nothing there"):
        read_descriptions(tmp_path / "e.jsonl", tmp_path, Problems())


def test_the_date_is_the_cameras(tmp_path):
    exif = Image.Exif()
    exif.get_ifd(0x8769)[36867] = "2021:06:05 04:03:02"
    make_picture(0).save(tmp_path / "a.jpg", exif=exif)
    with Image.open(tmp_path / "a.jpg") as image:
        assert moment(image).isoformat() == "2021-06-05T04:03:02"
    exif.get_ifd(0x8769)[36867] = "0000:00:00 00:00:00"
    make_picture(0).save(tmp_path / "a.jpg", exif=exif)
    with Image.open(tmp_path / "a.jpg") as image:
        assert moment(image) is None

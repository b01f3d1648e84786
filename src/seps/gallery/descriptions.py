"""What is said of a picture: in a JSONL, in a file beside it, or in the picture file itself."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from PIL import ExifTags, Image, ImageFile, IptcImagePlugin

from seps.data.images import UNREADABLE
from seps.data.layouts import json_object, read_jsonl
from seps.data.records import Problems

# Where each kind of entry keeps its text, the first that is there.
_TEXT_KEYS = ("dense", "description", "text", "caption", "captions", "title")
_TAG_KEYS = ("tags", "keywords")
_MOST_BYTES = 2**20
# What cameras write into every file they make.
_EMPTY_WORDS = re.compile(
    r"^(olympus digital camera|sony dsc|samsung( camera pictures)?|dcim|dsc[_ ]?\d*|img[_ ]?\d*|"
    r"kodak digital still camera|minolta digital camera|exif_jpeg(_picture|_t422)?|default|untitled|ascii|"
    r"screenshot|created with gimp|charset=\w+)$",
    re.IGNORECASE,
)
_DC = "{http://purl.org/dc/elements/1.1/}"
_RDF = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}"


@dataclass(frozen=True)
class Said:
    """A description and tags, either of which may be missing."""

    description: str | None = None
    tags: tuple[str, ...] = ()

    def __or__(self, other: Said) -> Said:
        """This, and where it says nothing the other; tags add up."""
        return Said(self.description or other.description, unique((*self.tags, *other.tags)))


def unique(texts: tuple[str, ...]) -> tuple[str, ...]:
    """The texts without repetition, in order."""
    return tuple(dict.fromkeys(texts))


def clean(text: object) -> str | None:
    """A text on one line that Unicode can carry, None where nothing is said."""
    if isinstance(text, bytes):
        text = decode(text)
    if not isinstance(text, str):
        return None
    text = "".join(letter if letter.isprintable() or letter.isspace() else " " for letter in text)
    text = " ".join(text.encode("utf-8", "ignore").decode("utf-8").split())
    return None if not text or _EMPTY_WORDS.match(text) else text


def decode(text: bytes) -> str:
    """Bytes as UTF-8, or as Latin-1 where they are not."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        return text.decode("latin-1")


def compose(texts: list[object]) -> str | None:
    """Several texts as one, each said once."""
    said: list[str] = []
    for text in (clean(each) for each in texts):
        if text and not any(text.lower() in other.lower() for other in said):
            said.append(text)
    return (
        ". ".join(text.rstrip(".") for text in said[:-1]) + (". " if len(said) > 1 else "") + said[-1]
        if said
        else None
    )


def from_entry(entry: Mapping[str, Any]) -> Said:
    """What a JSON object says, whichever of the usual names it uses."""
    text: str | None = None
    for key in _TEXT_KEYS:
        value = entry.get(key)
        text = text or (compose(list(value)) if isinstance(value, list) else clean(value))
    tags: list[str] = []
    for key in _TAG_KEYS:
        value = entry.get(key)
        names = (
            value if isinstance(value, list) else re.split(r"[,;]", value) if isinstance(value, str) else []
        )
        tags.extend(name for name in (clean(each) for each in names) if name)
    return Said(text, unique(tuple(tags)))


def read_descriptions(path: Path, root: Path, problems: Problems) -> dict[Path, Said]:
    """What a JSONL says of pictures, by their absolute path.

    Each line names an `image`, absolute or relative to root or to the JSONL's own folder, and a text under
    `dense`, `description`, `text`, `caption` or `captions`, and `tags` where there are any.
    """
    if not path.is_file():
        raise ValueError(f"{path}: expected a JSONL of descriptions, found nothing there")
    said: dict[Path, Said] = {}
    for number, entry in read_jsonl(path, problems, json_object):
        if entry is None:
            continue
        image = entry.get("image")
        if not isinstance(image, str) or not image.strip():
            problems.meet(f"{path}:{number}", f"expected 'image' as the name of a picture, found {image!r}")
            continue
        places = [root / image, path.parent / image]
        place = next((each for each in places if each.is_file()), places[0])
        said[Path(*place.absolute().parts)] = from_entry(entry)
    return said


def beside(picture: Path) -> Said:
    """What files beside a picture say of it: photo.txt, photo.json, photo.xmp, or photo.jpg.txt and so on."""
    said = Said()
    for stem in (picture.name, picture.stem):
        for suffix, read in ((".txt", _from_text), (".json", _from_json), (".xmp", from_xmp)):
            file = picture.with_name(stem + suffix)
            if file.is_file() and file.stat().st_size <= _MOST_BYTES:
                said = said | read(file.read_bytes())
    return said


def _from_text(content: bytes) -> Said:
    return Said(clean(content.removeprefix(b"\xef\xbb\xbf")))


def _from_json(content: bytes) -> Said:
    try:
        entry = json.loads(content)
    except (ValueError, RecursionError):
        return Said()
    return from_entry(entry) if isinstance(entry, dict) else Said()


def from_xmp(content: bytes) -> Said:
    """What an XMP packet says: dc:title, dc:description and dc:subject."""
    start, end = content.find(b"<x:xmpmeta"), content.rfind(b"</x:xmpmeta>")
    packet = content[start : end + len(b"</x:xmpmeta>")] if 0 <= start < end else content.strip(b"\0 ")
    # No document type, so no entity that could grow.
    if b"<!DOCTYPE" in packet or b"<!ENTITY" in packet:
        return Said()
    try:
        root = ET.fromstring(packet)
    except (ET.ParseError, ValueError):
        return Said()

    def items(name: str) -> list[str]:
        return [item.text or "" for element in root.iter(_DC + name) for item in element.iter(_RDF + "li")]

    tags = (clean(tag) for tag in items("subject"))
    return Said(
        compose([*items("title")[:1], *items("description")[:1]]), unique(tuple(t for t in tags if t))
    )


def embedded(image: Image.Image) -> Said:
    """What the picture file says of itself: IPTC, XMP, EXIF, the text chunks of a PNG."""
    said = Said()
    for read in (_from_iptc, _from_packet, _from_exif, _from_chunks):
        try:
            said = said | read(image)
        except UNREADABLE:
            continue
    return said


def _from_iptc(image: Image.Image) -> Said:
    fields = (IptcImagePlugin.getiptcinfo(image) if isinstance(image, ImageFile.ImageFile) else None) or {}
    keywords = fields.get((2, 25), [])
    tags = (clean(word) for word in (keywords if isinstance(keywords, list) else [keywords]))
    return Said(
        compose([fields.get((2, 5)), fields.get((2, 120))]), unique(tuple(tag for tag in tags if tag))
    )


def _from_packet(image: Image.Image) -> Said:
    packet = image.info.get("xmp") or image.info.get("XML:com.adobe.xmp")
    if isinstance(packet, str):
        packet = packet.encode()
    return from_xmp(packet) if isinstance(packet, bytes) else Said()


def _from_exif(image: Image.Image) -> Said:
    exif = image.getexif()
    comment = exif.get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.UserComment)
    texts = [
        _wide(exif.get(ExifTags.Base.XPTitle)),
        exif.get(ExifTags.Base.ImageDescription),
        _wide(exif.get(ExifTags.Base.XPComment)),
        _comment(comment),
    ]
    keywords = _wide(exif.get(ExifTags.Base.XPKeywords)) or ""
    tags = (clean(word) for word in keywords.split(";"))
    return Said(compose(texts), unique(tuple(tag for tag in tags if tag)))


def _wide(value: object) -> str | None:
    """A text as Windows keeps it in EXIF: little-endian UTF-16."""
    if isinstance(value, tuple):
        value = bytes(value)
    return value.decode("utf-16-le", "ignore") if isinstance(value, bytes) else None


def _comment(value: object) -> str | None:
    """A user comment behind its eight bytes of encoding."""
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        return None
    if value.startswith(b"UNICODE\0"):
        return value[8:].decode("utf-16-be" if value[8:9] == b"\0" else "utf-16-le", "ignore")
    return decode(value[8:] if value.startswith((b"ASCII\0", b"JIS\0", b"\0" * 8)) else value)


def _from_chunks(image: Image.Image) -> Said:
    info = image.info if image.format == "PNG" else {}
    comment = image.info.get("comment") if image.format in ("JPEG", "GIF") else None
    return Said(compose([info.get("Title"), info.get("Description"), info.get("Comment"), comment]))

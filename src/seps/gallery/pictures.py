"""Pictures as they come: files of a folder or bytes, their identity, size, dates and thumbnail."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from PIL import ExifTags, Image

from seps.data.images import MOST_PIXELS, UNREADABLE, open_image
from seps.gallery.descriptions import Said, embedded

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".jp2", ".ppm"}
)
THUMBNAIL_SIDE = 256
THUMBNAIL_QUALITY = 82


@dataclass(frozen=True)
class Picture:
    """A picture to add: a file, or the bytes of one; what is known of it beside its pixels.

    name stands for the file's own name where there is only bytes; description and tags go before what
    the file says of itself.
    """

    source: Path | bytes
    name: str = ""
    description: str | None = None
    tags: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Sixteen hexadecimal digits: of the file's place, or of the bytes' content."""
        if isinstance(self.source, bytes):
            return hashlib.blake2b(self.source, digest_size=8).hexdigest()
        return path_id(self.source)

    @property
    def label(self) -> str:
        """What a message calls it."""
        if isinstance(self.source, bytes):
            return self.name or "picture"
        return os.fsencode(self.source).decode("utf-8", "replace")

    def digest(self) -> str:
        """The hash of the content."""
        if isinstance(self.source, bytes):
            return hashlib.blake2b(self.source, digest_size=16).hexdigest()
        if self.label != str(self.source):
            raise ValueError(f"{self.label}: expected a name in UTF-8")
        with self.source.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


@dataclass(frozen=True)
class Opened:
    """A picture, its file's size in bytes, its own width and height, and what the file says of it.

    image: its pixels, of a large JPEG no more than are looked at.
    """

    image: Image.Image
    size: int
    width: int
    height: int
    taken: datetime
    modified: datetime
    said: Said

    def thumbnail(self) -> bytes:
        """A small JPEG of it."""
        return thumbnail(self.image)


def absolute(path: str | os.PathLike[str]) -> Path:
    """A path that means the same from everywhere; links stay links."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - Path.resolve follows links, Path.absolute keeps ".."


def path_id(path: Path) -> str:
    """The identity of a file: its place."""
    return hashlib.blake2b(os.fsencode(absolute(path)), digest_size=8).hexdigest()


def find_pictures(place: Path) -> Iterator[Path]:
    """The picture files of a folder and the folders in it, in order; hidden ones left out."""
    if place.is_file():
        yield absolute(place)
        return
    for folder, folders, names in os.walk(absolute(place)):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and Path(name).suffix.lower() in SUFFIXES:
                yield Path(folder) / name


def require_pictures(place: Path) -> list[Path]:
    """The picture files of a place; ValueError where there is none."""
    if not place.exists():
        raise ValueError(f"{place}: expected a folder of pictures, found nothing there")
    found = list(find_pictures(place))
    if not found:
        kinds = ", ".join(sorted(suffix[1:] for suffix in SUFFIXES))
        raise ValueError(f"{place}: expected pictures ({kinds}), found none")
    return found


def open_picture(picture: Picture, most_pixels: int = MOST_PIXELS, side: int = THUMBNAIL_SIDE) -> Opened:
    """The upright RGB picture with its dates and texts; ValueError names what cannot be read.

    side: how large it will be looked at; a JPEG is decoded at twice that or more, which is far quicker.
    """
    source, enough = picture.source, 2 * max(side, THUMBNAIL_SIDE)
    if isinstance(source, bytes):
        image = open_image(io.BytesIO(source), most_pixels, picture.label, enough)
        size, modified = len(source), datetime.now()
    else:
        image = open_image(source, most_pixels, enough=enough)
        status = source.stat()
        size, modified = status.st_size, datetime.fromtimestamp(status.st_mtime)
    with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as header:
        width, height = upright_size(header)
        taken, said = moment(header), embedded(header)
    taken = (taken or modified).replace(microsecond=0)
    return Opened(image, size, width, height, taken, modified.replace(microsecond=0), said)


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Width and height as the picture is to be shown."""
    width, height = image.size
    try:
        lies = image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    except UNREADABLE:
        lies = False
    return (height, width) if lies else (width, height)


def moment(image: Image.Image) -> datetime | None:
    """When the camera says the picture was taken."""
    try:
        exif = image.getexif()
        inner = exif.get_ifd(ExifTags.IFD.Exif)
    except UNREADABLE:
        return None
    for value in (
        inner.get(ExifTags.Base.DateTimeOriginal),
        inner.get(ExifTags.Base.DateTimeDigitized),
        exif.get(ExifTags.Base.DateTime),
    ):
        try:
            return datetime.strptime(str(value).strip("\0 ")[:19], "%Y:%m:%d %H:%M:%S")
        except ValueError:
            continue
    return None


def thumbnail(image: Image.Image, side: int = THUMBNAIL_SIDE) -> bytes:
    """A JPEG that fits into a square; no side shorter than one pixel."""
    small = image.copy()
    small.thumbnail((side, side), Image.Resampling.BICUBIC, reducing_gap=2.0)
    file = io.BytesIO()
    small.convert("RGB").save(file, "JPEG", quality=THUMBNAIL_QUALITY, optimize=True)
    return file.getvalue()

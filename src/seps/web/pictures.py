"""Pictures that come in as uploads and go out as JPEG."""

from __future__ import annotations

import io

from PIL import Image

from seps.data.images import UNREADABLE, open_image
from seps.web.limits import Refusal

# What browsers and cameras make; rarer decoders, some of which start other programs, stay shut.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
LARGEST_SIDE = 4096
_QUALITY = 90


def read_picture(data: bytes, most_pixels: int) -> Image.Image:
    """The upright RGB picture of an upload; Refusal for what is none, or too large to be decoded."""
    try:
        # Reads the header only: nothing is decoded before its size is known.
        with Image.open(io.BytesIO(data), formats=FORMATS) as header:
            width, height = header.size
        if width * height <= most_pixels:
            return open_image(io.BytesIO(data), most_pixels, "picture")
    except Image.DecompressionBombError:
        raise Refusal(422, f"picture: expected at most {most_pixels:,} pixels, found far more") from None
    except UNREADABLE:
        kinds = ", ".join(FORMATS[:-1]) + " or " + FORMATS[-1]
        raise Refusal(422, f"picture: expected a {kinds} file, found one that cannot be read") from None
    raise Refusal(422, f"picture: expected at most {most_pixels:,} pixels, found {width} x {height}")


def to_jpeg(picture: Image.Image) -> bytes:
    """A picture as any browser shows it, without what its file says of place and owner."""
    # Two axes of a JPEG are 16 bits, and a screen has no more use.
    if max(picture.size) > LARGEST_SIDE:
        picture.thumbnail((LARGEST_SIDE, LARGEST_SIDE), Image.Resampling.BICUBIC, reducing_gap=3.0)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()

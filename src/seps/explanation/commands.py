"""The command `seps explain`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from seps.data.images import open_image
from seps.data.records import written_beside
from seps.explanation.building import Explanation, explain, explain_stored
from seps.explanation.figure import draw
from seps.gallery import MissingPictureError, Picture, load_gallery
from seps.gallery.pictures import absolute
from seps.model import load

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExplainOptions:
    """Explain why a picture gets its score for a sentence, as a figure or as JSON."""

    image: str
    """The picture, a file or the id of one in the gallery."""
    text: str
    """The sentence."""
    output: str = "why.png"
    """The figure to write, or the overlay if it ends in .json; -o for short."""
    model: str = ""
    """The model's folder or hub name; may be left out with a gallery."""
    gallery: str = ""
    """The gallery the picture is in: its tokens and description are explained as they are stored."""
    description: str = ""
    """The picture's dense text, where there is no gallery."""


def run_explain(options: ExplainOptions) -> int:
    """Write the figure or the overlay of an explanation."""
    output = Path(options.output)
    if output.suffix.lower() not in (".png", ".jpg", ".webp", ".json"):
        raise ValueError(f"output: expected a .png, .jpg, .webp or .json file, found {options.output!r}")
    if not output.absolute().parent.is_dir():
        raise ValueError(f"output: expected a folder to write in, found none at {output.parent}")
    found, picture = explained(options)
    if output.suffix.lower() == ".json":
        with written_beside(output) as file:
            file.write(found.to_json() + "\n")
    else:
        kind = {".jpg": "JPEG"}.get(output.suffix.lower(), output.suffix[1:].upper())
        with written_beside(output, "wb") as file:
            draw(found, picture).save(file, kind)
    logger.info("score %.4f: %s", found.score, output)
    return 0


def explained(options: ExplainOptions) -> tuple[Explanation, Image.Image]:
    """The explanation of the options, and the picture it is about."""
    if not options.gallery:
        if not options.model:
            raise ValueError("model: expected --model or --gallery, found neither")
        picture = open_image(options.image)
        model, processor = load(options.model)
        return explain(model, processor, picture, options.text, options.description or None), picture
    gallery = load_gallery(options.gallery, options.model)
    for identity in (options.image, Picture(absolute(options.image)).id):
        try:
            return explain_stored(gallery, identity, options.text), gallery.picture(identity)
        except MissingPictureError:
            continue
    picture = open_image(options.image)
    found = explain(gallery.model, gallery.processor, picture, options.text, options.description or None)
    return found, picture

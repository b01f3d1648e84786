"""Gallery: an index of pictures, searched with words in two stages."""

from seps.gallery.descriptions import Said, read_descriptions
from seps.gallery.gallery import Gallery, MissingPictureError, Stored, load_gallery
from seps.gallery.indexing import Added, Pace
from seps.gallery.pictures import Picture, find_pictures, require_pictures
from seps.gallery.searching import Entry, Hit, TextHit

__all__ = [
    "Added",
    "Entry",
    "Gallery",
    "Hit",
    "MissingPictureError",
    "Pace",
    "Picture",
    "Said",
    "Stored",
    "TextHit",
    "find_pictures",
    "load_gallery",
    "read_descriptions",
    "require_pictures",
]

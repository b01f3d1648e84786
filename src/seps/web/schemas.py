"""What goes over the wire."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from seps.gallery import Entry, Hit

Tag = Annotated[str, Field(min_length=1, max_length=100)]

PICTURE_ID = "^[0-9a-f]{16}$"


class Filters(BaseModel):
    """How many results, and among which pictures."""

    model_config = ConfigDict(extra="forbid")

    k: int = Field(24, ge=1, le=1000, strict=True, description="How many results, best first.")
    tags: list[Tag] = Field([], max_length=10, description="Only pictures that carry all of these tags.")
    since: date | None = Field(None, description="Only pictures taken on this day or later.")
    until: date | None = Field(None, description="Only pictures taken on this day or earlier.")


class TextQuery(Filters):
    """A search by text."""

    text: str = Field(min_length=1, description="What the picture should show.")


class PictureQuery(Filters):
    """A search by picture."""

    # A form knows texts only.
    k: int = Field(24, ge=1, le=1000, description="How many results, best first.")


class Addition(BaseModel):
    """What is known of a picture to add."""

    model_config = ConfigDict(extra="forbid")

    description: str | None = Field(None, max_length=5000, description="What it shows, in words.")
    tags: list[Tag] = Field([], max_length=10)


class Shown(BaseModel):
    """A picture of the gallery."""

    id: str
    name: str
    width: int
    height: int
    taken: str = Field(description="Date and time on the camera's clock, which knows no time zone.")
    tags: list[str]
    description: str | None

    @classmethod
    def fields_of(cls, entry: Entry) -> dict[str, Any]:
        """What the world may know of an entry: not where its file is."""
        return {
            "id": entry.id,
            "name": entry.name,
            "width": entry.width,
            "height": entry.height,
            "taken": entry.taken.isoformat(),
            "tags": list(entry.tags),
            "description": entry.description,
        }

    @classmethod
    def of(cls, entry: Entry) -> Shown:
        """An entry as it is shown."""
        return cls(**cls.fields_of(entry))


class Result(Shown):
    """A picture found."""

    score: float

    @classmethod
    def found(cls, hit: Hit) -> Result:
        """A hit as it is shown."""
        return cls(score=round(hit.score, 5), **cls.fields_of(hit.entry))


class Found(BaseModel):
    """What a search found, best first."""

    results: list[Result]
    milliseconds: float


class Listing(BaseModel):
    """Some pictures of the gallery, in no particular order."""

    pictures: list[Shown]


class About(BaseModel):
    """What a page has to know before it asks for more."""

    pictures: int
    additions: bool = Field(description="Whether pictures may be added.")
    upload_bytes: int
    characters: int
    words: int
    results: int


class Stored(BaseModel):
    """A picture that was added."""

    id: str
    name: str
    known: bool = Field(description="Whether the gallery had it already.")


class Health(BaseModel):
    """Whether the service answers."""

    status: str


class Problem(BaseModel):
    """Why a request was not served, in one sentence."""

    error: str


def form_schema(known: type[BaseModel]) -> dict[str, Any]:
    """The schema of a form: a picture and what else is known."""
    schema = known.model_json_schema()
    schema["properties"] = {
        "picture": {"type": "string", "format": "binary", "description": "A picture file."},
        **schema["properties"],
    }
    schema["required"] = ["picture"]
    return schema

"""What is said of a built-in scene: captions of two things, a dense text of all, which words name what."""

from __future__ import annotations

from dataclasses import dataclass

from seps.data.text import words_in_span
from seps.data.things import Scene, Thing

PLACES = (
    ("at the top left", "at the top", "at the top right"),
    ("on the left", "in the middle", "on the right"),
    ("at the bottom left", "at the bottom", "at the bottom right"),
)
NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
FULL = ("size", "texture", "colour")


@dataclass(frozen=True)
class Mention:
    """The characters [start, end) of a text that name a thing: its attributes and its shape."""

    start: int
    end: int
    thing: int


@dataclass(frozen=True)
class Sentence:
    """A text and its mentions."""

    text: str
    mentions: tuple[Mention, ...]

    def words(self) -> dict[int, list[int]]:
        """Thing -> indices of the words (as `split_words` counts them) that name it."""
        named: dict[int, list[int]] = {}
        for mention in self.mentions:
            named.setdefault(mention.thing, []).extend(words_in_span(self.text, mention.start, mention.end))
        return named


def place(thing: Thing) -> str:
    """Where in the picture a thing stands, by thirds."""
    return PLACES[min(int(thing.y * 3), 2)][min(int(thing.x * 3), 2)]


def relation(scene: Scene, first: int, second: int) -> str:
    """How the first thing stands to the second: depth for the overlapping pair, direction for any other."""
    if scene.overlap is not None and set(scene.overlap) == {first, second}:
        return "in front of" if scene.in_front(first, second) else "behind"
    one, other = scene.things[first], scene.things[second]
    across, down = one.x - other.x, one.y - other.y
    side = "to the left of" if across < 0 else "to the right of"
    height = "above" if down < 0 else "below"
    if abs(down) < abs(across) / 2:
        return side
    if abs(across) < abs(down) / 2:
        return height
    return f"{height} and {side}"


class _Writer:
    """Puts a text together from words and names, and remembers where the names stand."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.text = ""
        self.mentions: list[Mention] = []

    def say(self, words: str) -> _Writer:
        if self.text and words[0] not in ",.":
            self.text += " "
        self.text += words[0].upper() + words[1:] if self.text in ("",) or self.text.endswith(". ") else words
        return self

    def name(self, index: int, attributes: tuple[str, ...], article: str = "a") -> _Writer:
        thing = self.scene.things[index]
        words = " ".join([*(getattr(thing, name) for name in attributes), thing.shape])
        if article == "a" and words[0] in "aeiou":
            article = "an"
        self.say(article)
        start = len(self.text) + 1
        self.say(words)
        self.mentions.append(Mention(start, len(self.text), index))
        return self

    def end(self) -> Sentence:
        return Sentence(self.text, tuple(self.mentions))


def captions(scene: Scene) -> tuple[Sentence, ...]:
    """The sparse captions: each names two things with attributes, and how the one stands to the other."""
    return tuple(_caption(scene, number) for number in range(len(scene.phrases)))


def _caption(scene: Scene, number: int) -> Sentence:
    phrase = scene.phrases[number]
    writer = _Writer(scene)
    opening = {1: "there is", 5: "a picture of"}.get(phrase.style)
    if opening:
        writer.say(opening)
    writer.name(phrase.first, phrase.first_attributes)
    if phrase.style == 0:
        writer.say("is")
    elif phrase.style == 3:
        writer.say("can be seen")
    elif phrase.style == 4:
        writer.say(place(scene.things[phrase.first])).say(",")
    writer.say(relation(scene, phrase.first, phrase.second))
    return writer.name(phrase.second, phrase.second_attributes).say(".").end()


def dense_text(scene: Scene) -> Sentence:
    """The dense text: every thing with all its attributes and its place, and how neighbours stand."""
    writer = _Writer(scene)
    count = len(scene.things)
    writer.say(f"the picture shows {NUMBERS[count]} things.")
    for index in range(count):
        writer.say("There is").name(index, FULL).say(place(scene.things[index])).say(".")
    for first in range(count - 1):
        writer.name(first, ("colour",), article="The").say("is").say(relation(scene, first, first + 1))
        writer.name(first + 1, ("colour",), article="the").say(".")
    return writer.end()

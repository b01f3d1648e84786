"""What is said of a scene: by hand for one, and that every mention names its thing for many."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seps.data.text import split_words
from seps.data.things import Backdrop, Phrase, Scene, Thing, compose
from seps.data.wording import captions, dense_text, place, relation


def _thing(shape: str, colour: str, x: float, y: float, texture: str = "plain", size: str = "large") -> Thing:
    return Thing(shape, colour, texture, size, x, y, 0.1, 0.0)


def _scene(*things: Thing, phrases: tuple[Phrase, ...] = (), overlap: tuple[int, int] | None = None) -> Scene:
    return Scene(things, tuple(range(len(things))), overlap, phrases, Backdrop("cloud", 0.5, 0.7, 0))


def test_sentences_by_hand() -> None:
    star = _thing("star", "orange", 0.2, 0.2, "striped", "small")
    ring = _thing("ring", "blue", 0.8, 0.2)
    phrases = tuple(Phrase(0, 1, ("size", "colour"), ("colour",), style) for style in range(6))
    said = [sentence.text for sentence in captions(_scene(star, ring, phrases=phrases))]
    assert said == [
        "A small orange star is to the left of a blue ring.",
        "There is a small orange star to the left of a blue ring.",
        "A small orange star to the left of a blue ring.",
        "A small orange star can be seen to the left of a blue ring.",
        "A small orange star at the top left, to the left of a blue ring.",
        "A picture of a small orange star to the left of a blue ring.",
    ]
    assert dense_text(_scene(star, ring)).text == (
        "The picture shows two things. There is a small striped orange star at the top left. "
        "There is a large plain blue ring at the top right. "
        "The orange star is to the left of the blue ring."
    )
    mentions = captions(_scene(star, ring, phrases=phrases))[1].mentions
    assert [(m.start, m.end, m.thing) for m in mentions] == [(11, 28, 0), (46, 55, 1)]
    assert captions(_scene(star, ring, phrases=phrases))[1].words() == {0: [3, 4, 5], 1: [11, 12]}
    alone = (Phrase(0, 1, ("colour",), ("colour",), 2),)
    assert captions(_scene(star, ring, phrases=alone))[0].text.startswith("An orange star")


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (0.2, 0.5, "to the left of"),
        (0.8, 0.6, "to the right of"),
        (0.5, 0.2, "above"),
        (0.6, 0.9, "below"),
        (0.3, 0.3, "above and to the left of"),
        (0.8, 0.7, "below and to the right of"),
    ],
)
def test_relations_by_hand(x: float, y: float, words: str) -> None:
    assert relation(_scene(_thing("star", "red", x, y), _thing("ring", "red", 0.5, 0.5)), 0, 1) == words


def test_depth_is_said_of_the_overlapping_pair() -> None:
    things = [
        _thing("star", "red", 0.5, 0.5),
        _thing("ring", "red", 0.6, 0.5),
        _thing("moon", "red", 0.1, 0.5),
    ]
    scene = _scene(*things, overlap=(0, 1))
    assert [relation(scene, 0, 1), relation(scene, 1, 0)] == ["behind", "in front of"]
    assert relation(scene, 0, 2) == "to the right of"


def test_places_by_thirds() -> None:
    assert place(_thing("star", "red", 0.32, 0.34)) == "on the left"
    assert place(_thing("star", "red", 0.5, 0.5)) == "in the middle"
    assert place(_thing("star", "red", 1.0, 1.0)) == "at the bottom right"


@given(st.integers(0, 2**31))
def test_every_mention_names_its_thing(seed: int) -> None:
    scene = compose(seed, 0)
    for number, sentence in enumerate((*captions(scene), dense_text(scene))):
        for mention in sentence.mentions:
            thing = scene.things[mention.thing]
            *attributes, shape = sentence.text[mention.start : mention.end].split()
            assert shape == thing.shape
            assert set(attributes) <= {thing.colour, thing.size, thing.texture}
        named = {mention.thing for mention in sentence.mentions}
        assert len(named) == (2 if number < 5 else len(scene.things))
        words = split_words(sentence.text)
        for thing_index, indices in sentence.words().items():
            assert scene.things[thing_index].shape in {words[i][0] for i in indices}
        assert sentence.text[0].isupper()
        assert sentence.text.endswith(".")
        assert "  " not in sentence.text

"""The parts of an explanation add up to the score, and its maps to the affinities."""

import json

import pytest
import torch
from PIL import Image

from seps.explanation import explain, explain_tokens
from seps.model import SepsConfig, create
from seps.recipe import described, laps, paper, released

TEXTS = ["A red dog runs over the green grass.", "two small cats sleep on a blue sofa", "the sky is blue"]
DENSE = "A large red dog, seen from the left, runs over fresh green grass under a blue sky."
LIGHT = {"kind": "light", "size": 64, "width": 32, "layers": 1, "heads": 2}
RECIPES = {
    "paper": paper(),
    "shared": paper(aggregation="shared"),
    "top": paper(pooling="top"),
    "words only": paper(directions="word_to_patch"),
    "patches only": paper(directions="patch_to_word", pooling="mean"),
    "released": released(),
    "laps": laps(),
    "laps all kept": laps(keep_ratio=1.0),
    "described": described(),
    "described slimmed": described(description_tokens="slimmed", description_length=16),
    "published paper": paper(dense_side="text"),
    "published released": released(dense_side="text"),
}


def make(recipe, global_term="none"):
    config = SepsConfig(
        recipe=recipe,
        channels=32,
        image_encoder=LIGHT,
        text_encoder={"kind": "light", "width": 32, "layers": 1, "heads": 2},
        global_term=global_term,
    )
    model, processor = create(config, [*TEXTS, DENSE])
    # Relevance networks start near zero; moved away, a part that is left out shows.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval(), processor


@pytest.fixture(scope="module")
def picture():
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randint(0, 256, (40, 60, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def score_of(model, processor, picture, text, dense):
    def words(given, limit):
        read = processor.texts([given], limit)
        return model.encode_texts(read["ids"], read["mask"])

    with torch.no_grad():
        images = model.encode_images(processor.images([picture]))
        about = None if dense is None else words(dense, model.recipe.description_length)
        return model.score(images, words(text, 90), about)[0, 0].item()


@pytest.mark.parametrize("global_term", ["none", "score"])
@pytest.mark.parametrize("dense", [None, DENSE])
@pytest.mark.parametrize("name", RECIPES)
def test_the_parts_add_up_to_the_score(name, dense, global_term, picture):
    model, processor = make(RECIPES[name], global_term)
    given = dense if RECIPES[name].dense != "none" else None
    found = explain(model, processor, picture, TEXTS[0], dense)
    assert found.score == pytest.approx(score_of(model, processor, picture, TEXTS[0], given), abs=1e-6)
    assert found.total == pytest.approx(found.score, abs=1e-5)
    assert ("global vectors" in found.terms) == (global_term == "score")
    assert [word.text for word in found.words] == [
        "A",
        "red",
        "dog",
        "runs",
        "over",
        "the",
        "green",
        "grass",
        ".",
    ]


@pytest.mark.parametrize("name", ["paper", "laps", "described"])
def test_a_words_map_adds_up_to_its_cosine_with_the_token_it_met(name, picture):
    model, processor = make(RECIPES[name])
    found = explain(model, processor, picture, TEXTS[0], DENSE)
    meeting = next(each for each in found.meetings if each.name == "patches")
    for place, word in enumerate(found.words):
        cosine = word.map.sum().item()
        read = cosine if model.recipe.affinity == "cosine" or cosine > 0 else 0.1 * cosine
        assert read == pytest.approx(word.token[1], abs=1e-5)
        assert meeting.tokens[int(meeting.best_tokens[place])] == word.token[0]


def test_the_kept_patches_lead_the_order(picture):
    model, processor = make(RECIPES["described"])
    found = explain(model, processor, picture, TEXTS[0], DENSE)
    assert set(found.choices) == {"sparse", "dense"}
    for choice in found.choices.values():
        count = int(choice.kept.sum())
        assert count == 8
        assert set(choice.order[:count].tolist()) == set(choice.kept.nonzero().flatten().tolist())
        assert (choice.saliency[choice.order].diff() <= 0).all()


def test_token_maps_are_shares_of_the_patches(picture):
    model, processor = make(RECIPES["paper"])
    found = explain(model, processor, picture, TEXTS[0], DENSE)
    assert list(found.token_maps) == ["1", "2", "3", "rest"]
    kept = torch.stack([choice.kept for choice in found.choices.values()]).any(0)
    for name, values in found.token_maps.items():
        assert values.sum().item() == pytest.approx(1, abs=1e-5)
        if name != "rest":
            assert values[~kept].abs().max() == 0


def test_each_word_names_the_descriptions_word_it_met(picture):
    model, processor = make(RECIPES["described"])
    found = explain(model, processor, picture, "red", DENSE)
    met = next(each for each in found.meetings if each.name == "description")
    assert met.tokens[:4] == ("A", "large", "red", "dog")
    word = found.words[0]
    assert word.description is not None
    assert word.description[0] == met.tokens[int(met.affinity[0].argmax())]
    assert explain(model, processor, picture, "red").words[0].description is None


def test_a_hand_worked_meeting():
    """Two words, two tokens: each mean shared out, tokens credited to the word they met."""
    from seps.alignment import Aligner
    from seps.explanation.meeting import meet

    cosines = torch.tensor([[0.8, 0.2], [0.4, 0.1]])
    found = meet("patches", ("a", "b"), ("1", "rest"), cosines, Aligner(laps(affinity="cosine")))
    assert found.word_shares.tolist() == pytest.approx([0.4, 0.2])
    assert found.token_shares.tolist() == pytest.approx([0.4, 0.1])
    assert found.shares.tolist() == pytest.approx([0.9, 0.2])
    assert found.relevance == (0.0, 0.0)
    assert found.score == pytest.approx(1.1)


def test_the_overlay_is_plain_json(picture):
    model, processor = make(RECIPES["described"])
    found = explain(model, processor, picture, "red dog", DENSE)
    layer = json.loads(found.to_json())
    patches = layer["grid"][0] * layer["grid"][1]
    assert layer["box"] == [0, 0, 1, 1]
    assert {len(word["map"]) for word in layer["words"]} == {patches}
    assert sorted(layer["branches"]["sparse"]["order"]) == list(range(patches))
    assert sum(w["share"] for w in layer["words"]) + sum(layer["terms"].values()) == pytest.approx(
        layer["score"], abs=1e-4
    )


def test_what_cannot_be_explained_is_refused(picture):
    model, processor = make(RECIPES["laps"])
    with pytest.raises(ValueError, match="found an empty text"):
        explain(model, processor, picture, "  ")
    with pytest.raises(ValueError, match="found it in training"):
        explain(model.train(), processor, picture, "red")


def test_emoji_and_right_to_left_text_are_explained(picture):
    model, processor = make(RECIPES["described"])
    for text in ("🐕🌿", "כלב אדום", "赤い犬"):
        found = explain(model, processor, picture, text, DENSE)
        assert found.total == pytest.approx(found.score, abs=1e-5)
        assert found.words


def test_stored_tokens_are_explained_as_they_are(picture):
    model, processor = make(RECIPES["paper"])
    with torch.no_grad():
        images = model.encode_images(processor.images([picture]))
    found = explain_tokens(model, processor, images, "red dog", picture.size)
    assert found.total == pytest.approx(found.score, abs=1e-5)
    assert set(found.choices) == {"sparse"}

"""Weighing the terms: put together they are the score, what helps counts more, ranking is fair."""

import logging
from dataclasses import replace

import pytest
import torch

from making import refusal
from seps.evaluation import encode, score_all
from seps.metrics import measure_retrieval
from seps.model import SepsConfig, create, load
from seps.sources import ReadOptions, SceneOptions, open_source
from seps.weighing import Terms, WeighOptions, contrast, describe, measure_terms, put_together, run, weigh

LIGHT = {"kind": "light", "width": 16}
READ = ReadOptions(scenes=SceneOptions(train=4, dev=6, test=4, size=32))


def made(recipe="described", term="score"):
    torch.manual_seed(0)
    texts = list(open_source("scenes", READ, "dev")[0].captions)
    return create(SepsConfig(recipe, 16, {**LIGHT, "size": 32}, LIGHT, term), texts=texts)


def weights(model):
    return torch.stack([model.head.description.weight, model.global_term.weight])


def absent(model):
    return model.head.description.absent_scale, model.head.description.absent_shift


def drawn(good: float, bad: float, count: int = 40) -> Terms:
    """Terms of which the descriptions' tell right from wrong by `good` spreads and the others by `bad`."""
    torch.manual_seed(0)
    owners = torch.arange(count).repeat_interleave(2)
    right = torch.nn.functional.one_hot(owners, count).T.float()
    noise = [0.1 * torch.randn(count, 2 * count) for _ in range(3)]
    patches, words, cosines = (
        0.1 * gap * right + each for gap, each in zip((bad, good, bad), noise, strict=True)
    )
    return Terms(patches, 2 * words + 0.7, cosines, owners)


def test_the_terms_put_together_are_the_score():
    model, processor = made()
    with torch.no_grad():
        model.head.description.absent_shift.fill_(0.3)
    corpus = encode(model, processor, open_source("scenes", READ, "dev"))
    terms = measure_terms(model, corpus)
    for described, dense in ((True, corpus.dense), (False, None)):
        every = torch.full((len(terms.patches),), described)
        found = put_together(terms, every, weights(model), *absent(model))
        torch.testing.assert_close(
            found.detach(), score_all(model, replace(corpus, dense=dense)), rtol=1e-4, atol=1e-4
        )


def test_what_tells_right_from_wrong_counts_more_than_what_does_not():
    model, _ = made()
    terms = drawn(good=3, bad=0.5)
    before = measure(model, terms, described=True)
    weigh(model, terms)
    assert model.head.description.weight > 2 > 2 * model.global_term.weight / model.head.description.weight
    assert measure(model, terms, described=True) > before + 10


def measure(model, terms, described):
    every = torch.full((len(terms.patches),), described)
    scores = put_together(terms, every, weights(model), *absent(model))
    return measure_retrieval(scores.detach(), terms.owners).rsum


def test_the_temperature_suits_the_new_scale_of_the_scores():
    model, _ = made()
    terms = drawn(good=3, bad=0.5)
    weigh(model, terms)
    every = torch.ones(len(terms.patches), dtype=torch.bool)
    scores = put_together(terms, every, weights(model), *absent(model))
    fitted = float(contrast(scores / model.temperature, terms.owners).detach())
    for factor in (0.5, 2.0):
        assert fitted < float(contrast(scores / (factor * model.temperature), terms.owners).detach())


def test_a_missing_description_is_worth_what_descriptions_usually_are():
    model, _ = made()
    terms = drawn(good=1, bad=1)
    weigh(model, terms)
    described = torch.arange(len(terms.patches)) % 2 == 0
    scores = put_together(terms, described, weights(model), *absent(model))
    share = described[scores.topk(10, dim=0).indices].float().mean()
    assert 0.4 < share < 0.6


def test_the_command_writes_a_model_that_differs_in_nothing_else(tmp_path, caplog):
    for part in (pair := made()):
        part.save_pretrained(tmp_path / "before")
    options = WeighOptions(str(tmp_path / "before"), "scenes", str(tmp_path / "after"), read=READ)
    with caplog.at_level(logging.INFO, logger="seps"):
        assert run(options) == 0
    after, _ = load(tmp_path / "after")
    changed = {
        name
        for (name, old), new in zip(pair[0].state_dict().items(), after.state_dict().values(), strict=True)
        if not torch.equal(old, new)
    }
    assert changed <= {
        "head.description.raw_weight",
        "head.description.absent_scale",
        "head.description.absent_shift",
        "global_term.raw_weight",
        "log_temperature",
    }
    assert describe(after) in caplog.text


@pytest.mark.parametrize(
    ("recipe", "term"), [("laps", "score"), ("described", "loss"), ("described", "none")]
)
def test_a_model_with_nothing_to_weigh_is_refused(recipe, term, tmp_path):
    for part in made(recipe, term):
        part.save_pretrained(tmp_path)
    options = WeighOptions(str(tmp_path), "scenes", str(tmp_path / "out"), read=READ)
    assert refusal(lambda: run(options)).startswith("model: expected a recipe with dense='matched'")
    assert not (tmp_path / "out").exists()


def test_a_test_split_is_refused():
    sentence = refusal(lambda: WeighOptions("model", "data", "out", split="test"))
    assert sentence == "split: expected one that is no test split, found 'test'"


def test_a_folder_with_something_in_it_is_refused_before_any_work(tmp_path):
    (tmp_path / "mine.txt").write_text("kept")
    options = WeighOptions(str(tmp_path / "nowhere"), "scenes", str(tmp_path), read=READ)
    sentence = refusal(lambda: run(options))
    assert sentence == f"out: expected a folder that is empty or not there yet, found {tmp_path}"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]

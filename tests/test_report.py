"""Measuring: figures on hand-made scores, ensembles, the truth of scenes, the report and its files."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from making import refusal
from seps.data import Scenes, write
from seps.evaluation import (
    chance_rsum,
    encode,
    figures_of,
    measure_grounding,
    on_side,
    score_all,
)
from seps.metrics import measure_retrieval
from seps.model import save
from seps.report import SCORES, EvalOptions, Scores, combine, markdown, run, summarise
from seps.report_page import extremes, report_html
from seps.retrieval import build_model
from seps.sources import ReadOptions, SceneOptions, open_source, truths_of
from seps.tokens import Tokens
from test_retrieval import LIGHT, options

SOURCE = Scenes(6, split="test", size=32)
READ = ReadOptions(scenes=SceneOptions(train=12, dev=4, test=6, size=32))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a small untrained model."""
    folder = tmp_path_factory.mktemp("model")
    model, processor = build_model(options(), open_source("scenes", READ, "train"))
    save(model, processor, folder)
    return folder, model.eval(), processor


def test_all_scores_are_those_of_pairs_one_by_one(saved, monkeypatch):
    _, model, processor = saved
    corpus = encode(model, processor, SOURCE)
    whole = score_all(model, corpus)
    monkeypatch.setattr("seps.evaluation.IMAGE_BLOCK", 4)
    monkeypatch.setattr("seps.evaluation.TEXT_BLOCK", 7)
    torch.testing.assert_close(score_all(model, corpus), whole, atol=1e-5, rtol=1e-5)
    for image, text in ((0, 0), (5, 29), (3, 11)):
        dense = corpus.dense[[image]]
        single = model.score(corpus.images[[image]], corpus.texts[[text]], dense)
        assert single.item() == pytest.approx(whole[image, text].item(), abs=1e-5)


def test_dense_text_on_the_text_side_is_that_of_the_texts_own_image(saved):
    _, model, processor = saved
    turned = on_side(model, "text")
    assert turned.recipe == replace(model.recipe, dense_side="text")
    corpus = encode(turned, processor, SOURCE)
    scores = score_all(turned, corpus)
    owner = int(corpus.owners[17])
    single = turned.score(corpus.images[[2]], corpus.texts[[17]], corpus.dense[[owner]])
    assert single.item() == pytest.approx(scores[2, 17].item(), abs=1e-5)
    assert on_side(model, "image") is model


def test_chance_is_what_guessing_reaches():
    generator = torch.Generator().manual_seed(0)
    owners = torch.arange(20).repeat_interleave(5)
    guesses = [measure_retrieval(torch.rand(20, 100, generator=generator), owners).rsum for _ in range(200)]
    assert np.mean(guesses) == pytest.approx(chance_rsum(20, 100), rel=0.03)


def test_grounding_finds_a_model_that_looks_where_it_should():
    """Patches that show things made equal to the words that name them, against patches of noise."""
    source = Scenes(4, split="test", size=128)
    encoder = {**LIGHT, "size": 128}
    model, processor = build_model(options(model={"image_encoder": encoder}), source)
    corpus = encode(model, processor, source)
    rows, columns = model.image_encoder.grid
    truths = truths_of(source, corpus.indices, "scenes")
    features = torch.randn(corpus.images.features.shape, generator=torch.Generator().manual_seed(0)) * 0.01
    texts = corpus.texts.features.clone()
    things = torch.eye(8, model.config.channels)
    for image, truth in enumerate(truths):
        cells = torch.from_numpy(truth.cells(rows, columns)).flatten(1)
        for thing in range(len(cells)):
            features[image, cells[thing]] = things[thing]
        for place, sentence in enumerate(truth.captions):
            row = 5 * image + place
            numbers = processor.texts([corpus.captions[row]])["words"][0]
            for thing, words in sentence.words().items():
                for token in range(len(numbers)):
                    if int(numbers[token]) in words:
                        texts[row, token] = things[thing]
    ideal = replace(corpus, images=Tokens(features), texts=Tokens(texts, corpus.texts.mask), dense=None)
    found = measure_grounding(model, processor, ideal, truths)
    shown = [
        bool(truth.cells(rows, columns)[thing].any())
        for truth in truths
        for sentence in truth.captions
        for thing, words in sentence.words().items()
        for _ in words
    ]
    assert found.pointing >= np.mean(shown) - 0.1 > found.pointing_chance + 0.3
    assert 0 <= found.kept <= 1
    assert found.figures()["pointing"] == 100 * found.pointing


def test_truth_is_read_from_a_folder_of_scenes_and_missing_elsewhere(tmp_path):
    write(tmp_path / "scenes", {"test": 3}, size=32)
    source = open_source(str(tmp_path / "scenes"), ReadOptions(), "test")
    assert truths_of(source, [2, 0], str(tmp_path / "scenes"))[0] == Scenes(3, split="test", size=32).truth(2)
    (tmp_path / "scenes" / "truth.jsonl").unlink()
    assert truths_of(source, [0], str(tmp_path / "scenes")) is None


def evaluate(saved, tmp_path, **changes):
    """The report of a run, as JSON."""
    out = tmp_path / changes.pop("out", "out")
    asked = EvalOptions(str(saved), "scenes", out=str(out), read=READ, device="cpu", **changes)
    assert run(asked) == 0
    return out, json.loads((out / "report.json").read_text())


def test_a_report_says_what_was_measured_and_with_which_side(saved, tmp_path):
    folder, model, processor = saved
    out, found = evaluate(folder, tmp_path, folds=3)
    corpus = encode(model, processor, SOURCE)
    expected = measure_retrieval(score_all(model, corpus), corpus.owners)
    assert found["retrieval"] == pytest.approx(figures_of(expected))
    assert (found["images"], found["texts"], found["dense_side"]) == (6, 30, "image")
    assert found["folds"]["count"] == 3
    assert set(found["grounding"]) >= {"kept", "kept_chance", "pointing"}
    assert "dense text on the image side" in (out / "report.md").read_text()
    ranks = [json.loads(line) for line in (out / "ranks.jsonl").read_text().splitlines()]
    assert len(ranks) == 36
    texts = [line["rank"] for line in ranks if line["query"] == "text"]
    assert 100 * np.mean(np.array(texts) <= 5) == pytest.approx(found["retrieval"]["t2i_r5"])
    page = (out / "report.html").read_text()
    assert page.count("data:image/jpeg;base64,") >= 12
    assert "http" not in page.replace('<meta charset="utf-8">', "")
    assert sorted(path.name for path in out.iterdir()) == [
        "ranks.jsonl",
        "report.html",
        "report.json",
        "report.md",
        "scores.npz",
    ]


def test_saved_scores_are_measured_again_and_in_ensembles(saved, tmp_path):
    folder, _, _ = saved
    first, found = evaluate(folder, tmp_path, out="a")
    _, other = evaluate(folder, tmp_path, out="b", dense_side="text")
    assert other["dense_side"] == "text"
    _, again = evaluate(first / SCORES, tmp_path, out="c")
    assert again["retrieval"] == found["retrieval"]
    _, both = evaluate(first / SCORES, tmp_path, out="d", ensemble=(str(tmp_path / "b" / SCORES),))
    assert both["dense_side"] == "image and text"
    parts = [Scores.read(tmp_path / name / SCORES) for name in "ab"]
    mean = (parts[0].values + parts[1].values) / 2
    assert both["retrieval"]["rsum"] == pytest.approx(measure_retrieval(mean, parts[0].owners).rsum)
    report = (tmp_path / "d" / "report.md").read_text()
    assert f"Scores are the mean of 2 matrices: {folder} (alignment), {folder} (alignment)." in report
    _, globally = evaluate(folder, tmp_path, out="e", scored="global")
    assert globally["dense_side"] == "none"


def test_kept_features_measure_like_the_images(tmp_path):
    kind = {**LIGHT, "tuning": "frozen"}
    chosen = {"image_encoder": {**kind, "size": 32}, "text_encoder": kind, "channels": 16}
    model, processor = build_model(options(model=chosen), open_source("scenes", READ, "train"))
    save(model, processor, tmp_path / "model")
    _, plain = evaluate(tmp_path / "model", tmp_path, out="a")
    _, kept = evaluate(tmp_path / "model", tmp_path, out="b", cache=str(tmp_path / "cache"))
    scores = [Scores.read(tmp_path / name / SCORES).values for name in "ab"]
    torch.testing.assert_close(scores[0], scores[1], atol=5e-3, rtol=5e-3)
    assert kept["images"] == plain["images"]
    assert any((tmp_path / "cache").iterdir())


def made(scores, owners, names=None) -> Scores:
    names = names or tuple(str(number) for number in range(len(scores)))
    return Scores(torch.tensor(scores), torch.tensor(owners), names, "none", {})


def test_an_ensemble_of_other_images_is_refused():
    with pytest.raises(ValueError, match="same 2 images"):
        combine([made([[1.0], [0.0]], [0]), made([[1.0], [0.0]], [1])])


def test_coco_is_measured_in_five_folds_by_itself():
    values = torch.eye(5000, dtype=torch.float32)
    scores = Scores(values, torch.arange(5000), tuple(map(str, range(5000))), "none", {})
    found = summarise(scores, EvalOptions("m", "d"))
    assert found["folds"]["count"] == 5
    assert found["folds"]["rsum"] == 600
    assert "mean of 5 folds" in markdown(found)


def test_scores_that_are_none_are_refused(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"no array")
    with pytest.raises(ValueError, match="expected scores that"):
        Scores.read(tmp_path / "x.npz")
    with pytest.raises(FileNotFoundError, match="no such score matrix"):
        Scores.read(tmp_path / "y.npz")
    made([[1.0]], [0], ("elsewhere",)).save(tmp_path / "z.npz")
    with pytest.raises(ValueError, match="found 'elsewhere'"):
        run(EvalOptions(str(tmp_path / "z.npz"), "scenes", out=str(tmp_path / "o"), read=READ))


def test_broken_images_are_counted_in_the_report(saved, tmp_path):
    folder, _, _ = saved
    write(tmp_path / "data", {"test": 6}, size=32)
    (tmp_path / "data" / "images" / "test-000002.png").write_bytes(b"broken")
    (tmp_path / "data" / "images" / "test-000004.png").unlink()
    asked = EvalOptions(
        str(folder),
        str(tmp_path / "data"),
        out=str(tmp_path / "o"),
        read=ReadOptions(broken="skip"),
        device="cpu",
    )
    with pytest.raises(ValueError, match=r"captions\.jsonl:5: .* is missing"):
        run(replace(asked, read=ReadOptions()))
    assert run(asked) == 0
    found = json.loads((tmp_path / "o" / "report.json").read_text())
    assert (found["images"], len(found["skipped"])) == (4, 2)
    assert "Broken items left out: 2." in (tmp_path / "o" / "report.md").read_text()


@pytest.mark.parametrize(("name", "value"), [("batch_size", 0), ("folds", 0), ("workers", -1)])
def test_options_refuse_what_measures_nothing(name, value):
    sentence = refusal(lambda: EvalOptions("model", "data", **{name: value}))
    assert sentence == f"{name}: expected at least {0 if name == 'workers' else 1}, found {value}"


def test_a_mistake_is_met_before_the_work_and_leaves_nothing(saved, tmp_path):
    folder, _, _ = saved
    asked = EvalOptions(str(folder), "scenes", out=str(tmp_path / "o"), read=READ, device="cpu")
    with pytest.raises(FileNotFoundError, match="no such score matrix"):
        run(replace(asked, ensemble=(str(tmp_path / "nowhere.npz"),)))
    assert "found no such folder" in refusal(lambda: run(replace(asked, model="nosuch")))
    assert not (tmp_path / "o").exists()


def test_scores_of_other_texts_are_refused(tmp_path):
    write(tmp_path / "data", {"test": 2}, size=32)
    names = tuple(f"images/test-{number:06d}.png" for number in range(2))
    made([[1.0, 0.0], [0.0, 1.0]], [0, 1], names).save(tmp_path / "s.npz")
    asked = EvalOptions(str(tmp_path / "s.npz"), str(tmp_path / "data"), out=str(tmp_path / "o"))
    sentence = refusal(lambda: run(asked))
    assert sentence.startswith(f"{tmp_path / 's.npz'}: expected scores of the 10 texts of these images")
    assert sentence.endswith("found scores of 2")


def test_the_hardest_queries_come_first():
    ranks, scores = torch.tensor([3, 1, 0, 7, 1]), torch.tensor([0.0, 0.2, 0.0, 0.0, 0.9])
    assert extremes(ranks, scores, 2, hardest=True) == [3, 0]
    assert extremes(ranks, scores, 2, hardest=False) == [4, 1]


def test_a_report_becomes_safe_html():
    page = report_html("# A <b>\n\ntext & more\n\n| a | b |\n|---|---|\n| <1> | 2 |\n")
    assert page == (
        "<h1>A &lt;b&gt;</h1>\n<p>text &amp; more</p>\n"
        "<table><tr><th>a</th><th>b</th></tr><tr><td>&lt;1&gt;</td><td>2</td></tr></table>"
    )


def test_a_picture_of_any_mode_becomes_a_thumbnail():
    from seps.report_page import data_address

    assert data_address(Image.new("L", (900, 30))).startswith("data:image/jpeg;base64,")

"""The demonstration on a handful of scenes: everything but its numbers."""

from dataclasses import replace

import pytest

from seps import demo
from seps.sources import SceneOptions


@pytest.fixture
def handful(monkeypatch):
    """A demonstration of seconds."""
    whole = demo.plan

    def small(folder):
        options = whole(folder)
        scenes = SceneOptions(train=8, dev=4, test=4, size=32)
        encoder = {**demo.LIGHT, "width": 32, "size": 32, "layers": 1}
        return replace(
            options,
            run=replace(options.run, epochs=1, evaluate_epochs=1),
            data=replace(options.data, scenes=scenes, batch_size=4),
            model=replace(options.model, channels=16, image_encoder=encoder),
        )

    monkeypatch.setattr(demo, "plan", small)


def test_the_demonstration_says_and_draws_what_it_measured(handful, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(demo.FOLDER, str(tmp_path / "demo"))
    monkeypatch.setenv("DEMO_SERVE", "0")
    assert demo.main() == 0
    out = capsys.readouterr().out
    for text in ("mean-pooled baseline", "SEPS", "blind guessing", "kept patches that show a thing:"):
        assert text in out
    assert (tmp_path / "demo" / "kept.png").read_bytes().startswith(b"\x89PNG")


def test_both_models_learn_for_equally_many_steps(tmp_path):
    options = demo.plan(tmp_path)
    other = demo.baseline(options, tmp_path)
    assert (options.data, options.optim) == (other.data, other.optim)
    assert options.model.image_encoder == other.model.image_encoder
    assert options.model.text_encoder == other.model.text_encoder
    assert (options.run.epochs, options.run.most_steps) == (other.run.epochs, other.run.most_steps)
    assert (options.objective.scored, other.objective.scored) == ("alignment", "global")


def test_what_cannot_be_written_is_one_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv(demo.FOLDER, str(tmp_path / "file"))
    assert demo.main() == 2
    err = capsys.readouterr().err
    assert err.startswith("demo: ")
    assert len(err.splitlines()) == 1


def test_the_table_holds_every_row():
    figures = {f"{side}_r{k}": 12.34 for side in ("i2t", "t2i") for k in (1, 5, 10)} | {"rsum": 74.0}
    lines = demo.table({"one": figures, "another": figures}, 9.5).splitlines()
    assert len(lines) == 4
    assert lines[1].split() == ["one", *["12.3"] * 6, "74.0"]
    assert lines[3].split()[-1] == "9.5"
    assert len({len(line) for line in lines}) == 1

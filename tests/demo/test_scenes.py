"""The drawn part of the demonstration on a handful of scenes: everything but its numbers."""

from dataclasses import replace

import pytest

from seps.demo import scenes
from seps.sources import SceneOptions


@pytest.fixture
def handful(monkeypatch):
    """A demonstration of seconds."""
    whole = scenes.plan

    def small(folder):
        options = whole(folder)
        drawn = SceneOptions(train=8, dev=4, test=4, size=32)
        encoder = {**scenes.LIGHT, "width": 32, "size": 32, "layers": 1}
        return replace(
            options,
            run=replace(options.run, epochs=1, evaluate_epochs=1),
            data=replace(options.data, scenes=drawn, batch_size=4),
            model=replace(options.model, channels=16, image_encoder=encoder),
        )

    monkeypatch.setattr(scenes, "plan", small)


def test_it_says_and_draws_what_it_measured(handful, tmp_path, capsys):
    scenes.show_training(tmp_path)
    out = capsys.readouterr().out
    for text in ("mean-pooled baseline", "SEPS", "blind guessing", "kept patches that show a thing:"):
        assert text in out
    assert (tmp_path / "kept.png").read_bytes().startswith(b"\x89PNG")


def test_both_models_learn_for_equally_many_steps(tmp_path):
    options = scenes.plan(tmp_path)
    other = scenes.baseline(options, tmp_path)
    assert (options.data, options.optim) == (other.data, other.optim)
    assert options.model.image_encoder == other.model.image_encoder
    assert options.model.text_encoder == other.model.text_encoder
    assert (options.run.epochs, options.run.most_steps) == (other.run.epochs, other.run.most_steps)
    assert (options.objective.scored, other.objective.scored) == ("alignment", "global")


def test_the_table_holds_every_row():
    figures = {f"{side}_r{k}": 12.34 for side in ("i2t", "t2i") for k in (1, 5, 10)} | {"rsum": 74.0}
    lines = scenes.table({"one": figures, "another": figures}, 9.5).splitlines()
    assert len(lines) == 4
    assert lines[1].split() == ["one", *["12.3"] * 6, "74.0"]
    assert lines[3].split()[-1] == "9.5"
    assert len({len(line) for line in lines}) == 1

"""The loop: what it trains, keeps, logs, refuses, and that a killed run ends like an unbroken one."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from seps import training
from seps.journal import draw_curves, read_log
from seps.optimisation import MovingAverage, OptimSettings, learning_rate_factor, make_optimiser
from seps.snapshots import read_snapshot, write_snapshot
from seps.training import BEST, SNAPSHOT, FitSettings


class Line(nn.Module):
    """A little network with everything that makes exact resumption hard: dropout, batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.top = nn.Linear(8, 1)

    def forward(self, rows):
        return self.top(torch.dropout(self.norm(self.body(rows)).relu(), 0.3, self.training))


class Regression:
    """A task with noise from every global source of randomness."""

    def __init__(self, pause: float = 0.0, broken_at: int | None = None) -> None:
        torch.manual_seed(7)
        self.model = Line()
        self.pause, self.broken_at = pause, broken_at
        self.seen: list[tuple[int, int]] = []

    def backbones(self):
        return [self.model.body]

    def steps(self):
        return 6

    def loader(self, epoch, start):
        for number in range(start, self.steps()):
            torch.rand(3)  # a loader that draws must not matter
            rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(100 * epoch + number))
            yield epoch, number, rows

    def names(self, batch):
        return f"rows of batch {batch[1]}"

    def loss(self, batch, _epoch):
        time.sleep(self.pause)
        self.seen.append(batch[:2])
        rows = batch[2] + 0.1 * torch.randn(16, 4) + 0.01 * random.random()
        error = (self.model(rows).squeeze(1) - rows.sum(1)).square().mean()
        if self.broken_at == batch[1]:
            error = error * math.inf
        return {"total": error, "half": error / 2}

    def evaluate(self):
        torch.rand(5)
        rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            return {"score": -float((self.model(rows).squeeze(1) - rows.sum(1)).square().mean())}

    def save(self, folder):
        write_snapshot(self.model.state_dict(), folder / "model.safetensors")


OPTIM = OptimSettings(lr=0.01, average=0.9, warmup_steps=3, milestones=(2,))


def settings(folder, **changes) -> FitSettings:
    start = FitSettings(folder=str(folder), epochs=3, log_steps=1, checkpoint_steps=1)
    return replace(start, **changes)


def fit(task, settings):
    return training.fit(task, settings, OPTIM)


def weights(folder: Path) -> dict:
    state = read_snapshot(folder / SNAPSHOT)
    return {"model": state["model"], "average": state["average"], "optimiser": state["optimiser"]}


def same(first, second) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def test_learning_improves_the_score_and_the_best_is_kept(tmp_path):
    task = Regression()
    before = task.evaluate()["score"]
    outcome = fit(task, settings(tmp_path, epochs=8))
    assert outcome.steps == 48
    assert outcome.best["score"] > before + 0.5
    entries = read_log(tmp_path / "log.jsonl")
    dev = [entry for entry in entries if entry["kind"] == "dev"]
    assert [entry["epoch"] for entry in dev] == list(range(1, 9))
    assert max(entry["score"] for entry in dev) == outcome.best["score"]
    assert dev[outcome.best_epoch - 1]["score"] == outcome.best["score"]
    assert len([entry for entry in entries if entry["kind"] == "train"]) == 48
    kept = Regression()
    kept.model.load_state_dict(read_snapshot(outcome.model / "model.safetensors"))
    kept.model.eval()
    assert kept.evaluate()["score"] == outcome.best["score"]


def test_without_a_score_the_newest_model_is_kept(tmp_path):
    class Unmeasured(Regression):
        def evaluate(self):
            return {}

    task = Unmeasured()
    outcome = fit(task, settings(tmp_path))
    assert outcome.best_epoch == 3 and outcome.best == {}
    kept, last = read_snapshot(outcome.model / "model.safetensors"), weights(tmp_path)["average"]
    assert last and same({name: kept[name] for name in last}, last)


def test_the_budget_of_steps_ends_a_run_inside_an_epoch(tmp_path):
    task = Regression()
    outcome = fit(task, settings(tmp_path, epochs=5, most_steps=8))
    assert outcome.steps == len(task.seen) == 8
    assert task.seen[-1] == (1, 1)
    assert "score" in outcome.last


@pytest.mark.parametrize("stop", [1, 5, 6, 7, 11])
def test_a_run_goes_on_exactly_where_it_broke(tmp_path, stop):
    """Broken by an exception after `stop` steps, in the middle of an epoch or at its end."""
    fit(Regression(), settings(tmp_path / "whole"))
    task = Regression()
    take, steps = task.loss, []

    def loss(batch, epoch):
        if len(steps) == stop:
            raise InterruptedError
        steps.append(1)
        return take(batch, epoch)

    task.loss = loss
    with pytest.raises(InterruptedError):
        fit(task, settings(tmp_path / "broken"))
    again = Regression()
    fit(again, settings(tmp_path / "broken"))
    assert len(again.seen) == 18 - stop
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "broken"))
    assert read_log(tmp_path / "whole" / "log.jsonl") == read_log(tmp_path / "broken" / "log.jsonl")


KILLED = """
import sys
sys.path.insert(0, {tests!r})
from test_training import Regression, fit, settings
print("ready", flush=True)
fit(Regression(pause=0.02), settings({folder!r}))
"""


def test_a_killed_run_ends_with_the_weights_of_an_unbroken_one(tmp_path):
    fit(Regression(), settings(tmp_path / "whole"))
    folder = tmp_path / "killed"
    code = KILLED.format(tests=str(Path(__file__).parent), folder=str(folder))
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, stderr=subprocess.DEVNULL
    )
    process.stdout.readline()
    started = time.monotonic()
    while not (folder / SNAPSHOT).exists() and time.monotonic() - started < 60:
        time.sleep(0.005)
    time.sleep(random.uniform(0, 0.4))
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    fit(Regression(), settings(folder))
    assert same(weights(tmp_path / "whole"), weights(folder))
    assert same(
        read_snapshot(tmp_path / "whole" / BEST / "model.safetensors"),
        read_snapshot(folder / BEST / "model.safetensors"),
    )


def test_a_finished_run_is_not_done_again(tmp_path):
    first = fit(Regression(), settings(tmp_path))
    task = Regression()
    assert fit(task, settings(tmp_path)) == first
    assert not task.seen


def test_resume_false_starts_over(tmp_path):
    fit(Regression(), settings(tmp_path))
    task = Regression()
    fit(task, settings(tmp_path, resume=False))
    assert len(task.seen) == 18
    assert len(read_log(tmp_path / "log.jsonl")) == 21


def test_a_run_of_other_settings_is_refused_by_name(tmp_path):
    fit(Regression(), settings(tmp_path))
    fit(Regression(), settings(tmp_path, log_steps=7))
    with pytest.raises(ValueError, match="seed 0, this one has 3"):
        fit(Regression(), settings(tmp_path, seed=3))


def test_a_loss_that_is_no_number_names_step_and_batch(tmp_path):
    with pytest.raises(FloatingPointError, match=r"loss is inf .* at step 4 .*rows of batch 3"):
        fit(Regression(broken_at=3), settings(tmp_path))
    assert read_snapshot(tmp_path / SNAPSHOT)["counters"]["step"] == 3


def test_a_gradient_that_is_no_number_is_caught_before_it_reaches_the_weights(tmp_path):
    task = Regression()
    task.model.top.weight.register_hook(lambda gradient: gradient * math.nan)
    before = {name: value.clone() for name, value in task.model.named_parameters()}
    with pytest.raises(FloatingPointError, match="gradient is nan .* at step 1 "):
        fit(task, settings(tmp_path))
    assert all(torch.equal(before[name], value) for name, value in task.model.named_parameters())


def test_what_a_task_refuses_is_said_with_its_step_and_batch(tmp_path):
    task = Regression()
    task.names = lambda _: "a picture"

    def refuse(*_):
        raise ValueError("expected finite features")

    task.loss = refuse
    with pytest.raises(ValueError, match=r"finite features; at step 1 \(epoch 0, batch 0\) with a picture"):
        fit(task, settings(tmp_path))


def test_an_epoch_without_batches_is_refused(tmp_path):
    task = Regression()
    task.loader = lambda *_: iter(())
    with pytest.raises(ValueError, match="expected at least one full batch"):
        fit(task, settings(tmp_path))


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"epochs": 0}, "epochs"), ({"most_steps": 0}, "most_steps"), ({"seed": -1}, "seed")],
)
def test_settings_refuse_what_makes_no_run(changes, what):
    with pytest.raises(ValueError, match=what):
        FitSettings(**changes)


@pytest.mark.parametrize("changes", [{"lr": 0}, {"clip": -1}, {"average": 1.0}, {"schedule": "up"}])
def test_optimiser_settings_refuse_what_makes_no_step(changes):
    with pytest.raises(ValueError, match=f"optim.{next(iter(changes))}"):
        OptimSettings(**changes)


def test_figures_in_one_line_say_nothing_twice():
    assert training.brief({"rsum": 123.456, "score": 123.456}) == "rsum 123.5"
    assert training.brief({"score": 0.5}) == "score 0.5"


def test_the_published_schedule():
    published = OptimSettings()
    factors = [learning_rate_factor(published, epoch, 0, 1) for epoch in range(30)]
    expected = [1.0] * 9 + [0.3] * 6 + [0.09] * 5 + [0.027] * 5 + [0.0081] * 5
    assert factors == pytest.approx(expected)


def test_warm_up_and_cosine():
    warm = OptimSettings(warmup_steps=4)
    assert [learning_rate_factor(warm, 0, step, 100) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    cosine = OptimSettings(schedule="cosine")
    assert [learning_rate_factor(cosine, 0, step, 4) for step in (0, 2, 4)] == pytest.approx([1, 0.5, 0])


def test_backbones_learn_at_their_own_rate_and_frozen_weights_not_at_all():
    model = Line()
    model.norm.requires_grad_(False)
    optimiser = make_optimiser(model, OptimSettings(lr=0.1), [model.body])
    rates = {id(p): group["lr"] for group in optimiser.param_groups for p in group["params"]}
    assert rates == {
        id(model.top.weight): 0.1,
        id(model.top.bias): 0.1,
        id(model.body.weight): pytest.approx(0.01),
        id(model.body.bias): pytest.approx(0.01),
    }
    with pytest.raises(ValueError, match="all of them frozen"):
        make_optimiser(model.requires_grad_(False), OptimSettings())


def test_the_moving_average_follows_and_is_only_lent():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.0)
    average = MovingAverage(model, 0.5)
    nn.init.constant_(model.weight, 1.0)
    average.update(model)  # 1 / 11 < 0.5 of the old stays
    assert float(average.weights["weight"]) == pytest.approx(10 / 11)
    with average.lent(model):
        assert model.weight.item() == pytest.approx(10 / 11)
    assert model.weight.item() == 1.0
    assert float(average.weights["weight"]) == pytest.approx(10 / 11)


def test_curves_are_drawn_from_the_log(tmp_path):
    pytest.importorskip("matplotlib")
    entries = [{"kind": "train", "step": 1, "epoch": 0, "total": 2.0}]
    entries += [{"kind": "dev", "step": 1, "epoch": 1, "score": 1.0}]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, entries)) + '\n{"cut', encoding="utf-8")
    draw_curves(tmp_path / "log.jsonl", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")

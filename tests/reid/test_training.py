"""Training on the shared loop, its losses, and the three commands from the first picture to the last."""

import json
from dataclasses import replace

import pytest
import torch

from seps.cli import main
from seps.losses import batch_hard_triplet
from seps.modalities import reidentification
from seps.reid.data import FilePicture, hold_out
from seps.reid.model import load
from seps.reid.rendered import render_dataset
from seps.reid.report import EvalOptions, open_split
from seps.reid.sources import SightingOptions
from seps.reid.training import (
    DataOptions,
    ModelOptions,
    ObjectiveOptions,
    ReIdTask,
    TrainOptions,
    build_model,
    drop_modalities,
    ratio_loss,
    train,
)
from seps.snapshots import read_snapshot
from seps.training import SNAPSHOT, FitSettings

LIGHT = {"kind": "light", "size": [64, 32], "width": 16, "layers": 1, "heads": 2}
SMALL = {"image_encoder": LIGHT, "channels": 16}


def test_batch_hard_triplet_by_hand():
    """On a line: 0 and 3 are alike, 4 and 4.5 are alike. Only 3 is nearer to the others than to its own."""
    features = torch.tensor([[0.0], [3.0], [4.0], [4.5]])
    classes = torch.tensor([0, 0, 1, 1])
    # farthest like - nearest unlike + margin: 3 - 4, 3 - 1, .5 - 1, .5 - 1.5
    found = batch_hard_triplet(features, classes, margin=0.7)
    torch.testing.assert_close(found, torch.tensor((0 + 2.7 + 0.2 + 0) / 4))
    soft = torch.nn.functional.softplus(torch.tensor([-1.0, 2.0, -0.5, -1.0])).mean()
    torch.testing.assert_close(batch_hard_triplet(features, classes, margin=None), soft)


def test_items_without_a_like_or_an_unlike_are_left_out():
    features = torch.tensor([[0.0], [1.0], [5.0]], requires_grad=True)
    found = batch_hard_triplet(features, torch.tensor([0, 0, 1]), margin=6.0)
    torch.testing.assert_close(found, torch.tensor(((1 - 5 + 6) + (1 - 4 + 6)) / 2))
    nothing = batch_hard_triplet(features, torch.tensor([0, 1, 2]))
    nothing.backward()
    assert nothing == 0 and not features.grad.any()
    assert batch_hard_triplet(features, torch.tensor([1, 1, 1])) == 0
    with pytest.raises(ValueError, match="features, identities"):
        batch_hard_triplet(features, torch.tensor([0, 1]))


def test_equal_features_have_a_finite_gradient():
    features = torch.ones(4, 3, requires_grad=True)
    batch_hard_triplet(features, torch.tensor([0, 0, 1, 1])).backward()
    assert torch.isfinite(features.grad).all()


def test_dropping_modalities_spares_the_last_one():
    table = torch.tensor([[True, True, True], [True, False, False]]).repeat(200, 1)
    present = dict(zip(("rgb", "nir", "tir"), table.unbind(1), strict=True))
    left = torch.stack(list(drop_modalities(present, 0.99).values()), 1)
    assert torch.equal(left[1::2], table[1::2])
    lost = table[::2] & ~left[::2]
    assert set(lost.sum(1).tolist()) <= {0, 1} and lost.any(0).all() and lost.any(1).float().mean() > 0.9
    assert torch.equal(torch.stack(list(drop_modalities(present, 0.0).values()), 1), table)


def small_task(**data) -> ReIdTask:
    options = DataOptions(people=3, each=2, padding=2, **data)
    dataset = hold_out(render_dataset(6, 2, 2, size=(64, 32)), 0.34)
    return ReIdTask(build_model(ModelOptions(**SMALL), dataset), dataset, options, ObjectiveOptions())


def test_the_loss_is_the_sum_of_its_parts():
    task = small_task(modality_dropout=0.3)
    task.model.train()
    batch = next(iter(task.loader(0, 0)))
    found = task.loss(batch, 0)
    assert set(found) == {"total", "identity", "triplet", "ratio"}
    expected = 0.25 * found["identity"] + found["triplet"] + found["ratio"]
    torch.testing.assert_close(found["total"], expected)
    assert len(task.names(batch).split(", ")) == 6


def test_the_batches_of_an_epoch_go_on_where_they_stopped():
    task = small_task()
    whole = [batch.names for batch in task.loader(2, 0)]
    assert [batch.names for batch in task.loader(2, 1)] == whole[1:] and len(whole) == task.steps()


def test_the_ratio_loss_counts_present_sightings_only():
    task = small_task()
    recipe = reidentification(keep_ratio=0.5)
    pixels = {name: torch.randn(2, 3, 64, 32) for name in ("rgb", "nir", "tir")}
    slim = task.model.eval().describe(task.model.encode(pixels)).slim
    shares = [each.decision.mean() for each in slim.values()]  # 5 of 8 patches
    expected = sum(2 * (share - 0.5) ** 2 for share in shares) / 3
    torch.testing.assert_close(ratio_loss(recipe, list(slim.values())), expected)
    absent = replace(slim["rgb"], present=torch.zeros(2, dtype=torch.bool))
    assert ratio_loss(recipe, [absent, absent, absent]) == 0


@pytest.mark.parametrize("features", ["original", "both"])
def test_only_what_is_compared_is_trained(features):
    dataset = hold_out(render_dataset(6, 2, 2, size=(64, 32)), 0.34)
    model = build_model(ModelOptions(features=features, **SMALL), dataset)
    task = ReIdTask(model, dataset, DataOptions(people=3, each=2), ObjectiveOptions())
    model.train()
    task.loss(next(iter(task.loader(0, 0))), 0)["total"].backward()
    assert (model.slimmed_head.classifier.weight.grad is not None) == (features == "both")
    assert model.original_head.classifier.weight.grad is not None


def options(folder, **run) -> TrainOptions:
    return TrainOptions(
        run=FitSettings(folder=str(folder), epochs=1, checkpoint_steps=2, log_steps=1, **run),
        data=DataOptions(people=4, each=2, rendered_people=8, rendered_test_people=3, dev_share=0.3),
        model=ModelOptions(**SMALL),
        device="cpu",
    )


def test_an_unreadable_picture_is_skipped_in_training_and_in_its_measure(tmp_path):
    """One of the pictures to train on and one of those held out are torn."""
    (tmp_path / "bad.jpg").write_bytes(b"nothing")

    def torn(sightings):
        pictures = dict(sightings[0].pictures) | {"nir": FilePicture(tmp_path / "bad.jpg")}
        return (replace(sightings[0], pictures=pictures), *sightings[1:])

    divided = hold_out(render_dataset(6, 2, 2, size=(64, 32)), 0.34)
    held = torn(divided.gallery)
    dataset = replace(divided, train=torn(divided.train), query=held, gallery=held)
    model = build_model(ModelOptions(**SMALL), dataset)
    for broken in ("refuse", "skip"):
        task = ReIdTask(model, dataset, DataOptions(people=3, each=2, broken=broken), ObjectiveOptions())
        if broken == "refuse":
            with pytest.raises(ValueError, match="bad.jpg: not a readable image"):
                task.evaluate()
    assert task.evaluate()["mAP"] > 0 and len(list(task.loader(0, 0))) == task.steps()
    assert {each.where for each in dataset.problems} == {dataset.train[0].name, held[0].name}


def test_a_run_that_was_broken_ends_as_if_it_had_not_been(tmp_path, monkeypatch):
    whole, _ = train(options(tmp_path / "whole"))
    broken, steps = tmp_path / "broken", 0
    original = ReIdTask.loss

    def failing(self, batch, epoch):
        nonlocal steps
        steps += 1
        if steps == 4:
            raise KeyboardInterrupt
        return original(self, batch, epoch)

    monkeypatch.setattr(ReIdTask, "loss", failing)
    with pytest.raises(KeyboardInterrupt):
        train(options(broken))
    monkeypatch.setattr(ReIdTask, "loss", original)
    resumed, _ = train(options(broken))
    assert resumed.steps == whole.steps > 4 and resumed.best == whole.best
    one, other = load(whole.model).state_dict(), load(resumed.model).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_with_nothing_held_out_all_are_trained_on_and_the_last_epoch_is_kept(tmp_path):
    """Its weights are those of the run's snapshot, at the end of the last of two epochs."""
    settings = options(tmp_path)
    outcome, _ = train(
        replace(settings, data=replace(settings.data, dev_share=0), run=replace(settings.run, epochs=2))
    )
    model = load(outcome.model)
    assert model.config.identities == 8 and outcome.best_epoch == 2 and not outcome.best
    kept, last = model.state_dict(), read_snapshot(tmp_path / SNAPSHOT)["model"]
    assert all(torch.equal(kept[name], last[name]) for name in last)


def test_what_was_not_held_out_cannot_be_measured_on():
    with pytest.raises(ValueError, match="data.dev_share: expected above 0"):
        open_split(SightingOptions(dev_share=0), "dev", "auto")


def test_train_eval_and_rank_from_the_command_line(tmp_path, caplog, capsys):
    caplog.set_level("INFO")
    data = ["--data.rendered_people", "8", "--data.rendered_test_people", "3"]
    encoder = json.dumps(LIGHT)

    def seps(*words: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["reid", *words])
        return int(ended.value.code or 0)

    run = ["--run.folder", str(tmp_path / "run"), "--run.epochs", "1", "--data.people", "4"]
    run += ["--data.each", "2", "--model.channels", "16", "--model.image_encoder", encoder, "--device", "cpu"]
    assert seps("train", *run, *data) == 0
    model = str(tmp_path / "run" / "best")
    folder = tmp_path / "report"
    assert seps("eval", model, *data, "--rerank", "true", "--report", str(folder), "--device", "cpu") == 0
    report = json.loads((folder / "report.json").read_text())
    rows = {row["missing"] for row in report["figures"]}
    assert rows == {"none", "r", "n", "t", "rn", "rt", "nt"} and report["protocol"] == "camera"
    assert "alike: n nir, r rgb, t tir." in (folder / "report.md").read_text()
    assert seps("eval", model, *data, "--protocol", "scene", "--missing", "false", "--device", "cpu") == 0
    assert "scene protocol" in caplog.text
    ranks = tmp_path / "ranks"
    assert seps("rank", model, str(ranks), *data, "--queries", "2", "--depth", "3", "--device", "cpu") == 0
    assert len(list(ranks.glob("*.png"))) == 2
    assert seps("eval", str(tmp_path / "nowhere")) == 2
    assert "there is no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: DataOptions(modality_dropout=1.0), "data.modality_dropout"),
        (lambda: DataOptions(workers=-1), "data.workers"),
        (lambda: DataOptions(dev_share=1.0), "data.dev_share: expected 0 to below 1, found 1.0"),
        (lambda: ObjectiveOptions(identity_weight=-1), "objective.identity_weight"),
        (lambda: ObjectiveOptions(smoothing=1.0), "objective.smoothing"),
        (lambda: ObjectiveOptions(margin=-0.1), "objective.margin: expected at least 0 or null, found -0.1"),
        (lambda: EvalOptions("model", batch_size=0), "batch_size: expected at least 1, found 0"),
        (lambda: small_task(flip=2), "flip: expected a share"),
    ],
)
def test_bad_options_meet_one_sentence(build, sentence):
    with pytest.raises(ValueError, match=sentence):
        build()

"""Training for retrieval: the joint batch however it is divided, kept features, resumption, refusals."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from making import refusal
from seps.data import Problems, Scenes, write
from seps.evaluation import encode, score_all
from seps.features import Features, FeatureStore, identity, image_key
from seps.model import load
from seps.objective import ObjectiveSettings, encode_in_parts, retrieval_loss
from seps.optimisation import OptimSettings
from seps.options import DataOptions, ModelOptions, RecipeOptions, TrainOptions, recipe_from
from seps.retrieval import build_model, disturb, make_task, run_cache, train
from seps.snapshots import read_snapshot
from seps.sources import ReadOptions, SceneOptions, open_source
from seps.tokens import Tokens
from seps.training import SNAPSHOT, FitSettings

LIGHT = {"kind": "light", "width": 32, "layers": 1, "heads": 2, "dropout": 0.0}


def options(folder="unused", **changes) -> TrainOptions:
    """A training that takes a second or two."""
    recipe = {"preset": "paper", **changes.pop("recipe", {})}
    model = {"channels": 16, "image_encoder": {**LIGHT, "size": 32}, "text_encoder": LIGHT}
    data = {"scenes": SceneOptions(train=12, dev=4, test=4, size=32), "batch_size": 4, "word_noise": 0.0}
    return TrainOptions(
        run=FitSettings(folder=str(folder), **{"epochs": 1, "log_steps": 1, **changes.pop("run", {})}),
        data=DataOptions(**{**data, **changes.pop("data", {})}),
        model=ModelOptions(**{**model, **changes.pop("model", {})}),
        recipe=RecipeOptions(**recipe),
        objective=ObjectiveSettings(**changes.pop("objective", {})),
        optim=OptimSettings(lr=1e-3),
        device="cpu",
    )


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def first_loss(task) -> dict[str, torch.Tensor]:
    losses = task.loss(next(iter(task.loader(0, 0))), 0)
    task.model.zero_grad()
    losses["total"].backward()
    return losses


def close(first, second, tolerance=1e-5) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=tolerance, rtol=tolerance, msg=name)


PRESETS = {
    "paper": {"preset": "paper"},
    "text": {"preset": "paper", "dense_side": "text"},
    "released": {"preset": "released", "dense_side": "text"},
    "described": {"preset": "described", "description_dropout": 0.0},
    "gates": {"preset": "laps", "selection": "gates", "ratio_form": "joint"},
}


@pytest.mark.parametrize("recipe", PRESETS.values(), ids=PRESETS.keys())
def test_encoding_in_parts_changes_no_number(recipe):
    found = []
    for size in (None, 3, 1):
        task = make_task(options(recipe=recipe, data={"micro_batch": size}, model={"global_term": "loss"}))
        task.model.train()
        torch.manual_seed(1)
        losses = first_loss(task)
        found.append((losses["total"].detach(), gradients(task.model)))
    for total, found_gradients in found[1:]:
        torch.testing.assert_close(total, found[0][0], atol=1e-5, rtol=1e-5)
        close(found_gradients, found[0][1])


def test_encoding_in_parts_keeps_the_activations_of_one_part():
    """Bytes that the forward pass saves for the backward pass, counted by autograd itself."""

    def saved(size) -> int:
        layers = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(20)))
        count = [0]

        def pack(tensor):
            count[0] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            encode_in_parts(lambda rows: Tokens(layers(rows)), (torch.rand(16, 5, 32),), size)
        return count[0]

    assert saved(4) < saved(None) / 8


JOINT = """
import sys, torch
sys.path.insert(0, {tests!r})
from test_retrieval import PRESETS, options, first_loss, gradients, make_task
from seps.distributed import average_gradients, joined
from seps.snapshots import write_snapshot
with joined("cpu") as world:
    state = {{}}
    for name in {names!r}:
        task = make_task(options(recipe=PRESETS[name], model={{"global_term": "loss"}}), world)
        torch.manual_seed(1)
        losses = first_loss(task)
        average_gradients(task.model.parameters())
        state[name] = {{"losses": dict(losses), "gradients": gradients(task.model)}}
    if world.main:
        from pathlib import Path
        write_snapshot(state, Path({out!r}))
"""


def test_two_processes_are_one_with_the_joint_batch(tmp_path):
    """torchrun with two gloo processes against one process, loss and every gradient to 1e-5."""
    names = ["paper", "text", "described"]
    code = tmp_path / "joint.py"
    out = tmp_path / "two"
    code.write_text(
        JOINT.format(tests=str(Path(__file__).parent), names=names, out=str(out)), encoding="utf-8"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    command = [*command, "--standalone", str(code)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    two = read_snapshot(out)
    for name in names:
        task = make_task(options(recipe=PRESETS[name], model={"global_term": "loss"}))
        torch.manual_seed(1)
        losses = {key: value.detach() for key, value in first_loss(task).items()}
        close(losses, two[name]["losses"])
        close(gradients(task.model), two[name]["gradients"])


def test_the_same_seed_gives_the_same_weights_and_training_learns(tmp_path):
    first = train(options(tmp_path / "a", run={"epochs": 2}))
    train(options(tmp_path / "b", run={"epochs": 2}))
    states = [read_snapshot(tmp_path / name / SNAPSHOT)["model"] for name in "ab"]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert first.steps == 6
    start = build_model(options(), open_source("scenes", options().data, "train"))[0].state_dict()
    assert any(not torch.equal(start[name], states[0][name]) for name in start)
    model, processor = load(first.model)
    corpus = encode(model, processor, Scenes(4, split="dev", size=32))
    assert score_all(model, corpus).shape == (4, 20)


def test_a_broken_training_goes_on_exactly(tmp_path):
    whole = options(tmp_path / "whole", run={"epochs": 2})
    train(whole)
    task = make_task(replace(whole, run=replace(whole.run, folder=str(tmp_path / "broken"))))
    broken = replace(whole, run=replace(whole.run, folder=str(tmp_path / "broken"), checkpoint_steps=1))
    take, steps = type(task).loss, []

    def loss(self, batch, epoch):
        if len(steps) == 4:
            raise InterruptedError
        steps.append(1)
        return take(self, batch, epoch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(task), "loss", loss)
        with pytest.raises(InterruptedError):
            train(broken)
    train(broken)
    states = [read_snapshot(tmp_path / name / SNAPSHOT)["model"] for name in ("whole", "broken")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_half_precision_trains_in_finite_numbers(tmp_path):
    outcome = train(options(tmp_path, run={"precision": "bf16"}))
    entries = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert outcome.steps == 3
    assert all(entry["total"] > 0 for entry in entries if entry["kind"] == "train")


def test_the_hinge_begins_with_all_negatives():
    task = make_task(options(recipe={"preset": "laps"}, objective={"all_negatives_epochs": 1}))
    task.model.eval()
    batch = next(iter(task.loader(0, 0)))
    assert task.loss(batch, 0)["alignment"] > task.loss(batch, 1)["alignment"] > 0


def test_the_baseline_trains_the_global_cosine_alone():
    task = make_task(options(recipe={"preset": "laps"}, objective={"scored": "global"}))
    losses = first_loss(task)
    assert set(losses) == {"total"}
    assert not any(name.startswith("head.") for name in gradients(task.model))
    assert 0 <= task.evaluate()["score"] <= 600


def test_a_loss_without_dense_text_reads_none():
    for scored, reads in (("alignment", True), ("global", False)):
        task = make_task(options(recipe={"preset": "described"}, objective={"scored": scored}))
        assert (next(iter(task.loader(0, 0))).dense is not None) is reads


def half_described(folder: Path, described: int) -> str:
    """Twelve training scenes, of which the first so many keep their description."""
    write(folder, {"train": 12, "dev": 2}, size=32)
    lines = [json.loads(line) for line in (folder / "captions.jsonl").read_text().splitlines()]
    for line in lines[described:12]:
        del line["dense"]
    (folder / "captions.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize("kept", [False, True])
def test_described_pictures_fill_batches_of_their_own_and_the_others_learn_too(tmp_path, kept):
    data = {"folder": half_described(tmp_path / "data", 5), "apart": True}
    if kept:
        data |= {"cache": str(tmp_path / "cache")}
    task = make_task(options(recipe={"preset": "described"}, data=data, model=frozen() if kept else {}))
    batches = list(task.loader(0, 0))
    assert sorted(int(batch.ids.lt(5).sum()) for batch in batches) == [0, 4]
    for batch in batches:
        task.loss(batch, 0)["total"].backward()
    assert all(grad.isfinite().all() for grad in gradients(task.model).values())


def test_too_few_pictures_to_stand_apart_are_refused(tmp_path):
    data = {"folder": half_described(tmp_path, 3), "apart": True}
    assert refusal(lambda: make_task(options(data=data))) == (
        "data.apart: expected at least a batch of 4 images with a description, found 3"
    )


def test_the_global_loss_keeps_its_temperature_whatever_the_scores():
    task = make_task(
        options(recipe={"preset": "laps"}, model={"global_term": "score"}, objective={"loss": "info_nce"})
    )
    task.model.eval()
    batch = next(iter(task.loader(0, 0)))
    with torch.no_grad():
        before = task.loss(batch, 0)
        task.model.log_temperature += 1
        after = task.loss(batch, 0)
    assert after["global"] == before["global"]
    assert after["alignment"] != before["alignment"]


def test_captions_of_one_image_are_no_negatives():
    task = make_task(options(recipe={"preset": "laps"}))
    model = task.model.eval()
    images, texts = Tokens(torch.rand(2, 4, 16)), Tokens(torch.rand(2, 3, 16))
    same = retrieval_loss(model, images, texts, None, torch.tensor([7, 7]), ObjectiveSettings(), 0)
    assert float(same["alignment"].detach()) == 0


def frozen(**changes) -> dict:
    """Encoders whose backbones stay as they are."""
    kind = {**LIGHT, "tuning": "frozen"}
    return {"image_encoder": {**kind, "size": 32}, "text_encoder": kind, "channels": 16, **changes}


def test_kept_features_train_and_measure_like_the_images_they_came_from(tmp_path):
    cached = options(
        tmp_path / "run", model=frozen(), data={"cache": str(tmp_path / "cache"), "flip": "never"}
    )
    task = make_task(cached)
    plain = make_task(options(model=frozen(), data={"flip": "never", "least_crop": 1.0}))
    plain.model.load_state_dict(task.model.state_dict())
    seen = encode(plain.model, plain.processor, plain.dev)
    kept = encode(task.model, task.processor, task.dev, task.features)
    torch.testing.assert_close(
        score_all(task.model, kept), score_all(plain.model, seen), atol=5e-3, rtol=5e-3
    )
    assert train(cached).steps == 3


def test_a_cache_is_filled_once_and_belongs_to_its_model(tmp_path, monkeypatch):
    cached = options(tmp_path / "run", model=frozen(), data={"cache": str(tmp_path / "cache")})
    assert run_cache(cached) == 0
    task = make_task(cached)
    stores = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert [name.split("-")[0] for name in stores] == ["images", "texts"]
    monkeypatch.setattr(FeatureStore, "extend", lambda *_: pytest.fail("computed again"))
    task.features.fill(task.train, 128, True, 90)
    monkeypatch.undo()
    with torch.no_grad():
        next(task.model.image_encoder.body.parameters()).add_(1)
    again = Features.open(tmp_path / "cache", task.model, task.processor)
    assert len(again.images) == 0
    assert len(again.texts) == len(task.features.texts) > 0


def test_mirrored_features_are_kept_where_no_text_names_a_side(tmp_path):
    cached = options(model=frozen(), data={"cache": str(tmp_path), "flip": "unsided"})
    task = make_task(cached)
    records = [task.train[index] for index in range(len(task.train))]
    for record in records:
        sided = any("left" in text or "right" in text for text in (*record.captions, record.dense))
        assert (image_key(record, mirrored=True) in task.features.images) is not sided


def test_pictures_that_cannot_be_read_are_left_out_where_features_are_kept(tmp_path):
    """In training, in measuring, and where projections start from pooled features that are not kept."""
    folder = tmp_path / "data"
    write(folder, {"train": 9, "dev": 3}, size=32)
    for name in ("train-000003", "dev-000001"):
        (folder / "images" / f"{name}.png").write_bytes(b"broken")
    data = {"folder": str(folder), "cache": str(tmp_path / "cache"), "broken": "skip"}
    with pytest.raises(ValueError, match=r"train-000003\.png: not a readable image"):
        make_task(options(model=frozen(), data={**data, "broken": "refuse"}))
    task = make_task(options(model=frozen(), data=data))
    assert (len(task.train), len(task.dev), len(task.problems)) == (8, 2, 2)
    assert first_loss(task)["total"] > 0
    corpus = encode(
        task.model,
        task.processor,
        open_source(str(folder), task.options.data, "dev"),
        task.features,
        problems=Problems("skip"),
    )
    assert corpus.indices == (0, 2)
    assert [record.image_id for record in corpus.records] == [
        "images/dev-000000.png",
        "images/dev-000002.png",
    ]
    cca = make_task(options(model=frozen(projections="cca"), data={**data, "cache": None}))
    assert len(cca.problems) == 1


def test_a_cache_without_frozen_backbones_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected a frozen backbone"):
        make_task(options(data={"cache": str(tmp_path)}))
    with pytest.raises(ValueError, match="expected the folder"):
        run_cache(options(model=frozen()))


def test_a_store_survives_a_kill_in_the_middle(tmp_path):
    about = {"kind": "test", "identity": "x", "channels": 3}
    store = FeatureStore(tmp_path, about)
    rows = [torch.rand(2, 3), torch.rand(5, 3)]
    store.extend(["a", "b"], rows)
    with (tmp_path / "data.f16").open("ab") as file:
        file.write(b"12345")
    with (tmp_path / "index.jsonl").open("ab") as file:
        file.write(b'["c", 7,')
    again = FeatureStore(tmp_path, about)
    assert len(again) == 2
    assert "c" not in again
    again.extend(["c"], [torch.ones(1, 3)])
    torch.testing.assert_close(again["b"], rows[1], atol=1e-3, rtol=1e-3)
    assert again["c"].tolist() == [[1, 1, 1]]
    with pytest.raises(ValueError, match="holds features of"):
        FeatureStore(tmp_path, {**about, "identity": "y"})
    with pytest.raises(ValueError, match="half precision"):
        again.extend(["d"], [torch.full((1, 3), 1e5)])
    (tmp_path / "data.f16").write_bytes(b"")
    with pytest.raises(ValueError, match="expected 48 bytes, found 0"):
        FeatureStore(tmp_path, about)


def test_two_who_fill_one_store_take_turns(tmp_path):
    """Both open it empty; neither overwrites, doubles or cuts off what the other wrote."""
    about = {"kind": "test", "identity": "x", "channels": 3}
    first, second = FeatureStore(tmp_path, about), FeatureStore(tmp_path, about)
    rows = {
        key: torch.full((length, 3), value)
        for key, length, value in (("a", 2, 1.0), ("b", 1, 2.0), ("c", 3, 3.0))
    }
    first.extend(["a", "b"], [rows["a"], rows["b"]])
    second.extend(["b", "c"], [rows["b"], rows["c"]])
    third = FeatureStore(tmp_path, about)
    first.extend(["c"], [rows["c"]])
    for store in (first, second, third):
        assert len(store) == 3
        assert all(torch.equal(store[key], block) for key, block in rows.items())
    assert (tmp_path / "data.f16").stat().st_size == 6 * 3 * 2


def test_identity_follows_every_weight_and_setting():
    model = torch.nn.Linear(2, 2)
    before = identity(model, 1)
    assert identity(model, 2) != before == identity(model, 1)
    with torch.no_grad():
        model.bias[1] += 1e-3
    assert identity(model, 1) != before


def test_disturbing_keeps_a_token_of_each_item():
    import numpy as np

    tokens = Tokens(torch.zeros(50, 3, 2), torch.tensor([[True, True, False]] * 50))
    found = disturb(tokens, 0.0, 0.9, np.random.default_rng(0))
    assert bool(found.mask.any(1).all())
    assert not bool((found.mask & ~tokens.mask).any())
    assert found.mask.sum() < tokens.mask.sum()
    noisy = disturb(Tokens(torch.randn(50, 30, 2)), 0.5, 0.0, np.random.default_rng(0))
    assert noisy.features.std() == pytest.approx(1.25**0.5, rel=0.1)


def test_a_recipe_is_a_preset_with_changes():
    recipe = recipe_from(RecipeOptions(preset="released", keep_ratio=0.25))
    assert (recipe.scoring, recipe.keep_ratio, recipe.detach_selection) == ("sum", 0.25, True)
    assert "keep_ratio:" in RecipeOptions.__doc__


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"dev": "test"}, "expected a split that is no test split"),
        ({"dev": "testall"}, "expected a split that is no test split"),
        ({"dev": "train"}, "another split than data.train"),
        ({"batch_size": 1}, "data.batch_size"),
        ({"micro_batch": 0}, "data.micro_batch"),
        ({"patch_dropout": 1.0}, "data.patch_dropout"),
        ({"workers": -1}, "data.workers: expected at least 0, found -1"),
        ({"least_crop": 3}, "data.least_crop: expected above 0 and at most 1, found 3"),
        ({"dev_limit": 0}, "data.dev_limit: expected at least 1, found 0"),
        ({"limit": 0}, "limit: expected at least 1, found 0"),
    ],
)
def test_data_options_refuse_what_makes_no_training(changes, what):
    with pytest.raises(ValueError, match=what):
        DataOptions(**changes)


def test_images_of_both_splits_are_refused(tmp_path):
    write(tmp_path, {"train": 6, "dev": 2}, size=32)
    lines = [json.loads(line) for line in (tmp_path / "captions.jsonl").read_text().splitlines()]
    (tmp_path / "captions.jsonl").write_text(
        "\n".join(json.dumps({**line, "split": "train"}) for line in lines)
        + "\n"
        + json.dumps({**lines[0], "image": f"./{lines[0]['image']}", "split": "dev"}),
        encoding="utf-8",
    )
    with pytest.raises(ValueError, match=r"expected images that training does not see, found .*train-000000"):
        make_task(options(data={"folder": str(tmp_path)}))


def test_a_run_that_met_a_broken_picture_goes_on_without_it(tmp_path):
    write(tmp_path / "data", {"train": 8, "dev": 3}, size=32)
    (tmp_path / "data" / "images" / "dev-000001.png").write_bytes(b"broken")
    asked = options(tmp_path / "run", data={"folder": str(tmp_path / "data")}, run={"checkpoint_steps": 1})
    with pytest.raises(ValueError, match=r"captions\.jsonl:10: .*dev-000001\.png: not a readable image"):
        train(asked)
    outcome = train(replace(asked, data=replace(asked.data, broken="skip")))
    assert outcome.steps == 2
    assert load(outcome.model)


def test_a_batch_larger_than_the_split_is_refused_by_name():
    sentence = refusal(lambda: make_task(options(data={"batch_size": 200})))
    assert sentence == (
        "data.batch_size: expected at most the 12 images of split 'train' of scenes, found 200"
    )


def test_scenes_have_their_splits_only():
    with pytest.raises(ValueError, match="train, dev, test"):
        open_source("scenes", ReadOptions(), "restval")

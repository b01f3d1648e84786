"""The whole model: what it says, saves and refuses; and the ecosystem's doors to it."""

import json
import logging
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoProcessor, PreTrainedTokenizerFast

from making import refusal
from seps.encoders import build_text_encoder
from seps.losses import hinge
from seps.model import SepsConfig, SepsModel, SepsProcessor, create, load, located, save_small
from seps.naming import NOWHERE
from seps.optimisation import OptimSettings, make_optimiser
from seps.processor import read_pieces
from seps.recipe import PRESETS, paper
from seps.tokens import Tokens
from test_encoders import SMALL, VISION

CAPTIONS = ["a red circle left of a blue square", "two dogs play, in the snow"]
LIGHT_IMAGE = {"kind": "light", "size": 32, "width": 16, "layers": 1}
LIGHT_TEXT = {"kind": "light", "width": 16}


def light_config(**changes):
    return SepsConfig(**{"channels": 16, "image_encoder": LIGHT_IMAGE, "text_encoder": LIGHT_TEXT, **changes})


def light_model(**changes):
    return create(light_config(**changes), texts=CAPTIONS)


def pictures(count=2):
    return [Image.new("RGB", (50, 40), colour) for colour in ("red", "blue", "green")[:count]]


@pytest.fixture
def bert_tokenizer(tmp_path):
    """A tiny word-piece tokenizer in a folder, as a BERT checkpoint brings it."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "blue", "dog", "snow", "##s", ","]
    vocabulary = {word: number for number, word in enumerate(words)}
    raw = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    raw.normalizer = normalizers.BertNormalizer()
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    names = {f"{name}_token": token for name, token in special.items()}
    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=raw, model_max_length=9, **names).save_pretrained(folder)
    return str(folder)


BERT = {"kind": "huggingface", "config": {"model_type": "bert", **SMALL, "vocab_size": 12}}


def bert_model(tokenizer, family="vit", **changes):
    image = {"kind": "huggingface", "config": {"model_type": family, **VISION[family]}}
    return create(
        SepsConfig(**{"channels": 16, "image_encoder": image, "text_encoder": BERT, **changes}),
        tokenizer=tokenizer,
    )


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("global_term", ["none", "loss", "score"])
def test_score_is_the_head_and_the_weighed_global_term(preset, global_term):
    model, processor = light_model(recipe=preset, global_term=global_term, global_weight=0.5)
    model.eval()
    ready = processor(pictures(3), CAPTIONS)
    images = model.encode_images(ready["pixels"])
    texts = model.encode_texts(ready["ids"], ready["mask"])
    head = model.head(images, texts)
    cosines = model.global_images(images) @ model.global_texts(texts).T
    assert head.shape == (3, 2)
    expected = head + 0.5 * cosines if global_term == "score" else head
    torch.testing.assert_close(model(**ready), expected)
    torch.testing.assert_close(model.global_scores(images, texts), cosines)
    assert cosines.abs().max() <= 1 + 1e-5
    for vectors in (model.global_images(images), model.global_texts(texts)):
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(vectors)))


def test_global_vector_starts_as_the_mean_token():
    model, _ = light_model(global_term="loss")
    tokens = Tokens.padded(torch.randn(3, 5, 16), [5, 2, 1])
    plain, _ = light_model()
    torch.testing.assert_close(model.global_texts(tokens), plain.global_texts(tokens))


def test_global_vector_ignores_padding():
    model, _ = light_model(global_term="score")
    torch.nn.init.normal_(model.global_term.texts.attention.weight)
    tokens = Tokens.padded(torch.randn(1, 5, 16), [3])
    torch.testing.assert_close(model.global_texts(tokens), model.global_texts(Tokens(tokens.features[:, :3])))


def test_kept_backbone_features_give_the_same_tokens():
    model, processor = light_model()
    model.eval()
    ready = processor(pictures(), CAPTIONS)
    raw = model.image_encoder.backbone(ready["pixels"])
    torch.testing.assert_close(
        model.project_images(raw).features, model.encode_images(ready["pixels"]).features
    )
    raw = model.text_encoder.backbone(ready["ids"], ready["mask"])
    kept = model.project_texts(raw)
    torch.testing.assert_close(kept.features, model.encode_texts(ready["ids"], ready["mask"]).features)
    assert torch.equal(kept.mask, model.encode_texts(ready["ids"], ready["mask"]).mask)


def test_every_weight_learns():
    model, processor = light_model(recipe="described", global_term="score")
    ready = processor(pictures(), CAPTIONS)
    dense = processor.texts([*CAPTIONS[:1], None])
    model.train()
    scores = model(**ready, dense_ids=dense["ids"], dense_mask=dense["mask"])
    (scores.sum() / model.temperature / model.global_temperature).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_temperature_is_learned_and_bounded():
    model, _ = light_model(initial_temperature=0.05)
    torch.testing.assert_close(model.temperature.item(), 0.05)
    model.log_temperature.data.fill_(-20.0)
    torch.testing.assert_close(model.temperature.item(), 0.01)


def groups_of(model) -> list[dict]:
    """What the training's optimiser makes of a model's weights."""
    settings = OptimSettings(lr=1e-3, backbone_factor=0.1, weight_decay=0.01)
    return make_optimiser(model, settings, model.backbones()).param_groups


def test_an_optimiser_holds_every_weight_once_at_its_rate(bert_tokenizer):
    model, _ = bert_model(bert_tokenizer)
    groups = groups_of(model)
    held = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())
    kinds = {(group["lr"], group["weight_decay"]) for group in groups}
    assert kinds == {(1e-4, 0.01), (1e-4, 0.0), (1e-3, 0.01), (1e-3, 0.0)}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            assert (group["weight_decay"] > 0) <= (not name.endswith("bias")), name
            assert (group["lr"] < 1e-3) == (".body." in name), name


def test_light_backbones_learn_at_the_full_rate_and_frozen_ones_not_at_all(bert_tokenizer):
    light, _ = light_model()
    assert {group["lr"] for group in groups_of(light)} == {1e-3}
    model, _ = bert_model(bert_tokenizer)
    model.tune("frozen")
    held = {id(parameter) for group in groups_of(model) for parameter in group["params"]}
    assert held == {id(parameter) for name, parameter in model.named_parameters() if ".body." not in name}
    assert model.config.image_encoder["tuning"] == model.config.text_encoder["tuning"] == "frozen"


def assert_same_model(model, other):
    assert other.recipe == model.recipe
    assert other.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def save(folder, model, processor):
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_saved_light_model_comes_back(preset, tmp_path):
    model, processor = light_model(recipe=preset, global_term="score")
    folder = save(tmp_path / "model", model, processor)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json",
        "model.safetensors",
        "processor_config.json",
        "vocabulary.json",
    ]
    again, same = load(folder)
    assert_same_model(model, again)
    assert not again.training
    ready = processor(pictures(), CAPTIONS)
    for name, value in same(pictures(), CAPTIONS).items():
        assert torch.equal(value, ready[name])
    torch.testing.assert_close(again(**ready), model.eval()(**ready), atol=0, rtol=0)


@pytest.mark.parametrize("family", VISION)
def test_a_saved_model_of_every_family_comes_back(family, tmp_path, bert_tokenizer):
    model, processor = bert_model(bert_tokenizer, family)
    folder = save(tmp_path / "model", model, processor)
    again, same = load(folder)
    assert_same_model(model, again)
    ready = processor(pictures(), CAPTIONS)
    torch.testing.assert_close(again(**same(pictures(), CAPTIONS)), model.eval()(**ready), atol=0, rtol=0)


def test_a_saved_model_reads_no_name_again(tmp_path, bert_tokenizer):
    """The folder stands without the backbone it started from."""
    model, processor = bert_model(bert_tokenizer)
    backbone = tmp_path / "backbone"
    model.image_encoder.body.network.save_pretrained(backbone)
    config = SepsConfig(
        channels=16, image_encoder={"kind": "huggingface", "name": str(backbone)}, text_encoder=BERT
    )
    started, _ = create(config, tokenizer=bert_tokenizer)
    assert config.image_encoder == {"kind": "huggingface", "name": str(backbone)}
    for name, value in model.image_encoder.body.state_dict().items():
        assert torch.equal(started.image_encoder.body.state_dict()[name], value), name
    folder = save(tmp_path / "model", started, processor)
    for path in backbone.iterdir():
        path.unlink()
    again, _ = load(folder)
    assert_same_model(started, again)


def test_a_frozen_model_stays_frozen(tmp_path):
    model, processor = light_model(image_encoder={**LIGHT_IMAGE, "tuning": "frozen"})
    again, _ = load(save(tmp_path / "model", model, processor))
    trained = {name for name, parameter in again.named_parameters() if parameter.requires_grad}
    assert trained == {
        name for name, _ in model.named_parameters() if not name.startswith("image_encoder.body.")
    }


def test_the_ecosystem_knows_the_model(tmp_path):
    model, processor = light_model()
    folder = save(tmp_path / "model", model, processor)
    assert isinstance(AutoConfig.from_pretrained(folder), SepsConfig)
    assert_same_model(model, AutoModel.from_pretrained(folder))
    assert isinstance(AutoProcessor.from_pretrained(folder), SepsProcessor)


def test_a_folder_says_every_choice(tmp_path):
    """A default that changes later must not change what a folder means."""
    light_model()[0].save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert set(written["recipe"]) == set(paper().names())
    assert {"channels", "image_encoder", "text_encoder", "global_term", "global_weight"} <= set(written)


def test_push_to_hub_uploads_what_was_saved(tmp_path, monkeypatch):
    """Up to where the network would begin."""
    from transformers.utils import hub

    sent = {}

    class Api:
        def create_repo(self, name, **_):
            return type("Repository", (), {"repo_id": name})

        def create_commit(self, repo_id, operations, **_):
            sent.setdefault(repo_id, set()).update(operation.path_in_repo for operation in operations)

    card = type("Card", (), {"save": lambda *_: None})
    monkeypatch.setattr(hub, "hf_api", Api)
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *_, **__: card())
    model, processor = light_model()
    model.push_to_hub("someone/model")
    processor.push_to_hub("someone/model")
    assert sent == {
        "someone/model": {"config.json", "model.safetensors", "processor_config.json", "vocabulary.json"}
    }


def test_recomputation_changes_no_gradient(bert_tokenizer):
    """The ecosystem's switch reaches backbones, light stacks and necks."""
    layers = {"layers": 1, "heads": 2}
    model, processor = bert_model(bert_tokenizer, text_encoder={**BERT, "neck": layers})
    for module in model.modules():
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    ready = processor(pictures(), CAPTIONS)
    gradients = []
    for recomputes in (False, True):
        if recomputes:
            model.activation_checkpointing_enable()
        model.zero_grad()
        model.train()(**ready).sum().backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    switched = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    assert model.text_encoder.neck.context in switched
    assert len(switched) > 2
    torch.testing.assert_close(gradients[0], gradients[1])


def test_processor_keeps_words_whole_and_absent_texts_absent(bert_tokenizer):
    _, processor = bert_model(bert_tokenizer)
    read = processor.texts(["a red dogs , snow", None, ""])
    assert read["ids"][0].tolist() == [2, 5, 6, 8, 10, 11, 9, 3]
    assert read["words"][0].tolist() == [-1, 0, 1, 2, 2, 3, 4, -1]
    assert read["mask"].sum(1).tolist() == [8, 0, 2]
    assert read["words"][1].tolist() == [-1] * 8
    assert processor.texts(["a red dogs , snow"], limit=3)["ids"].tolist() == [[2, 5, 6, 8, 10, 3]]
    # Nine tokens at most, and no half words: the last one would need two more.
    assert processor.texts(["a red a red a red dogs"])["ids"].tolist() == [[2, 5, 6, 5, 6, 5, 6, 3]]
    assert set(processor.tokenizer.ordinary) == set(range(5, 12)) and processor.tokenizer.mask_id == 4


def test_special_ids_come_from_the_tokenizer(bert_tokenizer):
    model, processor = bert_model(bert_tokenizer)
    read = processor.texts(["a [MASK] cat"])
    tokens = model.encode_texts(read["ids"], read["mask"])
    # The mask and the unknown word stand where a word stood.
    assert read["ids"].tolist() == [[2, 5, 4, 1, 3]]
    assert tokens.mask.tolist() == [[False, True, True, True, False]]


def test_processor_reads_pictures_of_any_mode():
    _, processor = light_model()
    modes = [Image.new(mode, (20, 30), 0) for mode in ("RGB", "L", "RGBA", "P", "1", "CMYK")]
    pixels = processor.images(modes)
    assert pixels.shape == (6, 3, 32, 32)
    assert torch.isfinite(pixels).all()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"chanels": 5}, "config: expected the keys recipe, channels, .*found 'chanels'"),
        ({"recipe": "papers"}, "recipe: expected one of paper, released, laps, described, found 'papers'"),
        ({"recipe": {"denser": 1}}, "recipe: expected the choices scoring, .*found 'denser'"),
        ({"global_term": "some"}, "global_term: expected one of none, loss, score, found 'some'"),
        ({"channels": 2}, "channels: expected at least 5, found 2"),
        ({"initial_temperature": 0}, "initial_temperature: expected above 0, found 0"),
        ({"image_encoder": {"kind": "vit"}}, "image_encoder.kind: expected one of .*found 'vit'"),
    ],
)
def test_a_wrong_configuration_meets_one_sentence(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        light_model(**changes)


def test_a_light_text_encoder_needs_texts():
    with pytest.raises(ValueError, match="texts: expected the texts that the light text encoder"):
        create(light_config())


def test_a_text_backbone_needs_a_tokenizer_that_fits(bert_tokenizer, tmp_path):
    with pytest.raises(ValueError, match="tokenizer: expected a hub name or folder"):
        bert_model(None)
    with pytest.raises(ValueError, match="tokenizer: expected a folder or hub name .*found '.*nowhere'"):
        bert_model(str(tmp_path / "nowhere"))
    small = {**BERT, "config": {**BERT["config"], "vocab_size": 10}}
    with pytest.raises(ValueError, match="tokenizer: expected at most 10 entries, .*found 12"):
        bert_model(bert_tokenizer, text_encoder=small)


def test_a_folder_that_is_not_there_is_no_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(ValueError, match="runs/best: expected a model folder, found none"):
        located("runs/best")
    assert located("someone/model") == "someone/model"
    sentence = refusal(lambda: located("nosuch"))
    assert sentence == (
        "nosuch: expected a model folder, seps-mini or a hub name (owner/name), "
        f"found no such folder in {Path.cwd()}"
    )


def test_a_name_that_nothing_answers_to_sends_nobody_to_the_hub():
    sentence = refusal(lambda: load("someone/nosuch"))
    assert sentence == (
        "someone/nosuch: expected a folder or hub name with a config.json and safetensors weights of a seps "
        f"model ({NOWHERE})"
    )
    for build in (
        lambda: read_pieces("someone/nosuch"),
        lambda: build_text_encoder({"kind": "huggingface", "name": "someone/nosuch"}, 8),
    ):
        assert refusal(build).endswith(f"found 'someone/nosuch' ({NOWHERE})")


def test_weights_can_be_read_by_whoever_reads_the_configuration(tmp_path):
    model, processor = light_model()
    save(tmp_path / "large", model, processor)
    save_small(model, processor, tmp_path / "small")
    for folder in (tmp_path / "large", tmp_path / "small"):
        modes = {path.stat().st_mode for path in folder.iterdir()}
        assert modes == {(folder / "config.json").stat().st_mode}


def test_broken_folders_meet_one_sentence(tmp_path):
    model, processor = light_model()
    with pytest.raises(ValueError, match="nowhere: expected a model folder, found none"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="expected a model folder, found no config.json in it$"):
        load(tmp_path)
    folder = tmp_path / "model"
    save(folder, model, processor)
    with pytest.raises(ValueError, match=r"no config.json in it; there is one in .*/model$"):
        load(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["image_encoder.neck.projection.bias"] = torch.zeros(3)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"projection.bias of shape \(3,\) instead of \(16,\) \(1 misfits"):
        load(folder)
    del weights["image_encoder.neck.projection.bias"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="lacks image_encoder.neck.projection.bias"):
        load(folder)
    weights |= {"image_encoder.neck.projection.bias": torch.zeros(16), "extra": torch.zeros(1)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="has no place for extra"):
        load(folder)
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="expected a folder or hub name with a config.json and safetensors"):
        load(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="safetensors weights"):
        load(folder)
    (folder / "processor_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"processor_config.json: expected JSON with a 'view'"):
        SepsProcessor.from_pretrained(folder)


@pytest.mark.parametrize(
    ("images", "texts", "sentence"),
    [
        ([], None, "images: expected at least one picture, found none"),
        (["a.jpg"], None, "images: expected PIL pictures, found str at place 0"),
        (Image.new("RGB", (2, 2)), None, "images: expected a list of pictures, found a single one"),
        (None, [], "texts: expected at least one text, found none"),
        (None, "a dog", "texts: expected a list of texts, found a single string"),
        (None, ["a", 3], "texts: expected strings, found int at place 1"),
    ],
)
def test_wrong_input_meets_one_sentence(images, texts, sentence):
    _, processor = light_model()
    with pytest.raises(ValueError, match=sentence):
        processor(images, texts)


def test_real_size_backbones_learn_and_evaluate():
    """ViT-B/16 and BERT-base, from random configurations: one training step and one evaluation."""
    config = SepsConfig(
        image_encoder={"kind": "huggingface", "config": {"model_type": "vit"}},
        text_encoder={"kind": "huggingface", "config": {"model_type": "bert"}, "special": [0, 101, 102]},
    )
    model = SepsModel(config)
    assert (model.image_encoder.patches, model.head.slimmer.tokens) == (196, 39)
    pixels, ids = torch.randn(2, 3, 224, 224), torch.tensor([[101, 2000, 3000, 102], [101, 2500, 102, 0]])
    optimiser = make_optimiser(model, OptimSettings(), model.backbones())
    watched = [model.image_encoder.body.network.embeddings.cls_token, model.head.slimmer.scale]
    before = [parameter.detach().clone() for parameter in watched]
    hinge(model.train()(pixels, ids, ids > 0), negatives="all").backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
    optimiser.step()
    assert all(not torch.equal(old, new) for old, new in zip(before, watched, strict=True))
    with torch.no_grad():
        scores = model.eval()(pixels, ids, ids > 0)
    assert scores.shape == (2, 2)
    assert torch.isfinite(scores).all()


def test_dense_ids_and_mask_come_together():
    model, processor = light_model()
    ready = processor(pictures(), CAPTIONS)
    with pytest.raises(ValueError, match="dense_ids, dense_mask: expected both or neither"):
        model(**ready, dense_ids=ready["ids"])
    assert isinstance(model, SepsModel)


def test_loading_a_folder_says_nothing(tmp_path):
    light_model()[0].save_pretrained(tmp_path)
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage()[:60])
    ecosystem = logging.getLogger("transformers")
    ecosystem.addHandler(handler)
    try:
        SepsModel.from_pretrained(tmp_path)
    finally:
        ecosystem.removeHandler(handler)
    assert said == []

"""Import of official checkpoints, from files made with the ancestors' parameter names."""

import argparse
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    SwinConfig,
    SwinModel,
    ViTConfig,
    ViTModel,
)

from seps import compat
from seps.checkpoints import ImportOptions, import_checkpoint, run
from seps.cli import main
from seps.model import load

CHANNELS = 16
RATIOS = {"sparse_ratio": 0.5, "aggr_ratio": 0.6}
VIT = ViTConfig(
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=48,
    image_size=32,
    patch_size=8,
)
SWIN = SwinConfig(
    image_size=64,
    patch_size=4,
    embed_dim=8,
    depths=[1, 2, 1],
    num_heads=[1, 2, 4],
    window_size=2,
    mlp_ratio=2.0,
)
BERT = BertConfig(
    vocab_size=20,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=1,
    intermediate_size=32,
    max_position_embeddings=16,
)
TEXTS = ["a red dog", "a blue dog , a red dog", "dog"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tiny BERT tokenizer in a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "blue", "dog", ","]
    raw = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=raw, mask_token="[MASK]", **special).save_pretrained(folder)
    return str(folder)


class Official:
    """A model as the ancestors build one: their names for its weights, compat's head for its scores."""

    def __init__(self, folder, vision, head, channels=CHANNELS):
        self.vision = (SwinModel if isinstance(vision, SwinConfig) else ViTModel)(vision).eval()
        self.bert = BertModel(BERT).eval()
        self.vision_projection = torch.nn.Linear(vision.hidden_size, channels)
        self.text_projection = torch.nn.Linear(BERT.hidden_size, channels)
        self.head = head.eval()
        for parameter in self.head.parameters():  # scale and norms differ from their start in a trained model
            parameter.data += 0.1 * torch.randn_like(parameter)
        self.folder = folder

    def names(self):
        """The state dict under the names that transformers 4 gave the backbones."""
        state = {}
        for prefix, network in (("img_enc.visual_encoder.", self.vision), ("txt_enc.bert.", self.bert)):
            network.save_pretrained(self.folder / prefix)
            weights = load_file(self.folder / prefix / "model.safetensors")
            state |= {prefix + name: value for name, value in weights.items()}
        parts = {
            "img_enc.vision_proj.": self.vision_projection,
            "txt_enc.fc.": self.text_projection,
            "cross_net.": self.head,
        }
        for prefix, module in parts.items():
            state |= {prefix + name: value for name, value in module.state_dict().items()}
        assert any("encoder.layer.0.attention.self.query.weight" in name for name in state)
        state["txt_enc.bert.embeddings.position_ids"] = torch.arange(16).unsqueeze(0)
        return state

    def save(self, prefix="", **arguments):
        options = argparse.Namespace(img_res=self.vision.config.image_size, **RATIOS, **arguments)
        state = {prefix + name: value for name, value in self.names().items()}
        path = self.folder / "model_best.pth"
        best = np.float64(502.2)
        torch.save({"model": state, "opt": options, "epoch": 3, "best_rsum": best, "Eiters": 7}, path)
        return path

    @torch.no_grad()
    def scores(self, pixels, texts, dense=()):
        images = self.vision_projection(self.vision(pixels).last_hidden_state)
        return self.head(images, *self.words(texts), *(self.words(dense) if dense else ()))

    def words(self, ids):
        lengths = torch.tensor([len(row) for row in ids])
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in ids], batch_first=True)
        features = self.bert(padded, attention_mask=(padded != 0).float()).last_hidden_state
        return self.text_projection(features), lengths


def options_for(patches, channels=CHANNELS):
    return argparse.Namespace(embed_size=channels, num_patches=patches, **RATIOS)


def released_head(patches):
    return compat.CrossSparseAggrNet_v2(options_for(patches))


def paper_head(patches, dual=True):
    return compat.CrossSparseAggrNet(
        CHANNELS, patches, RATIOS["sparse_ratio"], RATIOS["aggr_ratio"], True, use_dual_aggr=dual
    )


IDS = [[2, 5, 6, 8, 3], [2, 5, 7, 8, 9, 5, 6, 8, 3], [2, 8, 3]]
DENSE = ["a blue dog", "a red dog , a dog , a red dog", "a dog"]
DENSE_IDS = [[2, 5, 7, 8, 3], [2, 5, 6, 8, 9, 5, 8, 9, 5, 6, 8, 3], [2, 5, 8, 3]]


def pictures(count):
    generator = np.random.default_rng(0)
    return [Image.fromarray(generator.integers(0, 255, (40, 50, 3), dtype=np.uint8)) for _ in range(count)]


@pytest.mark.parametrize(
    ("vision", "head", "dense", "recipe"),
    [
        (VIT, released_head, False, "laps"),
        (VIT, released_head, True, "released"),
        (VIT, paper_head, True, "auto"),
        (VIT, lambda patches: paper_head(patches, dual=False), True, "auto"),
        (SWIN, released_head, False, "auto"),
        (SWIN, paper_head, True, "paper"),
    ],
)
def test_an_imported_model_scores_as_the_official_one(vision, head, dense, recipe, tmp_path, tokenizer):
    official = Official(tmp_path, vision, head(16))
    path = official.save(embed_size=CHANNELS, vit_type=vision.model_type)
    assert run(ImportOptions(str(path), str(tmp_path / "model"), tokenizer, recipe)) == 0
    model, processor = load(tmp_path / "model")
    ready = processor(pictures(2), TEXTS)
    assert ready["ids"][0, :5].tolist() == IDS[0]
    if dense:
        read = processor.texts(DENSE)
        found = model(**ready, dense_ids=read["ids"], dense_mask=read["mask"])
        expected = official.scores(ready["pixels"], IDS, DENSE_IDS)
        assert model.recipe.dense_side == "text"
    else:
        found, expected = model(**ready), official.scores(ready["pixels"], IDS)
        assert model.recipe.dense == "none"
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert expected.std() > 1e-4


def test_the_command_line_imports_a_checkpoint(tmp_path, tokenizer, capsys):
    path = Official(tmp_path, VIT, released_head(16)).save()
    words = ["import", str(path), str(tmp_path / "model"), "--tokenizer", tokenizer, "--recipe", "laps"]
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 0
    assert load(tmp_path / "model")[0].recipe.dense == "none"
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    said = capsys.readouterr().err.strip()
    assert said.endswith(f"expected a folder that is empty or not there yet, found {tmp_path / 'model'}")


def test_pictures_are_seen_as_the_ancestors_saw_them(tmp_path, tokenizer):
    path = Official(tmp_path, VIT, released_head(16)).save()
    _, processor = import_checkpoint(path, tokenizer)
    assert processor.view.mean == (0.485, 0.456, 0.406)
    assert processor.view.std == (0.229, 0.224, 0.225)
    assert (processor.view.height, processor.view.fit) == (32, "squash")


def test_weights_of_a_parallel_model_and_no_projection(tmp_path, tokenizer):
    """Names may begin with "module."; with C of the backbone's width the ancestors project nothing."""
    official = Official(tmp_path, VIT, compat.CrossSparseAggrNet_v2(options_for(16, 64)), channels=64)
    state = {name: value for name, value in official.names().items() if "txt_enc.fc" not in name}
    path = tmp_path / "model_best.pth"
    parallel = {f"module.{name}": value for name, value in state.items()}
    torch.save({"model": parallel, "opt": argparse.Namespace(img_res=32, **RATIOS)}, path)
    official.text_projection = torch.nn.Identity()
    model, processor = import_checkpoint(path, tokenizer, "laps")
    ready = processor(pictures(2), TEXTS)
    torch.testing.assert_close(model(**ready), official.scores(ready["pixels"], IDS), atol=1e-5, rtol=1e-5)


def test_recipe_follows_the_weights_and_arguments(tmp_path, tokenizer):
    path = Official(tmp_path, VIT, released_head(16)).save(long_text_path="descriptions.jsonl")
    model, _ = import_checkpoint(path, tokenizer)
    assert (model.recipe.dense, model.recipe.detach_selection) == ("branch", True)
    assert (model.recipe.keep_ratio, model.recipe.aggregate_ratio) == (0.5, 0.6)
    model, _ = import_checkpoint(path, tokenizer, "laps", "image")
    assert model.recipe.dense == "none"
    model, _ = import_checkpoint(path, tokenizer, "released", "image")
    assert model.recipe.dense_side == "image"


class Trap:
    """What a hostile file would run when it is read."""

    sprung = False

    def __reduce__(self):
        return setattr, (Trap, "sprung", True)


def test_nothing_in_a_checkpoint_is_executed(tmp_path, tokenizer):
    path = tmp_path / "model_best.pth"
    torch.save({"model": {}, "opt": Trap()}, path)
    with pytest.raises(ValueError, match="found what cannot be read safely") as caught:
        import_checkpoint(path, tokenizer)
    assert "\n" not in str(caught.value)
    path.write_bytes(pickle.dumps(Trap(), protocol=2))
    with pytest.raises(ValueError, match="found what cannot be read safely"):
        import_checkpoint(path, tokenizer)
    assert not Trap.sprung


def changed(state, **changes):
    kept = {name: value for name, value in state.items() if changes.get(name, 0) is not None}
    return kept | {name: value for name, value in changes.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"sim_enc.weight": torch.zeros(1)},
            "expected weights of img_enc.*'sim_enc.weight'",
        ),
        (
            {"img_enc.visual_encoder.layernorm.weight": None},
            "a vit under img_enc.visual_encoder, found missing layernorm.weight",
        ),
        (
            {"img_enc.visual_encoder.embeddings.cls_token": torch.zeros(1, 1, 5)},
            "a vit under img_enc.visual_encoder, found mismatched",
        ),
        (
            {"txt_enc.bert.encoder.extra": torch.zeros(1)},
            "under txt_enc.bert, found unexpected encod",
        ),
        (
            {"txt_enc.fc.weight": torch.zeros(16, 9)},
            "expected weights of txt_enc.fc that fit, found size",
        ),
        ({"cross_net.aggr_net.scale": None}, "expected weights of cross_net that fit, found Missing key"),
        ({"cross_net.other.weight": torch.zeros(1)}, "expected names that begin with .*'other.weight'"),
        (
            {"img_enc.visual_encoder.embeddings.patch_embeddings.projection.weight": None},
            "expected a ViT or Swin backbone, found no patch embedding",
        ),
        ({"txt_enc.bert.embeddings.word_embeddings.weight": None}, "expected a BERT backbone, found other"),
    ],
)
def test_weights_that_do_not_fit_meet_one_sentence(changes, sentence, tmp_path, tokenizer):
    state = changed(Official(tmp_path, VIT, released_head(16)).names(), **changes)
    path = tmp_path / "model_best.pth"
    torch.save({"model": state, "opt": argparse.Namespace(img_res=32, **RATIOS)}, path)
    with pytest.raises(ValueError, match=sentence) as caught:
        import_checkpoint(path, tokenizer)
    assert "\n" not in str(caught.value)


def test_wrong_files_meet_one_sentence(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="nowhere.pth: there is no such checkpoint"):
        import_checkpoint(tmp_path / "nowhere.pth", tokenizer)
    path = tmp_path / "model_best.pth"
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="found what cannot be read safely"):
        import_checkpoint(path, tokenizer)
    torch.save([1, 2], path)
    with pytest.raises(ValueError, match="expected a checkpoint with a state dict under 'model', found none"):
        import_checkpoint(path, tokenizer)
    torch.save({"model": {"txt_enc.fc.bias": torch.zeros(1)}}, path)
    with pytest.raises(ValueError, match="expected weights of img_enc.visual_encoder, found none"):
        import_checkpoint(path, tokenizer)
    good = Official(tmp_path, VIT, released_head(16)).save()
    with pytest.raises(ValueError, match="tokenizer: expected a folder or hub name"):
        import_checkpoint(good, str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="recipe: expected auto, laps, released or paper, found 'seps'"):
        import_checkpoint(good, tokenizer, "seps")
    full = tmp_path / "full"
    full.mkdir()
    (full / "note").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match="output: expected a folder that is empty or not there yet"):
        run(ImportOptions(str(good), str(full), tokenizer))
    assert (full / "note").read_text(encoding="utf-8") == "mine"

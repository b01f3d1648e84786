"""Dense text: from a tiny local LLaVA and from a server that fails now and then; broken runs go on."""

import base64
import io
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from PIL import Image

from seps.captions import PROMPT, CaptionOptions, find_pictures, run
from seps.chat import ChatServer, Pace, Unanswered


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    (folder / "inner").mkdir(parents=True)
    for number, name in enumerate(["b.png", "a.jpg", "inner/c.png", "d.png", "e.png"]):
        Image.new("RGB", (20 + number, 16), (40 * number, 10, 10)).save(folder / name)
    (folder / "notes.txt").write_text("no picture", encoding="utf-8")
    return folder


ORDER = ["a.jpg", "b.png", "d.png", "e.png", "inner/c.png"]


@contextmanager
def serving(answer):
    """A server whose POST handler is answer(number of the request, body) -> (code, headers, body)."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            """Quiet."""

        def do_GET(self):
            self._send(200, {}, {"data": [{"id": "first-model"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append({"path": self.path, "key": self.headers.get("Authorization"), **body})
            self._send(*answer(len(seen), body))

        def _send(self, code, headers, body):
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def said(text):
    return 200, {}, {"choices": [{"message": {"content": text}}]}


def shown(body) -> Image.Image:
    """The picture in a request."""
    address = body["messages"][0]["content"][0]["image_url"]["url"]
    return Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_server_is_asked_with_the_published_prompt_and_sampling(pictures, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serving(lambda _, body: said(f"width {shown(body).width}")) as (address, seen):
        monkeypatch.setenv("OPENAI_BASE_URL", address)
        assert run(CaptionOptions(str(pictures), str(tmp_path / "out.jsonl"))) == 0
    request = seen[0]
    assert request["path"] == "/v1/chat/completions"
    assert request["key"] == "Bearer secret"
    assert request["model"] == "first-model"
    assert (request["top_p"], request["temperature"], request["max_tokens"]) == (0.9, 0.2, 500)
    assert request["messages"][0]["content"][1]["text"] == PROMPT
    found = lines(tmp_path / "out.jsonl")
    assert [line["image"] for line in found] == ORDER
    assert {line["image"]: line["text"] for line in found}["e.png"] == "width 24"
    assert not list(tmp_path.glob("*.part"))


def failing(number, body):
    """Every way in which an answer can fail and pass."""
    kinds = {
        1: (503, {}, {"error": {"message": "busy"}}),
        2: (429, {"Retry-After": "0"}, {}),
        3: (200, {}, b"no json"),
        4: said(""),
        5: (200, {}, {"choices": []}),
    }
    return kinds.get(number, said(f"width {shown(body).width}"))


def test_what_passes_is_tried_again(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr("seps.chat.random.uniform", lambda *_: 0.001)
    with serving(failing) as (address, seen):
        options = CaptionOptions(str(pictures), str(tmp_path / "out.jsonl"), server=address, model="m")
        assert run(options) == 0
    assert len(seen) == len(ORDER) + 5
    assert len(lines(tmp_path / "out.jsonl")) == len(ORDER)


def test_what_was_described_is_not_described_again(pictures, tmp_path, monkeypatch, caplog):
    """A run in which some images failed says so, keeps the others, and goes on with a torn last line."""
    monkeypatch.setattr("seps.chat.random.uniform", lambda *_: 0.001)
    out = tmp_path / "out.jsonl"

    def half(_, body):
        return said("fine") if shown(body).width < 22 else (500, {}, {"error": "down"})

    with serving(half) as (address, _):
        assert run(CaptionOptions(str(pictures), str(out), server=address, model="m", retries=1)) == 1
    assert "3 of 5 images" in caplog.text
    assert "500 down, after 2 tries" in caplog.text
    assert not out.exists()
    part = tmp_path / "out.jsonl.part"
    assert len(lines(part)) == 2
    with part.open("ab") as file:
        file.write(b'{"text": "cut o')
    with serving(lambda *_: said("later")) as (address, seen):
        assert run(CaptionOptions(str(pictures), str(out), server=address, model="m")) == 0
        assert len(seen) == 3
        assert run(CaptionOptions(str(pictures), str(out), server=address, model="m")) == 0
        assert len(seen) == 3
    assert sorted(line["text"] for line in lines(out)) == ["fine"] * 2 + ["later"] * 3


def test_what_a_result_holds_of_other_pictures_stays_in_it(pictures, tmp_path):
    """Descriptions are dear: of a picture that went, of another folder, in a last line without its end."""
    out = tmp_path / "out.jsonl"
    elsewhere = {"text": "far", "image": "z.png"}
    out.write_text(f'{json.dumps(elsewhere)}\n{{"text": "mine", "image": "b.png"}}', encoding="utf-8")
    with serving(lambda *_: said("fine")) as (address, seen):
        assert run(CaptionOptions(str(pictures), str(out), server=address, model="m")) == 0
    assert len(seen) == len(ORDER) - 1
    assert [line["image"] for line in lines(out)] == [*ORDER, "z.png"]
    assert {line["image"]: line["text"] for line in lines(out)}["b.png"] == "mine"


def test_a_refused_key_ends_the_run_at_once_and_is_not_repeated(pictures, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    refusal = (401, {}, {"error": {"message": "wrong key sk-secret"}})
    with serving(lambda *_: refusal) as (address, seen):
        with pytest.raises(ValueError, match=r"refuses the request: 401 wrong key \(key\)$"):
            run(
                CaptionOptions(
                    str(pictures), str(tmp_path / "o.jsonl"), server=address, model="m", concurrency=1
                )
            )
        assert len(seen) <= 2
    assert not list(tmp_path.glob("*.part"))


def test_a_server_that_answers_nobody_is_not_asked_for_ever(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("seps.captions.PATIENCE", 3)
    for number in range(40):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number:02}.png")
    with serving(lambda *_: (503, {}, {"error": "down"})) as (address, seen):
        asked = CaptionOptions(
            str(tmp_path), str(tmp_path / "o.jsonl"), server=address, model="m", retries=0, concurrency=2
        )
        assert run(asked) == 1
    assert 3 <= len(seen) <= 8
    assert "40 of 40 images have no description yet" in caplog.text
    assert not list(tmp_path.glob("*.part"))


def test_what_went_wrong_is_said_in_words():
    with serving(lambda *_: (200, {}, b"<html>")) as (address, _):
        server = ChatServer(address, retries=0)
        with pytest.raises(Unanswered, match="^the answer is no JSON, after 1 tries"):
            server.ask("m", PROMPT, Image.new("RGB", (4, 4)), {})
    with pytest.raises(Unanswered, match="^Connection refused, after 1 tries"):
        server.ask("m", PROMPT, Image.new("RGB", (4, 4)), {})


@pytest.mark.parametrize(("asked", "waited"), [("90", 90), ("9000", 600), ("soon", 60)])
def test_a_server_is_given_the_time_it_asks_for(asked, waited, monkeypatch):
    monkeypatch.setattr("seps.chat.random.uniform", lambda *_: 1)
    with serving(lambda *_: (429, {"Retry-After": asked}, {})) as (address, _):
        server = ChatServer(address, retries=1, first_pause=1000)
        spans = []
        monkeypatch.setattr(server._closed, "wait", spans.append)
        with pytest.raises(Unanswered, match="429"):
            server.ask("m", PROMPT, Image.new("RGB", (4, 4)), {})
    assert spans == [waited]


def test_broken_pictures_are_refused_or_skipped(pictures, tmp_path):
    (pictures / "b.png").write_bytes(b"broken")
    with serving(lambda *_: said("fine")) as (address, _):
        options = CaptionOptions(str(pictures), str(tmp_path / "o.jsonl"), server=address, model="m")
        with pytest.raises(ValueError, match=r"b\.png: not a readable image"):
            run(options)
        skipping = CaptionOptions(
            str(pictures), str(tmp_path / "o.jsonl"), server=address, model="m", broken="skip"
        )
        assert run(skipping) == 0
    assert [line["image"] for line in lines(tmp_path / "o.jsonl")] == [n for n in ORDER if n != "b.png"]


def test_a_closed_client_gives_up_waiting():
    with serving(lambda *_: (503, {"Retry-After": "50"}, {})) as (address, seen):
        server = ChatServer(address)
        server.close()
        with pytest.raises(Unanswered, match="503"):
            server.ask("m", PROMPT, Image.new("RGB", (4, 4)), {})
        assert len(seen) == 1


def test_a_server_that_is_not_there_is_told_from_one_without_models(monkeypatch):
    with serving(lambda *_: said("")) as (address, _):
        assert ChatServer(address).first_model() == "first-model"
    gone = ChatServer(address, retries=0)
    with pytest.raises(ValueError, match=r"list of models, found .*refused.*, after 1 tries"):
        gone.first_model()
    monkeypatch.setattr(gone, "_send", lambda *_: {"data": []})
    with pytest.raises(ValueError, match="found none; name one with --model"):
        gone.first_model()


def test_requests_keep_their_distance(monkeypatch):
    now, slept = [100.0], []
    monkeypatch.setattr("seps.chat.time.monotonic", lambda: now[0])
    monkeypatch.setattr("seps.chat.time.sleep", slept.append)
    pace = Pace(60)
    pace.wait()
    pace.wait()
    now[0] += 5
    pace.wait()
    assert slept == [0, 1, 0]


def test_pictures_of_a_data_folder_keep_its_order(tmp_path):
    for name in ("z.png", "a.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    entries = [{"image": name, "captions": ["x"]} for name in ("z.png", "a.png")]
    (tmp_path / "captions.jsonl").write_text("\n".join(map(json.dumps, entries)), encoding="utf-8")
    assert [picture.name for picture in find_pictures(tmp_path)] == ["z.png", "a.png"]


@pytest.mark.parametrize(
    ("images", "options", "what"),
    [
        ("nowhere", {"model": "m"}, "no such folder"),
        (".", {"model": "m"}, "expected pictures"),
        ("pictures", {}, "found neither"),
        ("pictures", {"server": "localhost:1"}, "expected an address with http"),
        ("pictures", {"model": "nowhere/at-all"}, "expected an image-text-to-text model"),
    ],
)
def test_one_sentence_for_what_cannot_be(tmp_path, monkeypatch, images, options, what):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    folder = tmp_path / "pictures"
    folder.mkdir()
    if images == "pictures":
        Image.new("RGB", (8, 8)).save(folder / "a.png")
    with pytest.raises((ValueError, FileNotFoundError), match=what):
        run(CaptionOptions(str(tmp_path / images), str(tmp_path / "o.jsonl"), **options))


@pytest.mark.parametrize("field", ["top_p", "temperature", "concurrency", "requests_per_minute"])
def test_options_refuse_what_makes_no_sense(field):
    with pytest.raises(ValueError, match=field):
        CaptionOptions("i", "o", **{field: -1})


@pytest.fixture
def tiny_llava(tmp_path):
    """A LLaVA of random weights, saved as any model of transformers is."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )

    words = ["<pad>", "<s>", "</s>", "<unk>", "<image>", "USER:", "ASSISTANT:", *PROMPT.split()]
    words += [f"word{number}" for number in range(20)]
    inner = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<image>"],
    )
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    text = LlamaConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=4, image_seq_length=4)
    model = LlavaForConditionalGeneration(config)
    pictures = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    processor = LlavaProcessor(
        pictures,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    folder = tmp_path / "llava"
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def test_a_local_model_describes_every_picture(pictures, tmp_path, tiny_llava):
    out = tmp_path / "out.jsonl"
    options = CaptionOptions(
        str(pictures), str(out), model=str(tiny_llava), most_tokens=6, batch_size=2, device="cpu"
    )
    assert run(options) == 0
    found = lines(out)
    assert [line["image"] for line in found] == ORDER
    assert all(line["text"] and PROMPT not in line["text"] for line in found)
    assert all(len(line["text"].split()) <= 6 for line in found)

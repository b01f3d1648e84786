"""`seps caption`: dense text from a multimodal model, here or behind a server; one JSON line an image.

Lines are appended to a file beside the result as they come, so a broken run goes on where it stopped; the
result, in the order of the images, takes its place once every image has its line.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from PIL import Image

from seps.chat import ChatServer, Unanswered
from seps.data.images import open_image
from seps.data.layouts import read, recognise
from seps.data.records import Broken, Problems, written_beside
from seps.naming import reason
from seps.progress import progress_bar

logger = logging.getLogger(__name__)

PROMPT = "Provide a comprehensive description of this image"
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
LONGEST_SIDE = 1024
PATIENCE = 16
"""Pictures in a row without an answer after which a run ends: nobody is there."""


class Describer(Protocol):
    """Pictures in, their descriptions out: batch_size at once, in so many calls (workers) side by side."""

    workers: int
    batch_size: int

    def __call__(self, images: Sequence[Image.Image]) -> list[str]:
        """What there is to see in each."""
        ...

    def close(self) -> None:
        """Give up what is under way."""
        ...


@dataclass(frozen=True)
class CaptionOptions:
    """Describe images with a multimodal model, here (--model) or behind a server (--server)."""

    images: str
    """A folder of pictures, or a data folder of any known layout."""
    out: str
    """The JSONL to write: {"text": …, "image": …} a line."""
    model: str | None = None
    """An image-text-to-text model of transformers: hub name or folder. With --server, the name it goes by."""
    server: str | None = None
    """A server that speaks the OpenAI chat API; where no model is given either, $OPENAI_BASE_URL."""
    key: str | None = None
    """The server's key, by default $OPENAI_API_KEY."""
    prompt: str = PROMPT
    """What is asked."""
    top_p: float = 0.9
    """Nucleus of the sampling."""
    temperature: float = 0.2
    """Of the sampling; 0 always takes the likeliest word."""
    most_tokens: int = 500
    """Tokens of a description at most."""
    seed: int = 0
    """Of the sampling."""
    batch_size: int = 1
    """Pictures that a local model describes at once."""
    concurrency: int = 4
    """Requests to a server at once."""
    requests_per_minute: float | None = None
    """Requests to a server at most."""
    retries: int = 6
    """Times that a request which failed is sent again."""
    patience: float = 120.0
    """Seconds to wait for an answer."""
    broken: Broken = "refuse"
    """Stop at a picture that cannot be read, or skip and count it."""
    device: str = "auto"
    """Of a local model."""

    def __post_init__(self) -> None:
        for name in ("most_tokens", "batch_size", "concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected above 0 and at most 1, found {self.top_p}")
        for name in ("temperature", "retries", "patience"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected at least 0, found {getattr(self, name)}")
        if self.requests_per_minute is not None and self.requests_per_minute <= 0:
            raise ValueError(f"requests_per_minute: expected above 0, found {self.requests_per_minute}")


class Picture(NamedTuple):
    """A picture to describe: its name in the result, and its file."""

    name: str
    path: Path


def run(options: CaptionOptions) -> int:
    """`seps caption`: 0 when every image has its line, 1 when some could not be described."""
    pictures = find_pictures(Path(options.images))
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f"{out.name}.part")
    done = _read_lines(out) | _read_lines(beside)
    left = [picture for picture in pictures if picture.name not in done]
    problems = Problems(options.broken)
    failed: list[str] = []
    if left:
        with closing(choose(options)) as describer, appended(beside) as file:
            answers = describe_all(left, describer, problems, len(pictures))
            failed = keep_answers(answers, done, file)
    missing = sum(picture.name not in done for picture in pictures) - len(problems)
    if failed:
        logger.warning(
            "%d of %d images have no description yet, the same line tries them again: %s",
            missing,
            len(pictures),
            "; ".join(failed[:5]),
        )
        return 1
    described = [picture.name for picture in pictures if picture.name in done]
    with written_beside(out) as file:
        file.writelines(_line(name, done[name]) for name in dict.fromkeys((*described, *done)))
    beside.unlink(missing_ok=True)
    logger.info("%s: %d descriptions, %s", out, len(described), problems.summary())
    return 0


def keep_answers(
    described: Generator[tuple[Picture, str | Unanswered]], done: dict[str, str], file: IO[str]
) -> list[str]:
    """Add every description to those that are done and to a file; -> what had none, and why.

    So many failures in a row that nobody can be there end it.
    """
    failed: list[str] = []
    in_a_row = 0
    with closing(described):
        for picture, text in described:
            if isinstance(text, Unanswered):
                failed.append(f"{picture.name} ({text})")
                in_a_row += 1
                if in_a_row == PATIENCE:
                    break
                continue
            in_a_row = 0
            done[picture.name] = text
            file.write(_line(picture.name, text))
            file.flush()
    return failed


@contextmanager
def appended(path: Path) -> Iterator[IO[str]]:
    """A file to append to, which is not left behind with nothing in it."""
    with path.open("a", encoding="utf-8") as file:
        try:
            yield file
        finally:
            if not file.tell():
                path.unlink()


def choose(options: CaptionOptions) -> Describer:
    """The model that the options name, here or behind a server."""
    server = options.server or (None if options.model else os.environ.get("OPENAI_BASE_URL"))
    if server is not None:
        return ServedModel(options, server)
    if options.model is None:
        raise ValueError(
            "model, server: expected a model's name or a server's address, found neither "
            "(--model, --server, or OPENAI_BASE_URL in the environment)"
        )
    return LocalModel(options)


def find_pictures(place: Path) -> list[Picture]:
    """The pictures of a data layout in its order, or of a plain folder by name."""
    if not place.exists():
        raise FileNotFoundError(f"{place}: there is no such folder of pictures")
    if place.is_file() or _is_layout(place):
        return [Picture(record.image.name, record.image) for record in read(place)]
    files = [path for path in sorted(place.rglob("*")) if path.suffix.lower() in SUFFIXES and path.is_file()]
    if not files:
        raise ValueError(f"{place}: expected pictures ({', '.join(sorted(SUFFIXES))}), found none")
    return [Picture(path.relative_to(place).as_posix(), path) for path in files]


def _is_layout(place: Path) -> bool:
    try:
        recognise(place)
    except ValueError:
        return False
    return True


def describe_all(
    pictures: Sequence[Picture], describer: Describer, problems: Problems, total: int
) -> Generator[tuple[Picture, str | Unanswered]]:
    """Every readable picture with its description, in the order in which they come."""
    workers, size = describer.workers, describer.batch_size
    groups = (list(pictures[start : start + size]) for start in range(0, len(pictures), size))
    pending: dict[Future[list[str]], list[Picture]] = {}
    with (
        progress_bar("descriptions", total, total - len(pictures)) as advance,
        ThreadPoolExecutor(workers) as pool,
    ):
        try:
            while True:
                while len(pending) < 2 * workers and (group := next(groups, None)) is not None:
                    readable, images = _open(group, problems)
                    advance(len(group) - len(readable))
                    if readable:
                        pending[pool.submit(describer, images)] = readable
                if not pending:
                    return
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    group = pending.pop(future)
                    advance(len(group))
                    yield from zip(group, _results(future, len(group)), strict=True)
        finally:
            describer.close()
            pool.shutdown(wait=False, cancel_futures=True)


def _open(group: Sequence[Picture], problems: Problems) -> tuple[list[Picture], list[Image.Image]]:
    readable, images = [], []
    for picture in group:
        try:
            image = open_image(picture.path)
        except ValueError as error:
            problems.meet(str(picture.path), str(error).removeprefix(f"{picture.path}: "))
            continue
        image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
        readable.append(picture)
        images.append(image)
    return readable, images


def _results(future: Future[list[str]], count: int) -> Sequence[str | Unanswered]:
    try:
        return future.result()
    except Unanswered as failure:
        return [failure] * count


def _line(name: str, text: str) -> str:
    return json.dumps({"text": text, "image": name}, ensure_ascii=False) + "\n"


def _read_lines(path: Path) -> dict[str, str]:
    """Descriptions by image of a file; what a kill left of a last line is removed, a whole one completed."""
    found: dict[str, str] = {}
    if not path.is_file():
        return found
    content, whole = path.read_bytes(), 0
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        try:
            entry = json.loads(line)
            found[entry["image"]] = entry["text"]
        except (ValueError, KeyError, TypeError):
            if not line.endswith(b"\n"):
                break
            raise ValueError(
                f'{path}:{number}: expected {{"text": …, "image": …}} of an earlier run, found something else'
            ) from None
        whole += len(line)
    os.truncate(path, whole)
    if whole and content[whole - 1 : whole] != b"\n":
        with path.open("ab") as file:
            file.write(b"\n")
    return found


class ServedModel:
    """A model behind a server, one picture a request."""

    def __init__(self, options: CaptionOptions, server: str) -> None:
        key = options.key or os.environ.get("OPENAI_API_KEY")
        self.chat = ChatServer(server, key, options.retries, options.patience, options.requests_per_minute)
        self.workers, self.batch_size = options.concurrency, 1
        self.prompt = options.prompt
        self.request = {
            "temperature": options.temperature,
            "top_p": options.top_p,
            "max_tokens": options.most_tokens,
            "seed": options.seed,
        }
        self.name = options.model or self.chat.first_model()

    def __call__(self, images: Sequence[Image.Image]) -> list[str]:
        """One request a picture."""
        return [self.chat.ask(self.name, self.prompt, image, self.request) for image in images]

    def close(self) -> None:
        """Wait no longer between tries."""
        self.chat.close()


class LocalModel:
    """An image-text-to-text model of transformers, asked in its own chat form."""

    def __init__(self, options: CaptionOptions) -> None:
        import torch
        from transformers import AutoModelForImageTextToText, AutoProcessor

        from seps.distributed import choose_device

        name = str(options.model)
        self.options = options
        self.workers, self.batch_size = 1, options.batch_size
        self.device = choose_device(options.device)
        try:
            self.processor = AutoProcessor.from_pretrained(name)
            half = torch.bfloat16 if self.device.type == "cuda" else torch.float32
            self.model: Any = AutoModelForImageTextToText.from_pretrained(name, dtype=half)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"model: expected an image-text-to-text model of transformers, found {name!r} "
                f"({reason(error)})"
            ) from None
        torch.nn.Module.to(self.model, self.device).eval()
        self.text = self._ask()

    def _ask(self) -> str:
        """The prompt in the model's chat form, or in LLaVA's where it has none of its own."""
        if getattr(self.processor, "chat_template", None) is None:
            return f"USER: <image>\n{self.options.prompt} ASSISTANT:"
        content = [{"type": "image"}, {"type": "text", "text": self.options.prompt}]
        chat = [{"role": "user", "content": content}]
        return str(self.processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))

    def close(self) -> None:
        """Nothing waits here."""

    def __call__(self, images: Sequence[Image.Image]) -> list[str]:
        """All of them in one batch."""
        import torch

        given = self.processor(
            images=list(images),
            text=[self.text] * len(images),
            padding=True,
            padding_side="left",
            return_tensors="pt",
        ).to(self.device, self.model.dtype)
        sampling = (
            {"do_sample": True, "top_p": self.options.top_p, "temperature": self.options.temperature}
            if self.options.temperature > 0
            else {"do_sample": False}
        )
        torch.manual_seed(self.options.seed)
        with torch.no_grad():
            made = self.model.generate(**given, **sampling, max_new_tokens=self.options.most_tokens)
        fresh = made[:, given["input_ids"].shape[1] :]
        return [text.strip() for text in self.processor.batch_decode(fresh, skip_special_tokens=True)]

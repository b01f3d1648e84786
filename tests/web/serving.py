"""What the service's tests are made of: a small gallery of drawn scenes, and a service on a free port."""

import io
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from seps.data.scenes import Scenes
from seps.gallery import Gallery, Picture
from seps.model import SepsConfig, create
from seps.recipe import described

COUNT = 12


@dataclass(frozen=True)
class World:
    """The gallery, the scenes in it, and the id of each."""

    gallery: Gallery
    scenes: Scenes
    ids: list[str]
    texts: list[str]


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    """A picture as a file."""
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def small_model(texts: list[str]) -> Any:
    """A light model of random weights; its 64 patches are enough to look at."""
    torch.manual_seed(5)
    light = {"kind": "light", "width": 32, "layers": 1, "heads": 2}
    config = SepsConfig(
        recipe=described(),
        channels=32,
        image_encoder={**light, "size": 128},
        text_encoder=light,
    )
    model, processor = create(config, texts)
    return model.eval(), processor


def make_world(folder: Path, count: int = COUNT) -> World:
    """A gallery of scenes, each with its description and the tag "drawn"."""
    scenes = Scenes(count, seed=7, size=160)
    texts = [scenes[index].captions[0] for index in range(count)]
    model, processor = small_model([*texts, *(scenes[index].dense or "" for index in range(count))])
    gallery = Gallery.create(folder, model, processor)
    pictures = [
        Picture(encoded(scenes.open(index)), f"scene {index}.png", scenes[index].dense, ("drawn",))
        for index in range(count)
    ]
    gallery.add(pictures)
    return World(gallery, scenes, [picture.id for picture in pictures], texts)


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The address of a service in a thread of its own."""
    import uvicorn

    from seps.web.commands import listen

    with listen("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)

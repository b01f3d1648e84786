"""Requests a second and latencies of the service with 1, 8 and 64 clients, on loopback.

    python benchmarks/service.py [--pictures 300] [--requests 192]

Renders scenes, indexes them with a light model of random weights (speed does not depend on what it learned),
serves them from a process of its own and asks. Every answer is held against the one the gallery gave before.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch

from seps.data.scenes import Scenes, write
from seps.gallery import Gallery, find_pictures
from seps.model import SepsConfig, create, load
from seps.recipe import described
from seps.web import Limits, make_app
from seps.web.commands import listen

CLIENTS = (1, 8, 64)


def make_gallery(folder: Path, pictures: int) -> tuple[Gallery, list[str]]:
    """A gallery of scenes, and captions of them to ask for."""
    write(folder / "scenes", {"test": pictures}, size=128)
    scenes = Scenes(pictures, split="test", size=128)
    texts = [scenes[index].captions[0] for index in range(min(pictures, 64))]
    torch.manual_seed(0)
    model, processor = create(SepsConfig(recipe=described(), channels=128), texts)
    model.eval().save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    gallery = Gallery.create(folder / "gallery", *load(folder / "model"), model_source=folder / "model")
    gallery.add(find_pictures(folder / "scenes"))
    return gallery, texts


def serve(folder: str, port: Any) -> None:
    """The service, in a process of its own."""
    import uvicorn

    model, processor = load(f"{folder}/model")
    app = make_app(Gallery.open(f"{folder}/gallery", model, processor), Limits(rate=1e6, burst=1e6))
    with listen("127.0.0.1", 0) as listener:
        port.value = listener.getsockname()[1]
        uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


def measure(address: str, clients: int, requests: int, expected: dict[str, list[str]]) -> dict[str, float]:
    """Ask from so many clients at once; every answer must be its own question's."""
    texts = list(expected)
    share = max(1, requests // clients)

    def ask(number: int) -> list[float]:
        seconds = []
        with httpx.Client(base_url=address, timeout=120) as client:
            for place in range(share):
                text = texts[(number * 7 + place) % len(texts)]
                began = time.perf_counter()
                response = client.post("/search", json={"text": text, "k": 10})
                seconds.append(time.perf_counter() - began)
                response.raise_for_status()
                if [each["id"] for each in response.json()["results"]] != expected[text]:
                    raise SystemExit(f"the answer to {text!r} is another question's")
        return seconds

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        seconds = sorted(each for part in pool.map(ask, range(clients)) for each in part)
    lasted = time.perf_counter() - began
    return {
        "clients": clients,
        "requests": len(seconds),
        "requests/s": len(seconds) / lasted,
        "p50 ms": 1000 * statistics.median(seconds),
        "p99 ms": 1000 * seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pictures", type=int, default=300)
    parser.add_argument("--requests", type=int, default=192)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        gallery, texts = make_gallery(Path(name), options.pictures)
        expected = {text: [hit.id for hit in gallery.search(text, 10)] for text in texts}
        context = multiprocessing.get_context("spawn")
        port = context.Value("i", 0)
        process = context.Process(target=serve, args=(name, port), daemon=True)
        process.start()
        try:
            address = wait_for(port, process)
            print(f"{options.pictures} pictures, {os.cpu_count()} cores, {torch.get_num_threads()} threads")
            measure(address, 4, 16, expected)  # the first searches open files and fill caches
            for clients in CLIENTS:
                row = measure(address, clients, options.requests, expected)
                print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
            text = httpx.get(f"{address}/metrics").text
            print(
                *(
                    line
                    for line in text.splitlines()
                    if "batch_size_sum" in line or "batch_size_count" in line
                )
            )
        finally:
            process.terminate()
            process.join(10)


def wait_for(port: Any, process: Any) -> str:
    """The address, once the service answers."""
    for _ in range(600):
        if not process.is_alive():
            raise SystemExit("the service ended before it answered")
        if port.value:
            try:
                httpx.get(f"http://127.0.0.1:{port.value}/healthz").raise_for_status()
                return f"http://127.0.0.1:{port.value}"
            except httpx.HTTPError:
                pass
        time.sleep(0.1)
    raise SystemExit("the service did not answer within a minute")


if __name__ == "__main__":
    main()

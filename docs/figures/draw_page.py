"""Draws results.png and page.png: the page on the demonstration's photographs, in a real browser.

Needs the extras mini, demo, gallery, web and dev, and chromium (Debian: apt-get install chromium).
"""

import io
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from seps.demo.photographs import make_gallery
from seps.gallery import Gallery
from seps.web import make_app
from seps.web.commands import listen

FOLDER = Path(__file__).parent
QUERY, WORD = "a cup of coffee", "coffee"
SIZE = {"width": 1120, "height": 700}


@contextmanager
def serving(gallery: Gallery) -> Iterator[str]:
    """The address of the gallery's service."""
    import uvicorn

    with listen("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(make_app(gallery), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.05)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)


def take(page: Any, name: str) -> None:
    """A screenshot in a palette: a tenth of the size, and nobody sees it."""
    shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    shot.quantize(256, dither=Image.Dither.FLOYDSTEINBERG).save(FOLDER / name, optimize=True)
    print(FOLDER / name)


def draw(address: str, program: str) -> None:
    """Search, open the best, look at a word."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(address)
        page.wait_for_selector(".card")
        page.fill("#query", QUERY)
        page.press("#query", "Enter")
        page.wait_for_selector(".mark")
        page.wait_for_load_state("networkidle")
        page.evaluate("document.activeElement.blur()")
        take(page, "results.png")
        page.click(".card")
        page.wait_for_selector("#why:not([hidden])")
        page.wait_for_function("document.getElementById('viewer-picture').naturalWidth > 0")
        page.hover(f"#words button:has-text('{WORD}')")
        page.wait_for_timeout(300)
        take(page, "page.png")
        browser.close()


def main() -> None:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        sys.exit("draw_page: expected chromium, found none")
    with tempfile.TemporaryDirectory() as folder, serving(make_gallery(Path(folder))) as address:
        draw(address, program)


if __name__ == "__main__":
    main()

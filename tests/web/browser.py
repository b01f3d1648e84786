"""A real headless browser for the page's tests."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# The browser stays off the network and leaves nothing behind.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def program() -> str:
    """Where the browser is; the test is skipped where there is none."""
    pytest.importorskip("playwright", reason="playwright is not installed (the dev extra brings it)")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")
    return found


@contextmanager
def browsing(profile: Path) -> Iterator[Any]:
    """A browser with an empty profile."""
    path = program()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(profile),
            executable_path=path,
            headless=True,
            args=list(FLAGS),
            viewport={"width": 1280, "height": 800},
            color_scheme="light",
        )
        try:
            yield context
        finally:
            context.close()

"""A gallery that the tests of the service share, and services of it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the web extra is not installed")
pytest.importorskip("lancedb", reason="the gallery extra is not installed")

from serving import World, make_world, serving

from seps.web import Limits, make_app

FREE = Limits(rate=1e6, burst=1e6)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("web") / "gallery")


@pytest.fixture
def serve(world: World) -> Iterator[Callable[..., str]]:
    """Serves the gallery until the test ends; -> its address."""
    with ExitStack() as stack:

        def begin(limits: Limits = FREE, **settings: Any) -> str:
            return stack.enter_context(serving(make_app(world.gallery, limits, **settings)))

        yield begin

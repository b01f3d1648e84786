"""What all tests share: the golden cases, a fixed seed, and no way out to the network."""

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

GOLDEN = Path(__file__).parent / "golden"

settings.register_profile(
    "seps",
    deadline=None,  # a slow machine is no failure
    max_examples=25,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("seps")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Small tensors gain nothing from a second thread, and lose much to waiting for it on a busy machine.
torch.set_num_threads(1)

Golden = tuple[dict[str, Any], dict[str, torch.Tensor]]


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Golden]:
    """Reads a golden case by name: its settings and its arrays as tensors."""

    def load(name: str) -> Golden:
        with np.load(GOLDEN / f"{name}.npz") as arrays:
            meta = json.loads(str(arrays["meta"]))
            return meta, {key: torch.from_numpy(arrays[key].copy()) for key in arrays.files if key != "meta"}

    return load


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Refuses every connection that would leave this machine."""
    connect = socket.socket.connect

    def connect_locally(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in (
            "127.0.0.1",
            "::1",
            "localhost",
        ):
            raise RuntimeError(f"a test tried to reach {address}: tests use no network")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connect_locally)
        yield

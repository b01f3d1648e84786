"""Compiled scores: the hot loop of the engine in C++, built once per machine where a compiler is found.

`SEPS_NATIVE` in the environment chooses: "auto" (the default) compiles if it can, "off" never does.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

_SOURCE = Path(__file__).with_name("kernel.cpp")
_PARTS = (_SOURCE, *map(_SOURCE.with_name, ("gradient.h", "pair.h", "vectors.h")))
# What each compiler takes for threads: with OpenMP the kernel shares those of torch, which spin for a while
# after their own work and would keep others waiting.
_COMPILERS = {"g++": "-fopenmp", "clang++": "-pthread"}
_OPTIONS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fPIC",
    "-shared",
    # The parts of -ffast-math that let sums be reordered. The whole of it would also link code that makes the
    # process flush small numbers to zero, everywhere and for good.
    "-fassociative-math",
    "-freciprocal-math",
    "-fno-signed-zeros",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-ffp-contract=fast",
)
logger = logging.getLogger(__name__)


def library() -> ctypes.CDLL | None:
    """The compiled kernel, None where it is switched off or cannot be built."""
    choice = os.environ.get("SEPS_NATIVE", "auto")
    if choice not in ("auto", "off"):
        raise ValueError(f"SEPS_NATIVE: expected auto or off, found {choice!r}")
    return None if choice == "off" else _load()


@lru_cache(maxsize=1)
def _load() -> ctypes.CDLL | None:
    failures = []
    for name in _COMPILERS:
        try:
            return ctypes.CDLL(str(_build(name)))
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            failures.append(str(error))
    logger.info("no compiled kernel, the plain path computes the same: %s", "; ".join(failures))
    return None


def _build(name: str) -> Path:
    """The library's file, compiled unless this source was compiled on such a processor before."""
    compiler = shutil.which(name)
    if compiler is None:
        raise OSError(f"expected a compiler {name}, found none")
    command = [compiler, *_OPTIONS, _COMPILERS[name]]
    sources = b"".join(part.read_bytes() for part in _PARTS)
    seen = hashlib.sha256(" ".join(command).encode() + sources + _processor())
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seps"
    target = home / f"kernel-{seen.hexdigest()[:16]}.so"
    if target.exists():
        return target
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as folder:
        made = Path(folder) / target.name
        subprocess.run(
            [*command, str(_SOURCE), "-o", str(made)], check=True, capture_output=True, timeout=300
        )
        made.replace(target)
    return target


def _processor() -> bytes:
    """What the machine's processor can do, as far as the system says."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return b""
    return "".join(line for line in text.splitlines() if line.startswith(("flags", "Features"))).encode()

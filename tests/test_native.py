"""The compiled kernel is built on first use, once, by whoever comes first, and is never missed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from seps.pairwise import native

LOAD = "from seps.pairwise import native; print(native.library() is not None)"


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """No kernel loaded or kept; what is loaded in the test is forgotten after it."""
    monkeypatch.delenv("SEPS_NATIVE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native._load.cache_clear()
    yield tmp_path
    native._load.cache_clear()


def put_compiler(folder: Path, body: str) -> str:
    """A PATH whose only compilers run a script."""
    folder.mkdir()
    for name in ("g++", "clang++"):
        (folder / name).write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    return os.pathsep.join([str(folder), "/usr/bin", "/bin"])


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    """A fresh interpreter that runs code."""
    source = str(Path(native.__file__).parents[3])
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": source, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


def only_line(caplog) -> str:
    lines = [record.getMessage() for record in caplog.records if record.name == native.__name__]
    assert len(lines) == 1
    return lines[0]


def test_the_environment_switches_the_kernel(monkeypatch):
    monkeypatch.setenv("SEPS_NATIVE", "off")
    assert native.library() is None
    monkeypatch.setenv("SEPS_NATIVE", "sometimes")
    with pytest.raises(ValueError, match="SEPS_NATIVE: expected auto or off, found 'sometimes'"):
        native.library()


def test_no_compiler_is_no_failure(fresh, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(fresh))
    with caplog.at_level("INFO"):
        assert native.library() is None
        assert native.library() is None
    assert "no compiled kernel" in only_line(caplog)


def test_a_compiler_that_fails_is_no_failure(fresh, monkeypatch, caplog):
    monkeypatch.setenv("PATH", put_compiler(fresh / "bin", "exit 1"))
    with caplog.at_level("INFO"):
        assert native.library() is None
    assert "no compiled kernel" in only_line(caplog)
    assert not any((fresh / "cache" / "seps").iterdir())


def test_a_cache_that_cannot_be_written_is_no_failure(fresh, monkeypatch, caplog):
    (fresh / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / "file"))
    with caplog.at_level("INFO"):
        assert native.library() is None
    assert "no compiled kernel" in only_line(caplog)


def test_a_user_without_a_home_is_no_failure(fresh, monkeypatch, caplog):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    with caplog.at_level("INFO"):
        assert native.library() is None
    assert "no compiled kernel" in only_line(caplog)


def test_the_second_compiler_takes_over(fresh, monkeypatch):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no compiler here")
    monkeypatch.setenv("PATH", put_compiler(fresh / "bin", "exit 1"))
    (fresh / "bin" / "clang++").unlink()
    (fresh / "bin" / "clang++").symlink_to(compiler)
    assert native.library() is not None


def test_importing_compiles_nothing(tmp_path):
    path = put_compiler(tmp_path / "bin", f"touch {tmp_path / 'called'}; exit 1")
    process = start("import seps, seps.pairwise", PATH=path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert process.wait() == 0
    assert not (tmp_path / "called").exists()


def test_processes_that_start_at_once_all_have_the_kernel(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("no compiler here")
    cache = tmp_path / "cache"
    processes = [start(LOAD, XDG_CACHE_HOME=str(cache), SEPS_NATIVE="auto") for _ in range(3)]
    assert [process.communicate()[0].strip() for process in processes] == ["True"] * 3
    assert len(list((cache / "seps").iterdir())) == 1


def test_the_kernel_leaves_small_numbers_to_everyone_else():
    """-ffast-math at the linker would make the whole process flush them to zero."""
    native.library()
    assert torch.tensor(1e-40).mul(1) > 0
    assert np.float32(1e-40) * np.float32(1) > 0

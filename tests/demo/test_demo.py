"""The entry point of the demonstration: what it runs, where it writes, how it ends."""

import socket

import pytest

pytest.importorskip("lancedb", reason="the gallery extra is not installed")
pytest.importorskip("fastapi", reason="the web extra is not installed")

from seps.demo import __main__ as demo
from seps.demo import photographs, scenes
from seps.web import commands


class Stub:
    location = "where the gallery stands"


@pytest.fixture
def parts(monkeypatch):
    """The parts of the demonstration, each noting where it was to write."""
    seen = []

    def show(folder):
        seen.append(("photographs", folder))
        return Stub()

    monkeypatch.setattr(photographs, "show_photographs", show)
    monkeypatch.setattr(scenes, "show_training", lambda folder: seen.append(("scenes", folder)))
    monkeypatch.setattr(commands, "run_serve", lambda options: seen.append(("serve", options.gallery)))
    return seen


def test_it_ends_with_the_page(parts, tmp_path, monkeypatch):
    monkeypatch.setenv(demo.FOLDER, str(tmp_path / "demo"))
    monkeypatch.delenv(demo.SERVE, raising=False)
    assert demo.main() == 0
    folder = tmp_path / "demo"
    assert parts == [("photographs", folder), ("scenes", folder), ("serve", Stub.location)]


def test_it_stops_before_serving_if_told_to(parts, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(demo.FOLDER, str(tmp_path / "demo"))
    monkeypatch.setenv(demo.SERVE, "0")
    assert demo.main() == 0
    assert [name for name, _ in parts] == ["photographs", "scenes"]
    assert f"seps serve {Stub.location}" in capsys.readouterr().out


def test_a_port_that_is_taken_is_seen():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert not demo.vacant(port)
    assert demo.vacant(port)


def test_what_cannot_be_written_is_one_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv(demo.FOLDER, str(tmp_path / "file"))
    assert demo.main() == 2
    err = capsys.readouterr().err
    assert err.startswith("demo: ")
    assert len(err.splitlines()) == 1

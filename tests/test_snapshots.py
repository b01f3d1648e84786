"""The state of a run on disk: whole at every moment at which a kill can come, readable by whom one lets."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from seps.snapshots import alone_in, read_snapshot, recover_folder, replace_folder, write_snapshot
from test_training import same


def test_a_snapshot_gives_back_what_it_was_given(tmp_path):
    tied = torch.arange(3.0)
    state = {"a": [tied, tied, 1, None, True, "x"], 3: {"half": torch.ones(2, dtype=torch.bfloat16)}, "e": {}}
    write_snapshot(state, tmp_path / "s")
    assert same(read_snapshot(tmp_path / "s"), state)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_snapshot_refuses_what_it_cannot_hold_and_what_it_did_not_write(tmp_path):
    with pytest.raises(ValueError, match="/a: expected tensors and plain values, found object"):
        write_snapshot({"a": object()}, tmp_path / "s")
    (tmp_path / "s").write_bytes(b"something else")
    with pytest.raises(ValueError, match="not a snapshot"):
        read_snapshot(tmp_path / "s")
    with pytest.raises(FileNotFoundError, match="no such snapshot"):
        read_snapshot(tmp_path / "t")


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_who_may_read_a_snapshot_is_for_the_user_to_say(tmp_path, mask, mode):
    (tmp_path / ".s.part").touch(0o600)  # of a kill
    before = os.umask(mask)
    try:
        write_snapshot({"a": 1}, tmp_path / "s")
    finally:
        os.umask(before)
    assert (tmp_path / "s").stat().st_mode & 0o777 == mode


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize("error", [FULL, Exception("I/O error: No space left on device (os error 28)")])
def test_a_full_disk_is_told_with_its_place_and_leaves_what_was(tmp_path, monkeypatch, error):
    def fail(*_, **__):
        raise type(error)(*error.args)

    write_snapshot({"a": 1}, tmp_path / "s")
    replace_folder(tmp_path / "best", write(weights="1"))
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", fail)
        with pytest.raises(OSError, match="No space left") as met:
            write_snapshot({"a": 2}, tmp_path / "s")
        assert met.value.filename == str(tmp_path / "s")
    with pytest.raises(OSError, match="No space left") as met:
        replace_folder(tmp_path / "best", fail)
    assert met.value.filename == str(tmp_path / "best")
    assert read_snapshot(tmp_path / "s") == {"a": 1}
    assert held(tmp_path / "best") == {"weights": "1"}
    assert {path.name for path in tmp_path.iterdir()} == {"s", "best"}


def test_what_is_no_fault_of_the_disk_stays_what_it_is(tmp_path):
    def fail(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        replace_folder(tmp_path / "best", fail)
    assert not any(tmp_path.iterdir())


def write(**files):
    """A save function that writes some files."""

    def save(folder):
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")

    return save


def held(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def test_a_folder_is_replaced_whatever_differs(tmp_path):
    place = tmp_path / "best"
    for files in ({"a": "1"}, {"a": "1", "b": "2"}, {"a": "1", "b": "3"}, {"a": "4", "b": "5"}, {"c": "6"}):
        replace_folder(place, write(**files))
        assert held(place) == files
        assert list(tmp_path.iterdir()) == [place]


def test_a_folder_whose_one_file_differs_never_leaves_its_place(tmp_path, monkeypatch):
    """Files of equal length, written at the same moment, are told apart by what they hold."""
    place = tmp_path / "best"
    replace_folder(place, write(config="same", weights="1"))
    monkeypatch.setattr(Path, "rename", lambda *_: pytest.fail("the folder was moved"))
    for text in "234":
        replace_folder(place, write(config="same", weights=text))
        assert held(place) == {"config": "same", "weights": text}


@pytest.mark.parametrize("placed", [False, True])
def test_a_swap_that_a_kill_broke_off_is_undone_or_finished(tmp_path, placed):
    place, before, beside = (tmp_path / name for name in ("best", ".best.before", ".best.part"))
    before.mkdir()
    write(a="old")(before)
    new = place if placed else beside
    new.mkdir()
    write(a="new")(new)
    recover_folder(place)
    assert held(place) == {"a": "new" if placed else "old"}
    assert list(tmp_path.iterdir()) == [place]


def test_two_processes_do_not_share_a_run(tmp_path):
    """Nor does a worker, which outlives its killed process for as long as it reads, keep others out."""
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom seps.snapshots import alone_in\n"
        "with alone_in(Path(sys.argv[1])):\n"
        "    if os.fork():\n        print('in', flush=True)\n    sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"in\n"
        with pytest.raises(ValueError, match=r"run: expected a run that is not under way, found another"):
            alone_in(tmp_path / "run").__enter__()
        other.kill()
        other.wait()
        with alone_in(tmp_path / "run"):
            pass


def test_a_disk_that_knows_no_locks_is_worked_on_without(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", refuse)
    with alone_in(tmp_path):
        pass


FAULTS = """
import json, os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
from test_training import Regression, fit, settings, weights, same
from seps import training
from seps.snapshots import read_snapshot

torch.set_num_threads(1)
training.draw_curves = lambda *_: None
place = Path({place!r})
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT

class Short(Regression):
    def steps(self):
        return 2
    def save(self, folder):
        super().save(folder)
        (folder / "config.json").write_text("always the same")

def run(folder):
    fit(Short(), settings(folder, epochs=2, checkpoint_steps=1))

def train(folder, last=None):
    # Whether a run ends well in a process of its own, which is killed before its act number `last` on disk.
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    done = [0]
    def act(event, arguments):
        acts = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.truncate", "fsync")
        if event in acts or event == "open" and arguments[2] & WRITING:
            done[0] += 1
            if done[0] == last:
                os.kill(os.getpid(), signal.SIGKILL)
    sync = os.fsync
    os.fsync = lambda handle: (act("fsync", ()), sync(handle))
    sys.addaudithook(act)
    run(folder)
    (folder / "acts").write_text(str(done[0]))
    os._exit(0)

def best_of(folder):
    best = folder / "best"
    if not best.exists():
        return None
    assert (best / "config.json").read_text() == "always the same"
    return read_snapshot(best / "model.safetensors")

run(place / "loads all there is to load")
whole = place / "whole"
assert train(whole)
acts = int((whole / "acts").read_text())
found = []
for last in range(1, acts + 1):
    folder = place / str(last)
    assert not train(folder, last), last
    found.append(best_of(folder) is not None)
    assert train(folder), last
    assert same(weights(whole), weights(folder)), last
    assert same(best_of(whole), best_of(folder)), last
    names = [{{path.name for path in each.iterdir()}} for each in (whole, folder)]
    assert names[0] == names[1], (last, names)
    assert (folder / "log.jsonl").read_text() == (whole / "log.jsonl").read_text(), last
print(json.dumps(found))
"""


def test_a_kill_before_any_act_on_disk_changes_nothing_in_the_end(tmp_path):
    """Every rename, sync, removal and opening of a run in turn; once there is a best, there always is."""
    code = FAULTS.format(tests=str(Path(__file__).parent), place=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) > 30
    assert found == sorted(found)
    assert found[-1]

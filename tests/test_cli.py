"""The command line: fast to ask, options from dataclasses and YAML, one sentence for a mistake."""

import gc
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from seps import cli
from seps.cli import COMMANDS, Command, main, parse


@dataclass(frozen=True)
class Inner:
    """What is inside."""

    rate: float = 0.5
    """How fast."""
    steps: tuple[int, ...] = (1, 2)
    """When."""

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"inner.rate: expected at least 0, found {self.rate}")


@dataclass(frozen=True)
class Options:
    """Try things out."""

    place: str
    """Where to."""
    inner: Inner = field(default_factory=Inner)
    """The inside."""
    kind: dict[str, Any] = field(default_factory=dict)
    """Anything."""
    most: int | None = None
    """How many at most."""


def succeed(options):
    sys.stdout.write(f"{options}\n")
    return 0


def fail(options):
    raise {
        "value": ValueError("this is\nwrong"),
        "file": FileNotFoundError(2, "No such file or directory", "x.txt"),
        "module": ModuleNotFoundError("No module named 'lancedb'", name="lancedb"),
        "nan": FloatingPointError("the loss is nan"),
        "stop": KeyboardInterrupt(),
        "bug": ZeroDivisionError("a defect"),
    }[options.place]


@pytest.fixture(autouse=True)
def commands(monkeypatch):
    monkeypatch.setitem(COMMANDS, "try", Command(__name__, "Options", "succeed", "try things out"))
    monkeypatch.setitem(COMMANDS, "fail", Command(__name__, "Options", "fail", "fail at things"))
    monkeypatch.delenv(cli.DEBUG, raising=False)


def ask(capsys, *words) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(words)
    captured = capsys.readouterr()
    return stop.value.code, captured.out.strip(), captured.err.strip()


def test_help_lists_every_command(capsys):
    code, out, _ = ask(capsys, "--help")
    assert code == 0
    assert all(f"  {name} " in out and command.help in out for name, command in COMMANDS.items())


def test_help_of_a_command_teaches_its_options(capsys):
    code, out, _ = ask(capsys, "try", "--help")
    assert code == 0
    for text in ("Try things out.", "--inner.rate", "How fast.", "Where to.", "--print_config"):
        assert text in out


def test_yaml_and_flags_make_the_dataclass(tmp_path):
    (tmp_path / "o.yaml").write_text("inner: {rate: 0.25, steps: [3]}\nkind: {a: 1}", encoding="utf-8")
    found = parse(Options, [str(tmp_path / "o.yaml"), "here", "--inner.rate", "1e-2", "--kind.b", "2"])
    assert found == Options("here", Inner(0.01, (3,)), {"a": 1, "b": 2})


def test_print_config_writes_what_can_be_read_again(capsys, tmp_path):
    code, out, _ = ask(capsys, "try", "here", "--inner.rate", "2", "--print_config")
    assert code == 0
    (tmp_path / "o.yaml").write_text(out, encoding="utf-8")
    assert parse(Options, ["--config", str(tmp_path / "o.yaml"), "here"]).inner.rate == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["try", "here", "--config", "no.yaml"], "no.yaml: there is no such file of options"),
        (["try", "no.yaml"], "there is no such file of options"),
        (["try"], "the following arguments are required: place"),
        (["try", "here", "--inner.rat", "1"], "inner: expected one of rate, steps, found 'rat'"),
        (["try", "here", "--outer=1"], "options: expected one of place, inner, kind, most, found 'outer'"),
        (["try", "here", "there"], "unrecognized arguments: there"),
        (["try", "here", "--most", "many"], "most: expected int, found many"),
        (["try", "here", "--inner.steps", "7"], "inner.steps: expected a list such as [7], found 7"),
        (["try", "here", "--inner.rate", "fast"], "inner.rate: expected float, found fast"),
        (["try", "here", "--inner.rate", "-1"], "inner.rate: expected at least 0, found -1.0"),
        (["nothing"], "there is no command 'nothing'; expected one of train"),
        (["reid"], "expected one of: reid train"),
        (["fail", "value"], "this is wrong"),
        (["fail", "file"], "x.txt: no such file or directory"),
        (["fail", "module"], "the package lancedb is not installed"),
    ],
)
def test_a_mistake_is_one_sentence_and_code_2(capsys, words, sentence):
    code, _, err = ask(capsys, *words)
    assert code == 2
    assert sentence in err
    assert len(err.splitlines()) == 1
    assert err.startswith("seps")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "o.yaml: expected options by name, found nothing"),
        (b"# nothing yet\n", "o.yaml: expected options by name, found nothing"),
        (b"inner:\n  rate: [1\n", "o.yaml:3: expected YAML (expected ',' or ']'"),
        (b"kind: {a: \x07}", "o.yaml: expected YAML (unacceptable character"),
        (b"kind: \xff", "o.yaml: expected YAML ('utf-8' codec can't decode byte"),
    ],
)
def test_a_file_that_holds_no_options_is_named(capsys, tmp_path, content, sentence):
    (tmp_path / "o.yaml").write_bytes(content)
    code, _, err = ask(capsys, "try", "here", "--config", str(tmp_path / "o.yaml"))
    assert code == 2
    assert sentence in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("inner: {rat: 0.25}", "inner: expected one of rate, steps, found 'rat'"),
        ("iner: {rate: 0.25}", "options: expected one of place, inner, kind, most, found 'iner'"),
        ("inner: 3", "inner: expected options such as rate, found 3"),
        ("inner: fast", "inner: expected options, found fast"),
        ("- inner", "config: expected options by name, found - inner"),
    ],
)
def test_a_wrong_key_of_a_yaml_file_is_named_with_those_that_are_right(capsys, tmp_path, text, sentence):
    (tmp_path / "o.yaml").write_text(text, encoding="utf-8")
    code, _, err = ask(capsys, "try", str(tmp_path / "o.yaml"), "here")
    assert (code, err) == (2, f"seps try: {sentence}")


def test_other_ends(capsys):
    assert ask(capsys, "fail", "nan") == (1, "", "seps fail: the loss is nan")
    assert ask(capsys, "fail", "stop") == (130, "", "seps fail: interrupted")
    with pytest.raises(ZeroDivisionError):
        main(["fail", "bug"])


def test_debug_shows_the_traceback(monkeypatch):
    with pytest.raises(ValueError, match="this is"):
        main(["fail", "value", "--debug"])
    monkeypatch.setenv(cli.DEBUG, "1")
    with pytest.raises(ValueError, match="this is"):
        main(["fail", "value"])


def test_the_version_is_said(capsys):
    from seps import __version__

    assert ask(capsys, "--version") == (0, __version__, "")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("try", "fail")])
def test_every_command_finds_its_function_and_options(name):
    command = COMMANDS[name]
    for package in ("lancedb", "fastapi"):
        if command.module.startswith(("seps.gallery", "seps.web")) and find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    module = import_module(command.module)
    assert callable(getattr(module, command.function))
    with pytest.raises(SystemExit) as stop:
        parse(getattr(module, command.options), ["--help"], name, command.help)
    assert stop.value.code == 0


def test_asking_for_help_loads_no_command():
    code = (
        "import sys\nfrom seps.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(*[m for m in ('jsonargparse', 'transformers', 'seps.retrieval') if m in sys.modules], 'end')"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip().splitlines()[-1] == "end"


def test_a_group_of_commands_lists_them(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["reid", "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(f"  reid {name} " in said for name in ("train", "eval", "rank"))
    assert "  index " not in said


def test_the_ecosystem_draws_no_bars_of_its_own(capsys):
    from transformers.utils import logging as ecosystem

    ecosystem.enable_progress_bar()
    try:
        assert ask(capsys, "try", "here")[0] == 0
        assert not ecosystem.is_progress_bar_enabled()
    finally:
        ecosystem.enable_progress_bar()


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_ends_a_process_with_130():
    code = (
        "import sys, types, time, dataclasses\nfrom seps import cli\n"
        "module = types.ModuleType('slow')\n"
        "@dataclasses.dataclass\nclass Options:\n    pass\n"
        "Options.__module__ = 'slow'\n"
        "def run(options):\n    print('ready', flush=True)\n    time.sleep(600)\n"
        "module.Options, module.run = Options, run\nsys.modules['slow'] = module\n"
        "cli.COMMANDS['slow'] = cli.Command('slow', 'Options', 'run', 'wait')\ncli.main(['slow'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err


def test_garbage_is_looked_for_again_once_a_command_is_loaded():
    with cli.uncollected():
        inside = gc.isenabled()
    assert (inside, gc.isenabled()) == (False, True)


def test_a_full_disk_is_told_without_its_number():
    assert cli.sentence(OSError(28, "gallery: nothing was written")) == "gallery: nothing was written"

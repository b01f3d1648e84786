"""The command line: options from the fields of a dataclass, a user's mistake answered in one sentence."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_type_hints

DEBUG = "SEPS_DEBUG"


class Command(NamedTuple):
    """Where a command lives: module, the dataclass of its options, the function, and what it does."""

    module: str
    options: str
    function: str
    help: str


# Fields without a default are positional, the others --dotted.flags; looked up only when the command runs.
COMMANDS: dict[str, Command] = {
    "train": Command("seps.retrieval", "TrainOptions", "run", "train a model from a recipe file"),
    "cache": Command("seps.retrieval", "TrainOptions", "run_cache", "keep the features of frozen backbones"),
    "eval": Command("seps.report", "EvalOptions", "run", "measure a model, or saved score matrices, on data"),
    "ablate": Command("seps.ablation", "AblateOptions", "run", "train a grid of choices at equal budget"),
    "baseline": Command("seps.baseline", "BaselineOptions", "run", "measure what needs no training"),
    "import": Command(
        "seps.checkpoints", "ImportOptions", "run", "turn an official .pth into a model folder"
    ),
    "weigh": Command("seps.weighing", "WeighOptions", "run", "fit how much each term of a score counts"),
    "blend": Command("seps.blending", "BlendOptions", "run", "average a model and one trained from it"),
    "shrink": Command("seps.shrinking", "ShrinkOptions", "run", "write a model folder in eight bits"),
    "caption": Command("seps.captions", "CaptionOptions", "run", "describe images with a multimodal model"),
    "index": Command("seps.gallery.commands", "IndexOptions", "run_index", "index a folder of pictures"),
    "search": Command("seps.gallery.commands", "SearchOptions", "run_search", "find pictures by words"),
    "explain": Command("seps.explanation.commands", "ExplainOptions", "run_explain", "show why it scores"),
    "serve": Command("seps.web.commands", "ServeOptions", "run_serve", "serve a gallery: page and HTTP API"),
    "gallery stats": Command("seps.gallery.commands", "GalleryOptions", "run_stats", "what a gallery holds"),
    "gallery compact": Command("seps.gallery.commands", "GalleryOptions", "run_compact", "merge and sweep"),
    "gallery remove": Command("seps.gallery.commands", "RemoveOptions", "run_remove", "take pictures out"),
    "reid train": Command("seps.reid.training", "TrainOptions", "run", "train re-identification"),
    "reid eval": Command("seps.reid.report", "EvalOptions", "run", "measure it, with modalities missing too"),
    "reid rank": Command("seps.reid.pictures", "RankOptions", "run", "draw its rank lists"),
}

# How the parser names an option of a YAML file that it does not know.
UNKNOWN = re.compile(r"^(?:Group '([\w.]+)' does not accept option|Option) '([\w.]+)'(?: is not accepted)?$")
UNRECOGNISED = re.compile(r"^unrecognized arguments: --([\w.]+)")
# How it says that a value fits none of some kinds, the last of them being none.
ALTERNATIVES = re.compile(
    r": Does not validate against .*Subtypes: \[(.+?), NoneType\] Errors: .*Given value: (.+)"
)
# What a user can cause, as opposed to what only a defect can.
MISTAKES = (ValueError, OSError, ImportError, FloatingPointError)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The entry point of `seps`: exits with the command's code, 2 for a user's mistake, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words or bool(os.environ.get(DEBUG))
    words = [word for word in words if word != "--debug"]
    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, format="%(message)s")
    if not debug:
        for noisy in ("httpx", "httpcore", "urllib3", "matplotlib", "PIL", "filelock"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
    name = "seps"
    try:
        if not words or words[0] in ("-h", "--help"):
            print(overview())
            sys.exit(0)
        if words[0] == "--version":
            from seps import __version__

            print(__version__)
            sys.exit(0)
        if words[1:] in (["-h"], ["--help"]) and group_of(words[0]):
            print(overview(group_of(words[0])))
            sys.exit(0)
        name, rest = choose(words)
        sys.exit(run(name, rest))
    except KeyboardInterrupt:
        sys.exit(_farewell(name, "interrupted", 130))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except MISTAKES as error:
        if debug:
            raise
        sys.exit(_farewell(name, sentence(error), 1 if isinstance(error, FloatingPointError) else 2))


def group_of(word: str) -> list[str]:
    """The commands of two words that begin with one."""
    return [name for name in COMMANDS if name.startswith(f"{word} ")]


def overview(names: Sequence[str] = ()) -> str:
    """What `seps --help` prints, of some commands alone where a group is asked for."""
    names = names or list(COMMANDS)
    width = max(len(name) for name in names)
    lines = [f"  {name:<{width}}  {COMMANDS[name].help}" for name in names]
    return "\n".join(
        [
            "usage: seps COMMAND [options]",
            "",
            "Fine-grained image-text retrieval: slim the patches, align them with the words.",
            "",
            "commands:",
            *lines,
            "",
            "`seps COMMAND --help` explains the options of a command; all of them may stand in a YAML file,",
            "given as `--config FILE`, with single options overridden after it. --debug shows tracebacks.",
        ]
    )


def choose(words: Sequence[str]) -> tuple[str, list[str]]:
    """The command that a line begins with, one word or two, and what follows it."""
    for count in (2, 1):
        name = " ".join(words[:count])
        if len(words) >= count and name in COMMANDS:
            return name, list(words[count:])
    if group := group_of(words[0]):
        raise ValueError(f"expected one of: {', '.join(group)}; see `seps {words[0]} --help`")
    raise ValueError(
        f"there is no command {words[0]!r}; expected one of {', '.join(COMMANDS)}; see `seps --help`"
    )


def run(name: str, words: Sequence[str]) -> int:
    """Parse a command's options and call its function, whose result is the exit code."""
    command = COMMANDS[name]
    # Where the hub cannot be reached the error itself says so.
    for ecosystem in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(ecosystem, "error")
    with uncollected():
        module = importlib.import_module(command.module)
    quieten_ecosystem()
    options = parse(getattr(module, command.options), words, name, command.help)
    return int(getattr(module, command.function)(options) or 0)


@contextmanager
def uncollected() -> Iterator[None]:
    """While modules are loaded nothing is garbage: looking for it would take a quarter of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def quieten_ecosystem() -> None:
    """No bar of transformers' own for every model that is read, where a command has loaded it at all."""
    if "transformers" in sys.modules:
        from transformers.utils import logging as ecosystem

        ecosystem.disable_progress_bar()


def parse(kind: type, words: Sequence[str], name: str = "", description: str = "") -> Any:
    """An options dataclass from a command line; a first word that is a YAML file is its configuration."""
    from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog=f"seps {name}",
        description=_describe(kind, description),
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="A YAML file with any of these options.")
    parser.add_class_arguments(kind, as_positional=True, as_group=False)
    words = spell_out(kind, words)
    if words and words[0].endswith((".yaml", ".yml")):
        words = ["--config", *words]
    for word, following in pairwise(words):
        if word == "--config":
            require_options(Path(following))
    try:
        parsed = parser.parse_args(words)
        refuse_bare_sections(kind, parsed)
        values = vars(parser.instantiate(parsed))
    except ArgumentError as error:
        raise ValueError(_plain(str(error), kind)) from None
    return kind(**{field.name: values[field.name] for field in fields(kind)})


def require_options(file: Path) -> None:
    """A file of options is there, is YAML, and holds some."""
    import yaml

    if not file.is_file():
        raise ValueError(f"{file}: there is no such file of options")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        raise ValueError(f"{file}{line}: expected YAML ({error.problem})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: expected YAML ({sentence(error)})") from None
    if content is None:
        raise ValueError(f"{file}: expected options by name, found nothing")


def sections(kind: type) -> dict[str, type]:
    """The options of a dataclass that are dataclasses themselves."""
    hints = get_type_hints(kind).items()
    return {name: hint for name, hint in hints if isinstance(hint, type) and is_dataclass(hint)}


def refuse_bare_sections(kind: type, values: Any, place: str = "") -> None:
    """A section of a YAML file holds options, not a value of its own."""
    for name, inner in sections(kind).items():
        value = getattr(values, name)
        if not hasattr(value, "__dict__"):
            found = "nothing" if value is None else repr(value)
            raise ValueError(
                f"{place}{name}: expected options such as {fields(inner)[0].name}, found {found}"
            )
        refuse_bare_sections(inner, value, f"{place}{name}.")


def spell_out(kind: type, words: Sequence[str]) -> list[str]:
    """The words with -o as --output, and a bare --switch as --switch true."""
    switches = {f"--{field.name}" for field in fields(kind) if field.type in (bool, "bool")}
    spelled: list[str] = []
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        spelled.append("--output" if word == "-o" else word)
        if word in switches and following.lower() not in ("true", "false"):
            spelled.append("true")
    return spelled


def _describe(kind: type, description: str) -> str:
    documented = (kind.__doc__ or "").strip()
    own = "" if documented.startswith(f"{kind.__name__}(") else textwrap.dedent(documented)
    return own or description


def sentence(error: BaseException) -> str:
    """An error as one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"the package {error.name} is not installed"
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}"
    return text.removeprefix(f"[Errno {error.errno}] ") if isinstance(error, OSError) else text


def _plain(text: str, kind: type) -> str:
    """What the parser has to say, in words."""
    text = " ".join(text.split())
    if unknown := UNKNOWN.match(text):
        return _unknown(".".join(filter(None, unknown.groups())), kind)
    if unknown := UNRECOGNISED.match(text):
        return _unknown(unknown.group(1), kind)
    text = re.sub(r'^(?:Problem in [^:]*: )?Parser key "([^"]+)": ', r"\1: ", text)
    text = re.sub(r"^(\S+): Unable to load config ['\"](.+?)['\"].*", r"\1: expected options, found \2", text)
    text = re.sub(r"^Unexpected config: ", "config: expected options by name, found ", text)
    text = re.sub(r"<class '(\w+)'>", r"\1", text)
    text = re.sub(r"typing\.Literal\[(.+?)\]", r"one of \1", text)
    text = re.sub(
        r": Expected a .*tuple.*?\. Got value: (.+)", r": expected a list such as [\1], found \1", text
    )
    text = ALTERNATIVES.sub(r": expected \1, found \2", text)
    return text.replace(": Expected a ", ": expected ").replace(". Got value: ", ", found ")


def _unknown(key: str, kind: type) -> str:
    """An option that is not there, and those that are in its place."""
    *path, name = key.split(".")
    for depth, section in enumerate(path):
        inner = sections(kind).get(section)
        if inner is None:
            path, name = path[:depth], section
            break
        kind = inner
    known = ", ".join(field.name for field in fields(kind))
    return f"{'.'.join(path) or 'options'}: expected one of {known}, found {name!r}"


def _farewell(name: str, text: str, code: int) -> int:
    print(f"{name if name == 'seps' else f'seps {name}'}: {text}", file=sys.stderr)
    return code

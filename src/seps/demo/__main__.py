"""The entry point of `make demo`."""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path

from seps.cli import MISTAKES, quieten_ecosystem, sentence
from seps.demo.saying import say, title

FOLDER = "DEMO_FOLDER"
SERVE = "DEMO_SERVE"
PORT = 8000


def run(folder: Path, serves: bool) -> None:
    """The whole demonstration."""
    from seps.demo.photographs import show_photographs
    from seps.demo.scenes import show_training

    quieten_ecosystem()
    folder.mkdir(parents=True, exist_ok=True)
    gallery = show_photographs(folder)
    show_training(folder)
    if serves:
        serve(gallery.location)
    else:
        say(f"\nThe page: seps serve {gallery.location}")


def serve(location: str) -> None:
    """The page of the photographs, until Ctrl-C."""
    from seps.web.commands import ServeOptions, run_serve

    title("The page")
    logging.getLogger("seps").setLevel(logging.INFO)
    run_serve(ServeOptions(location, port=PORT if vacant(PORT) else 0))


def vacant(port: int) -> bool:
    """Whether nobody listens there on this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def main() -> int:
    """Run it where DEMO_FOLDER says; DEMO_SERVE=0 stops before serving."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        run(Path(os.environ.get(FOLDER, "runs/demo")), os.environ.get(SERVE, "1") != "0")
    except KeyboardInterrupt:
        return 130
    except MISTAKES as error:
        print(f"demo: {sentence(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

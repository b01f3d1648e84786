"""What the demonstration says to whoever watches the terminal."""

from __future__ import annotations


def say(text: str = "") -> None:
    """A line."""
    print(text, flush=True)


def title(text: str) -> None:
    """The beginning of a part."""
    print(f"\n{text}\n{'=' * len(text)}", flush=True)

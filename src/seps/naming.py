"""Why the ecosystem could not read what a name stands for, as one clause for a sentence of ours."""

from __future__ import annotations

HUB = "huggingface.co"
NOWHERE = "there is no such folder, and the hub holds none of that name or was not reached"


def reason(error: BaseException) -> str:
    """The start of a long message; where it would send its reader to the hub, what that means here."""
    lines = str(error).strip().splitlines()
    first = lines[0].strip().rstrip(".") if lines else type(error).__name__
    return NOWHERE if HUB in first else first

"""Explanation: which patches were kept, which word met which patch, in numbers that add up."""

from seps.explanation.building import Choice, Explanation, Word, explain, explain_stored, explain_tokens
from seps.explanation.figure import draw
from seps.explanation.meeting import Meeting

__all__ = ["Choice", "Explanation", "Meeting", "Word", "draw", "explain", "explain_stored", "explain_tokens"]

"""Counts, latencies and levels in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)

Labels = tuple[tuple[str, str], ...]


@dataclass
class Counter:
    """How often something happened, by labels."""

    name: str
    help: str
    counts: dict[Labels, int] = field(default_factory=dict)

    def add(self, **labels: str) -> None:
        """Once more."""
        key = tuple(labels.items())
        self.counts[key] = self.counts.get(key, 0) + 1

    def lines(self) -> list[str]:
        """The samples."""
        values = [f"{self.name}{written(key)} {count}" for key, count in sorted(self.counts.items())]
        return [f"# HELP {self.name} {self.help}", f"# TYPE {self.name} counter", *values]


@dataclass
class Histogram:
    """How values spread, by labels; edges are upper bounds, inclusive."""

    name: str
    help: str
    edges: Sequence[float]
    counts: dict[Labels, list[int]] = field(default_factory=dict)
    sums: dict[Labels, float] = field(default_factory=dict)

    def observe(self, value: float, **labels: str) -> None:
        """One more value."""
        key = tuple(labels.items())
        self.counts.setdefault(key, [0] * (len(self.edges) + 1))[bisect_left(self.edges, value)] += 1
        self.sums[key] = self.sums.get(key, 0.0) + value

    def lines(self) -> list[str]:
        """The samples: cumulative buckets, sum and count."""
        lines = [f"# HELP {self.name} {self.help}", f"# TYPE {self.name} histogram"]
        for key, counts in sorted(self.counts.items()):
            total = 0
            for edge, count in zip([*(f"{edge:g}" for edge in self.edges), "+Inf"], counts, strict=True):
                total += count
                lines.append(f"{self.name}_bucket{written((*key, ('le', edge)))} {total}")
            lines.append(f"{self.name}_sum{written(key)} {self.sums[key]:.6f}")
            lines.append(f"{self.name}_count{written(key)} {total}")
        return lines


@dataclass(frozen=True)
class Gauge:
    """A level, read when it is asked for."""

    name: str
    help: str
    read: Callable[[], float]

    def lines(self) -> list[str]:
        """The sample."""
        return [
            f"# HELP {self.name} {self.help}",
            f"# TYPE {self.name} gauge",
            f"{self.name} {self.read():g}",
        ]


class Metrics:
    """What the service counts of itself."""

    def __init__(self) -> None:
        self.requests = Counter("seps_requests_total", "Requests answered, by route and status.")
        self.seconds = Histogram("seps_request_seconds", "Time from request to answer, by route.", SECONDS)
        self.batches = Histogram("seps_search_batch_size", "Queries searched together.", SIZES)
        self.gauges: list[Gauge] = []

    def text(self) -> str:
        """Everything."""
        groups: list[Counter | Histogram | Gauge] = [self.requests, self.seconds, self.batches, *self.gauges]
        return "\n".join(line for group in groups for line in group.lines()) + "\n"


def written(labels: Labels) -> str:
    """Labels in braces, their values escaped."""
    if not labels:
        return ""
    escaped = (
        (name, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")) for name, value in labels
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"

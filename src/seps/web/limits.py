"""What a client may ask for: sizes, rate, work at once; and how a refusal is put."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# So many clients are remembered; the one that was silent longest is forgotten first.
_MOST_CLIENTS = 10_000


class Refusal(Exception):  # noqa: N818 - an answer, not a failure
    """A request that is not served: the HTTP status, one sentence, seconds after which to ask again."""

    def __init__(self, status: int, sentence: str, retry_after: float | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.headers = {} if retry_after is None else {"Retry-After": str(max(1, math.ceil(retry_after)))}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"


def busy(what: str) -> Refusal:
    """There is more to do than is taken on."""
    return Refusal(503, f"the service is busy ({what}); ask again in a second", 1)


@dataclass(frozen=True)
class Limits:
    """How much the service takes on."""

    upload_bytes: int = 20 * 2**20
    """Largest picture file."""
    body_bytes: int = 64 * 2**10
    """Largest other request."""
    pixels: int = 40_000_000
    """Largest picture, decoded."""
    characters: int = 2000
    """Longest query."""
    results: int = 100
    """Most results of one query."""
    rate: float = 20.0
    """Searches a second of one client in the long run; a page of thumbnails counts as one."""
    burst: float = 60.0
    """Searches at once of one client."""
    workers: int = 2
    """Pictures decoded, explained or added at once."""
    waiting: int = 64
    """Requests that wait for a worker."""
    uploads: int = 16
    """Pictures received at once."""
    queue: int = 256
    """Queries that wait for the next batch."""
    batch: int = 16
    """Queries encoded and searched together."""
    collect_seconds: float = 0.004
    """How long a query waits for others to join it."""
    patience: float = 30.0
    """Seconds after which a request that still waits is refused."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name in ("waiting", "collect_seconds") else 1
            if not math.isfinite(value) or value < least:
                raise ValueError(f"limits.{name}: expected at least {least}, found {value}")


class Buckets:
    """A token bucket for each client: burst at once, rate a second in the long run."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._clients: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._clients)

    def spend(self, client: str, cost: float) -> None:
        """Take from a client's bucket; Refusal (429) where it does not hold enough."""
        now = self._clock()
        left, since = self._clients.pop(client, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._rate)
        enough = left >= cost
        self._clients[client] = (left - cost if enough else left, now)
        while len(self._clients) > _MOST_CLIENTS:
            self._clients.popitem(last=False)
        if not enough:
            seconds = (cost - left) / self._rate
            raise Refusal(
                429,
                f"too many requests; ask again in {max(1, math.ceil(seconds))} s",
                seconds,
            )


def client_key(address: str | None) -> str:
    """Whose bucket it is: an IPv4 address, the network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address or "")
    except ValueError:
        return address or "unknown"
    if parsed.version == 4:
        return str(parsed)
    # One household has a whole /64 to take addresses from.
    return str(ipaddress.ip_network((parsed, 64), strict=False))


class Gate:
    """Lets so many in at once and so many wait; the others are refused."""

    def __init__(self, name: str, running: int, waiting: int, patience: float) -> None:
        self._name = name
        self._waiting_room = waiting
        self._patience = patience
        self._places = asyncio.Semaphore(running)
        self._pool = ThreadPoolExecutor(running, thread_name_prefix=f"seps-{name}")
        self.running = 0
        self.waiting = 0

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """A place inside for as long as the block lasts."""
        if self._places.locked() and self.waiting >= self._waiting_room:
            raise busy(self._name)
        self.waiting += 1
        try:
            async with asyncio.timeout(self._patience):
                await self._places.acquire()
        except TimeoutError:
            raise busy(self._name) from None
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._places.release()

    async def work(self, action: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run something long in a thread; to be called inside."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._pool, lambda: action(*args, **kwargs))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # A thread cannot be interrupted: its place is taken until it ends.
            await asyncio.wait([future])
            raise

    async def run(self, action: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Enter and run something long in a thread."""
        async with self.enter():
            return await self.work(action, *args, **kwargs)

    def close(self) -> None:
        """Take on nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

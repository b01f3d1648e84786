"""Rates, places and sizes, by the clock and by the count."""

import asyncio
import threading

import pytest

from seps.web.limits import Buckets, Gate, Limits, Refusal, client_key
from seps.web.metrics import Counter, Histogram
from seps.web.service import condition


def refused(action):
    with pytest.raises(Refusal) as caught:
        action()
    return caught.value


def test_a_bucket_empties_and_refills():
    now = 0.0
    buckets = Buckets(rate=2, burst=3, clock=lambda: now)
    for _ in range(3):
        buckets.spend("a", 1)
    assert refused(lambda: buckets.spend("a", 1)).headers == {"Retry-After": "1"}
    buckets.spend("b", 3)
    now = 0.5
    buckets.spend("a", 1)
    assert refused(lambda: buckets.spend("a", 3)).status == 429
    now = 100.0
    buckets.spend("a", 3)
    refused(lambda: buckets.spend("a", 0.1))


def test_clients_beyond_memory_are_forgotten():
    buckets = Buckets(rate=1, burst=1, clock=lambda: 0.0)
    for number in range(10_500):
        buckets.spend(str(number), 1)
    assert len(buckets) == 10_000


def test_a_household_has_one_bucket():
    assert client_key("2001:db8:1:2::3") == client_key("2001:db8:1:2:ffff::9")
    assert client_key("2001:db8:1:2::3") != client_key("2001:db8:1:3::3")
    assert client_key("192.0.2.1") != client_key("192.0.2.2")
    assert client_key(None) == "unknown"


@pytest.mark.parametrize(("name", "value"), [("rate", 0), ("pixels", -1), ("burst", float("nan"))])
def test_limits_that_allow_nothing_are_refused(name, value):
    with pytest.raises(ValueError, match=f"limits.{name}: expected at least"):
        Limits(**{name: value})


def test_a_gate_lets_so_many_in_and_so_many_wait():
    held = threading.Event()
    inside, most = 0, 0
    lock = threading.Lock()

    def work():
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        held.wait(10)
        with lock:
            inside -= 1
        return "done"

    async def main():
        gate = Gate("test", 2, 3, 10.0)
        tasks = [asyncio.create_task(gate.run(work)) for _ in range(8)]
        await asyncio.sleep(0.1)
        levels = gate.running, gate.waiting
        held.set()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        gate.close()
        return levels, answers

    levels, answers = asyncio.run(main())
    assert levels == (2, 3)
    assert most == 2
    assert answers[:5] == ["done"] * 5
    assert [each.status for each in answers[5:]] == [503] * 3


def test_a_place_is_taken_until_its_thread_ends():
    held = threading.Event()

    async def main():
        gate = Gate("test", 1, 0, 10.0)
        task = asyncio.create_task(gate.run(held.wait, 10))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.sleep(0.05)
        still = gate.running
        held.set()
        await asyncio.wait([task])
        return still, gate.running

    assert asyncio.run(main()) == (1, 0)


def test_waiting_has_an_end():
    held = threading.Event()

    async def main():
        gate = Gate("test", 1, 5, 0.1)
        first = asyncio.create_task(gate.run(held.wait, 10))
        await asyncio.sleep(0.02)
        with pytest.raises(Refusal):
            await gate.run(held.wait, 10)
        held.set()
        return await first

    assert asyncio.run(main())


def test_filters_are_quoted():
    from datetime import date

    assert condition([], None, None) is None
    assert condition(["it's"], None, None) == "array_has(tags, 'it''s')"
    assert condition([], date(2024, 1, 2), date(2024, 1, 2)) == (
        "taken >= timestamp '2024-01-02 00:00:00' AND taken < timestamp '2024-01-03 00:00:00'"
    )
    assert condition([], None, date.max) == "taken IS NOT NULL"


def test_metrics_are_written_as_prometheus_reads_them():
    counter = Counter("asked", "How often.")
    counter.add(route='a"b\\c\n')
    counter.add(route='a"b\\c\n')
    assert counter.lines() == [
        "# HELP asked How often.",
        "# TYPE asked counter",
        'asked{route="a\\"b\\\\c\\n"} 2',
    ]
    histogram = Histogram("took", "How long.", (0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    assert histogram.lines()[2:] == [
        'took_bucket{le="0.1"} 2',
        'took_bucket{le="1"} 3',
        'took_bucket{le="+Inf"} 4',
        "took_sum 7.650000",
        "took_count 4",
    ]

"""Batches: who asks together is answered together, each by its own answer."""

import asyncio
import threading

import pytest

from seps.web.batching import Batcher
from seps.web.limits import Refusal


def run(scenario, answer, most=4, seconds=0.05, queue=100, patience=10.0):
    """A scenario with a batcher that serves; -> its result and the sizes of the batches."""
    sizes = []

    async def main():
        batcher = Batcher("test", answer, most, seconds, queue, patience, sizes.append)
        batcher.start()
        try:
            return await scenario(batcher)
        finally:
            await batcher.stop()

    return asyncio.run(main()), sizes


def test_questions_that_come_together_are_answered_together():
    async def scenario(batcher):
        return await asyncio.gather(*(batcher.ask(number) for number in range(10)))

    answers, sizes = run(scenario, lambda numbers: [number * number for number in numbers])
    assert answers == [number * number for number in range(10)]
    assert sizes == [4, 4, 2]


def test_a_lone_question_does_not_wait_for_a_full_batch():
    async def scenario(batcher):
        return await batcher.ask(3)

    assert run(scenario, lambda numbers: numbers, most=1000, seconds=0.0) == (3, [1])


def test_one_questions_fault_is_not_the_others():
    def answer(numbers):
        if 2 in numbers:
            raise ValueError("two")
        return numbers

    async def scenario(batcher):
        return await asyncio.gather(*(batcher.ask(number) for number in range(4)), return_exceptions=True)

    answers, sizes = run(scenario, answer)
    assert sizes == [4]
    assert answers[:2] + answers[3:] == [0, 1, 3]
    assert isinstance(answers[2], ValueError)


@pytest.mark.parametrize("answer", [lambda numbers: numbers[1:], lambda numbers: len(numbers) / 0])
def test_a_defect_reaches_every_asker_and_the_next_are_served(answer):
    broken = True

    def maybe(numbers):
        return answer(numbers) if broken else numbers

    async def scenario(batcher):
        nonlocal broken
        first = await asyncio.gather(*(batcher.ask(number) for number in range(3)), return_exceptions=True)
        broken = False
        return first, await batcher.ask(5)

    (first, then), _ = run(scenario, maybe)
    assert [type(each) in (RuntimeError, ZeroDivisionError) for each in first] == [True] * 3
    assert then == 5


def test_a_full_queue_refuses_and_keeps_what_it_took():
    held = threading.Event()

    def answer(numbers):
        held.wait(10)
        return numbers

    async def scenario(batcher):
        first = asyncio.create_task(batcher.ask(0))
        await asyncio.sleep(0.1)
        waiting = [asyncio.create_task(batcher.ask(number)) for number in range(1, 5)]
        await asyncio.sleep(0.1)
        held.set()
        return await asyncio.gather(first, *waiting, return_exceptions=True)

    answers, _ = run(scenario, answer, most=1, queue=2)
    assert answers[:3] == [0, 1, 2]
    assert [each.status for each in answers[3:]] == [503, 503]


def test_who_has_left_is_not_worked_for():
    asked = []

    def answer(numbers):
        asked.extend(numbers)
        return numbers

    async def scenario(batcher):
        leaving = asyncio.create_task(batcher.ask(1))
        staying = asyncio.create_task(batcher.ask(2))
        await asyncio.sleep(0)
        leaving.cancel()
        return await staying

    assert run(scenario, answer) == (2, [1])
    assert asked == [2]


def test_patience_ends():
    held = threading.Event()

    async def scenario(batcher):
        with pytest.raises(Refusal) as refused:
            await batcher.ask(1)
        held.set()
        return refused.value.status

    assert run(scenario, lambda numbers: held.wait(10) and numbers, patience=0.1)[0] == 503


def test_whoever_waits_when_it_stops_is_told():
    async def main():
        batcher = Batcher("test", lambda numbers: numbers, 4, 10.0, 10, 10.0)
        batcher.start()
        waiting = [asyncio.create_task(batcher.ask(number)) for number in range(2)]
        await asyncio.sleep(0.05)
        await batcher.stop()
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)

    assert [each.status for each in asyncio.run(main())] == [503, 503]

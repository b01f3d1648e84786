"""Dynamic batching: questions that arrive together are answered together, each to its own asker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from seps.web.limits import busy

Q = TypeVar("Q")
A = TypeVar("A")


@dataclass(frozen=True)
class Asked(Generic[Q, A]):
    """A question and where its answer goes."""

    question: Q
    answer: asyncio.Future[A]


class Batcher(Generic[Q, A]):
    """Collects up to `most` questions or for `seconds`, then answers them at once in a thread of its own.

    answer: as many answers as questions, in their order; a ValueError is taken to be one question's fault,
    which the others of the batch do not share. seen: is told the size of every batch.
    """

    def __init__(
        self,
        name: str,
        answer: Callable[[list[Q]], Sequence[A]],
        most: int,
        seconds: float,
        queue: int,
        patience: float,
        seen: Callable[[int], None] | None = None,
    ) -> None:
        self._name = name
        self._answer = answer
        self._most = most
        self._seconds = seconds
        self._patience = patience
        self._seen = seen
        self._queue: asyncio.Queue[Asked[Q, A]] = asyncio.Queue(queue)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"seps-{name}")
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Questions that are in no batch yet."""
        return self._queue.qsize()

    def start(self) -> None:
        """Begin to answer."""
        self._task = asyncio.get_running_loop().create_task(self._serve(), name=f"seps-{self._name}")

    async def stop(self) -> None:
        """Finish the batch at hand, refuse what waits."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        refuse_all([self._queue.get_nowait() for _ in range(self._queue.qsize())])
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def ask(self, question: Q) -> A:
        """The answer to a question; Refusal (503) where too many wait already."""
        asked: Asked[Q, A] = Asked(question, asyncio.get_running_loop().create_future())
        try:
            self._queue.put_nowait(asked)
        except asyncio.QueueFull:
            raise busy(self._name) from None
        try:
            async with asyncio.timeout(self._patience):
                return await asked.answer
        except TimeoutError:
            raise busy(self._name) from None

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            # Who has left in the meantime is owed no answer.
            batch = [asked for asked in await self._collect() if not asked.answer.done()]
            if not batch:
                continue
            if self._seen is not None:
                self._seen(len(batch))
            questions = [asked.question for asked in batch]
            future = loop.run_in_executor(self._thread, self._answer_each, questions)
            try:
                answers = await asyncio.shield(future)
            except asyncio.CancelledError:
                refuse_all(batch)
                raise
            for asked, answer in zip(batch, answers, strict=True):
                settle(asked, answer)

    async def _collect(self) -> list[Asked[Q, A]]:
        batch = [await self._queue.get()]
        deadline = asyncio.get_running_loop().time() + self._seconds
        try:
            while len(batch) < self._most:
                if self._queue.empty():
                    async with asyncio.timeout_at(deadline):
                        batch.append(await self._queue.get())
                else:
                    batch.append(self._queue.get_nowait())
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            refuse_all(batch)
            raise
        return batch

    def _answer_each(self, questions: list[Q]) -> list[A | Exception]:
        try:
            answers = list(self._answer(questions))
            if len(answers) != len(questions):
                raise RuntimeError(f"expected {len(questions)} answers, found {len(answers)}")
        except ValueError as error:
            if len(questions) == 1:
                return [error]
            return [each for question in questions for each in self._answer_each([question])]
        except Exception as error:
            return [error for _ in questions]
        return list(answers)


def settle(asked: Asked[Q, A], answer: A | Exception) -> None:
    """Hand over an answer, or what went wrong instead of it."""
    if asked.answer.done():
        return
    if isinstance(answer, Exception):
        asked.answer.set_exception(answer)
    else:
        asked.answer.set_result(answer)


def refuse_all(batch: Sequence[Asked[Q, A]]) -> None:
    """Tell those who wait that nobody will answer."""
    for asked in batch:
        settle(asked, busy("it is shutting down"))

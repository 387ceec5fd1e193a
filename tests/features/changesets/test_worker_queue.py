"""The order in which the worker of changesets does what is asked of it."""

from __future__ import annotations

import asyncio
import random

from goondan.features.changesets.process.supervised import ASKING, FINISHING, OPENING, REMOVING, WorkerQueue


async def waiting(queue: WorkerQueue, kind: int, name: str, done: list[str], work: int = 1) -> None:
    async with queue.turn(kind):
        done.append(name)
        for _ in range(work):
            await asyncio.sleep(0)


async def test_what_finishes_comes_before_what_begins_and_each_kind_in_its_order() -> None:
    queue, done = WorkerQueue(), list[str]()
    kinds = {
        "first": OPENING,
        "r": REMOVING,
        "o1": OPENING,
        "o2": OPENING,
        "h": ASKING,
        "c1": FINISHING,
        "c2": FINISHING,
    }
    await asyncio.gather(*(waiting(queue, kind, name, done) for name, kind in kinds.items()))
    assert done == ["first", "c1", "c2", "h", "o1", "o2", "r"]


async def test_a_commit_that_comes_later_passes_openings_that_wait() -> None:
    """Ten at once: each is committed right after it was opened, and not when all are open."""
    queue, done = WorkerQueue(), list[str]()

    async def proposal(number: int) -> None:
        await waiting(queue, OPENING, f"o{number}", done)
        await waiting(queue, FINISHING, f"c{number}", done)

    await asyncio.gather(*(proposal(number) for number in range(10)))
    # While one is opened, the one before it is ready to be committed.
    assert max(done.index(f"c{n}") - done.index(f"o{n}") for n in range(10)) <= 2


class Inside:
    """How many have their turn at once, and how often there was one."""

    def __init__(self) -> None:
        self.queue = WorkerQueue()
        self.now = self.most = self.done = 0

    async def one(self, kind: int) -> None:
        async with self.queue.turn(kind):
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                await asyncio.sleep(0)
            finally:
                self.now -= 1
            self.done += 1


async def test_whoever_gives_up_lets_the_next_one_in_and_two_are_never_in_at_once() -> None:
    chance = random.Random(5)
    for _ in range(200):
        inside = Inside()
        tasks = [asyncio.ensure_future(inside.one(chance.randrange(4))) for _ in range(8)]
        for task in chance.sample(tasks, 4):
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)
            task.cancel()
        told = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        assert inside.done == sum(each is None for each in told)
        assert inside.most == 1
        await asyncio.wait_for(inside.one(OPENING), 5)

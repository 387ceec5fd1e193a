"""The order in which the worker of changesets does what is asked of it."""

from __future__ import annotations

import asyncio
import random

from kernel.changesets.line import ASKING, FINISHING, OPENING, REMOVING, Line


async def waiting(line: Line, kind: int, name: str, done: list[str], work: int = 1) -> None:
    async with line.turn(kind):
        done.append(name)
        for _ in range(work):
            await asyncio.sleep(0)


async def test_what_finishes_comes_before_what_begins_and_each_kind_in_its_order() -> None:
    line, done = Line(), list[str]()
    kinds = {
        "first": OPENING,
        "r": REMOVING,
        "o1": OPENING,
        "o2": OPENING,
        "h": ASKING,
        "c1": FINISHING,
        "c2": FINISHING,
    }
    await asyncio.gather(*(waiting(line, kind, name, done) for name, kind in kinds.items()))
    assert done == ["first", "c1", "c2", "h", "o1", "o2", "r"]


async def test_a_commit_that_comes_later_passes_openings_that_wait() -> None:
    """Ten at once: each is committed right after it was opened, and not when all are open."""
    line, done = Line(), list[str]()

    async def proposal(number: int) -> None:
        await waiting(line, OPENING, f"o{number}", done)
        await waiting(line, FINISHING, f"c{number}", done)

    await asyncio.gather(*(proposal(number) for number in range(10)))
    # While one is opened, the one before it is ready to be committed.
    assert max(done.index(f"c{n}") - done.index(f"o{n}") for n in range(10)) <= 2


async def test_whoever_gives_up_lets_the_next_one_in_and_two_are_never_in_at_once() -> None:
    chance = random.Random(5)
    for _ in range(200):
        line, inside, most, done = Line(), 0, 0, 0

        async def one(kind: int) -> None:
            nonlocal inside, most, done
            async with line.turn(kind):
                inside += 1
                most = max(most, inside)
                try:
                    await asyncio.sleep(0)
                finally:
                    inside -= 1
                done += 1

        tasks = [asyncio.ensure_future(one(chance.randrange(4))) for _ in range(8)]
        gone = chance.sample(tasks, 4)
        for task in gone:
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)
            task.cancel()
        told = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        assert done == sum(each is None for each in told)
        assert most == 1
        await asyncio.wait_for(one(OPENING), 5)

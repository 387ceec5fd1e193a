"""Plays the scenarios of a certificate, several at a time, and leaves nothing behind.

Source: docs/certify.md; docs/decisions/150.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

from kernel.certify.trace import Played, Scenario
from schemas.errors import fail

#: Scenarios that are played at a time. Most of one's time is waiting.
AT_A_TIME: Final = 4 + 2 * (os.cpu_count() or 1)
#: A scenario in which this machine was too slow to judge is played again, at most so often.
TRIES: Final = 3


class Stage(Protocol):
    """A scenario that is about to be played."""

    #: This machine did not keep up, so that what was seen may not be the program's fault.
    slow: bool

    def play(self) -> Played:
        """Play it to its end, and end the program."""
        ...


def probe(argv: Sequence[str], stage: Callable[[threading.Event], Stage]) -> None:
    """Play what every program has to be able to. Raises GoondanError E_CERTIFY with what went wrong."""
    played = stage(threading.Event()).play()
    odd = next((seen.what for seen in played.trace if seen.kind == "odd"), None)
    if odd is not None or played.fault is not None:
        raise fail("E_CERTIFY", f"{argv[0]} cannot be certified: {odd or played.fault}")


def play_all(scenarios: Sequence[Scenario], stage: Callable[[Scenario, threading.Event], Stage]) -> list[Played]:
    """Play all of them; what came of each, in their order.

    Raises GoondanError E_CERTIFY when the program cannot be started.
    """
    stopping = threading.Event()

    def one(scenario: Scenario) -> Played:
        for _ in range(TRIES - 1):
            staged = stage(scenario, stopping)
            played = staged.play()
            if not (staged.slow and played.fault is not None):
                return played
        return stage(scenario, stopping).play()

    pool = ThreadPoolExecutor(AT_A_TIME)
    try:
        return list(pool.map(one, scenarios))
    except BaseException:
        stopping.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def chosen(scenarios: Sequence[Scenario], words: Sequence[str]) -> list[Scenario]:
    """Those whose name or section has one of the words; without words all. Raises GoondanError E_USAGE."""
    found = [
        one for one in scenarios if not words or any(w.lower() in f"{one.section} {one.name}".lower() for w in words)
    ]
    if not found:
        raise fail("E_USAGE", f"no scenario has {words[0]!r} in its name or section")
    return found

"""Plays the scenarios of a certificate, several at a time, and leaves nothing behind.

Source: docs/certify.md; docs/design/tests.md section 7.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, Final

from goondan.kernel.certify.matching import Names
from goondan.kernel.certify.program import Program
from goondan.kernel.certify.trace import Kind, Played, Scenario, Seen, Trace
from goondan.schemas.errors import fail

#: Scenarios that are played at a time. Most of one's time is waiting.
AT_A_TIME: Final = 4 + 2 * (os.cpu_count() or 1)
#: A scenario in which this machine was too slow to judge is played again, at most so often.
TRIES: Final = 3
#: One look lasts at most so long (seconds), so that an interrupt is noticed.
LOOK_S: Final = 0.2
#: What is waited for in vain is not as the steps say: after so many seconds.
PATIENCE_S: Final = 20.0
#: Of a time that passes in the steps, so much has to pass here: a program's clock is not ours.
PASSES: Final = 0.95
#: A time that passes in the steps is not longer here (seconds): it stands for any.
LONGEST_S: Final = 6.0
#: What comes unasked at the end of a scenario is waited for (seconds).
SETTLE_S: Final = 0.15
#: More frames and lines than any scenario has: what goes on beyond that is rubbish without end.
MAX_SEEN: Final = 100_000


class Differs(Exception):
    """The program did something else than the steps say."""


class NotOffered(Exception):
    """The program said that it cannot do this."""


class Player:
    """A scenario while it is played. A step `{name: value}` is done by the method `step_name`."""

    #: What the steps say of a program: set by what starts it.
    program: Program

    def __init__(self, scenario: Scenario, stopping: threading.Event, patience: float, names: Names) -> None:
        self.scenario, self.names, self.patience = scenario, names, patience
        self.trace: Trace = []
        #: This machine did not keep up, so that what was seen may not be the program's fault.
        self.slow = False
        #: What is sent without being due is no fault any more.
        self.over = False
        self.link = 0
        self._stopping = stopping

    # --- what a certificate of its own does

    def look(self, seconds: float) -> None:
        """Take what comes within some time; return as soon as there is something."""
        raise NotImplementedError

    def undue(self) -> str | None:
        """What came and is not due; None when nothing did."""
        raise NotImplementedError

    def end(self) -> None:
        """End the program as it should be ended. Raises Differs."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what the scenario has."""
        raise NotImplementedError

    # --- the same for all

    def see(self, kind: Kind, what: Any = None, link: int | None = None) -> None:
        """Write down what was seen. Raises Differs when it has no end, KeyboardInterrupt when all of it is to stop."""
        if self._stopping.is_set():
            raise KeyboardInterrupt
        if len(self.trace) >= MAX_SEEN:
            raise Differs("it sends or writes without end")
        self.trace.append(Seen(time.monotonic(), kind, what, self.link if link is None else link))

    def until(self, there: Callable[[], bool], what: str, more: float = 0.0) -> None:
        """Wait for something, `more` seconds longer than for anything. Raises Differs."""
        began = time.monotonic()
        while not there():
            left = began + self.patience + more - time.monotonic()
            if self.program.ended():
                self.look(0)
                if there():
                    return
                raise Differs(f"it ended by itself, and {what} was due{self.program.why()}")
            if left <= 0:
                raise Differs(f"nothing came for {time.monotonic() - began:.1f} s, and {what} was due")
            self._look(left)

    def wait(self, seconds: float) -> None:
        """Let some time pass. Raises Differs when something comes that is not due."""
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            self._look(left)
            if (text := self.undue()) is not None and not self.over:
                raise Differs(text)

    def _look(self, seconds: float) -> None:
        if self._stopping.is_set():
            raise KeyboardInterrupt
        self.look(min(seconds, LOOK_S))

    def step_passes(self, milliseconds: int) -> None:
        """Time passes, and nothing is due."""
        self.wait(min(milliseconds / 1000 * PASSES, LONGEST_S))

    def play(self) -> Played:
        """Play the scenario to its end."""
        played = Played(self.scenario, self.trace)
        try:
            for step in self.scenario.steps:
                name = next(name for name in step if hasattr(self, f"step_{name}"))
                getattr(self, f"step_{name}")(step if name == "do" else step[name])
            self.wait(SETTLE_S)
            self.end()
        except Differs as error:
            played.fault = str(error)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            played.fault = f"what it did cannot be followed: {type(error).__name__}: {error}"
        except NotOffered:
            played.offered = False
        finally:
            self.program.stop()
            self.close()
        return played


def probe(argv: Sequence[str], player: Callable[[threading.Event], Player]) -> None:
    """Play what every program has to be able to. Raises GoondanError E_CERTIFY with what went wrong."""
    played = player(threading.Event()).play()
    odd = next((seen.what for seen in played.trace if seen.kind == "odd"), None)
    if odd is not None or played.fault is not None:
        raise fail("E_CERTIFY", f"{argv[0]} cannot be certified: {odd or played.fault}")


def play_all(scenarios: Sequence[Scenario], player: Callable[[Scenario, threading.Event], Player]) -> list[Played]:
    """Play all of them; what came of each, in their order. Raises GoondanError E_CERTIFY when it cannot be started."""
    stopping = threading.Event()

    def one(scenario: Scenario) -> Played:
        for _ in range(TRIES - 1):
            playing = player(scenario, stopping)
            played = playing.play()
            if not playing.slow or played.fault is None:
                return played
        return player(scenario, stopping).play()

    pool = ThreadPoolExecutor(AT_A_TIME)
    try:
        futures = [pool.submit(one, scenario) for scenario in scenarios]
        while wait(futures, LOOK_S, FIRST_EXCEPTION).not_done and not any(f.done() and f.exception() for f in futures):
            pass  # a wait without end would hear no signal that another thread has got
        return [future.result() for future in futures]
    except BaseException:
        stopping.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)

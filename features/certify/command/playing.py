"""Plays the scenarios of a certificate to a program, several at a time, and leaves nothing behind.

For each scenario the program is started in a session of its own. It is heard without waiting, and ended with all of its
group.

Source: docs/certify.md; docs/design/tests.md section 7.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, Final

from goondan.features.certify.command.rules import Kind, Names, Played, Scenario, Seen, Trace
from goondan.features.certify.wire import CANNOT
from goondan.schemas.wire.errors import fail

#: What is read of its output at a time (bytes). A pipe holds less, so this takes several reads.
READ_BYTES: Final = 1 << 18
#: What is kept of its standard error (bytes): the end, which says why it ended.
KEPT: Final = 2000
#: A line of its output (bytes). A longer one is no line of the protocol.
MAX_LINE: Final = 4 << 20


class Program:
    """A started COMMAND. `out` and `err` are its pipes, for a poller."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], *, channel: int | None = None) -> None:
        """Start it. `channel`: a socket that becomes its descriptor 3; then it has no input, and one output.

        Raises GoondanError E_CERTIFY.
        """
        worker = channel is not None
        # A shell moves the descriptor: nothing of ours has to run between fork and exec.
        words = ["/bin/sh", "-c", 'exec "$@" 3<&0 0</dev/null', "sh", *argv] if worker else list(argv)
        try:
            self._process = subprocess.Popen(
                words,
                env=env,
                stdin=channel if worker else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if worker else subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise fail(CANNOT, f"{argv[0]} cannot be started: {error.strerror}") from None
        self.pid = self._process.pid
        self.out = self._process.stdout
        self.err = self._process.stderr
        self.tail = b""
        self._waiting = bytearray()
        self._line = bytearray()
        for pipe in (self._process.stdin, self.out, self.err):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)

    def polled(self) -> list[tuple[int, int]]:
        """What to poll: descriptors, and the events of each."""
        pipes = [
            (pipe.fileno(), select.POLLIN) for pipe in (self.out, self.err) if pipe is not None and not self.ended()
        ]
        pipe = self._process.stdin
        takes = self._waiting and pipe is not None and not pipe.closed and not self.ended()
        return [*pipes, (pipe.fileno(), select.POLLOUT)] if takes and pipe is not None else pipes

    def write(self, line: bytes) -> None:
        """Put a line into its standard input, as soon as it reads."""
        self._waiting += line
        self.flush()

    def flush(self) -> None:
        """Write what its input takes now."""
        pipe = self._process.stdin
        if pipe is None or pipe.closed:
            return
        with suppress(BlockingIOError, BrokenPipeError):
            while self._waiting:
                del self._waiting[: os.write(pipe.fileno(), self._waiting[:READ_BYTES])]

    def lines(self) -> list[bytes]:
        """The lines that it has written since. Raises ValueError for one that is too long."""
        if self.err is not None:
            self.tail = (self.tail + self._read(self.err.fileno()))[-KEPT:]
        if self.out is None:
            return []
        self._line += self._read(self.out.fileno())
        *lines, rest = self._line.split(b"\n")
        self._line = rest
        if len(rest) > MAX_LINE:
            raise ValueError(f"a line of more than {MAX_LINE} bytes")
        return [bytes(line) for line in lines]

    def _read(self, fd: int) -> bytes:
        read = bytearray()
        with suppress(BlockingIOError):
            while len(read) < READ_BYTES and (data := os.read(fd, READ_BYTES)):
                read += data
        return bytes(read)

    def ended(self) -> bool:
        """Whether it has ended. It is not reaped, so its group cannot become another's."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def end_input(self) -> None:
        """Close its standard input."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def stop(self) -> int:
        """Kill it and all that it has started, if anything of it runs. Its exit status."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            for pipe in (self._process.stdin, self.out, self.err):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
        return self._process.returncode

    def why(self) -> str:
        """The last line of its standard error, for a report."""
        lines = self.tail.decode("utf-8", "replace").strip().splitlines()
        return f": {lines[-1][:300]}" if lines else ""


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
        #: Until when the time of the last steps was to pass; None when another step came since.
        self._passed: float | None = None
        self._stopping = stopping

    # --- what a certificate of its own does

    def look(self, seconds: float) -> None:
        """Take what comes within some time; return as soon as there is something."""
        raise NotImplementedError

    def undue(self) -> str | None:
        """What came and is not due; None when nothing did."""
        return None

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
        self._wait_until(time.monotonic() + seconds)

    def _wait_until(self, ends: float) -> None:
        while (left := ends - time.monotonic()) > 0:
            self._look(left)
            if (text := self.undue()) is not None and not self.over:
                # A machine that wakes us too late shows us what has become due meanwhile.
                self.slow = self.slow or time.monotonic() > ends
                raise Differs(text)

    def _look(self, seconds: float) -> None:
        if self._stopping.is_set():
            raise KeyboardInterrupt
        self.look(min(seconds, LOOK_S))

    def step_passes(self, milliseconds: int) -> None:
        """Time passes, and nothing is due. Steps in a row count from the first, oversleeping included."""
        began = time.monotonic() if self._passed is None else self._passed
        self._passed = began + min(milliseconds / 1000 * PASSES, LONGEST_S)
        self._wait_until(self._passed)

    def play(self) -> Played:
        """Play the scenario to its end."""
        played = Played(self.scenario, self.trace)
        try:
            for step in self.scenario.steps:
                name = next(name for name in step if hasattr(self, f"step_{name}"))
                if name != "passes":
                    self._passed = None
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
        raise fail(CANNOT, f"{argv[0]} cannot be certified: {odd or played.fault}")


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

"""What a script has of its agent: calls of the agent's tools, some at a time on their way, the others in a queue; and
what it prints, of which the model reads the beginning and the end.

Source: docs/code-mode.md.
"""

from __future__ import annotations

import sys
from _thread import allocate_lock

from goondan_tool import ToolError

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterable
    from typing import Any
else:
    from _collections import deque

#: Calls that may be on their way at once. The host refuses more (docs/code-mode.md).
IN_FLIGHT = 16


class ToolCallError(ToolError):
    """A call of a tool failed. `code` says how, `suggestion` what to do about it."""

    #: How it failed.
    code: str

    @property
    def message(self) -> str:
        """What went wrong."""
        return str(self)


class Pending:
    """What a call returns when the work goes on after it: `handle` names the work."""

    __slots__ = ("handle",)

    def __init__(self, handle: str) -> None:
        self.handle = handle

    def __repr__(self) -> str:
        return f"Pending(handle={self.handle!r})"


class Calls:
    """All calls of one script. Any thread may use it."""

    def __init__(self, asking: Any) -> None:
        """`asking` is `ctx.tools`."""
        self._asking, self._wait = asking
        self._lock = allocate_lock()
        self._on_their_way = 0
        self._queue: deque[tuple[str, Any, Callable[[dict[str, Any]], None]]] = deque()
        #: How many calls of tools were begun.
        self.count = 0

    def start(self, questions: list[tuple[str, Any, Callable[[dict[str, Any]], None]]]) -> None:
        """Ask for each (`tool` or `tools`, value, who gets the answer frame), now or when there is room."""
        with self._lock:
            self._queue.extend(questions)
            for op, _, _ in questions:
                self.count += op == "tool"
            batch = self._next()
        self._send(batch)

    def ask(self, op: str, value: Any, read: Callable[[Any], Any]) -> Any:
        """Ask and wait for what `read` makes of the answer; where an event loop runs, return something to await.

        Raises ToolCallError.
        """
        asyncio = sys.modules.get("asyncio")  # without it no loop runs
        loop = None if asyncio is None else asyncio._get_running_loop()
        if loop is not None:
            return self._future(loop, op, value, read)
        return value_of(self.ask_all([(op, value)])[0], read)

    def ask_all(self, questions: list[tuple[str, Any]]) -> list[dict[str, Any]]:
        """Ask all and wait for all: their answer frames (`value_of`), in the same order."""
        answers = [_Answer() for _ in questions]
        self.start([(op, value, answer.take) for (op, value), answer in zip(questions, answers, strict=True)])
        for answer in answers:
            if not answer.done.acquire(False):
                self._wait(answer.done)
        return [answer.frame for answer in answers]

    def _future(self, loop: Any, op: str, value: Any, read: Callable[[Any], Any]) -> Any:
        future = loop.create_future()

        def settle(frame: dict[str, Any]) -> None:
            if future.done():
                return  # nobody awaits it any more
            try:
                future.set_result(value_of(frame, read))
            except ToolCallError as error:
                future.set_exception(error)

        def take(frame: dict[str, Any]) -> None:
            try:  # noqa: SIM105 # contextlib is not imported here
                loop.call_soon_threadsafe(settle, frame)
            except RuntimeError:
                pass  # the script has closed its loop

        self.start([(op, value, take)])
        return future

    # --- inside

    def _next(self) -> list[tuple[str, Any, Callable[[dict[str, Any]], None]]]:
        """What may be sent now. Call it with the lock."""
        batch = []
        while self._queue and self._on_their_way < IN_FLIGHT:
            batch.append(self._queue.popleft())
            self._on_their_way += 1
        return batch

    def _send(self, batch: list[tuple[str, Any, Callable[[dict[str, Any]], None]]]) -> None:
        while batch:
            try:
                self._asking([(op, value, self._freeing(take)) for op, value, take in batch])
                return
            except (ToolError, TypeError) as error:
                if len(batch) > 1:
                    for one in batch:  # only some of them cannot be sent
                        self._send([one])
                    return
                (_, _, take) = batch[0]
                told = {"message": str(error), "code": getattr(error, "code", None) or "E_TOOL_INVALID_ARGS"}
                take({"error": told | {"suggestion": getattr(error, "suggestion", None)}})
            batch = self._freed()

    def _freed(self) -> list[tuple[str, Any, Callable[[dict[str, Any]], None]]]:
        """One is not on its way any more: what may be sent now."""
        with self._lock:
            self._on_their_way -= 1
            return self._next()

    def _freeing(self, take: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
        def answered(frame: dict[str, Any]) -> None:
            if batch := self._freed():
                self._send(batch)
            take(frame)

        return answered


class _Answer:
    """The answer frame to one question. `done` is released when it is there."""

    __slots__ = ("done", "frame")

    def __init__(self) -> None:
        self.done = allocate_lock()
        self.done.acquire()
        self.frame: dict[str, Any] = {}

    def take(self, frame: dict[str, Any]) -> None:
        self.frame = frame
        self.done.release()


def value_of(frame: dict[str, Any], read: Callable[[Any], Any]) -> Any:
    """What `read` makes of an answer. Raises ToolCallError."""
    error = frame.get("error")
    if error is None:
        return read(frame.get("value"))
    raise ToolCallError(
        error["message"],
        code=error.get("code") or "E_TOOL",
        suggestion=error.get("suggestion"),
        help_url=error.get("helpUrl"),
    )


def output_of(result: dict[str, Any]) -> Any:
    """What a script gets from a result: the tool's output, or a Pending."""
    return Pending(result["handle"]) if result.get("status") == "pending" else result.get("output")


# --- what a script prints ---------------------------------------------------------------------------------------------

#: Characters that are kept of the beginning and of the end: a model reads all of it, and pays for it.
MAX_HEAD = 40_000
MAX_TAIL = 10_000
#: Characters that an error repeats of what was printed last.
ERROR_TAIL = 1_500


class Printed:
    """A text file that can be written to, from any thread."""

    encoding = "utf-8"
    errors = "replace"
    closed = False

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._head: list[str] = []
        self._head_size = 0
        self._end = ""
        self._size = 0

    def write(self, text: str) -> int:
        """Take a piece of text."""
        if not isinstance(text, str):
            raise TypeError(f"write() takes a str, not {type(text).__name__}")
        with self._lock:
            self._size += len(text)
            room = MAX_HEAD - self._head_size
            if room > 0:
                self._head.append(text[:room])
                self._head_size += min(room, len(text))
            if len(text) > room:
                self._end = (self._end + text[max(0, room) :])[-MAX_TAIL:]
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Take several pieces."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Nothing waits here."""

    def isatty(self) -> bool:
        """Nobody looks at it while it is written."""
        return False

    def writable(self) -> bool:
        """It can be written to."""
        return True

    def text(self) -> str:
        """All of it; where something was left out, how much."""
        head, left_out = "".join(self._head), self._size - self._head_size - len(self._end)
        return f"{head}\n… {left_out} characters left out …\n{self._end}" if left_out > 0 else head + self._end

    def tail(self) -> str:
        """Its end, for an error."""
        text = "".join(self._head) + self._end
        return text if len(text) <= ERROR_TAIL else "…" + text[-ERROR_TAIL:]

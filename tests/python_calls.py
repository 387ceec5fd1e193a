"""The calls of Python functions in a block: a count is the same on every machine, where a time is not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

#: Nobody asks what this block itself calls.
_OWN = (__file__, contextmanager.__code__.co_filename)


@contextmanager
def python_calls(counts: Callable[[CodeType], bool] = lambda code: True) -> Iterator[list[str]]:
    """The names of the functions that are called in this thread, in their order; `counts` says which ones are named. A
    coroutine is called at its begin and at each awakening.
    """
    called: list[str] = []

    def look(frame: FrameType, what: str, argument: object) -> None:
        code = frame.f_code
        if what == "call" and code.co_filename not in _OWN and counts(code):
            called.append(code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield called
    finally:
        sys.setprofile(before)

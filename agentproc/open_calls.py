"""Calls that run as tasks of this process, until they end or are given up."""

from __future__ import annotations

import asyncio


class OpenCalls:
    """The open calls of one turn, by the model's ids of the calls. To be made inside a loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, asyncio.Task[None]] = {}

    def drop(self, tool_call_id: str) -> None:
        """Give a call up. Its `done` is not called any more."""
        task = self._open.pop(tool_call_id, None)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        """Give every call up."""
        for tool_call_id in list(self._open):
            self.drop(tool_call_id)

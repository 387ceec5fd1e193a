"""The bundled extension `logging`: one line in the agent's log for each turn, step and tool call that ends.

A line says what ended, how it ended and how long it took. Texts of messages and results are never written. Arguments
are written if the config asks for them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any


def register(api: Any, config: dict[str, Any]) -> None:
    """Put a layer around each of `config["of"]`."""
    write: Callable[[str], None] = getattr(api.logger, config["level"])
    lines = _Lines(write, api.logger.warn, config["maxChars"], config["arguments"])
    for kind, layer in (("turn", lines.turn), ("step", lines.step), ("toolCall", lines.tool_call)):
        if kind in config["of"]:
            api.pipeline.register(kind, layer)


class _Lines:
    """The layers that write the lines. `limit` is the longest piece of text (characters)."""

    def __init__(
        self, write: Callable[[str], None], warn: Callable[[str], None], limit: int, with_arguments: bool
    ) -> None:
        self._write = write
        self._warn = warn
        self._limit = limit
        self._with_arguments = with_arguments

    async def turn(self, ctx: Any) -> Any:
        began = time.monotonic()
        result = await ctx.next()
        self._line(f"turn {ctx.turn_id}: {result.finish_reason}", began, result.error)
        return result

    async def step(self, ctx: Any) -> Any:
        began = time.monotonic()
        result = await ctx.next()
        calls = ", ".join(call.name for call in result.tool_calls) or "no tool calls"
        self._line(f"step {ctx.step_index} of turn {ctx.turn_id}: {calls}", began, result.error)
        return result

    async def tool_call(self, ctx: Any) -> Any:
        given = f" {self._cut(json.dumps(ctx.args, ensure_ascii=False))}" if self._with_arguments else ""
        what = f"call {ctx.tool_call_id} of {ctx.tool_name}{given}"
        began = time.monotonic()
        result = await ctx.next()
        self._line(f"{what}: {result.status}", began, result.error)
        return result

    def _line(self, what: str, began: float, error: Any) -> None:
        took = f"{what} ({time.monotonic() - began:.3f} s)"
        if error is None:
            self._write(took)
        else:
            self._warn(f"{took}: {error.code}: {self._cut(error.message)}")

    def _cut(self, text: str) -> str:
        return text if len(text) <= self._limit else text[: self._limit] + " ..."

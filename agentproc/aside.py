"""Questions of extensions to the agent's own model that are no part of the conversation: a summary, say.

One question at a time, because one clock watches a silent model. What is open when the
turn ends is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from agentproc.conversation import Message, MessageSource, UserData
from agentproc.providers.base import ModelAnswer, ModelRequest, Provider
from schemas.errors import fail
from schemas.launch import AgentSpec, ModelSpec


class AskOnce(Protocol):
    """One request to a model; `hidden`: nobody is shown the answer while it is made. Raises GoondanError."""

    async def __call__(self, provider: Provider, request: ModelRequest, *, hidden: bool) -> ModelAnswer: ...


class Aside:
    """The questions of one turn. `time_left` is the turn's, in seconds; None when nothing bounds it."""

    def __init__(
        self, spec: AgentSpec, ask_once: AskOnce, time_left: Callable[[], float | None], clock: Callable[[], str]
    ) -> None:
        self._spec = spec
        self._ask_once = ask_once
        self._time_left = time_left
        self._clock = clock
        self._turn_of = asyncio.Lock()
        self._asking: asyncio.Task[ModelAnswer] | None = None

    async def ask(self, provider: Provider, model: ModelSpec, text: str, system: str | None, step: int) -> str:
        """What the model answers in this step (from 1). Raises GoondanError."""
        async with self._turn_of:
            request = ModelRequest(
                agent=self._spec.name,
                model=model,
                messages=[Message("aside", UserData(text), self._clock(), MessageSource("extension"))],
                tools=[],
                step=step,
                system=system,
                timeout_s=self._time_left(),
            )
            asking = self._asking = asyncio.ensure_future(self._ask_once(provider, request, hidden=True))
            try:
                await asyncio.wait([asking])
            finally:
                asking.cancel()  # nothing, once it has ended
            if asking.cancelled():
                raise fail("E_MODEL_FAILED", "the model was asked by an extension, and said nothing for too long")
            return asking.result().text

    def stop(self) -> None:
        """Give up what is asked now."""
        if self._asking is not None:
            self._asking.cancel()

"""Questions that extensions ask the agent's own model outside of the conversation, for example for a summary.

One question is asked at a time, because one clock watches a silent model. A question that is open when the turn ends is
given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from goondan.agentproc.conversation import Message, MessageSource, UserData
from goondan.agentproc.providers.base import ModelAnswer, ModelRequest, Provider
from goondan.schemas.bundle.launch import AgentSpec, ModelSpec
from goondan.schemas.wire.errors import fail


class AskOnce(Protocol):
    """One request to a model. With `hidden`, nobody sees the answer while it is made. Raises GoondanError."""

    async def __call__(self, provider: Provider, request: ModelRequest, *, hidden: bool) -> ModelAnswer: ...


class Aside:
    """The questions of one turn. `time_left` gives the seconds that the turn has left; None when there is no limit."""

    def __init__(
        self, spec: AgentSpec, ask_once: AskOnce, time_left: Callable[[], float | None], clock: Callable[[], str]
    ) -> None:
        self._spec = spec
        self._ask_once = ask_once
        self._time_left = time_left
        self._clock = clock
        self._turn_of = asyncio.Lock()
        self._asking: asyncio.Task[ModelAnswer] | None = None

    async def ask(self, provider: Provider, model: ModelSpec, text: str, system: str | None, step: int) -> ModelAnswer:
        """The model's answer to `text` in this step (from 1). Raises GoondanError."""
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
            return asking.result()

    def stop(self) -> None:
        """Give up the question that is open."""
        if self._asking is not None:
            self._asking.cancel()

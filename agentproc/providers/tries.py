"""The tries of one model call: each with a permit, and again after a fault.

Source: docs/design/turns.md sections 6 and 13.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from goondan.agentproc.providers.base import ModelAnswer, ModelNews, ModelRequest, Permit
from goondan.agentproc.providers.retry import Retries
from goondan.agentproc.providers.vendor import Fault


class Tries:
    """The tries of `request`. `clock` gives seconds."""

    def __init__(self, request: ModelRequest, on_news: Callable[[ModelNews], None], clock: Callable[[], float]) -> None:
        self.retries = Retries(request.model.retry)
        self._permit: Permit | None = request.permit
        self._on_news = on_news
        self._clock = clock
        self._until = None if request.timeout_s is None else clock() + request.timeout_s
        self._faulty_since: float | None = None
        self._queued_s = 0.0  # since the first fault: for others, not for the server
        self._inside = False

    async def enter(self, size: int) -> None:
        """Wait until the next try may go out. `size` is that of its body (bytes). A request that is sent again at once
        is out already. Raises Fault, GoondanError.
        """
        if self._permit is not None and not self._inside:
            began = self._clock()
            await self._permit.enter(size, self._on_news)
            self._inside = True
            if self._faulty_since is not None:
                self._queued_s += self._clock() - began
        self._on_news("asking")

    def answered(self, answer: ModelAnswer, headers: dict[str, str]) -> None:
        """The model has answered. `headers` are those of the answer."""
        usage = answer.usage
        self._over(headers, accepted=True, tokens=None if usage is None else usage.input_tokens + usage.output_tokens)

    def next_wait(self, fault: Fault, chance: float) -> float | None:
        """A try has failed: the seconds until the next one, None to give up. `chance` is in [0, 1)."""
        now = self._clock()
        self._faulty_since = now if self._faulty_since is None else self._faulty_since
        left = None if self._until is None else self._until - now
        return self.retries.next_wait(fault, chance, now - self._faulty_since - self._queued_s, left)

    async def pause(self, fault: Fault, wait_s: float, sleep: Callable[[float], Awaitable[None]]) -> None:
        """Wait for the next try, unless it waits for a permit: all requests wait for theirs together."""
        if fault.kind == "limited" and self._permit is not None and self._inside:
            self._permit.refused(fault.retry_after_s)
            self._inside = False
            return
        self._over(None, accepted=False)
        self._on_news("waiting")
        await sleep(wait_s)

    def close(self) -> None:
        """The call is over."""
        self._over(None, accepted=False)

    def _over(self, headers: dict[str, str] | None, *, accepted: bool, tokens: int | None = None) -> None:
        if self._permit is not None and self._inside:
            self._inside = False
            self._permit.over(headers, accepted=accepted, tokens=tokens)

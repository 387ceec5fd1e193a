"""The provider that answers from the recording of a run, and the one that records what another answers.

Source: docs/design/turns.md section 12.
"""

from __future__ import annotations

from collections.abc import Callable

from goondan.agentproc.providers.base import ModelAnswer, ModelNews, ModelRequest, Provider, TextDelta
from goondan.agentproc.recordings.replayed import Replayed
from goondan.agentproc.recordings.tape import Tape, is_aside
from goondan.schemas.wire.errors import GoondanError, fail


class ReplayProvider:
    """Answers each request at once with the recorded answer, without a model and without a network."""

    def __init__(self, replayed: Replayed) -> None:
        self._replayed = replayed

    @property
    def needs_history(self) -> bool:
        """As the recorded provider did."""
        return not self._replayed.own

    async def complete(
        self,
        request: ModelRequest,
        on_delta: Callable[[TextDelta], None] | None = None,
        on_news: Callable[[ModelNews], None] | None = None,
    ) -> ModelAnswer:
        """The recorded answer. Raises GoondanError E_REPLAY_DIFFERS, and the recorded error."""
        answer = self._replayed.answer(request, aside=is_aside(request))
        if on_delta is not None and answer.text:
            on_delta(TextDelta(answer.text))
        return answer

    async def window(self, request: ModelRequest) -> int | None:
        """That of the recorded model (tokens)."""
        return self._replayed.window

    async def close(self) -> None:
        """Nothing to close."""


class TapedProvider:
    """Asks `provider`, and tells `tape` of each answer. `in_place`: it is asked when another one gave no answer."""

    def __init__(self, provider: Provider, tape: Tape, in_place: bool) -> None:
        self._provider = provider
        self._tape = tape
        self._in_place = in_place

    @property
    def needs_history(self) -> bool:
        """As the provider does."""
        return self._provider.needs_history

    async def complete(
        self,
        request: ModelRequest,
        on_delta: Callable[[TextDelta], None] | None = None,
        on_news: Callable[[ModelNews], None] | None = None,
    ) -> ModelAnswer:
        """The provider's answer. Raises GoondanError as the provider does, and E_REPLAY_DIFFERS."""
        own = not self._provider.needs_history
        try:
            answer = await self._provider.complete(request, on_delta, on_news)
        except GoondanError as error:
            self._tape.failed(request, error, own=own, in_place=self._in_place)
            raise
        self._tape.answered(request, answer, own=own, in_place=self._in_place)
        return answer

    async def window(self, request: ModelRequest) -> int | None:
        """As the provider says."""
        self._tape.listed_window = window = await self._provider.window(request)
        return window

    async def close(self) -> None:
        """Close the provider."""
        await self._provider.close()


def replaying(tape: Tape) -> ReplayProvider:
    """The provider of `provider: replay`. Raises GoondanError E_CONFIG_INVALID_VALUE when there is no recording."""
    if tape.replayed is None:
        raise fail("E_CONFIG_INVALID_VALUE", "provider replay needs a recording")
    return ReplayProvider(tape.replayed)

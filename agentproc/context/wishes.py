"""What extensions wish of the context of one step. Pure.

Source: docs/design/turns.md section 10; docs/extensions.md.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from msgspec import Struct

from goondan.agentproc.context.estimate import HIGH, LOW, RESULT
from goondan.agentproc.conversation import Message

#: Asks the agent's model outside of the conversation: a text, and a system prompt.
AskModel = Callable[[str, str | None], Awaitable[str]]
#: Makes a summary: the way to ask the model, the summary so far, the messages that came then, and the most bytes that
#: one question may have. Raises GoondanError.
Summarise = Callable[[AskModel, str, list[Message], int], Awaitable[str]]


class Wishes(Struct, frozen=True, kw_only=True):
    """What is wished besides that each request fits."""

    #: The most messages that are shown; None: as many as fit.
    max_messages: int | None = None
    #: The most tokens of the conversation that are shown; None: as many as fit.
    max_tokens: int | None = None
    #: To how many tokens a longer conversation is cut; None: two thirds of `max_tokens`.
    keep_tokens: int | None = None
    #: How much of the window one tool's result may have.
    result_share: float = RESULT
    #: What makes a summary of the messages that are left out; None: nothing does.
    summarise: Summarise | None = None

    def too_much(self, messages: int, tokens: int) -> bool:
        """Whether a conversation that is shown with so many messages and tokens is to be cut."""
        return (self.max_messages is not None and messages > self.max_messages) or (
            self.max_tokens is not None and tokens > self.max_tokens
        )

    @property
    def fault(self) -> str | None:
        """Why these cannot be wished; None: they can. An extension may give anything."""
        for name, least in (("max_messages", 2), ("max_tokens", 1), ("keep_tokens", 1)):
            value: Any = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                return f"{name} is not a whole number of at least {least}"
        share: Any = self.result_share
        if type(share) not in (int, float) or not 0 < share <= 1:
            return "result_share is not a number above 0 and at most 1"
        if self.keep_tokens is not None and (self.max_tokens is None or self.keep_tokens >= self.max_tokens):
            return "keep_tokens is not less than max_tokens"
        summarise: Any = self.summarise
        return None if summarise is None or callable(summarise) else "summarise is no function"

    @property
    def kept_messages(self) -> int | None:
        """To how many messages a longer conversation is cut. The message that began the turn may come on top."""
        return None if self.max_messages is None else max(1, int(self.max_messages * LOW / HIGH))

    @property
    def kept_tokens(self) -> int | None:
        """To how many tokens a longer conversation is cut."""
        if self.max_tokens is None:
            return None
        kept = self.keep_tokens
        return kept if kept is not None and kept < self.max_tokens else int(self.max_tokens * LOW / HIGH)

    def both(self, other: Wishes) -> Wishes:
        """What fulfils both: the smaller numbers. The later summary is made."""
        return Wishes(
            max_messages=_least(self.max_messages, other.max_messages),
            max_tokens=_least(self.max_tokens, other.max_tokens),
            keep_tokens=_least(self.keep_tokens, other.keep_tokens),
            result_share=min(self.result_share, other.result_share),
            summarise=other.summarise or self.summarise,
        )


NO_WISHES: Final = Wishes()


def _least(one: int | None, other: int | None) -> int | None:
    return min(one, other) if one is not None and other is not None else one if other is None else other

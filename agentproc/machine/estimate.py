"""How long a request is, how many tokens that may be, and how many it may have. Pure.

- The parts of a request are measured in bytes of what the model reads: those of the texts, without what JSON and the
  form of a vendor add. A token is never counted here: each vendor counts in its own way.
- Tokens are guessed from bytes. What a vendor counts of each request corrects the guess: more tokens than expected
  count at once, fewer only little by little, so the guess is rather too high. What the last request did not have is
  guessed with the first guess at least: a conversation in English may go on in digits.
- Extensions may wish that a step shows less than fits.

Source: docs/design/turns.md section 10; docs/extensions.md.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from goondan.agentproc.machine.messages import (
    REASONING,
    AssistantData,
    Message,
    TextPart,
    ToolData,
    begins_with,
    files_of,
)
from goondan.agentproc.providers.history import KEPT
from goondan.schemas.bundle.launch import CatalogItem
from goondan.schemas.wire import codec, frames

#: Tokens of a byte, before a vendor has counted any. English has a quarter; other languages, code and numbers have
#: more.
FIRST_GUESS: Final = 1 / 3
#: A count outside of these is no count (tokens of a byte).
LEAST_RATIO: Final = 1 / 16
MOST_RATIO: Final = 8.0
#: How much of a lower count is believed.
BELIEVED: Final = 0.25
#: A request may have so much of the window, and is cut to so much. Between the two a conversation only grows, so the
#: vendor's cache fits.
HIGH: Final = 0.9
LOW: Final = 0.6
#: At most so much of the window is kept for the answer.
ANSWER: Final = 0.25
#: One tool's result is shown with at most so much of the window.
RESULT: Final = 0.25
#: How much of the guessed tokens a request surely has, once a vendor has counted one, and its tokens of a byte before.
SURELY: Final = 0.8
FIRST_SURELY: Final = 1 / 8
#: The shortest answer that is worth a request (tokens).
LEAST_ANSWER: Final = 16


class Window(Struct, frozen=True):
    """The tokens of a model's context, and what of it a request may use."""

    #: All of them.
    tokens: int
    #: The most tokens of an answer that the model may give.
    answer: int

    @property
    def high(self) -> int:
        """A request with more tokens is cut."""
        return min(int(self.tokens * HIGH), self.tokens - min(self.answer, int(self.tokens * ANSWER)))

    @property
    def low(self) -> int:
        """It is cut to so many tokens."""
        return min(int(self.tokens * LOW), int(self.high * LOW / HIGH))

    def answer_beside(self, tokens: int) -> int | None:
        """The most tokens of an answer beside a request of so many tokens. None: as many as the model may give."""
        left = self.tokens - tokens
        return None if left >= self.answer else max(LEAST_ANSWER, left)


class Counted(Struct, frozen=True):
    """A request that a vendor has counted."""

    #: The bytes of the request.
    size: int
    #: Its tokens.
    tokens: int

    @property
    def ratio(self) -> float:
        """The tokens of a byte."""
        return self.tokens / self.size


def counted(size: int, tokens: int) -> Counted:
    """A count of a request of `size` bytes, made believable: servers say all kinds of numbers."""
    size = max(1, size)
    return Counted(size, max(1, int(min(max(tokens, size * LEAST_RATIO), size * MOST_RATIO))))


def corrected(ratio: float, count: Counted) -> float:
    """The tokens of a byte after a count."""
    seen = min(max(count.tokens / count.size, LEAST_RATIO), MOST_RATIO)
    return seen if seen >= ratio else ratio + (seen - ratio) * BELIEVED


def tokens_of(size: int, ratio: float, last: Counted | None = None) -> int:
    """The tokens of a request of `size` bytes. `last`: a request that this one begins with."""
    if last is None or last.size > size:
        return int(size * ratio) + 1
    return last.tokens + int((size - last.size) * max(ratio, FIRST_GUESS)) + 1


def surely(ratio: float) -> float:
    """The tokens that a byte has at least, where they are thought to be `ratio`: a request that is longer even so is
    not sent.
    """
    return ratio * SURELY if ratio != FIRST_GUESS else FIRST_SURELY


def size_of(tokens: int, ratio: float) -> int:
    """The bytes that so many tokens hold."""
    return int(tokens / ratio)


#: What stands around each message and each call in a vendor's form (bytes): the names of roles and the marks between
#: them.
AROUND: Final = 16
#: A picture has as many tokens as so many bytes of text: vendors make 1,600 tokens of a large one.
PICTURE: Final = 4800
#: A PDF has as many tokens as this part of its bytes. Vendors make 2,000 tokens of a page, which has some 50 kB.
PDF_PART: Final = 8


def text_size(text: str | None) -> int:
    """The bytes of a text."""
    if not text:
        return 0
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def message_size(message: Message) -> int:
    """The bytes of a message, with what its vendor gets back, and with its files."""
    data = message.data
    if isinstance(data, ToolData):
        size = 0
        for result in data.content:
            size += AROUND + result_size(result.result)
            if result.files:
                size += sum(map(_file_size, result.files))
        return size
    if not isinstance(data, AssistantData):
        return AROUND + text_size(data.content) + files_size(message)
    size = AROUND
    for part in data.content:
        if isinstance(part, TextPart):
            size += text_size(part.text)
        else:
            size += AROUND + len(part.tool_name) + len(codec.encode_value(part.args))
    kept = message.metadata.get(KEPT)
    if kept is None:
        return size
    reasoning = message.metadata.get(REASONING)  # of chat completions, whose vendor gets it back under the kept name
    goes_back = isinstance(kept, dict) and "reasoning" in kept and isinstance(reasoning, str)
    return size + len(codec.encode_value(kept)) + (text_size(reasoning) if goes_back else 0)


def files_size(message: Message) -> int:
    """The bytes of text that have as many tokens as the files of a message. They are shown whole, or not at all."""
    return sum(map(_file_size, files_of(message)))


def _file_size(file: frames.FilePart) -> int:
    return max(PICTURE, file.blob.size // PDF_PART) if file.media_type == "application/pdf" else PICTURE


def result_size(result: frames.ToolResult) -> int:
    """The bytes of a result."""
    if result.status == "ok":
        return 0 if result.output is None else len(memoryview(result.output))
    return len(codec.encode_value([result.handle, result.error]))


def blocks_size(blocks: Sequence[dict[str, Any]]) -> int:
    """The bytes of the blocks of a step."""
    return sum([AROUND + len(msgspec.json.encode(block, enc_hook=str)) for block in blocks])


def tools_size(items: Iterable[CatalogItem]) -> int:
    """The bytes of the tools' definitions."""
    return sum(map(_item_size, items))


def _item_size(item: CatalogItem) -> int:
    parameters = 0 if item.parameters is None else len(msgspec.json.encode(item.parameters, enc_hook=str))
    return AROUND + len(item.name) + text_size(item.description) + parameters


class MessageSizes(Struct, eq=False):
    """The bytes of a conversation's messages. Those that were counted before are not counted again."""

    #: The messages that were counted.
    _known: list[Message] = []
    #: The bytes of each.
    _sizes: list[int] = []
    #: The bytes of all of them.
    total: int = 0
    #: The bytes of the longest one.
    largest: int = 0

    def of(self, messages: list[Message]) -> list[int]:
        """The bytes of each. `messages` may not be changed afterwards; the sizes are good until the next call."""
        known = self._known
        if not begins_with(messages, known):
            known, self._sizes, self.total, self.largest = [], [], 0, 0
        for message in messages[len(known) :] if known else messages:
            size = message_size(message)
            self._sizes.append(size)
            self.total += size
            self.largest = max(self.largest, size)
        self._known = messages
        return self._sizes


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
            max_messages=least(self.max_messages, other.max_messages),
            max_tokens=least(self.max_tokens, other.max_tokens),
            keep_tokens=least(self.keep_tokens, other.keep_tokens),
            result_share=min(self.result_share, other.result_share),
            summarise=other.summarise or self.summarise,
        )


NO_WISHES: Final = Wishes()


def least(one: int | None, other: int | None) -> int | None:
    """The smaller number; None: there is none."""
    return min(one, other) if one is not None and other is not None else one if other is None else other

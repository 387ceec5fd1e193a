"""How many tokens a request has, and how many it may have. Pure.

Tokens are guessed from bytes. What a vendor counts of each request corrects the guess: more tokens than expected count
at once, fewer only little by little, so the guess is rather too high. What the last request did not have is guessed
with the first guess at least: a conversation in English may go on in digits.

Source: docs/design/turns.md section 10.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

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
    seen = min(max(count.ratio, LEAST_RATIO), MOST_RATIO)
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

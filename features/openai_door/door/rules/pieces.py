"""The stream of a turn as pieces of an answer, of which nothing is missing in the end.

A step may begin again with other words, and reasoning may be lost. What was sent to a client cannot be taken back, so
pieces are only ever added: after a gap nothing more of the step goes out, and the end brings what is missing of the
answer.

Source: schemas/PROTOCOL.md "Live events"; docs/design/wire.md section 8.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from goondan.schemas.wire.frames import Answer

#: What stands between the texts of two steps.
BETWEEN: Final = "\n\n"


class Piece(Struct, frozen=True):
    """A piece of what a client is shown."""

    #: What it is a piece of.
    kind: Literal["text", "reasoning"]
    #: The piece.
    text: str
    #: The piece begins another text: the step's, or the answer itself where it is not what was heard.
    begins: bool = False


class _Flow:
    """The text, or the reasoning, of one step."""

    def __init__(self) -> None:
        #: What went out.
        self.sent = ""
        #: How much of the step's text was heard, and what of it since it began again (None: it has not).
        self.heard = 0
        self.again: str | None = None
        self.lost = False

    def void(self) -> None:
        self.heard, self.again, self.lost = 0, "", False

    def take(self, text: str, at: int) -> str:
        """What of a piece goes out."""
        if at != self.heard or self.lost:
            self.lost = True
            return ""
        self.heard += len(text)
        if self.again is not None:
            self.again += text
            if self.again.startswith(self.sent):
                text, self.again = self.again[len(self.sent) :], None
            elif self.sent.startswith(self.again):
                return ""
            else:
                self.lost = True
                return ""
        self.sent += text
        return text


class Pieces:
    """Makes pieces of one turn's stream."""

    def __init__(self) -> None:
        self._step = 0
        self._text = _Flow()
        self._reasoning = _Flow()
        #: All text that went out, in parts.
        self._out: list[str] = []

    @property
    def said(self) -> str:
        """All text that went out."""
        return "".join(self._out)

    def heard(self, kind: str, step: int, text: str = "", at: int = 0, *, again: bool = False) -> list[Piece]:
        """The pieces of one event: of its `kind`, in this step, with a text that begins at this character of it.
        `again`: what was heard of the step before is void.
        """
        if kind == "reasoning":
            # It has no place among the texts. What comes behind the words that it was before is not shown.
            if step != self._step or self._text.sent:
                return []
            if again:
                self._reasoning.void()
            text = self._reasoning.take(text, at)
            return [Piece("reasoning", text)] if text else []
        if step and step != self._step:
            self._step, self._text, self._reasoning = step, _Flow(), _Flow()
        if kind == "text.again":
            self._text.void()
        if kind != "text":
            return []
        begins = not self._text.sent
        text = self._text.take(text, at)
        return self._sent(text, begins=begins) if text else []

    def ended(self, answer: Answer) -> list[Piece]:
        """The pieces that are missing of a completed turn's answer."""
        found = []
        reasoning, shown = answer.reasoning or "", self._reasoning.sent
        if len(reasoning) > len(shown) and reasoning.startswith(shown) and not self._text.sent:
            found.append(Piece("reasoning", reasoning[len(shown) :]))
        response, sent = answer.response or "", self._text.sent
        if response.startswith(sent):
            rest = response[len(sent) :]
            return found + self._sent(rest, begins=not sent) if rest else found
        if response.strip() == sent.strip():
            return found
        return found + self._sent(response, begins=True)

    def _sent(self, text: str, *, begins: bool) -> list[Piece]:
        begins = begins and bool(self._out)
        self._out.append(BETWEEN + text if begins else text)
        return [Piece("text", text, begins)]

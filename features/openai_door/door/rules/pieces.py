"""The stream of a turn as pieces of an answer, of which nothing is missing in the end.

A step may begin again, perhaps with other words, and reasoning may be lost. What was sent to a client cannot be taken
back, so pieces are only ever added: after that nothing more of the step goes out, and the end brings what is missing of
the answer.

Source: schemas/PROTOCOL.md "Live events"; docs/design/wire.md section 8.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from goondan.kernel.traces.rules.progress import News
from goondan.schemas.wire.frames import Answer
from goondan.schemas.wire.runtime_events import RuntimeEvent

#: What stands between the texts of two steps.
BETWEEN: Final = "\n\n"


class Piece(Struct, frozen=True):
    """A piece of what a client is shown."""

    #: What it is a piece of.
    kind: Literal["text", "reasoning"]
    #: The piece.
    text: str


class _Flow:
    """The text, or the reasoning, of one step."""

    def __init__(self) -> None:
        self.sent = ""  # what went out
        self.lost = False  # what is heard fits no more to it

    def take(self, text: str, at: int) -> str:
        """What of a piece goes out."""
        self.lost = self.lost or at != len(self.sent)
        if self.lost:
            return ""
        self.sent += text
        return text


class Pieces:
    """Makes pieces of one turn's stream."""

    def __init__(self) -> None:
        self._step = 0
        self._text = _Flow()
        self._reasoning = _Flow()
        self._out: list[str] = []

    @property
    def said(self) -> str:
        """All text that went out."""
        return "".join(self._out)

    def heard(self, news: News) -> list[Piece]:
        """The pieces of one event."""
        data = news.data
        if isinstance(data, RuntimeEvent):
            # Reasoning has no place among the texts. What comes behind the words that it was before is not shown.
            if news.kind != "reasoning" or data.step != self._step or self._text.sent:
                return []
            self._reasoning.lost = self._reasoning.lost or data.again
            text = self._reasoning.take(data.text or "", data.at)
            return [Piece("reasoning", text)] if text else []
        if data["step"] != self._step:
            self._step, self._text, self._reasoning = data["step"], _Flow(), _Flow()
        if news.kind == "text.again":
            self._text.lost = True
        if news.kind != "text":
            return []
        begins = not self._text.sent
        return self._sent(self._text.take(data["text"], data["at"]), begins=begins)

    def ended(self, answer: Answer) -> list[Piece]:
        """The pieces that are missing of a completed turn's answer."""
        reasoning, response = answer.reasoning or "", answer.response or ""
        shown, sent = self._reasoning.sent, self._text.sent
        found = []
        if not sent and len(reasoning) > len(shown) and reasoning.startswith(shown):
            found.append(Piece("reasoning", reasoning[len(shown) :]))
        if response.startswith(sent):
            return found + self._sent(response[len(sent) :], begins=not sent)
        return found if response.strip() == sent.strip() else found + self._sent(response, begins=True)

    def _sent(self, text: str, *, begins: bool) -> list[Piece]:
        """`begins`: the text is another one, the step's or the answer's."""
        if not text:
            return []
        self._out.append(BETWEEN + text if begins and self._out else text)
        return [Piece("text", self._out[-1])]

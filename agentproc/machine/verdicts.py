"""What becomes of an answer that has to fit a schema: an input of the turn machine, so nothing here checks anything.

Source: docs/design/structured-answers.md section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec import Raw, Struct

from goondan.schemas.wire import errors, frames

#: The key in the metadata of the message that asks for the answer again.
REPAIR: Final = "repair"


class Verdict(Struct, frozen=True):
    """What an answer is."""

    #: The value, encoded as msgpack; None: the answer does not fit.
    value: Raw | None
    #: The answer as JSON, without anything around it.
    text: str
    #: What does not fit.
    violations: list[str] = []

    @property
    def repair(self) -> str:
        """The words that ask the model for the answer again."""
        return (
            f"Your answer does not have the form that is needed: {'; '.join(self.violations)}. "
            "Give it again, corrected and complete: only the JSON value, nothing else."
        )

    @property
    def error(self) -> frames.ErrorPayload:
        """The error of a turn whose answer does not fit."""
        return errors.error_payload(
            "E_OUTPUT_INVALID", f"the model's answer does not fit: {'; '.join(self.violations)}"
        )


#: Judges the text of an answer.
Judge = Callable[[str], Verdict]

"""Secrets that this process received while it ran. They are removed from its log, its traces and its errors.

Extensions get OAuth tokens, and write log lines of their own. Output that they print past the log is not checked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec
from msgspec import structs

from goondan.agentproc.providers.base import ModelAnswer
from goondan.schemas.text.redaction import Redactor
from goondan.schemas.text.secret_values import in_texts
from goondan.schemas.wire.frames import ErrorPayload, ToolResult

#: How many secrets are remembered, the latest ones. A token is replaced about every hour, and an agent has a few.
REMEMBERED: Final = 64


class KnownSecrets:
    """Takes secrets out of texts."""

    def __init__(self) -> None:
        self._secrets: dict[str, None] = {}
        self._redactor: Redactor | None = None

    def add(self, secret: str) -> None:
        """Treat this text as a secret from now on."""
        self._secrets.pop(secret, None)
        self._secrets[secret] = None
        while len(self._secrets) > REMEMBERED:
            del self._secrets[next(iter(self._secrets))]
        self._redactor = None

    def redact(self, text: str) -> str:
        """`text` with `***` in the place of every secret."""
        if not self._secrets:
            return text
        if self._redactor is None:
            self._redactor = Redactor(*self._secrets)
        return self._redactor(text)

    def out_of(self, result: ToolResult) -> ToolResult:
        """A call's result without secrets in its error. The output is not changed; the extension is
        responsible for it.
        """
        if not self._secrets or result.error is None:
            return result
        return structs.replace(result, error=structs.replace(result.error, message=self.redact(result.error.message)))

    def out_of_error(self, error: ErrorPayload | None) -> ErrorPayload | None:
        """The error of a turn without secrets; the same object when there are none."""
        if not self._secrets or error is None:
            return error
        return structs.replace(error, message=self.redact(error.message))


def out_of_answer(answer: ModelAnswer, redact: Callable[[str], str]) -> ModelAnswer:
    """A model's answer without secrets, in whatever field they stand; the same object when there are none. The usual
    answer, which has none, is searched once, as JSON.
    """
    with suppress(ValueError, OverflowError, RecursionError):  # a text with half of a surrogate pair is no JSON
        whole = msgspec.json.encode(answer).decode()
        if redact(whole) == whole:
            return answer
    return msgspec.convert(in_texts(msgspec.to_builtins(answer), redact), ModelAnswer)


class HidingFormatter(logging.Formatter):
    """Lines of a log without secrets, tracebacks included."""

    def __init__(self, form: str, secrets: KnownSecrets) -> None:
        super().__init__(form)
        self._secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as text without secrets."""
        return self._secrets.redact(super().format(record))

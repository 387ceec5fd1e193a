"""Secrets that came to this process while it ran: they are taken out of its log, its traces and its errors.

Extensions get OAuth tokens, and write lines of their own. What they print past the log is not looked at.
"""

from __future__ import annotations

import logging
from typing import Final

from msgspec import structs

from schemas.frames import ErrorPayload, ToolResult
from schemas.redaction import Redactor

#: So many are remembered, the latest: a token is replaced every hour or so, and an agent has a few.
REMEMBERED: Final = 64


class KnownSecrets:
    """Takes secrets out of texts."""

    def __init__(self) -> None:
        self._secrets: dict[str, None] = {}
        self._redactor: Redactor | None = None

    def add(self, secret: str) -> None:
        """From now on this is one."""
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
        """A call's result whose error tells no secret; what an extension returns as output is its own affair."""
        if not self._secrets or result.error is None:
            return result
        return structs.replace(result, error=structs.replace(result.error, message=self.redact(result.error.message)))

    def out_of_error(self, error: ErrorPayload | None) -> ErrorPayload | None:
        """The error of a turn without secrets; the same object when there are none."""
        if not self._secrets or error is None:
            return error
        return structs.replace(error, message=self.redact(error.message))


class HidingFormatter(logging.Formatter):
    """Lines of a log without secrets, tracebacks included."""

    def __init__(self, form: str, secrets: KnownSecrets) -> None:
        super().__init__(form)
        self._secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        """The whole line."""
        return self._secrets.redact(super().format(record))

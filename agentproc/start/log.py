"""What an agent writes to its log: without secrets, and no more than its share.

Extensions get OAuth tokens, and write log lines of their own. Secrets that this process received while it ran are
removed from its log, its traces and its errors. Output that extensions print past the log is not checked. One instance
of an agent may write only so much to the log that all instances of the agent share.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Final

from msgspec import structs

from goondan.schemas.text.redaction import Redactor
from goondan.schemas.traces.log_admission import Admission, suppressed_lines
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


class HidingFormatter(logging.Formatter):
    """Lines of a log without secrets, tracebacks included. `agent` is the agent's name, a field for the form."""

    def __init__(self, form: str, secrets: KnownSecrets, agent: str = "") -> None:
        super().__init__(form)
        self.secrets = secrets
        self.agent = agent

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as text without secrets."""
        record.agent = self.agent
        return self.secrets.redact(super().format(record))


#: The approximate size of a line besides its message: time, level and name (bytes).
_HEAD: Final = 64
#: The approximate size of a traceback (bytes). It is made after this decision.
_TRACEBACK: Final = 4096


class Share(logging.Filter):
    """Lets records through as long as the instance has room. The next record after a gap says how many were
    suppressed.
    """

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__()
        self._handler = handler
        self._admission: Admission[str] = Admission()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether this record is written. Threads may call this at the same time; then one line too many or too few is
        written.
        """
        size = len(record.getMessage()) + _HEAD + (_TRACEBACK if record.exc_info else 0)
        if not self._admission.admit("", "", size, time.monotonic()):
            return False
        count = self._admission.take_suppressed("")
        if count:
            said = {"msg": suppressed_lines(count, None).message, "levelno": logging.WARNING, "levelname": "WARNING"}
            self._handler.acquire()
            try:
                self._handler.emit(logging.makeLogRecord(said))
            finally:
                self._handler.release()
        return True


_FORM: Final = "%(asctime)s %(levelname)s %(agent)s %(message)s"


def configure_log(name: str, secrets: KnownSecrets) -> None:
    """Write log lines to stderr, with `name` in each line and without these secrets. A process that was forked with
    such a log only writes these two into it: making another one costs each agent 270 KiB of its own.
    """
    for handler in logging.root.handlers:
        form = handler.formatter
        if isinstance(form, HidingFormatter) and getattr(handler, "stream", None) is sys.stderr:
            form.agent, form.secrets = name, secrets
            return
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, force=True)
    for handler in logging.root.handlers:
        handler.setFormatter(HidingFormatter(_FORM, secrets, name))
        handler.addFilter(Share(handler))

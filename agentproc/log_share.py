"""Limits how much one instance of an agent may write to the log that all instances of that agent share."""

from __future__ import annotations

import logging
import time
from typing import Final

from goondan.schemas.system.log_admission import Admission, suppressed_lines

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

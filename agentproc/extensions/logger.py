"""`api.logger` and a dynamic tool's `ctx.logger`: the console's methods over the process's log.

Source: requirements CONTEXT-06, EXT-11.
"""

from __future__ import annotations

import logging
from typing import Any


class ConsoleLogger:
    """debug, info, warn, error (and log, warning): values are joined by spaces; `name` stands in front of each line."""

    __slots__ = ("_logger", "_name")

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger("agentproc.extension")
        self._name = name

    def debug(self, *values: Any) -> None:
        """Log details; by default the log does not contain them."""
        self._write(logging.DEBUG, values)

    def info(self, *values: Any) -> None:
        """Log what happened."""
        self._write(logging.INFO, values)

    def warn(self, *values: Any) -> None:
        """Log what may be wrong."""
        self._write(logging.WARNING, values)

    def error(self, *values: Any) -> None:
        """Log what went wrong."""
        self._write(logging.ERROR, values)

    log = info
    warning = warn

    def _write(self, level: int, values: tuple[Any, ...]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s: %s", self._name, " ".join(str(value) for value in values))

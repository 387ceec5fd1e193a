"""Imports that a signal does not interrupt.

Python raises KeyboardInterrupt wherever it is when the signal comes. In the middle of an import that can be a callback
of the import system, which swallows the exception, or the initialisation of an extension module, which crashes. One
Ctrl-C in a hundred had one of these effects while `gdn run` imported asyncio and ZeroMQ.
"""

from __future__ import annotations

import signal
from importlib import import_module
from types import ModuleType
from typing import Final

#: The signals that end a command.
_ENDING: Final = {signal.SIGINT, signal.SIGTERM}


def import_whole(name: str) -> ModuleType:
    """Import a module. A signal that ends commands and comes meanwhile is handled when the import is over.

    Raises what the import raises, and what the handler of the signal raises.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        return import_module(name)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

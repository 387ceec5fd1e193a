"""How a handler's failure is put into words, and into a frame.

Source: requirements ERROR-01 to ERROR-09; schemas/WORKER.md.
"""

from __future__ import annotations

import errno

from . import wire

#: An error's message (characters).
MAX_ERROR = 16384


def error_frame(
    call_id: str,
    name: str,
    message: str,
    *,
    code: object = None,
    suggestion: object = None,
    help_url: object = None,
) -> bytes:
    """A result frame with status `error`; only strings are carried."""
    error = {"name": name, "message": message[:MAX_ERROR]}
    for key, value in (("code", code), ("suggestion", suggestion), ("helpUrl", help_url)):
        if isinstance(value, str) and value:
            error[key] = value[:MAX_ERROR]
    return wire.pack({"type": "result", "callId": call_id, "status": "error", "error": error})


def out_of_means(error: Exception) -> bool:
    """Whether there may be no descriptor or memory left to import anything with."""
    return isinstance(error, MemoryError) or getattr(error, "errno", None) in (errno.EMFILE, errno.ENOMEM)


def describe(error: BaseException) -> str:
    """An exception's message; its class when it has none."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r}) was called"
    try:
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__


def where(error: BaseException) -> str:
    """File and line of the innermost frame, without importing traceback."""
    trace = error.__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return f" at {code.co_filename}:{trace.tb_lineno} in {code.co_name}"

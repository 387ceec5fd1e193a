"""How a handler's failure is put into words, and into a frame.

A tool that was granted no network may make no sockets: the system says "Operation not permitted", and a library wraps
that once or twice. Such a failure is told from others by the exceptions behind it.

Source: requirements ERROR-01 to ERROR-09; schemas/WORKER.md; docs/design/sandbox.md section 6.
"""

from __future__ import annotations

import errno

from . import wire

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from types import TracebackType

#: An error's message (characters).
MAX_ERROR = 16384
#: Where the worker's own code stands. Whoever reads of a failure has no use for its lines.
_OURS = (__file__.rpartition("/")[0] + "/", "<frozen ")
#: Exceptions looked at behind the one that was raised; a chain can be a ring.
_DEPTH = 16
_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ECONNREFUSED)


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


def describe(error: BaseException) -> str:
    """An exception's message; its class when it has none."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r}) was called"
    try:
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__


def where(error: BaseException) -> str:
    """File and line of the innermost frame, without importing traceback. "" for one in the worker's own code."""
    trace = _innermost(error)
    if trace is None or trace.tb_frame.f_code.co_filename.startswith(_OURS):
        return ""
    code = trace.tb_frame.f_code
    return f" at {code.co_filename}:{trace.tb_lineno} in {code.co_name}"


def _innermost(error: BaseException) -> TracebackType | None:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def is_offline(error: BaseException) -> bool:
    """Whether `error`, or one that it was raised from, comes from a missing network."""
    seen: BaseException | None = error
    for _ in range(_DEPTH):
        if seen is None:
            return False
        if isinstance(seen, OSError) and _of_network(seen):
            return True
        reason = getattr(seen, "reason", None)  # urllib.error.URLError
        following = seen.__cause__ or seen.__context__
        seen = reason if following is None and isinstance(reason, BaseException) else following
    return False


def _of_network(error: OSError) -> bool:
    if type(error).__name__ == "gaierror" or error.errno in _UNREACHABLE:
        return True
    return error.errno in (errno.EPERM, errno.EACCES) and error.filename is None and _raised_by_socket(error)


def _raised_by_socket(error: BaseException) -> bool:
    """Whether the standard library's socket module could not make a socket: EPERM alone can mean anything."""
    trace = _innermost(error)
    return trace is not None and trace.tb_frame.f_code.co_filename.endswith("/socket.py")

"""Whether a handler failed because its tool was granted no network.

A jail without network may make no sockets: the system says "Operation not permitted", and a library wraps that once or
twice. This module is imported when a handler has failed, so it costs nothing before.

Source: docs/design/sandbox.md section 6.
"""

from __future__ import annotations

import errno

OFFLINE = "no network was granted to this tool (spec.sandbox.network is none)"
#: Exceptions looked at behind the one that was raised; a chain can be a ring.
_DEPTH = 16
_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ECONNREFUSED)


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
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.endswith("/socket.py")

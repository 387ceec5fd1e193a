"""The last of the boot stage where the jail runs another program than our Python worker: it becomes that program.

Of an MCP server, standard input and output are one socket, whose other end speaks with the server. Standard error is
the log. A JavaScript runtime finds what every worker finds (schemas/WORKER.md section 1).

Source: docs/design/sandbox.md sections 8 and 9.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # without the enumerations of the module around it
import posix

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from typing import Any, NoReturn

#: The other end is closed when the jail has what it was granted: its network, above all.
_GATE_FD = 3
#: What a shell ends with when there is no such program.
_NOT_FOUND = 127
#: Signals that Python ignores or handles, and no program expects to find so.
_CHANGED = (2, 13, 25)  # SIGINT, SIGPIPE, SIGXFSZ
_ENOENT, _ENOTDIR, _ENOEXEC = 2, 20, 8


def become(program: dict[str, Any]) -> NoReturn:
    """Run the program. When it cannot be run, say why on standard error, and end."""
    if program["gated"]:
        while posix.read(_GATE_FD, 1):
            pass
        posix.close(_GATE_FD)
    for number in _CHANGED:
        _signal.signal(number, _signal.SIG_DFL)
    argv = program["argv"]
    environment = {**posix.environ, **{name.encode(): value.encode() for name, value in program["env"].items()}}
    why = f"there is no {argv[0]} in the PATH of its jail"
    for path in _candidates(argv[0], environment.get(b"PATH", b"").decode("utf-8", "surrogateescape")):
        try:
            posix.execve(path, argv, environment)
        except OSError as error:
            if error.errno not in (_ENOENT, _ENOTDIR) or "/" in argv[0]:
                hint = " (a script begins with #! and its interpreter)" if error.errno == _ENOEXEC else ""
                why = f"{path} cannot be run in its jail: {error.strerror}{hint}"
    posix.write(2, f"{why}\n".encode("utf-8", "replace"))
    posix._exit(_NOT_FOUND)


def _candidates(name: str, path: str) -> list[str]:
    if "/" in name:
        return [name]
    return [f"{folder}/{name}" for folder in path.split(":") if folder]

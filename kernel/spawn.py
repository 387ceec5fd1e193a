"""Starts the programs of the kernel; reaping.py observes their ends.

- A program is started by exec, with an explicit argument list, a chosen environment, /dev/null as input, its log as
  output, a session of its own (so that its group can be killed without a race) and no descriptors but those named.
  Tokens and plans pass by descriptor. Call it from the main thread: a parent-death signal is sent when the thread
  that started the child ends.

Source: docs/design/processes.md section 1.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from goondan.kernel.import_path import folders
from goondan.schemas import transport
from goondan.schemas.system.users import VARIABLE

#: What a child of ours may inherit from our environment, besides LC_*. PYTHON* is not among it, and would not be
#: heeded: a child runs what is installed here. No name of it holds a secret; secrets pass by descriptor.
ENVIRONMENT: Final = frozenset(
    (
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "XDG_RUNTIME_DIR",
        "GOONDAN_STATE_ROOT",
        "GOONDAN_NODE",
        "GOONDAN_BUN",
        "GOONDAN_LOG_FORMAT",
        VARIABLE,
        transport.VARIABLE,
    )
)
#: Variables that name certificate authorities (schemas/system/authorities.py).
AUTHORITIES: Final = frozenset(("SSL_CERT_FILE", "SSL_CERT_DIR"))
#: Variables that agents need in addition: their models' servers may be behind a proxy or a company's certificate, and
#: may want to know traces.
AGENT_ENVIRONMENT: Final = AUTHORITIES.union(
    ("GOONDAN_TRACEPARENT",),
    (name for upper in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY") for name in (upper, upper.lower())),
)
#: The first word of a supervisor that waits for its arguments (ahead.receive). The number of its socket is the second.
WAITS: Final = "--ahead"

START: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "start.py")


def environment(source: Mapping[str, str], extra: Iterable[str] = ()) -> dict[str, str]:
    """The part of `source` that a child gets; `extra` are further names."""
    names = ENVIRONMENT.union(extra)
    return {name: value for name, value in source.items() if name in names or name.startswith("LC_")}


def command(module: str, arguments: Sequence[str]) -> list[str]:
    """The argument list that runs a module of this installation with this interpreter, isolated."""
    given = [word for folder in folders() for word in ("--packages", folder)]
    return [sys.executable, "-I", START, *given, module, *arguments]


def start_program(
    argv: list[str],
    *,
    env: Mapping[str, str],
    output_fd: int | None,
    pass_fds: Iterable[int] = (),
    errors_fd: int | None = None,
) -> int:
    """Start a program in a session of its own; its pid.

    Output and errors go to `output_fd` (None: to ours), errors to `errors_fd` if it is given. `pass_fds` keep their
    numbers; every other descriptor of ours is expected to be close-on-exec, which is Python's and libzmq's way.

    Raises OSError when it cannot be started.
    """
    actions: list[tuple[int, int, str, int, int] | tuple[int, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    ]
    if output_fd is not None:
        actions += [(os.POSIX_SPAWN_DUP2, output_fd, 1), (os.POSIX_SPAWN_DUP2, errors_fd or output_fd, 2)]
    passed = list(pass_fds)
    before = [os.get_inheritable(fd) for fd in passed]
    try:
        for fd in passed:
            os.set_inheritable(fd, True)
        return os.posix_spawn(
            argv[0],
            argv,
            dict(env),
            file_actions=actions,
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP],
        )
    finally:
        for fd, inheritable in zip(passed, before, strict=True):
            os.set_inheritable(fd, inheritable)


def memory_file(name: str, data: bytes) -> int:
    """A descriptor from which `data` can be read to its end: how plans and secrets reach a child."""
    fd = os.memfd_create(name)
    fill(fd, data)
    return fd


def environment_file() -> int:
    """A descriptor with the whole environment of this process, for `read_environment`."""
    return memory_file("environment", b"\0".join(b"%b=%b" % item for item in os.environb.items()))


def read_environment(fd: int) -> None:
    """Take the environment of a descriptor in place of our own. The descriptor is closed. Raises E_USAGE."""
    try:
        with open(fd, "rb") as source:
            pairs = [entry.partition(b"=") for entry in source.read().split(b"\0")]
    except OSError as error:
        from goondan.schemas.wire.errors import fail  # a command has no time to import it before it needs it

        raise fail("E_USAGE", f"the environment cannot be read: {error}") from None
    os.environ.clear()
    os.environb.update({name: value for name, _, value in pairs if name})  # a name can be empty only in what was given


def fill(fd: int, data: bytes) -> None:
    """Write `data` to a descriptor of a memory file, to be read from its beginning."""
    with open(fd, "wb", closefd=False) as out:
        out.write(data)
    os.lseek(fd, 0, os.SEEK_SET)


def close_unknown_descriptors(keep: Iterable[int]) -> None:
    """Close what was inherited by accident: a shell's pipe held open by a daemon makes the shell wait for ever."""
    wanted = {0, 1, 2, *keep}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in wanted:
            with suppress(OSError):
                os.close(int(name))

"""Starts the programs of the kernel; reaping.py observes their ends.

- A program is started by exec, with an explicit argument list, a chosen environment, /dev/null as input, its log as
  output, a session of its own (so that its group can be killed without a race) and no descriptors but those named.
  Tokens and plans pass by descriptor. Call it from the main thread: a parent-death signal is sent when the thread
  that started the child ends.
- A program says itself, on its ready descriptor, that it is ready (one newline) or why it never will be (one line of
  JSON, {"error": {…}}).

Source: docs/design/processes.md section 1.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from goondan.kernel.import_path import folders
from goondan.schemas import transport
from goondan.schemas.system.users import VARIABLE
from goondan.schemas.text.visible import visible_line
from goondan.schemas.wire import errors, frames

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
        VARIABLE,
        transport.VARIABLE,
    )
)
#: Variables that name certificate authorities (schemas/system/authorities.py).
AUTHORITIES: Final = frozenset(("SSL_CERT_FILE", "SSL_CERT_DIR"))
#: Variables that agents need in addition: their models' servers may be behind a proxy or a company's certificate.
AGENT_ENVIRONMENT: Final = AUTHORITIES.union(
    name for upper in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY") for name in (upper, upper.lower())
)
#: What a program may say about its failed start (bytes).
MAX_REPORT: Final = 65536

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
    argv: list[str], *, env: Mapping[str, str], output_fd: int | None, pass_fds: Iterable[int] = ()
) -> int:
    """Start a program in a session of its own; its pid.

    Output and errors go to `output_fd` (None: to ours). `pass_fds` keep their numbers; every other descriptor of
    ours is expected to be close-on-exec, which is Python's and libzmq's way. Raises OSError when it cannot be started.
    """
    actions: list[tuple[int, int, str, int, int] | tuple[int, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    ]
    if output_fd is not None:
        actions += [(os.POSIX_SPAWN_DUP2, output_fd, 1), (os.POSIX_SPAWN_DUP2, output_fd, 2)]
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
        raise errors.fail("E_USAGE", f"the environment cannot be read: {error}") from None
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


# --- readiness ------------------------------------------------------------------------------------------------------


class _Report(msgspec.Struct):
    #: Why the start failed.
    error: frames.ErrorPayload


def parse_report(data: bytes) -> frames.ErrorPayload | None:
    """The error of a `{"error": {…}}` line; None for anything else."""
    try:
        return msgspec.json.decode(data, type=_Report).error
    except msgspec.DecodeError:
        return None


def report_start_failure(fd: int | None, error: errors.GoondanError) -> None:
    """Say why a kernel does not start, with every problem of its bundle, on the ready descriptor, or to the person."""
    if fd is None:
        print(visible_line(f"{error.info.code}: {error.info.message}"), file=sys.stderr)
        return
    report = {
        "error": error.info,
        "problems": getattr(error, "problems", []),
        "dropped": getattr(error, "dropped", 0),
    }
    with suppress(OSError), open(fd, "wb") as out:
        out.write(msgspec.json.encode(report) + b"\n")


def start_failure(role: str, cause: str, log_path: str) -> frames.ErrorPayload:
    """The error for a program that ended before it was ready and did not say why."""
    tail = last_line(log_path)
    return errors.error_payload(
        "E_INTERNAL", f"{role} could not be started: {cause}" + (f"; its log ends: {tail}" if tail else "")
    )


def last_line(path: str) -> str:
    """The last line of a log that is not empty, cut to 300 characters; empty without one."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 4096))
            lines = log.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")

"""Executes one launch plan: bubblewrap with exactly the plan's options, and the descriptors that belong to it.

It chooses nothing. Spawn only from the main thread: bubblewrap dies with the thread that started it.

Source: sandbox.md section 3; delivery.md section 8.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from schemas.errors import fail
from schemas.worker_frames import WORKER_FD
from toolhost.policy import ARGS_FD, BOOT_FD, FILES_FD, FILTER_FD, STATUS_FD, WORKDIR_FD, LaunchPlan

#: Descriptors are moved above this before they go to their places, so that no place is taken by one of them.
_ABOVE: Final = 16
#: Handlers of ours must not reach the jail: what is ignored stays ignored through exec.
_DEFAULT_SIGNALS: Final = (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


class Launched(NamedTuple):
    """A jail that has just been started. The caller owns every descriptor, and reaps `pid`.

    `pid` is bubblewrap outside the jail, `pidfd` refers to it; `channel` is our end of the worker's socket; `status`
    yields bubblewrap's JSON lines, `output` whatever is written to the jail's standard output and error.
    """

    pid: int
    pidfd: int
    channel: socket.socket
    status: int
    output: int


def launch(plan: LaunchPlan) -> Launched:
    """Start the jail. Raises GoondanError: E_SANDBOX_DENIED (the workdir moved), E_SANDBOX_UNAVAILABLE (no start)."""
    given: list[int] = []  # descriptors of ours that are only for the jail
    kept: list[int] = []  # ours, closed only when the start fails
    channel: socket.socket | None = None
    try:
        channel, theirs = socket.socketpair()
        places = {WORKER_FD: theirs.detach()}
        given.append(places[WORKER_FD])
        channel.setblocking(False)
        status, places[STATUS_FD] = os.pipe()
        kept.append(status)
        given.append(places[STATUS_FD])
        output, places[1] = os.pipe()
        kept.append(output)
        given.append(places[1])
        places[2] = places[1]
        places[0] = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        given.append(places[0])
        # The options as bubblewrap reads them: each followed by a zero byte.
        places[ARGS_FD] = _memory_file(b"".join(os.fsencode(option) + b"\0" for option in plan.options))
        given.append(places[ARGS_FD])
        places[FILTER_FD] = _memory_file(plan.filter)
        given.append(places[FILTER_FD])
        places[BOOT_FD] = _memory_file(msgspec.msgpack.encode({"landlock": plan.landlock}))
        given.append(places[BOOT_FD])
        for place, text in enumerate(plan.files, FILES_FD):
            places[place] = _memory_file(text.encode())
            given.append(places[place])
        if plan.open_workdir is not None:
            places[WORKDIR_FD] = _open_folder(plan.open_workdir)
            given.append(places[WORKDIR_FD])
        os.set_blocking(status, False)
        os.set_blocking(output, False)
        pid = _spawn([plan.bwrap, "--args", str(ARGS_FD), "--", *plan.command], places)
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        for fd in kept:
            os.close(fd)
        if channel is not None:
            channel.close()
        raise fail("E_SANDBOX_UNAVAILABLE", f"a jail could not be started: {error.strerror or error}") from None
    except BaseException:
        for fd in kept:
            os.close(fd)
        if channel is not None:
            channel.close()
        raise
    finally:
        for fd in given:
            os.close(fd)
    return Launched(pid, pidfd, channel, status, output)


def _memory_file(data: bytes) -> int:
    """A file in memory that will be read from its beginning."""
    fd = os.memfd_create("jail", os.MFD_CLOEXEC)
    try:
        os.write(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
    except OSError:
        os.close(fd)
        raise
    return fd


def _open_folder(path: str) -> int:
    """The folder of that very path: a tool that can rename what is above it must not send us elsewhere."""
    try:
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise fail("E_SANDBOX_DENIED", f"the workdir {path} cannot be opened: {error.strerror}") from None
    if os.readlink(f"/proc/self/fd/{fd}") != path:
        os.close(fd)
        raise fail("E_SANDBOX_DENIED", f"the workdir {path} was replaced while a jail was being started")
    return fd


def _spawn(argv: list[str], places: dict[int, int]) -> int:
    """posix_spawn with `places` (descriptor there -> descriptor here) and nothing else, not even an environment."""
    moved: list[int] = []
    # Whatever this process was given to inherit (tokens, status descriptors, a shell's leftovers) is not the jail's.
    actions: list[tuple[int, int] | tuple[int, int, int]] = [(os.POSIX_SPAWN_CLOSE, fd) for fd in _inheritable()]
    try:
        for place, fd in places.items():
            high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE)
            moved.append(high)
            actions.append((os.POSIX_SPAWN_DUP2, high, place))
        return os.posix_spawn(
            argv[0], argv, {}, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_DEFAULT_SIGNALS
        )
    finally:
        for fd in moved:
            os.close(fd)


def _inheritable() -> list[int]:
    """Descriptors beyond the standard ones that would survive exec."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own is closed by now
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.append(int(name))
    return found

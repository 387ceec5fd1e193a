"""How a jail is started: its plan becomes a request to the launcher, with the descriptors that belong to it.

Work on the file system (making the plan, opening the places) runs beside the loop, and the launcher answers through the
loop. So a start holds nobody up, and several can be on their way at once. The only choice made here is which user
number is free. Use from the loop's thread.

Source: docs/design/processes.md section 1; docs/design/sandbox.md sections 3 and 3.1.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec import Struct

from goondan.schemas.system import directories, users
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.worker.worker_frames import WORKER_FD
from goondan.toolhost.lookup.this_host import machine
from goondan.toolhost.policy.launch_plan import LaunchPlan, quick_boot_plan
from goondan.toolhost.policy.plan import has_namespaces, start_of
from goondan.toolhost.policy.subject import ARGS_FD, BOOT_FD, FILES_FD, FILTER_FD, STATUS_FD, WORKDIR_FD
from goondan.toolhost.privileges.launcher_link import LauncherLost
from goondan.toolhost.privileges.powers import Powers, instance_uid
from goondan.toolhost.watch.keeper import Group, Keeper

if TYPE_CHECKING:
    from goondan.toolhost.launcher.requests import Launch


class Launched(Struct):
    """A jail that has been started, or is about to be. Whoever gets it owns every descriptor, reaps `pid`, and gives
    `uid` back.
    """

    #: What the jail is made from.
    plan: LaunchPlan
    #: Our end of the worker's socket.
    channel: socket.socket
    #: Yields bubblewrap's JSON lines.
    status: int
    #: Yields whatever is written to the jail's standard output and error.
    output: int
    #: Keeps its limits.
    keeper: Keeper
    #: Its place among others while processors are short (toolhost/policy/limits.py).
    niceness: int
    #: The process of bubblewrap outside of the jail.
    pid: int = 0
    #: A descriptor of that process.
    pidfd: int = -1
    #: The jail's user on this host, None when that is our own.
    uid: int | None = None
    #: Why owners of files could not be shown as that user, None when all could.
    unmapped: str | None = None


class Wires(NamedTuple):
    """The descriptors between a jail and whoever speaks with it. Whoever launches the jail gets all of them."""

    #: Our end of the socket of the worker.
    channel: socket.socket
    #: Our end of what the jail's processes write to.
    output: int
    #: The jail's own descriptors, by their numbers there.
    places: dict[int, int]


class _Parts(NamedTuple):
    """What a launch needs beside the launcher."""

    #: The jail.
    launched: Launched
    #: Descriptors for the jail, by their numbers there.
    places: dict[int, int]
    #: Descriptors of what its stages show.
    staged: list[int]
    #: Closes the descriptors for the jail.
    given: ExitStack
    #: Closes and removes everything else.
    undo: ExitStack


async def launch(
    make_plan: Callable[[], LaunchPlan], powers: Powers, *, niceness: int = 0, wires: Wires | None = None
) -> Launched:
    """Start the jail of the plan that `make_plan` returns; it is called on another thread.

    `niceness` is its place among others while processors are short (policy/limits.py). `wires`: None for a worker in
    the jail, which speaks over a socket of its own.
    Raises what `make_plan` raises, and GoondanError: E_SANDBOX_DENIED (the workdir moved), E_SANDBOX_UNAVAILABLE (no
    start).

    A launcher that was lost may have begun this jail. That jail has run nothing of a tool, and ends when it finds its
    channel closed. So the start is tried once more, as another user; with `wires`, which are used up, the caller's
    caller tries.
    """
    for last in (False, True) if wires is None else (True,):
        try:
            return await _launch(make_plan, powers, niceness, wires)
        except LauncherLost as error:
            if last:
                raise fail("E_SANDBOX_UNAVAILABLE", str(error), suggestion="Call again; it is started anew.") from None
    raise AssertionError  # two tries have an outcome


async def _launch(make_plan: Callable[[], LaunchPlan], powers: Powers, niceness: int, wires: Wires | None) -> Launched:
    try:
        parts = await powers.offload.prepared(lambda: _prepare(make_plan, powers, niceness, wires))
    except OSError as error:
        raise _no_start(error.strerror or str(error)) from None
    launched = parts.launched
    with parts.undo as undo:
        with parts.given:
            if launched.plan.stage is not None:
                launched.uid = powers.uids.take()
                if launched.uid is None:
                    raise fail("E_SANDBOX_UNAVAILABLE", "every user number for jails is in use")
            try:
                request = _request(parts)
                fds = [*(parts.places[place] for place in request["places"]), *parts.staged]
                answer, counters = await powers.launcher.ask(request, fds)
                for fd in counters:
                    undo.callback(os.close, fd)
                if "error" in answer:
                    raise _no_start(answer["error"], answer["fix"])
                launched.pid, launched.unmapped = int(answer["pid"]), answer["unmapped"]
                launched.pidfd = os.pidfd_open(launched.pid)
            except LauncherLost:
                raise  # whoever it may have begun is that user for a while: the number is not given back
            except (OSError, GoondanError) as error:
                if launched.uid is not None:
                    powers.uids.give_back(launched.uid)
                raise error if isinstance(error, GoondanError) else _no_start(error.strerror or str(error)) from None
        undo.pop_all()
    if launched.uid is not None and (following := powers.uids.next()) is not None:
        powers.launcher.prepare(0, 0, following)  # what we made for an instance is root's
    launched.keeper.began(launched.pid, counters[0] if counters else None)
    return launched


def _no_start(problem: str, fix: str | None = None) -> GoondanError:
    return fail("E_SANDBOX_UNAVAILABLE", f"a jail could not be started: {problem}", suggestion=fix)


def _prepare(make_plan: Callable[[], LaunchPlan], powers: Powers, niceness: int, wires: Wires | None) -> _Parts:
    """Make descriptors, control groups and folders of one jail. Raises OSError, GoondanError; then nothing is left."""
    with ExitStack() as undo, ExitStack() as given:

        def ours(fd: int) -> int:
            undo.callback(os.close, fd)
            return fd

        def jails(fd: int) -> int:
            given.callback(os.close, fd)
            return fd

        channel, output, own = _plain_wires() if wires is None else wires
        undo.callback(channel.close)
        ours(output)
        places = {place: jails(fd) for place, fd in own.items()}
        plan = make_plan()
        reading, writing = os.pipe()
        status, places[STATUS_FD] = ours(reading), jails(writing)
        os.set_blocking(status, False)
        places.setdefault(1, places[2])
        if 0 not in places:
            places[0] = jails(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        # The options as bubblewrap reads them: each followed by a zero byte.
        places[ARGS_FD] = jails(_memory_file(b"".join(os.fsencode(option) + b"\0" for option in plan.options)))
        places[FILTER_FD] = jails(_memory_file(plan.filter))
        places[BOOT_FD] = jails(_memory_file(_boot_plan(plan)))
        for place, text in enumerate(plan.files, FILES_FD):
            places[place] = jails(_memory_file(text.encode()))
        if plan.open_workdir is not None:
            places[WORKDIR_FD] = jails(open_place(plan.open_workdir, "dir"))
        staged = [jails(open_place(source, "dir" if stage["folder"] else "file")) for source, stage in plan.stages]
        if plan.private is not None:
            undo.callback(directories.remove_tree, plan.private)
            _make_private(plan.private, plan.code)
        keeper = Keeper(powers) if plan.group is None else Group(plan.group, powers, niceness)
        undo.callback(keeper.remove)
        launched = Launched(plan, channel, status, output, keeper, niceness)
        parts = _Parts(launched, places, staged, given.pop_all(), undo.pop_all())
    return parts  # noqa: RET504 # inside, the stacks could be taken for swallowing an exception


def _plain_wires() -> Wires:
    """Those of a jail whose worker is in it. Raises OSError."""
    channel, theirs = socket.socketpair()
    channel.setblocking(False)
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    return Wires(channel, reading, {WORKER_FD: theirs.detach(), 2: writing})


def _make_private(folder: str, code: str) -> None:
    """Make the folder of a jail without mounts: its home, its temporary files, and our code under its name there."""
    os.mkdir(folder, 0o700)
    for name in ("home", "tmp", "code"):
        os.mkdir(f"{folder}/{name}", 0o700)
    os.symlink(code, f"{folder}/code/goondan_tool")


def _boot_plan(plan: LaunchPlan) -> bytes:
    """What the boot stage has to put up. Where bubblewrap starts the jail, it installs the filter."""
    seen = {at: _identity(path) for at, path in plan.seen}
    if plan.quick:
        return quick_boot_plan(plan, seen, machine())
    bare = not has_namespaces(plan.tier)
    limits = [
        (number, value + _own_tasks() if number == resource.RLIMIT_NPROC and bare else value)
        for number, value in plan.limits
    ]
    text = plan.filter.hex() if bare else None  # msgpack of jails has no bytes
    return msgspec.msgpack.encode(
        {
            "landlock": plan.landlock,
            "limits": limits,
            "filter": text,
            "calls": plan.calls,
            "program": plan.program,
            "drops": plan.enclosure is not None,
            "folder": plan.workdir,
            "seen": seen,
        }
    )


def _identity(path: str) -> tuple[int, int]:
    """Device and inode of what is at exactly that path. Raises E_SANDBOX_DENIED when the path is or contains a link."""
    fd = open_place(path)
    try:
        status = os.fstat(fd)
        return status.st_dev, status.st_ino
    finally:
        os.close(fd)


def _own_tasks() -> int:
    """How many processes and threads this user has. Without a user namespace a limit of processes counts them all."""
    found = 0
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.geteuid():
                found += len(os.listdir(f"/proc/{name}/task"))
    return found


def _request(parts: _Parts) -> Launch:
    plan, keeper = parts.launched.plan, parts.launched.keeper
    bare = not has_namespaces(plan.tier)
    return {
        "argv": plan.command if bare else start_of(plan.bwrap, plan.command),
        "env": plan.environment,
        "folder": plan.workdir if bare else None,
        "places": [place for place in parts.places if not bare or place in (0, 1, 2, WORKER_FD, BOOT_FD)],
        "stage": plan.stage,
        "stages": [stage for _, stage in plan.stages],
        "uid": parts.launched.uid,
        "fallbackOwner": None if plan.fallback_owner is None else instance_uid(plan.fallback_owner, users.NUMBERS),
        "enclosure": plan.enclosure,
        "joins": keeper.joins,
        "niceness": parts.launched.niceness,
        "counted": not keeper.counts_cpu,
    }


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


def open_place(path: str, kind: str = "file") -> int:
    """Open the file or folder at exactly that path: a tool that can rename a folder above must not mislead us."""
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_DIRECTORY if kind == "dir" else 0)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        raise fail("E_SANDBOX_DENIED", f"{path} cannot be opened: {error.strerror}") from None
    if os.readlink(f"/proc/self/fd/{fd}") != path:
        os.close(fd)
        raise fail("E_SANDBOX_DENIED", f"{path} was replaced while a jail was being started")
    return fd

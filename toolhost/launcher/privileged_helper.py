"""The privileged helper: it keeps root's powers for a tool host that gave them up.

It makes launchers and does the privileged operations (operations.py).

    first:  the allow-list (allow_list.py), from a tool host that is still root; no answer
    then:   {"operation": NAME, "with": [...]}  -> {"done": value} or {"error": [errno, text]}

The operation `make_launcher` answers with the new launcher's process number, and with one descriptor: the tool host's
end of its socket.

Rules.
- One request at a time, one answer to each. It never starts a program that a request names.
- A launcher is forked from here and not executed again: that takes two milliseconds and shares the loaded modules. It
  is the tool host's child, and so is every jail, as if the tool host had started them.
- It ends when the tool host ends, and removes the control groups that the tool host has left.

Source: docs/design/sandbox.md section 3.1; docs/decisions/039.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import time
from contextlib import suppress
from typing import Any, Final, NoReturn

from goondan.toolhost.launcher import program, syscalls
from goondan.toolhost.launcher.allow_list import AllowList, NotAllowed, check_enclosed, check_launch, is_jails, way_of
from goondan.toolhost.launcher.operations import Operations, Settled, user_of
from goondan.toolhost.launcher.places import ReadOnlyPlace, check_stages
from goondan.toolhost.launcher.request import Enclosed, Launch, Run

#: Largest request (bytes): a name and some paths. The allow-list names the folders of our code.
MAX_REQUEST: Final = 1 << 16
#: Largest size of the options and of a filter, which have some kilobytes (bytes).
MAX_TEXT: Final = 1 << 20
#: How long jails may take to end after their tool host (seconds). Groups that remain are left to the next tool host.
_LEFT_S: Final = 2.0
_LEFT_POLL_S: Final = 0.02


def serve(channel: socket.socket, umask: int) -> NoReturn:
    """Serve requests until the tool host is gone. Jails write under `umask`."""
    program.begin("gdn-privileged")
    gc.collect()
    gc.freeze()  # what is here now is shared with every launcher
    allowed: AllowList = json.loads(channel.recv(MAX_REQUEST))
    settled = Settled()
    operations = Operations(allowed, settled)
    names = {name for name in vars(Operations) if not name.startswith("_")}
    while True:
        data = _received(channel)
        if not data:
            _tidy(operations, allowed)
            os._exit(0)
        fds: list[int] = []
        try:
            request = json.loads(data)
            name = request["operation"]
            if name == "make_launcher":
                answer: dict[str, Any] = {"done": _make_launcher(channel, umask, allowed, settled, fds)}
            elif name in names:
                answer = {"done": getattr(operations, name)(*request["with"])}
            else:
                raise NotAllowed(f"there is no {name}")
        except OSError as error:
            answer = {"error": [error.errno or 0, error.strerror or str(error)]}
        except (ValueError, TypeError, KeyError) as error:
            answer = {"error": [0, f"{type(error).__name__}: {error}"]}
        with suppress(ConnectionError):
            socket.send_fds(channel, [json.dumps(answer).encode()], fds)
        for fd in fds:
            os.close(fd)


def _received(channel: socket.socket) -> bytes:
    """A request; b"" when the tool host is gone. Then it may have left an answer of ours unread."""
    with suppress(ConnectionError):
        return channel.recv(MAX_REQUEST)
    return b""


def _make_launcher(channel: socket.socket, umask: int, allowed: AllowList, settled: Settled, fds: list[int]) -> int:
    """Fork a launcher. Returns its process number, and adds the tool host's end of its socket to `fds`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        pid = syscalls.sibling()
        if pid == 0:
            try:
                channel.close()
                ours.close()
                os.setsid()
                program.serve(theirs, umask, lambda request, given: guard(request, given, allowed, settled))
            finally:
                os._exit(program.FAILED)
    fds.append(ours.detach())
    return pid


def guard(request: Launch | Run, fds: list[int], allowed: AllowList, settled: Settled) -> list[ReadOnlyPlace]:
    """What must stay read-only for a request. Raises OSError when a launcher must not do it for this tool host."""
    state_root, may_enclose = settled.read()
    if "argv" in request:
        check_launch(request, allowed, enclosed=may_enclose)
        if request["enclosure"] is not None:
            _hold_enclosed(request, fds, allowed["enclosed"])
        return check_stages(request["stages"], fds[len(request["places"]) :], allowed, state_root)
    if set(request) != {"program", "arguments"}:
        raise NotAllowed("that is no request of a tool host")
    _check_program(request, allowed)
    return []


def _hold_enclosed(request: Launch, fds: list[int], ways: list[Enclosed]) -> None:
    """Check such a launch. What was checked is replaced by a copy that nobody else can write to."""
    allowed = way_of(request, ways)
    found = {}
    for number in (allowed["options"], allowed["filter"]):
        if number not in request["places"]:
            raise NotAllowed("that is not how bubblewrap is started here")
        index = request["places"].index(number)
        data = found[number] = os.pread(fds[index], MAX_TEXT, 0)
        copy = os.memfd_create("jail", os.MFD_CLOEXEC)
        os.close(fds[index])
        fds[index] = copy
        os.write(copy, data)
        os.lseek(copy, 0, os.SEEK_SET)
    check_enclosed(request, found[allowed["options"]], found[allowed["filter"]], allowed)


def _check_program(request: Run, allowed: AllowList) -> None:
    """Raise NotAllowed unless a program is asked for in the way in which a tool host may have it."""
    program_, given = request["program"], request["arguments"]
    into_jail = program_ == "listen" and len(given) == 1 and is_jails(user_of(int(given[0])), allowed)
    as_jail = program_ == "mcp" and len(given) == 1 and is_jails(int(given[0]), allowed)
    if not into_jail and not as_jail and (program_ != "proxy" or given):
        raise NotAllowed("that is no program of a tool host")


def _tidy(operations: Operations, allowed: AllowList) -> None:
    until = time.monotonic() + _LEFT_S
    while any(os.path.exists(group) for group in allowed["groups"]):
        operations.remove_groups()
        if time.monotonic() > until:
            return
        time.sleep(_LEFT_POLL_S)

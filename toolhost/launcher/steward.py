"""The privileged helper: it keeps root's powers for a tool host that gave them up.

It makes launchers and does a fixed list of operations on the file system (deeds.py).

    first:  the terms (terms.py), from a tool host that is still root; no answer
    then:   {"launcher": true}        -> {"pid"} and the tool host's end of the new launcher's socket
            {"deed": NAME, "with": [...]}  -> {"done": value}
            either may be answered with {"error": [errno, text]}

Rules.
- One request at a time, one answer to each. It never starts a program that a request names.
- A launcher is forked from here and not executed anew, which takes two milliseconds and shares what is loaded. It is
  the tool host's child, and so is every jail, as if the tool host had started it.
- It ends when the tool host ends, and removes the control groups that the tool host has left.

Source: docs/design/sandbox.md section 3.1; docs/decisions/039.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import signal
import socket
import time
from contextlib import suppress
from typing import Any, Final, NoReturn

from toolhost.launcher import calls, enclosed, program
from toolhost.launcher.deeds import Deeds, uid_of
from toolhost.launcher.keeping import Kept
from toolhost.launcher.places import check_stages, path_of
from toolhost.launcher.request import Check, Hold, Launch, Run
from toolhost.launcher.sizes import POINT
from toolhost.launcher.terms import Refused, Terms, check_launch, check_trial, check_workspace, is_jails

#: A request is a name and some paths; the terms name the folders of our code (bytes).
MAX_REQUEST: Final = 1 << 16
#: What can be asked for by name.
DEEDS: Final = (
    "state", "settle", "trial", "remove_trial", "workdir", "placeholders", "remove_placeholder", "group",
    "remove_group", "remove_groups", "niceness", "sockets",
)  # fmt: skip
#: Room for a path, and where it begins, after its length and one word more (bytes).
_NOTE: Final = 8192
_PATH: Final = 5
#: How long jails may take to end after their tool host (seconds), until their groups are left to the next one.
_LEFT_S: Final = 2.0
_LEFT_POLL_S: Final = 0.02


class Note:
    """What the steward knows by now, and all of its launchers, earlier and later ones, can read."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, _NOTE)  # shared with what is forked

    def write(self, deeds: Deeds) -> None:
        path = os.fsencode(deeds.state_root or "")[: _NOTE - _PATH]
        self._page[_PATH : _PATH + len(path)] = path
        self._page[:_PATH] = len(path).to_bytes(4, "little") + bytes([deeds.enclosed])

    @property
    def state_root(self) -> str | None:
        """The state root, None as long as nobody has said which it is."""
        length = int.from_bytes(self._page[:4], "little")
        return os.fsdecode(self._page[_PATH : _PATH + length]) if length else None

    @property
    def enclosed(self) -> bool:
        """Whether bubblewrap may run as root."""
        return self._page[4] == 1


def serve(channel: socket.socket, umask: int) -> NoReturn:
    """Do what is asked until the tool host is gone. `umask` is what jails write under."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the tool host's affair
    program.call_oneself("gdn-steward")
    gc.collect()
    gc.freeze()  # what is here now is shared with every launcher
    terms: Terms = json.loads(channel.recv(MAX_REQUEST))
    deeds, note = Deeds(terms), Note()
    note.write(deeds)
    while True:
        data = _received(channel)
        if not data:
            _tidy(deeds, terms)
            os._exit(0)
        fds: list[int] = []
        try:
            answer = _answer(json.loads(data), deeds, fds, lambda: _launcher(channel, umask, terms, note))
            note.write(deeds)
        except OSError as error:
            answer = {"error": [error.errno or 0, error.strerror or str(error)]}
        except (ValueError, TypeError, KeyError) as error:
            answer = {"error": [0, f"{type(error).__name__}: {error}"]}
        with suppress(ConnectionError):
            socket.send_fds(channel, [json.dumps(answer).encode()], fds)
        for fd in fds:
            os.close(fd)


def _received(channel: socket.socket) -> bytes:
    """A request; nothing when the tool host is gone, perhaps with an answer of ours unread."""
    with suppress(ConnectionError):
        return channel.recv(MAX_REQUEST)
    return b""


def _answer(request: dict[str, Any], deeds: Deeds, fds: list[int], launcher: Any) -> dict[str, Any]:
    if request.get("launcher"):
        pid, fd = launcher()
        fds.append(fd)
        return {"pid": pid}
    if request["deed"] not in DEEDS:
        raise Refused(f"there is no {request['deed']}")
    return {"done": getattr(deeds, request["deed"])(*request["with"])}


def _launcher(channel: socket.socket, umask: int, terms: Terms, note: Note) -> tuple[int, int]:
    """Fork one: its number, and the tool host's end of its socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        pid = calls.sibling()
        if pid == 0:
            try:
                channel.close()
                ours.close()
                os.setsid()
                program.serve(theirs, umask, lambda request, fds: guard(request, fds, terms, note))
            finally:
                os._exit(program.FAILED)
    return pid, ours.detach()


def guard(request: Launch | Run | Hold | Check, fds: list[int], terms: Terms, note: Note) -> list[Kept]:
    """What must stay read-only for it. Raises OSError for what a launcher does not do for this tool host."""
    if "argv" in request:
        check_launch(request, terms, enclosed=note.enclosed)
        if request["enclosure"] is not None:
            enclosed.hold(request, fds, terms["enclosed"])
        return check_stages(request["stages"], fds[len(request["places"]) :], terms, note.state_root)
    if "program" in request:
        given = request["arguments"]
        into_jail = request["program"] == "listen" and len(given) == 1 and is_jails(uid_of(int(given[0])), terms)
        if not into_jail and (request["program"] != "proxy" or given):
            raise Refused("that is no program of a jail's network")
    elif "hold" in request:
        check_workspace(f"{path_of(fds[0])}/{POINT}", note.state_root)
    else:
        check_trial(path_of(fds[0]), note.state_root)
    return []


def _tidy(deeds: Deeds, terms: Terms) -> None:
    until = time.monotonic() + _LEFT_S
    while any(os.path.exists(group) for group in terms["groups"]):
        with suppress(OSError):
            deeds.remove_groups()
        if time.monotonic() > until:
            return
        time.sleep(_LEFT_POLL_S)

"""Files of a bundle that a tool may have written: a kernel does not load them before the operator has accepted them.

Tool hosts write down when jails could write to which folders (schemas/worker/tool_host_reports.py). A file whose time
of change lies in such a time may be a tool's work, unless it stood read-only. Only the system sets that time, so
nothing has to be compared with the state before. A person who edits a file while no tool can write to its folder is not
asked.

What was accepted is pinned to its bytes, in `<state root>/accepted-files.json`.

Source: docs/design/sandbox.md section 2.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Struct

from goondan.kernel.bundle.files import MAX_TREE_FILES, SKIPPED_FOLDERS, file_digest, read_file
from goondan.kernel.bundle.rules.lookup import Unreadable
from goondan.kernel.state_root import doubt
from goondan.schemas.system.directories import leads_to, replace_file
from goondan.schemas.wire.errors import fail
from goondan.schemas.worker.grantable import within
from goondan.schemas.worker.tool_host_reports import EXPOSURES, LOCK, MAX_SILENCE_S, TOOLHOSTS, WriteExposure

ACCEPTED_FILE: Final = "accepted-files.json"
#: A record of exposures, or what was accepted (bytes).
_MAX_RECORD: Final = 16 << 20
#: The largest file that can be accepted (bytes). The programs of JavaScript runtimes have 100 MiB and more.
_MAX_BYTES: Final = 512 << 20


class Window(Struct, frozen=True):
    """A time in which tools could write below a folder."""

    #: The folder.
    folder: str
    #: When it began (nanoseconds since 1970).
    began: int
    #: When it ended (nanoseconds since 1970).
    ended: float
    #: What tools could not write to.
    kept: frozenset[str]
    #: Tools can still write there.
    open: bool = False


class Written(Struct, frozen=True):
    """A file that a tool may have written."""

    #: The file.
    path: str
    #: The folder in which tools could write.
    folder: str
    #: Tools can still write there.
    open: bool
    #: SHA-256 of its bytes now, in hexadecimal digits. '': it cannot be read.
    digest: str


def find_written(
    paths: Iterable[str], state_root: str, *, read: Mapping[str, bytes] | None = None, accepted: bool = False
) -> list[Written]:
    """Those of the files, and of the files in the folders, that a tool may have written, and that were not accepted.

    `read` is what was read of some of them: this is what must have been accepted. `accepted`: also those that were.
    """
    windows, known = read_windows(state_root), {} if accepted else read_accepted(state_root)
    found: list[Written] = []
    for path in _files(paths):
        window = _window(path, windows, state_root)
        if window is None:
            continue
        data = (read or {}).get(path)
        digest = _digest(path) if data is None else hashlib.sha256(data).hexdigest()
        if not digest or known.get(path) != digest:
            found.append(Written(path, window.folder, window.open, digest))
    return found


def accept(files: Iterable[Written], state_root: str) -> None:
    """Accept what is there now. Raises GoondanError E_USAGE while tools can write there, and E_STATE."""
    why = doubt(state_root)
    if why is not None:
        raise fail("E_STATE", f"what is accepted would not be read again: {why}")
    known = {path: digest for path, digest in read_accepted(state_root).items() if os.path.lexists(path)}
    for file in files:
        if file.open:
            message = f"tools can still write to {file.folder}: what you accept could be something else by then"
            raise fail("E_USAGE", message, suggestion="Stop the kernel whose tools work there: `gdn stop`.")
        with suppress(OSError):
            if os.stat(file.path).st_nlink > 1:
                message = f"{file.path} has another name, by which a tool could still change it"
                raise fail("E_USAGE", message, suggestion="Put a copy of it in its place.")
        if not file.digest:
            raise fail("E_USAGE", f"{file.path} cannot be read, or is too large")
        known[file.path] = file.digest
    _keep(known, state_root, sync=False)


def pin(digests: Mapping[str, str | None], state_root: str) -> None:
    """Accept files with just these bytes (SHA-256), whoever can write there: for what the kernel itself has written.
    None: a file is not accepted any more. Raises GoondanError E_STATE.
    """
    if doubt(state_root) is not None:
        return  # what is accepted is not read there, and nothing else is either
    known = read_accepted(state_root)
    for path, digest in digests.items():
        if digest is None:
            known.pop(path, None)
        else:
            known[path] = digest
    _keep(known, state_root, sync=True)


def _keep(accepted: Mapping[str, str], state_root: str, *, sync: bool) -> None:
    path = os.path.join(state_root, ACCEPTED_FILE)
    try:
        replace_file(path, msgspec.json.encode(accepted), sync=sync)
    except OSError as error:
        raise fail("E_STATE", f"{path}: {error.strerror}") from None


def read_accepted(state_root: str) -> dict[str, str]:
    """What was accepted: path -> SHA-256. Nothing in a state root that is not to be believed."""
    if doubt(state_root) is not None:
        return {}
    try:
        data = read_file(os.path.join(state_root, ACCEPTED_FILE), _MAX_RECORD)
        return msgspec.json.decode(data, type=dict[str, str])
    except (Unreadable, msgspec.DecodeError):
        return {}


def read_windows(state_root: str) -> list[Window]:
    """The times in which tools could write to somebody's folders, of all tool hosts of this state."""
    found: list[Window] = []
    for workspace in _listing(os.path.join(state_root, "workspaces")):
        for host in _listing(os.path.join(workspace, TOOLHOSTS)):
            found += _read_host(host)
    return found


def _read_host(host: str) -> list[Window]:
    path = os.path.join(host, EXPOSURES)
    try:
        lives = _is_locked(os.path.join(host, LOCK))
        exposures = msgspec.json.decode(read_file(path, _MAX_RECORD), type=list[WriteExposure])
        last = os.stat(path).st_mtime_ns + MAX_SILENCE_S * 1e9
    except (OSError, Unreadable, msgspec.DecodeError):
        return []
    windows = []
    for exposure in exposures:
        if exposure.ended is not None:
            kept = frozenset(place.path for place in exposure.kept)
            windows.append(Window(exposure.folder, exposure.began, exposure.ended, kept))
        else:
            kept = frozenset(place.path for place in exposure.kept if leads_to(place.path, place.device, place.inode))
            windows.append(Window(exposure.folder, exposure.began, float("inf") if lives else last, kept, lives))
    return windows


def _window(path: str, windows: list[Window], state_root: str) -> Window | None:
    """The window in which a file was changed last. A link counts as well as what it leads to."""
    real = os.path.realpath(path)
    parts = os.path.relpath(real, os.path.realpath(state_root)).split(os.sep)
    if len(parts) > 6 and (parts[0], parts[2], parts[5]) == ("workspaces", "instances", "workspace"):
        return Window(os.path.join(state_root, *parts[:6]), 0, float("inf"), frozenset())
    times: list[tuple[str, int]] = []
    with suppress(OSError):
        times = [(path, os.lstat(path).st_ctime_ns), (real, os.stat(real).st_ctime_ns)]
    for window in windows:
        for name, changed in times:
            inside = within(name, window.folder) and window.began <= changed <= window.ended
            if inside and not any(within(name, place) for place in window.kept):
                return window
    return None


def _files(paths: Iterable[str]) -> list[str]:
    """Files, and what is in folders: all of it but what is compiled, MAX_TREE_FILES of each at most."""
    found: dict[str, None] = {}
    for path in paths:
        todo, count = [path], 0
        while todo and count <= MAX_TREE_FILES:
            here = todo.pop()
            if os.path.islink(here) or not os.path.isdir(here):
                found[here] = None
                count += 1
                continue
            todo += [name for name in _listing(here) if os.path.basename(name) not in SKIPPED_FOLDERS]
    return list(found)


def _listing(folder: str) -> list[str]:
    try:
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
    except OSError:
        return []


def _is_locked(path: str) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _digest(path: str) -> str:
    try:
        return file_digest(path, _MAX_BYTES)
    except Unreadable:
        return ""

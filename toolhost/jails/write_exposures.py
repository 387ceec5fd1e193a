"""The folders of others that jails can write to now, and the record of that (schemas/worker/tool_host_reports.py).

A write exposure is a time in which jails could write to a folder.

Rules.
- An exposure begins, and is on disk, before the first jail that can write to its folder starts. It ends after the last
  one.
- The places that stay read-only are held open, so that nothing else can get their inode. A program of the host may put
  another file in such a place (an editor that saves by renaming). That removes the mount that protected the place: then
  `intact` is False, and new jails must replace the jails of the folder.
- A folder that was made for a jail is shared-locked while it is in use, and removed only under an exclusive lock:
  another tool host may guard it as well.

A record must be on disk before a jail starts, which takes long on a busy disk. So `begin` and `end` are called from one
thread beside the loop (`Offload`), one after the other. `intact` and `beat` are called from the loop.

Source: docs/design/sandbox.md section 2.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import stat
import threading
import time
from contextlib import suppress
from typing import Final

import msgspec

from goondan.schemas.system.directories import leads_to, read_list, replace_file
from goondan.schemas.wire.errors import fail
from goondan.schemas.worker.grantable import within
from goondan.schemas.worker.tool_host_reports import MAX_SILENCE_S, SLACK_NS, GuardedPlace, WriteExposure
from goondan.toolhost.lookup.folders import MADE_NAMES, remove_placeholders
from goondan.toolhost.privileges.powers import Powers

#: Exposures of one tool host that are kept apart. Above that number, exposures of one folder are joined.
MAX_EXPOSURES: Final = 200
#: A larger record was not written by us (bytes).
_MAX_BYTES: Final = 16 << 20


class _Exposed:
    """One folder that jails can write to now."""

    def __init__(self, folder: str, powers: Powers) -> None:
        self.folder = folder
        self._powers = powers
        self.began = time.time_ns() - SLACK_NS
        self.began_after_boot = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self.jails = 0
        self.pins: dict[str, tuple[int, GuardedPlace]] = {}
        self.broken: set[str] = set()
        self.made: list[str] = []

    def pin(self, path: str) -> None:
        """Hold a place open. Raises OSError."""
        fd = _open_shared(path) if os.path.basename(path) in MADE_NAMES else None
        if fd is None:
            fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
                self.broken.add(path)  # it can be written by another name
            if not leads_to(path, status.st_dev, status.st_ino):
                raise BlockingIOError(f"{path} was replaced")
        except OSError:
            os.close(fd)
            raise
        self.pins[path] = (fd, GuardedPlace(path, status.st_dev, status.st_ino))

    def look(self) -> bool:
        """Whether every place is still what it was. A place that is not is no longer held."""
        gone = [path for path, (_, kept) in self.pins.items() if not leads_to(path, kept.device, kept.inode)]
        for path in gone:
            os.close(self.pins.pop(path)[0])
            self.broken.add(path)
        return not gone

    def kept(self) -> list[GuardedPlace]:
        return [kept for path, (_, kept) in self.pins.items() if path not in self.broken]

    def end(self) -> WriteExposure:
        """The exposure as it goes into the record, now that it is over."""
        self.look()
        kept = self.kept()
        for fd, _ in self.pins.values():
            os.close(fd)
        remove_placeholders(self.made, self._powers)
        # The clock of files is behind this one: what was written until now has no later time. And a person who writes
        # from now on is not taken for a tool.
        now = time.time_ns()
        # The clock may have been set meanwhile; `lasted` makes sure that no file escapes because of that.
        lasted = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - self.began_after_boot + SLACK_NS
        return WriteExposure(self.folder, min(self.began, now - lasted), max(now, self.began + lasted), kept)


class WriteExposures:
    """All write exposures of one tool host. `path` is the record, None when none can be kept."""

    def __init__(self, path: str | None, powers: Powers) -> None:
        """Goes on with the content of the record."""
        self._powers = powers
        self._path = path
        self._present: dict[str, _Exposed] = {}
        self._past: list[WriteExposure] = []
        self._lock = threading.Lock()  # of what is present: never held while something is written
        self.take_over(path)

    def take_over(self, path: str | None) -> None:
        """Make the record of a tool host that is gone part of ours, and remove the folders that it made."""
        if path is None:
            return
        for past in read_list(path, WriteExposure, _MAX_BYTES):
            remove_placeholders(past.made, self._powers)
            if past.ended is not None:
                self._past.append(past)
                continue
            with suppress(OSError):
                last = os.stat(path).st_mtime_ns + int(MAX_SILENCE_S * 1e9)
                kept = [place for place in past.kept if leads_to(place.path, place.device, place.inode)]
                ended = min(last, time.time_ns() + SLACK_NS)
                self._past.append(WriteExposure(past.folder, past.began, ended, kept))
        if self._past:
            self._write()
        if path != self._path:
            with suppress(OSError):
                os.unlink(path)

    def begin(self, folders: list[str], guarded: list[str], made: list[str]) -> None:
        """A jail that can write to these folders is about to start. Raises GoondanError E_SANDBOX_DENIED."""
        begun: list[str] = []
        new = False
        try:
            with self._lock:
                for folder in dict.fromkeys(folders):
                    present = self._present.get(folder)
                    if present is None:
                        present = self._present[folder] = _Exposed(folder, self._powers)
                        new = True
                    present.jails += 1
                    begun.append(folder)
                    present.made += [path for path in made if within(path, folder)]
                    mine = [path for path in guarded if within(path, folder) and path != folder]
                    if present.jails > 1:  # what the others may write to is not kept
                        present.broken |= present.pins.keys() ^ set(mine)
                    for path in mine:
                        if path not in present.pins:
                            present.pin(path)
            if new or made:
                self._write(durable=True)
        except OSError as error:
            for folder in begun:
                self._leave(folder)
            text = f"what must stay read-only there cannot be kept so: {error.strerror or error}"
            raise fail("E_SANDBOX_DENIED", text, suggestion="Call again; see whether the disk is full.") from None

    def end(self, folders: list[str]) -> None:
        """The last process of a jail that could write to these folders is gone."""
        before = len(self._present)
        for folder in dict.fromkeys(folders):
            self._leave(folder)
        if len(self._present) != before:
            self._write()

    def intact(self, folders: list[str]) -> bool:
        """Whether everything in these folders that must stay read-only still does. Takes a few system calls."""
        if not folders:
            return True
        with self._lock:
            return all(present.look() for folder in folders if (present := self._present.get(folder)) is not None)

    def beat(self) -> None:
        """Call every second or so while there are jails."""
        if self._present and self._path is not None:
            with suppress(OSError):
                os.utime(self._path)

    def _leave(self, folder: str) -> None:
        with self._lock:
            present = self._present.get(folder)
            if present is None:
                return
            present.jails -= 1
            if present.jails > 0:
                return
            del self._present[folder]
        self._past.append(present.end())

    def _write(self, *, durable: bool = False) -> None:
        """Put the record in place. Raises OSError when a beginning cannot be recorded; an end can wait."""
        self._past = joined(self._past)
        if self._path is None:
            return
        with self._lock:
            now = [WriteExposure(one.folder, one.began, None, one.kept(), one.made) for one in self._present.values()]
        try:
            replace_file(self._path, msgspec.json.encode([*self._past, *now]), sync=durable)
        except OSError:
            if durable:
                raise


def joined(exposures: list[WriteExposure]) -> list[WriteExposure]:
    """At most MAX_EXPOSURES of the exposures in folders that still exist. The two of one folder with the shortest time
    between them become one, which keeps only the places that were kept in both.
    """
    left = sorted((one for one in exposures if os.path.isdir(one.folder)), key=lambda one: (one.folder, one.began))
    while len(left) > MAX_EXPOSURES:
        gaps = [
            (after.began - (before.ended or 0), index)
            for index, (before, after) in enumerate(itertools.pairwise(left))
            if before.folder == after.folder
        ]
        if not gaps:
            break
        index = min(gaps)[1]
        one, other = left[index], left[index + 1]
        paths = {kept.path for kept in other.kept}
        kept = [place for place in one.kept if place.path in paths]
        left[index : index + 2] = [WriteExposure(one.folder, one.began, max(one.ended or 0, other.ended or 0), kept)]
    return left


def _open_shared(path: str) -> int | None:
    """Open and lock a folder that others may want to remove; None when it cannot be locked. Raises OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (NotADirectoryError, PermissionError):
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd

"""The file systems that jails write to: how much they lose, which jails may have taken that, and who it was.

A jail that may have reached a limit is frozen where there is a group for that, walked, and then ended or let go on. So
what is written meanwhile is at most what its system calls under way write. Free space is looked at between any two
steps, and during walks.

Used by the watch's thread, but for `enter`.

Source: sandbox.md section 4; docs/decisions/029.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from toolhost.limits import look
from toolhost.limits.account import Account
from toolhost.limits.decide import DISK_PART, MIB, DiskMeter, Growth, Lost, walk_again_at, walked_before
from toolhost.limits.growth import walk

#: Between two looks at free space (seconds): at 1 GB/s that is 5 MB.
DISK_S: Final = 0.005
#: Between two walks over folders of a file system that does not count its entries (seconds).
WALK_S: Final = 1.0


class _Device:
    """A file system, and what it has lost since we look at it."""

    __slots__ = ("_entries", "_free", "counts_entries", "lost", "walked_at")

    def __init__(self) -> None:
        self.lost = Lost(0, 0)
        self.walked_at = 0.0
        self.counts_entries = True
        self._free = self._entries = -1

    def look(self, place: str) -> None:
        """Add up falls only: what others give back must not hide what a jail takes. Raises OSError."""
        at = os.statvfs(place)
        free, entries = at.f_bfree * at.f_frsize, at.f_ffree
        self.counts_entries = at.f_files > 0
        if self._free >= 0:
            fallen, taken = self.lost
            self.lost = Lost(fallen + max(0, self._free - free), taken + max(0, self._entries - entries))
        self._free, self._entries = free, entries


class _Suspect(NamedTuple):
    """A jail that may have reached a limit on that file system."""

    jail: Account
    number: int
    frozen: bool


class Disks:
    """All file systems that watched jails may write to."""

    def __init__(self) -> None:
        self._devices: dict[int, _Device] = {}
        self._suspects: list[_Suspect] = []
        self._busy: list[Account] = []
        self._looked_at = 0.0

    def enter(self, jail: Account) -> None:
        """Watch this one's folders from now on."""
        for number, places in jail.devices.items():
            device = self._devices.setdefault(number, _Device())
            with suppress(OSError):
                device.look(places[0])
            jail.disks[number] = DiskMeter(device.lost)

    def due_in(self) -> float:
        """When `look` has something to do (seconds from now), 0 or less for now."""
        return self._looked_at + DISK_S - time.monotonic()

    def look(self, busy: list[Account]) -> None:
        """Ask for free space if it is time for that; who may have reached a limit becomes a suspect, and is frozen."""
        self._busy = busy
        if self.due_in() <= 0:
            self._look()

    def _look(self) -> None:
        self._looked_at = time.monotonic()
        for number in {number for jail in self._busy for number in jail.devices}:
            device = self._devices[number]
            for place in (place for jail in self._busy for place in jail.devices.get(number, ())):
                with suppress(OSError):  # that folder is gone; another one may be there
                    device.look(place)
                    break
            blind = not device.counts_entries and self._looked_at - device.walked_at >= WALK_S
            if blind:
                device.walked_at = self._looked_at
            for jail in self._busy:
                meter = jail.disks.get(number)
                if meter is None or self._looked_at < jail.walk_again_at or jail.ending:
                    continue
                if any(suspect.jail is jail and suspect.number == number for suspect in self._suspects):
                    continue
                if meter.suspects(device.lost, jail.limits):
                    self._suspects.append(_Suspect(jail, number, jail.freeze()))
                elif blind:
                    self._suspects.append(_Suspect(jail, number, False))

    def walk_one(self, is_quick: Callable[[Account], bool]) -> tuple[Account, str] | None:
        """Walk the folders of one suspect, if there is one. A jail that has reached a limit, and which, is returned:
        its processes have been killed. Any other goes on.
        """
        if not self._suspects:
            return None
        suspect = min(self._suspects, key=lambda each: walked_before(each.frozen, is_quick(each.jail)))
        jail, limit = suspect.jail, None
        try:
            with suppress(OSError, ValueError, IndexError, struct.error):  # it may end at any moment
                if not jail.closed:
                    limit = self._walk(jail, suspect.number)
                    if limit is not None:
                        jail.end(limit)
        finally:
            self._suspects.remove(suspect)
            if suspect.frozen and not any(other.jail is jail and other.frozen for other in self._suspects):
                jail.thaw()
        return None if limit is None else (jail, limit)

    @property
    def suspects(self) -> bool:
        """Whether any jail is to be walked."""
        return bool(self._suspects)

    def _walk(self, jail: Account, number: int) -> str | None:
        device, meter = self._devices[number], jail.disks[number]
        began, lost = time.monotonic(), device.lost
        enough = Growth(int(jail.limits.disk_mb * MIB * DISK_PART), int(jail.limits.files * DISK_PART))
        size = entries = 0
        for place in jail.devices[number]:
            found = walk(place, jail.since, enough, self._meanwhile)
            size, entries = size + found.size, entries + found.entries
        if jail.view is not None and size < enough.size:
            size += sum(file.size for file in look.nameless(jail.view, self._meanwhile) if file.device == number)
        jail.walk_again_at = walk_again_at(began, time.monotonic())
        self._look()
        return meter.walked(Growth(size, entries), lost, device.lost, jail.limits)

    def _meanwhile(self) -> None:
        if self.due_in() <= 0:
            self._look()

    def let_go(self) -> None:
        """Nobody is a suspect any more."""
        suspects, self._suspects = self._suspects, []
        for suspect in suspects:
            if suspect.frozen:
                suspect.jail.thaw()

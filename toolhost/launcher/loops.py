"""Loop devices: finds the device of a file, or attaches a new one.

A device goes with its last user (LO_FLAGS_AUTOCLEAR). So whoever unmounts need not know of it, and nothing is left of a
device that was made in vain. Two devices for one file would be two file systems that destroy each other: a file that
has a device gets no other one. The caller holds a lock.

Source: loop(4).
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from contextlib import suppress
from typing import Final

from goondan.toolhost.launcher.descriptors import opened

#: The number of loop devices (Documentation/admin-guide/devices.txt).
MAJOR: Final = 7
_CONFIGURE, _GET_STATUS64, _GET_FREE = 0x4C0A, 0x4C05, 0x4C82
_AUTOCLEAR: Final = 4
#: Writes pass the page cache of the disk below, where that is possible: the data would be in memory twice.
_DIRECT_IO: Final = 16
#: struct loop_info64: device, inode, …, flags, …; struct loop_config: descriptor, block size, info, 64 bytes unused.
_INFO: Final = struct.Struct("=QQQQQIIII64s64s32sQQ")
_CONFIG: Final = struct.Struct("=II")
_UNUSED: Final = bytes(64)
#: How often a free device is tried: another process may take it before we do.
_TRIES: Final = 16


def of(image: int, number: int) -> str | None:
    """The name of the loop device with that device number, if it has this file (a descriptor)."""
    if os.major(number) != MAJOR:
        return None
    with suppress(OSError):
        name = os.path.basename(os.readlink(f"/sys/dev/block/{MAJOR}:{os.minor(number)}"))
        with opened(f"/dev/{name}", os.O_RDONLY) as device:
            return name if _has(device, image) else None
    return None


def attach(image: int) -> tuple[str, int]:
    """The loop device of this file (a descriptor); a new one if it has none. Returns its name, and a descriptor that
    keeps it until it is mounted. Raises OSError, which says what is missing.
    """
    for name in sorted(os.listdir("/sys/block")):
        if name.startswith("loop") and os.path.exists(f"/sys/block/{name}/loop"):
            try:
                device = os.open(f"/dev/{name}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # one that nobody can open is not mounted for us either
            if _has(device, image):  # and it stays so while it is open
                return name, device
            os.close(device)
    return _new(image)


def _new(image: int) -> tuple[str, int]:
    info = _INFO.pack(0, 0, 0, 0, 0, 0, 0, 0, _AUTOCLEAR | _DIRECT_IO, b"", b"", b"", 0, 0)
    path = "/dev/loop-control"
    try:
        with opened(path, os.O_RDWR) as control:
            for _ in range(_TRIES):
                path = f"/dev/loop{fcntl.ioctl(control, _GET_FREE)}"
                device = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.ioctl(device, _CONFIGURE, _CONFIG.pack(image, 4096) + info + _UNUSED)
                except OSError as error:
                    os.close(device)
                    if error.errno != errno.EBUSY:
                        raise
                else:
                    return os.path.basename(path), device
    except OSError as error:
        raise OSError(error.errno, f"{path}: {error.strerror}") from None
    raise OSError(errno.EBUSY, "no free loop device")


def _has(device: int, image: int) -> bool:
    if not stat.S_ISBLK(os.fstat(device).st_mode):
        return False
    try:
        said = fcntl.ioctl(device, _GET_STATUS64, bytes(_INFO.size))
    except OSError:
        return False  # it has none
    of_file = os.fstat(image)
    return _INFO.unpack(said)[:2] == (of_file.st_dev, of_file.st_ino)

"""State directories whose workdirs get file systems of their own; nothing stays mounted, and no loop device is left.

They are not among pytest's own folders: one of a run that was killed is cleaned up by the next run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from goondan.toolhost.launcher import sized, syscalls

_PREFIX: Final = "gdn-sized-"
#: What the kernel may take to clear a loop device that nobody uses any more (seconds).
_PATIENCE_S: Final = 10.0


def folder_of(folder: Path) -> int:
    """As the tool host hands it to the launcher."""
    return os.open(folder, os.O_PATH | os.O_DIRECTORY)


@pytest.fixture(scope="session")
def sized_host() -> None:
    """Skips where no such file system can be made."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        if not os.path.exists(f"/proc/{left.name.split('-')[2]}"):
            _remove(left)
    with _folder() as folder:
        fd = folder_of(folder)
        try:
            held = sized.check(fd)
        finally:
            os.close(fd)
    if held["state"] != "sized":
        pytest.skip(f"no sized file systems here: {held['why']}")


@pytest.fixture
def state(sized_host: None) -> Iterator[Path]:
    """Empty. Whatever is mounted below it is unmounted at the end."""
    with _folder() as folder:
        yield folder
    assert is_released(folder)


@pytest.fixture
def small_disk(sized_host: None) -> Iterator[Path]:
    """The same on a disk of 96 MiB."""
    with _folder() as folder:
        made = folder / "disk"
        made.mkdir()
        syscalls.mount_tmpfs(str(made), "size=96m,mode=0700")
        yield made


@contextmanager
def _folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    try:
        yield made
    finally:
        _remove(made)


def _remove(folder: Path) -> None:
    for point in reversed(mounts(folder)):
        if (Path(point).parent / "workspace.ext4").exists():
            syscalls.unmount(point)
        else:  # a loop device that others' jails hold (see is_released) keeps the disk of its file
            subprocess.run(["umount", "--lazy", point], check=True)
    shutil.rmtree(folder)


def mounts(folder: Path) -> list[str]:
    """What is mounted below it."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in points if point.startswith(f"{folder}/")]


def loops(folder: Path) -> list[str]:
    """The files below it that have a loop device."""
    found = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):  # it has gone meanwhile
            found.append(path.read_text().strip().removesuffix(" (deleted)"))
    return [file for file in found if file.startswith(f"{folder}/")]


def is_released(folder: Path) -> bool:
    """Whether no file below it has a loop device, but for those that others' jails on this machine still hold: they
    began meanwhile, and where mounts are not shared between namespaces they have copies of all.
    """
    until = time.monotonic() + _PATIENCE_S
    while loops(folder):
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended meanwhile
                elsewhere = not os.path.samefile(process / "ns/mnt", "/proc/self/ns/mnt")
                if elsewhere and str(folder) in (process / "mountinfo").read_text():
                    return True
        if time.monotonic() > until:
            return False
        time.sleep(0.01)  # the kernel clears a device beside the unmount that has let it go, and tells nobody
    return True


def instance(state: Path, key: str = "k1") -> Path:
    """The folder of an instance, whose workdir is `workspace` in it."""
    return state / "instances" / "coder" / key

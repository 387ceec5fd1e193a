"""A state directory whose workdirs get file systems of their own; nothing stays mounted, and no loop device is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from toolhost.launcher import calls, sized


def folder_of(folder: Path) -> int:
    """As the tool host hands it to the launcher."""
    return os.open(folder, os.O_PATH | os.O_DIRECTORY)


@pytest.fixture(scope="session")
def sized_host(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where no such file system can be made."""
    folder = tmp_path_factory.mktemp("can")
    fd = folder_of(folder)
    try:
        held = sized.check(fd)
    finally:
        os.close(fd)
    if held["state"] != "sized":
        pytest.skip(f"no sized file systems here: {held['why']}")


@pytest.fixture
def state(sized_host: None, tmp_path: Path) -> Iterator[Path]:
    """Empty. Whatever is mounted below it is unmounted at the end."""
    made = tmp_path / "state"
    made.mkdir(mode=0o700)
    try:
        yield made
    finally:
        for point in mounts(made):
            calls.unmount(point)
        assert is_released(made)


def mounts(folder: Path) -> list[str]:
    """What is mounted below it."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in points if point.startswith(f"{folder}/")]


def loops(folder: Path) -> list[str]:
    """The files below it that have a loop device."""
    files = (path.read_text().strip() for path in Path("/sys/block").glob("loop*/loop/backing_file"))
    return [file for file in files if file.startswith(f"{folder}/")]


def is_released(folder: Path) -> bool:
    """Whether no file below it has a loop device, but for those that others' jails on this machine still hold: they
    began meanwhile, and where mounts are not shared between namespaces they have copies of all.
    """
    if not loops(folder):
        return True
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            elsewhere = not os.path.samefile(process / "ns/mnt", "/proc/self/ns/mnt")
            if elsewhere and str(folder) in (process / "mountinfo").read_text():
                return True
    return not loops(folder)


def instance(state: Path, key: str = "k1") -> Path:
    """The folder of an instance, whose workdir is `workspace` in it."""
    return state / "instances" / "coder" / key

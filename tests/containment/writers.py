"""Handlers that fill the workdir in every way there is, by several processes at once, until they are stopped. Imported
by no test; it is the source of a tool.
"""

import mmap
import os
import time
from collections.abc import Callable
from typing import Any

#: What one file gets, below the limit of files' sizes (bytes), and what most of these write at once.
FILE = 32 << 20
BLOCK = 1 << 20


def opened(name: str, flags: int = 0) -> int:
    return os.open(name, os.O_CREAT | os.O_RDWR | flags, 0o644)


def plain(name: str) -> None:
    fd, block = opened(name), b"x" * BLOCK
    for _ in range(FILE // BLOCK):
        os.write(fd, block)
    os.close(fd)


def small(name: str) -> None:
    """Many files of a few KiB, so that a walk takes long."""
    os.mkdir(name)
    for number in range(100):
        fd = opened(f"{name}/{number}")
        os.write(fd, b"x" * (256 << 10))
        os.close(fd)


def at_once(name: str) -> None:
    """One call that writes a whole file: no signal but SIGKILL ends it early."""
    fd = opened(name)
    os.write(fd, b"x" * FILE)
    os.close(fd)


def vector(name: str) -> None:
    """The same from one small buffer, over and over."""
    fd = opened(name)
    os.writev(fd, [memoryview(b"x" * (64 << 10))] * (FILE >> 16))
    os.close(fd)


kept: list[Any] = []


def nameless(name: str) -> None:
    fd, block = opened(name), b"x" * BLOCK
    os.unlink(name)
    for _ in range(FILE // BLOCK):
        os.write(fd, block)
    kept.append(fd)


def mapped(name: str) -> None:
    """Pages of a mapping, one byte of each."""
    fd = opened(name)
    os.ftruncate(fd, FILE)
    with mmap.mmap(fd, FILE) as pages:
        pages[:: mmap.PAGESIZE] = b"x" * (FILE // mmap.PAGESIZE)
    os.close(fd)


def sparse(name: str) -> None:
    """One byte of each block, as a library does that may not allocate."""
    fd = opened(name)
    for at in range(0, FILE, 4096):
        os.pwrite(fd, b"x", at)
    os.close(fd)


def source() -> int:
    """A file to copy from, in memory."""
    if not kept:
        kept.append(os.memfd_create("source"))
        os.write(kept[0], b"x" * BLOCK)
    return int(kept[0])


def sendfile(name: str) -> None:
    fd = opened(name)
    for _ in range(FILE // BLOCK):
        os.sendfile(fd, source(), 0, BLOCK)
    os.close(fd)


def splice(name: str) -> None:
    reading, writing = os.pipe()
    fd = opened(name)
    for _ in range(FILE >> 16):
        os.write(writing, b"x" * (1 << 16))
        os.splice(reading, fd, 1 << 16)
    for each in (reading, writing, fd):
        os.close(each)


def copied(name: str) -> None:
    """Within the file system, from one file to the next."""
    if not kept:
        plain(f"{name}-source")
        kept.append(opened(f"{name}-source"))
    fd = opened(name)
    os.copy_file_range(kept[0], fd, FILE, 0, 0)
    os.close(fd)


def direct(name: str) -> None:
    """Past the page cache."""
    fd = opened(name, os.O_DIRECT)
    with mmap.mmap(-1, BLOCK) as block:  # aligned
        for _ in range(FILE // BLOCK):
            os.write(fd, block)
    os.close(fd)


KINDS: dict[str, Callable[[str], None]] = {
    each.__name__: each
    for each in (plain, small, at_once, vector, nameless, mapped, sparse, sendfile, splice, copied, direct)
}


def fill(ctx: Any, input: dict[str, Any]) -> Any:
    """`kind` of KINDS by `writers` processes."""
    write = KINDS[input["kind"]]
    for writer in range(input["writers"]):
        if os.fork() == 0:
            try:
                for number in range(100_000):
                    write(f"{writer}-{number}")
            except BaseException as error:
                with open("/tmp/said", "w") as out:
                    out.write(f"{type(error).__name__}: {error}")
            finally:
                os._exit(1)
    while True:
        time.sleep(0.05)
        if os.path.exists("/tmp/said"):
            with open("/tmp/said") as said:
                raise OSError(said.read() or "failed")


def quiet(ctx: Any, input: dict[str, Any]) -> Any:
    return "here"


def little(ctx: Any, input: dict[str, Any]) -> Any:
    """20 MiB, written again and again for a second, with pauses: the longest (seconds) from one write to the next."""
    end = time.monotonic() + 1
    block, longest = b"x" * BLOCK, 0.0
    while (began := time.monotonic()) < end:
        for number in range(20):
            with open(f"little-{number}", "wb") as out:
                out.write(block)
            time.sleep(0.002)
        longest = max(longest, (time.monotonic() - began) / 20)
    return longest


handlers = {"fill": fill, "little": little}

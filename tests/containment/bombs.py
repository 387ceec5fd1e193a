"""Handlers that use up what they can get: one bomb of each kind. Imported by no test; it is the source of a tool."""

import mmap
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any


def quiet(ctx: Any, input: dict[str, Any]) -> Any:
    return "here"


def forks(ctx: Any, input: dict[str, Any]) -> Any:
    """Processes without end; each stays."""
    while True:
        try:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
        except BlockingIOError:
            if not input.get("stubborn"):
                raise
            time.sleep(0.01)


def threads(ctx: Any, input: dict[str, Any]) -> Any:
    """The same with threads."""
    import threading

    while True:
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()


def memory(ctx: Any, input: dict[str, Any]) -> Any:
    """One process that takes more and more; without its limit of data it is killed, with it an allocation fails."""
    kept = []
    while True:
        kept.append(bytearray(b"x") * (4 << 20))


def memory_of_many(ctx: Any, input: dict[str, Any]) -> Any:
    """Each takes less than one process may."""
    for _ in range(input.get("processes", 8)):
        if os.fork() == 0:
            kept = bytearray(b"x") * (input["mb"] << 20)
            time.sleep(60)
            os._exit(len(kept) & 1)
    time.sleep(60)


def shared_memory(ctx: Any, input: dict[str, Any]) -> Any:
    """Anonymous files in memory, which no process has mapped."""
    block = b"x" * (1 << 20)
    while True:
        fd = os.memfd_create("bomb")
        for _ in range(8):
            os.write(fd, block)


def mapped_memory(ctx: Any, input: dict[str, Any]) -> Any:
    """Memory that processes share, and no file shows."""
    kept = []
    while True:
        kept.append(mmap.mmap(-1, 8 << 20))
        kept[-1].write(b"x" * (8 << 20))


def private_files(ctx: Any, input: dict[str, Any]) -> Any:
    """The memory file systems that every jail has."""
    block = b"x" * (1 << 20)
    for folder in ("/dev/shm", "/tmp", os.environ["HOME"]):
        try:
            for number in range(10_000):
                with open(f"{folder}/{number}", "wb") as out:
                    out.write(block)
        except OSError as error:
            if error.errno != 28:  # no room: the next one
                raise
    kept = [bytearray(b"x") * (input["mb"] << 20)]
    time.sleep(60)
    return len(kept)


def socket_buffers(ctx: Any, input: dict[str, Any]) -> Any:
    """What was sent to nobody lies in the kernel's memory."""
    for _ in range(14):
        if os.fork() == 0:
            kept = []
            try:
                while True:
                    pair = socket.socketpair()
                    pair[0].setblocking(False)
                    kept.append(pair)
                    with suppress(BlockingIOError):
                        while True:
                            pair[0].send(b"x" * 65536)
            except OSError:
                time.sleep(60)
                os._exit(0)
    time.sleep(60)


def page_tables(ctx: Any, input: dict[str, Any]) -> Any:
    """Pages that were never written to are the kernel's one page of zeros, but each 2 MiB of them take a table."""
    for _ in range(6):
        if os.fork() == 0:
            room = mmap.mmap(
                -1, 16 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, mmap.PROT_READ
            )  # MAP_NORESERVE
            room.madvise(mmap.MADV_NOHUGEPAGE)
            for at in range(0, len(room), 2 << 20):
                room[at]
            time.sleep(60)
            os._exit(0)
    time.sleep(60)


def one_file(ctx: Any, input: dict[str, Any]) -> Any:
    """A file that grows until it may not."""
    with open("big", "wb", buffering=0) as out:
        while True:
            out.write(b"x" * (1 << 20))


def many_files(ctx: Any, input: dict[str, Any]) -> Any:
    """Files of a size that is allowed, by several writers."""
    for writer in range(input.get("writers", 4)):
        if os.fork() == 0:
            block = b"x" * (1 << 20)
            for number in range(100_000):
                with open(f"part-{writer}-{number}", "wb") as out:
                    for _ in range(8):
                        out.write(block)
            os._exit(0)
    time.sleep(60)


def allocated(ctx: Any, input: dict[str, Any]) -> Any:
    """Room on disk without a byte written."""
    for number in range(100_000):
        fd = os.open(f"a{number}", os.O_CREAT | os.O_WRONLY)
        os.posix_fallocate(fd, 0, 32 << 20)
        os.close(fd)


def nameless(ctx: Any, input: dict[str, Any]) -> Any:
    """Files without names: no walk over folders finds them."""
    kept = []
    block = b"x" * (1 << 20)
    while True:
        fd = os.open("gone", os.O_CREAT | os.O_RDWR)
        os.unlink("gone")
        for _ in range(32):
            os.write(fd, block)
        kept.append(fd)


def unnamed() -> int:
    """A new file without a name: not every file system knows O_TMPFILE."""
    name = f"gone-{os.getpid()}"
    fd = os.open(name, os.O_CREAT | os.O_RDWR)
    os.unlink(name)
    return fd


def send_off(fd: int) -> tuple[socket.socket, socket.socket]:
    """Its last descriptor lies in a socket from now on, until somebody receives it."""
    pair = socket.socketpair()
    socket.send_fds(pair[0], [b"x"], [fd])
    os.close(fd)
    return pair


def files_in_flight(ctx: Any, input: dict[str, Any]) -> Any:
    """Files without names, whose descriptors no process has."""
    kept = []
    block = b"x" * (1 << 20)
    for _ in range(input["mb"] // 8):
        fd = unnamed()
        for _ in range(8):
            os.write(fd, block)
        kept.append(send_off(fd))
    time.sleep(3)
    return len(kept)


def memory_in_flight(ctx: Any, input: dict[str, Any]) -> Any:
    """The same with files in memory; each pair of sockets lies in the next one."""
    block, inner = b"x" * (1 << 20), None
    for _ in range(input["mb"] // 8):
        fd = os.memfd_create("bomb")
        for _ in range(8):
            os.write(fd, block)
        pair = send_off(fd)
        if inner is not None:
            socket.send_fds(pair[0], [b"x"], [inner[0].fileno(), inner[1].fileno()])
            inner[0].close()
            inner[1].close()
        inner = pair
    time.sleep(3)
    return "done"


def without_first_thread(ctx: Any, input: dict[str, Any]) -> Any:
    """Memory, files in memory or nameless ones of processes whose first threads have ended before the others."""
    import ctypes
    import threading

    def fill() -> None:
        kept: list[Any] = []
        block = b"x" * (1 << 20)
        for _ in range(input["mb"] // 8):
            if input["kind"] == "memory":
                kept.append(bytearray(b"x") * (8 << 20))
                continue
            kept.append(unnamed() if input["kind"] == "disk" else os.memfd_create("bomb"))
            for _ in range(8):
                os.write(kept[-1], block)
        time.sleep(3)
        os._exit(len(kept) & 1)

    for _ in range(2):
        if os.fork() == 0:
            threading.Thread(target=fill).start()
            ctypes.CDLL(None).pthread_exit(None)
    time.sleep(3)
    return "done"


def passing(ctx: Any, input: dict[str, Any]) -> Any:
    """Two processes that pass a descriptor to and fro, until there is a file `done` in the folder: how often."""
    here, there = socket.socketpair()
    if os.fork() == 0:
        here.close()
        while True:
            _, fds, _, _ = socket.recv_fds(there, 1, 1)
            if not fds:
                os._exit(0)
            socket.send_fds(there, [b"x"], fds)
            os.close(fds[0])
    there.close()
    fd = unnamed()
    times = 0
    while not os.path.exists("done"):
        for _ in range(10):
            socket.send_fds(here, [b"x"], [fd])
            os.close(fd)
            fd = socket.recv_fds(here, 1, 1)[1][0]
            times += 1
    here.close()
    os.wait()
    return times


def writing(ctx: Any, input: dict[str, Any]) -> Any:
    """One file, written again and again."""
    block = b"x" * (1 << 20)
    for _ in range(input["mb"] // 16):
        with open("again", "wb") as out:
            for _ in range(16):
                out.write(block)
        os.unlink("again")
    return "here"


def mapped_files(ctx: Any, input: dict[str, Any]) -> Any:
    """The same, held by a mapping alone."""
    kept = []
    while True:
        fd = os.open("gone", os.O_CREAT | os.O_RDWR)
        os.unlink("gone")
        os.ftruncate(fd, 16 << 20)
        kept.append(mmap.mmap(fd, 16 << 20))
        os.close(fd)
        kept[-1].write(b"x" * (16 << 20))


def deep_files(ctx: Any, input: dict[str, Any]) -> Any:
    """At the bottom of a tree that is deeper than anybody walks."""
    for _ in range(400):
        os.mkdir("d")
        os.chdir("d")
    return many_files(ctx, input)


def empty_files(ctx: Any, input: dict[str, Any]) -> Any:
    """Entries without contents."""
    for number in range(10_000_000):
        if number % 1000 == 0:
            os.mkdir(f"{number}")
        os.close(os.open(f"{number // 1000 * 1000}/{number}", os.O_CREAT | os.O_WRONLY))


def relay(ctx: Any, input: dict[str, Any]) -> Any:
    """Processor time by children that live for a few milliseconds each: whoever samples processes sees little of it."""
    if os.fork() > 0:
        time.sleep(60)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that nobody waits for them, and their time is nobody's
    while True:
        pid = os.fork()
        if pid == 0:
            end = time.process_time() + 0.004
            while time.process_time() < end:
                pass
            os._exit(0)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def spin(ctx: Any, input: dict[str, Any]) -> Any:
    while True:
        pass


def output(ctx: Any, input: dict[str, Any]) -> Any:
    """A result that is too large."""
    return "x" * (64 << 20)


def printing(ctx: Any, input: dict[str, Any]) -> Any:
    """Lines without end."""
    while True:
        sys.stdout.write("x" * 4096 + "\n")


def descriptors(ctx: Any, input: dict[str, Any]) -> Any:
    """Open files without end."""
    kept = []
    while True:
        kept.append(os.open("/dev/null", os.O_RDONLY))


def deaf(ctx: Any, input: dict[str, Any]) -> Any:
    """Ignores every request to end, and so do its children."""
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        os.fork()
    while True:
        with suppress(BaseException):
            time.sleep(60)


handlers = {name: value for name, value in list(globals().items()) if type(value) is type(quiet)}

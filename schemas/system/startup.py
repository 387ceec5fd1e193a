"""The steps that every process takes when it starts and is ready: name, parent, token, readiness.

Source: docs/design/processes.md section 1.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from goondan.schemas.system.users import TOOLHOST_UID
from goondan.schemas.wire import errors, frames

if TYPE_CHECKING:
    import argparse

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_GET_TID_ADDRESS: Final = 40
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
#: Blocks from this size on are mapped by themselves: glibc's own first value (bytes).
_MAPPED_BYTES: Final = 128 << 10
#: What trusted processes make is closed to everybody but their user.
PRIVATE_UMASK: Final = 0o077
#: The kernel keeps this many bytes of a thread's name.
_MAX_NAME: Final = 15
#: A token is some hundred bytes; more on the descriptor is no token.
_MAX_TOKEN: Final = 4096
#: Standard input, output and error are the descriptors up to this one.
_LAST_STREAM: Final = 2
#: How wide the help of a program is (characters).
_HELP_WIDTH: Final = 100

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int | bytes) -> None:
    # Pointers and numbers are both machine words; ctypes would pass a bare int as 32 bits.
    value = ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"prctl({option})")


def option_parser(module: str, description: str) -> argparse.ArgumentParser:
    """What reads the options of a program of ours, which is a module. Its help has one width everywhere: to ask the
    terminal for one, argparse imports shutil with all kinds of archives, at the first option and whether or not anybody
    wants help (3 ms).
    """
    import argparse

    layout = partial(argparse.HelpFormatter, width=_HELP_WIDTH)
    return argparse.ArgumentParser(prog=f"python -m {module}", description=description, formatter_class=layout)


def close_to_others() -> int:
    """From now on every file that this process makes is closed to other users, whatever mode it names. Returns the
    umask until now.

    Every trusted process of a kernel calls this: state and runtime files belong to one user only. Files for a person,
    and files that a jail makes, get the caller's umask instead. It is passed on to the start of jails.
    """
    return os.umask(PRIVATE_UMASK)


def set_process_name(name: str) -> None:
    """The name that ps and /proc/PID/comm show; cut to 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode("utf-8", "replace")[:_MAX_NAME])


def deny_dumps() -> None:
    """Be dumped and looked into by nobody but root; see `goondan.schemas.system.secrecy.close_memory`."""
    _prctl(_PR_SET_DUMPABLE, 0)


def become_subreaper() -> None:
    """Orphans among our descendants become our children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def thread_number_address() -> int:
    """Where the C library keeps the number of the main thread; 0 where the system does not tell."""
    address = ctypes.c_void_p()
    with suppress(OSError):
        _prctl(_PR_GET_TID_ADDRESS, ctypes.addressof(address))
    return address.value or 0


def keep_memory_steady() -> None:
    """Have the C library give back the memory of large payloads, and use one heap for all threads. Best called first.

    A large block is mapped separately. By itself the library raises the size of such blocks each time that one is
    freed, up to 32 MiB. Then large payloads leave holes in the heap, and the process never becomes smaller.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, 1)
        _libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        _libc.mallopt(_M_TRIM_THRESHOLD, _MAPPED_BYTES)


def die_with_parent(parent_pid: int | None) -> None:
    """Be killed when `parent_pid` ends; exits at once when it has ended already. None: started by hand, no parent.

    Call it from the main thread. The parent must have started this process from its own main thread: the signal is sent
    when the parent's thread ends.
    """
    if parent_pid is None:
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(f"parent process {parent_pid} is gone")


def admit_toolhost(path: str) -> None:
    """Make the user that tool hosts of root become the owner of a socket or a folder of ours, if we are root; its mode
    stays closed to all others.

    Root goes on using it. In a container that has no such number nothing happens: tool hosts stay root there.
    """
    if os.geteuid() == 0:
        with suppress(OSError):
            os.chown(path, TOOLHOST_UID, TOOLHOST_UID, follow_symlinks=False)


def raise_descriptor_limit(wanted: int) -> None:
    """Let this process and its children open so many descriptors, or as many as the system allows."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, wanted) if hard != resource.RLIM_INFINITY else wanted
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def report_ready(ready_fd: int | None) -> None:
    """Say once that this process is ready: a newline on `ready_fd`, then close it. None: nobody asked."""
    _report(ready_fd, b"\n")


def report_failure(ready_fd: int | None, error: frames.ErrorPayload) -> None:
    """Say why this process will never be ready: `{"error": {…}}` on `ready_fd`, then close it."""
    _report(ready_fd, msgspec.json.encode({"error": error}))


def _report(ready_fd: int | None, told: bytes) -> None:
    if ready_fd is None:
        return
    try:
        os.write(ready_fd, told)
    except BrokenPipeError:
        pass  # whoever asked has stopped waiting
    finally:
        os.close(ready_fd)


def read_token(token_fd: int | None, token_file: str | None) -> str:
    """The launch token, from a descriptor (read to its end and closed) or a file.

    A standard stream is replaced by /dev/null instead of being closed: libuv aborts when it has to close a descriptor
    with such a number, and the next one that is opened would have it.

    Raises GoondanError E_USAGE when neither is given or nothing can be read. The message never holds the token.
    """
    if token_fd is None and token_file is None:
        raise errors.fail("E_USAGE", "a token is needed: --token-fd or --token-file")
    try:
        with open(token_fd if token_fd is not None else str(token_file), "rb") as source:
            data = source.read(_MAX_TOKEN + 1)
        if token_fd is not None and token_fd <= _LAST_STREAM:
            null = os.open(os.devnull, os.O_RDWR)  # takes the number that has become free, if no lower one is
            if null != token_fd:
                os.dup2(null, token_fd)
                os.close(null)
    except OSError as error:
        raise errors.fail("E_USAGE", f"the token cannot be read: {error.strerror}") from None
    if not data.strip() or len(data) > _MAX_TOKEN or not data.isascii():
        raise errors.fail("E_USAGE", "what was given as token is none")
    return data.decode("ascii").strip()

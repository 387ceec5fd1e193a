"""System calls that Python has no function for: mounts by descriptor, user namespaces, keyrings, a sibling as child."""

from __future__ import annotations

import ctypes
import os
import signal
import struct

TYPE_CHECKING = False  # see allow_list.py
if TYPE_CHECKING:
    from typing import Final

# The same numbers on every machine from 424 on; the older ones differ.
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _PIDFD_GETFD, _MOUNT_SETATTR = 428, 429, 430, 431, 432, 438, 442
_OLD: Final = {
    "x86_64": {"clone": 56, "pivot_root": 155, "keyctl": 250, "perf_event_open": 298, "seccomp": 317},
    "aarch64": {"clone": 220, "pivot_root": 41, "keyctl": 219, "perf_event_open": 241, "seccomp": 277},
}

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000
_CLONE_PARENT: Final = 0x00008000
_PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, _PR_CAPBSET_READ, _PR_CAPBSET_DROP = 1, 4, 8, 23, 24
PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
_LINUX_CAPABILITY_VERSION_3: Final = 0x20080522
_SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC = 1, 1
#: struct sock_filter (bytes).
_INSTRUCTION: Final = 8
_KEYCTL_JOIN_SESSION_KEYRING: Final = 1

_AT_FDCWD: Final = -100
_AT_EMPTY_PATH: Final = 0x1000
_AT_RECURSIVE: Final = 0x8000
_OPEN_TREE_CLONE: Final = 1
_OPEN_TREE_CLOEXEC: Final = os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH: Final = 4
_MOUNT_ATTR_RDONLY: Final = 0x1
_MOUNT_ATTR_NOSUID: Final = 0x2
_MOUNT_ATTR_NODEV: Final = 0x4
_MOUNT_ATTR_IDMAP: Final = 0x00100000
# struct perf_event_attr: a software event, the clock of tasks; for all descendants, and without what only root may see.
_PERF_TYPE_SOFTWARE, _PERF_COUNT_SW_TASK_CLOCK, _PERF_ATTR_SIZE = 1, 1, 128
_PERF_INHERIT, _PERF_EXCLUDE_KERNEL, _PERF_EXCLUDE_HV = 1 << 1, 1 << 5, 1 << 6
_PERF_FLAG_FD_CLOEXEC: Final = 8
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_SLAVE = 2, 4, 4096, 16384, 1 << 19
_MNT_DETACH: Final = 2
_FSOPEN_CLOEXEC, _FSMOUNT_CLOEXEC, _FSCONFIG_SET_STRING, _FSCONFIG_CREATE = 1, 1, 1, 6
#: More than any kernel has; the last one is found by asking.
_CAPABILITIES: Final = 64

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _call(what: str, number: int, *arguments: int | bytes | None) -> int:
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _check(_libc.syscall(ctypes.c_long(number), *words), what)


def _old(name: str, *arguments: int | bytes | None) -> int:
    return _call(name, _OLD[os.uname().machine][name], *arguments)


def prctl(option: int, argument: int = 0, /) -> int:
    """Call prctl and return its answer. Raises OSError."""
    words = [ctypes.c_ulong(word) for word in (argument, 0, 0, 0)]
    return _check(_libc.prctl(option, *words), "prctl")


def sibling() -> int:
    """Fork a process whose parent is our own parent, so that our parent can wait for it. 0 in the new process.

    Only for a process with one thread that will exec or exit: the interpreter is not told.
    """
    flags = _CLONE_PARENT | signal.SIGCHLD
    return _old("clone", flags, 0, 0, 0, 0)


def child_in_user_namespace() -> int:
    """Fork a process in a user namespace of its own; 0 in the new process, which should only wait to be killed."""
    return _old("clone", CLONE_NEWUSER | signal.SIGCHLD, 0, 0, 0, 0)


def leave_mount_namespace() -> None:
    """Go into a mount namespace of our own. Mounts there do not show in the host's."""
    _check(_libc.unshare(CLONE_NEWNS), "unshare")
    _check(_libc.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None), "make / a slave")


def leave_network_namespace() -> None:
    """Go into a network namespace of our own. Its loopback interface is down."""
    _check(_libc.unshare(_CLONE_NEWNET), "unshare")


def mount_tmpfs(at: str, options: str) -> None:
    """Mount a file system in memory."""
    _check(_libc.mount(b"tmpfs", os.fsencode(at), b"tmpfs", _MS_NOSUID | _MS_NODEV, options.encode()), f"mount {at}")


def detached_tmpfs(options: dict[str, str]) -> int:
    """Make a file system in memory that is mounted nowhere. Returns a descriptor of its top folder."""
    context = _call("fsopen", _FSOPEN, b"tmpfs", _FSOPEN_CLOEXEC)
    try:
        for name, value in options.items():
            _call("fsconfig", _FSCONFIG, context, _FSCONFIG_SET_STRING, name.encode(), value.encode(), 0)
        _call("fsconfig", _FSCONFIG, context, _FSCONFIG_CREATE, None, None, 0)
        return _call("fsmount", _FSMOUNT, context, _FSMOUNT_CLOEXEC, _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV)
    finally:
        os.close(context)


def copy_tree(fd: int, *, recursive: bool) -> int:
    """A detached copy of the mount at `fd` (O_PATH) from there downwards, as a descriptor."""
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_EMPTY_PATH | (_AT_RECURSIVE if recursive else 0)
    return _call("open_tree", _OPEN_TREE, fd, b"", flags)


def set_attributes(tree: int, *, read_only: bool, user_namespace: int | None, recursive: bool) -> None:
    """Make a detached mount nosuid, nodev, perhaps read-only, and show its owners as a user namespace maps them."""
    attributes = _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV | (_MOUNT_ATTR_RDONLY if read_only else 0)
    if user_namespace is not None:
        attributes |= _MOUNT_ATTR_IDMAP
    # struct mount_attr: attr_set, attr_clr, propagation, userns_fd
    words = (attributes, 0, 0, user_namespace or 0)
    data = b"".join(word.to_bytes(8, "little") for word in words)
    flags = _AT_EMPTY_PATH | (_AT_RECURSIVE if recursive else 0)
    _call("mount_setattr", _MOUNT_SETATTR, tree, b"", flags, data, len(data))


def attach(tree: int, at: str) -> None:
    """Mount a detached mount at its place."""
    _call("move_mount", _MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(at), _MOVE_MOUNT_F_EMPTY_PATH)


def bind_to_itself(fd: int) -> None:
    """Make what is open there a mount of its own, with everything that is mounted below it."""
    at = f"/proc/self/fd/{fd}".encode()
    _check(_libc.mount(at, at, None, _MS_BIND | _MS_REC, None), "bind")


def change_root(folder: str) -> None:
    """Make a mount of this namespace its root. The old root is out of reach after that."""
    os.chdir(folder)
    _old("pivot_root", b".", b".")  # the old one lies on top of the new one
    _check(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")


def is_bounding(number: int) -> bool:
    """Whether programs that root executes from here have that capability."""
    return bool(_libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) == 1)  # refused for a number that the kernel lacks


def bound_capabilities(kept: tuple[int, ...]) -> None:
    """Let programs that root executes from now on have these capabilities at most."""
    for number in range(_CAPABILITIES):
        if number not in kept and is_bounding(number):
            prctl(_PR_CAPBSET_DROP, number)


def die_with_parent() -> None:
    """Be killed when our parent ends."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def permitted_capabilities() -> int:
    """The capabilities that this process may have, of the first 32, as bits."""
    held = ctypes.create_string_buffer(24)
    _check(_libc.capget(struct.pack("=Ii", _LINUX_CAPABILITY_VERSION_3, 0), held), "capget")
    return int(struct.unpack("=6I", held.raw)[1])


def keep_capabilities(kept: int) -> None:
    """Keep these of the first 32 capabilities (bits) and no others, and no ambient or inheritable ones."""
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = struct.pack("=Ii", _LINUX_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, struct.pack("=6I", kept, kept, 0, 0, 0, 0)), "capset")


def install_filter(program: bytes) -> None:
    """Put a system call filter (an array of struct sock_filter) on this process and all of its threads."""
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxQ", len(program) // _INSTRUCTION, ctypes.addressof(buffer))
    _old("seccomp", _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC, header)


def clock_of(pid: int) -> int:
    """A descriptor that counts the processor time (nanoseconds, 8 bytes) of a process and of all that it starts later.

    Raises OSError where the kernel refuses it.
    """
    words = _PERF_TYPE_SOFTWARE | _PERF_ATTR_SIZE << 32, _PERF_COUNT_SW_TASK_CLOCK, 0, 0, 0
    flags = _PERF_INHERIT | _PERF_EXCLUDE_KERNEL | _PERF_EXCLUDE_HV
    attributes = b"".join(word.to_bytes(8, "little") for word in (*words, flags)).ljust(_PERF_ATTR_SIZE, b"\0")
    return _old("perf_event_open", attributes, pid, -1, -1, _PERF_FLAG_FD_CLOEXEC)


def fresh_session_keyring() -> None:
    """Leave the session keyring of the process that started us. A Linux kernel without keyrings has none to leave."""
    try:
        _old("keyctl", _KEYCTL_JOIN_SESSION_KEYRING, None)
    except OSError:
        return  # not built in, refused by a container's filter, or the quota of keys is used up


def copy_of(pidfd: int, number: int) -> int:
    """A copy of a descriptor of another process."""
    return _call("pidfd_getfd", _PIDFD_GETFD, pidfd, number, 0)

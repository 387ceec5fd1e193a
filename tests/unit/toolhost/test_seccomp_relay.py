"""The egress proxy's filter, run in an interpreter: what it needs is there, what a hijacked one would want is not."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from goondan.toolhost.policy.seccomp import ARCHITECTURES, NUMBERS, Machine, own_program
from tests.unit.toolhost.bpf_machine import load, run, verdict

MACHINES: tuple[Machine, ...] = ("x86_64", "aarch64")
FILTERS = {machine: load(own_program("relay", machine)) for machine in MACHINES}
ANYTHING = 0x7FFF1234
THREAD = 0x3D0F00  # what libc starts one with

pytestmark = pytest.mark.parametrize("machine", MACHINES)


def ask(machine: Machine, name: str, *args: int) -> int:
    """The errno that the call fails with, 0 when it is let through."""
    return verdict(run(FILTERS[machine], NUMBERS[machine][name], args, ARCHITECTURES[machine]))


def test_what_it_needs(machine: Machine) -> None:
    for name in ("recvmsg", "sendmsg", "connect", "accept4", "epoll_ctl", "futex", "listen", "getrandom", "sendmmsg"):
        assert ask(machine, name) == 0
    assert ask(machine, "openat", ANYTHING, ANYTHING, os.O_RDONLY | os.O_CLOEXEC) == 0
    assert ask(machine, "clone", THREAD) == 0
    assert ask(machine, "mmap", 0, 4096, 5, 2, 3) == 0  # a library's code, from its file
    assert ask(machine, "mprotect", 0, 4096, 1) == 0
    for family in (socket.AF_INET, socket.AF_INET6):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC):
            assert ask(machine, "socket", family, kind) == 0
    assert ask(machine, "socketpair", socket.AF_UNIX, socket.SOCK_STREAM) == 0


@pytest.mark.parametrize(
    "name",
    [
        "execve", "execveat", "kill", "tgkill", "ptrace", "process_vm_readv", "pidfd_open", "unlinkat", "mkdirat",
        "renameat2", "fchmodat", "fchownat", "ftruncate", "pwrite64", "mount", "unshare", "setns", "bpf",
        "io_uring_setup", "setresuid", "setuid", "capset", "memfd_create", "perf_event_open", "keyctl", "clone3",
        "openat2", "wait4",
    ],
)  # fmt: skip
def test_what_does_not_exist_for_it(machine: Machine, name: str) -> None:
    assert ask(machine, name) == errno.ENOSYS


def test_what_is_refused(machine: Machine) -> None:
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_TMPFILE | os.O_RDWR, os.O_CREAT | os.O_CLOEXEC):
        assert ask(machine, "openat", ANYTHING, ANYTHING, flags) == errno.EACCES
    assert ask(machine, "clone", 17) == errno.EPERM  # a process of its own
    assert ask(machine, "clone", THREAD | 0x10000000) == errno.EPERM
    assert ask(machine, "mmap", 0, 4096, 7, 2, 3) == errno.EPERM
    assert ask(machine, "mmap", 0, 4096, 5, 0x22, -1) == errno.EPERM
    assert ask(machine, "mprotect", 0, 4096, 5) == errno.EPERM
    assert ask(machine, "ioctl", 0, 0x5412) == errno.EPERM
    assert ask(machine, "prctl", 4) == errno.EPERM
    assert ask(machine, "prlimit64", 0, 7, ANYTHING) == errno.EPERM
    for family, kind in ((1, 1), (2, 3), (17, 3), (16, 3 | 1 << 4), (40, 1), (38, 5)):
        expected = errno.EAFNOSUPPORT if (family, kind) != (16, 3 | 1 << 4) else 0
        assert ask(machine, "socket", family, kind) == expected
    assert ask(machine, "socket", socket.AF_NETLINK, socket.SOCK_RAW, 12) == errno.EAFNOSUPPORT

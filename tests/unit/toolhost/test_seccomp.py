"""The system call filter, run in an interpreter: every rule, on both machines, with and without a granted network."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.toolhost.policy.seccomp import (
    ALLOWED,
    ARCHITECTURES,
    NO_ATTRIBUTES,
    NUMBERS,
    REFUSED,
    RET_KILL_PROCESS,
    Machine,
    program,
    rules,
)
from tests.unit.toolhost.bpf_machine import load, run, verdict

MACHINES: tuple[Machine, ...] = ("x86_64", "aarch64")
FILTERS = {(m, sockets): load(program(m, sockets=sockets)) for m in MACHINES for sockets in (False, True)}
#: Calls that only the older machine has.
OLD = {
    "access", "alarm", "arch_prctl", "chmod", "chown", "creat", "dup2", "epoll_create", "epoll_wait", "eventfd", "fork",
    "futimesat", "getdents", "getpgrp", "inotify_init", "lchown", "link", "lstat", "mkdir", "mknod", "open", "pause",
    "pipe", "poll", "readlink", "rename", "rmdir", "select", "signalfd", "stat", "symlink", "time", "unlink", "utime",
    "utimes", "vfork",
}  # fmt: skip

pytestmark = pytest.mark.parametrize("machine", MACHINES)


def ask(machine: Machine, name: str, *args: int, sockets: bool = False) -> int:
    """The errno that the call fails with, 0 when it is let through."""
    number = NUMBERS[machine][name]
    return verdict(run(FILTERS[machine, sockets], number, args, ARCHITECTURES[machine]))


def has(machine: Machine, name: str) -> bool:
    return name in NUMBERS[machine]


def test_a_machine_has_every_call_that_is_named(machine: Machine) -> None:
    missing = {name for name in rules(sockets=True) if not has(machine, name)}
    assert missing == (set() if machine == "x86_64" else OLD)


def test_numbers_are_those_of_this_system(machine: Machine) -> None:
    headers = {"x86_64": "x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "aarch64-linux-gnu/asm/unistd_64.h"}
    header = Path("/usr/include", headers[machine])
    if not header.exists():
        pytest.skip("the kernel's headers are not installed")
    theirs = dict(re.findall(r"#define __NR_(\w+)\s+(\d+)", header.read_text()))
    known = {name: number for name, number in NUMBERS[machine].items() if name in theirs}
    assert len(known) > 200
    assert known == {name: int(theirs[name]) for name in known}
    assert len(set(NUMBERS[machine].values())) == len(NUMBERS[machine])


def test_what_programs_need_is_allowed(machine: Machine) -> None:
    conditional = set(rules(sockets=False)) - set(ALLOWED)
    for name in ALLOWED:
        assert name not in conditional
        if has(machine, name):
            assert ask(machine, name) == ask(machine, name, sockets=True) == 0, name


@given(number=st.integers(-(2**31), 2**31 - 1), argument=st.integers(0, 2**64 - 1))
def test_unknown_calls_do_not_exist(machine: Machine, number: int, argument: int) -> None:
    if number in NUMBERS[machine].values():
        return
    returned = run(FILTERS[machine, True], number, (argument,) * 6, ARCHITECTURES[machine])
    assert verdict(returned) == errno.ENOSYS


def test_every_number_that_the_kernel_could_have_is_judged(machine: Machine) -> None:
    named = {number: name for name, number in NUMBERS[machine].items()}
    wanted = rules(sockets=False)
    for number in range(-1, 1024):
        name = named.get(number)
        found = verdict(run(FILTERS[machine, False], number, (), ARCHITECTURES[machine]))
        if name is None or name not in wanted:
            assert found == errno.ENOSYS, number
    # the second table of numbers on x86_64 (x32) has the same calls once more
    assert verdict(run(FILTERS[machine, True], 0x40000000, (), ARCHITECTURES[machine])) == errno.ENOSYS


def test_another_architectures_calls_end_the_process(machine: Machine) -> None:
    for other in (0x40000003, 0x40000028, *(value for name, value in ARCHITECTURES.items() if name != machine)):
        assert run(FILTERS[machine, False], 0, (), other) == RET_KILL_PROCESS


@pytest.mark.parametrize("name", ["clone3", "openat2"])
def test_calls_with_their_arguments_in_memory_do_not_exist(machine: Machine, name: str) -> None:
    assert ask(machine, name) == errno.ENOSYS


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name(machine: Machine, kind: str) -> None:
    for name in REFUSED[kind]:
        assert ask(machine, name) == ask(machine, name, 0, 1, 2, sockets=True) == errno.EPERM, name


def test_extended_attributes_are_not_supported(machine: Machine) -> None:
    assert {ask(machine, name) for name in NO_ATTRIBUTES} == {errno.EOPNOTSUPP}


def test_room_on_disk_is_taken_by_writing_alone(machine: Machine) -> None:
    """posix_fallocate writes where the file system says so; whatever mode is asked for."""
    assert {ask(machine, "fallocate", 3, mode) for mode in (0, 1, 0x10)} == {errno.EOPNOTSUPP}


#: Modes of files that get an error, and that pass: set-id bits; devices.
SET_ID = (0o4755, 0o2755, 0o6000, 0o104755, 0x1_0000_0000 | 0o4000), (0o755, 0o1777, 0, 0x4000_0000_0000_0000)
NODES = (0o104755, 0o102755, 0o4755, 0o20666, 0o60666, 0x1_0000_0000 | 0o60600), (0o100644, 0o10644, 0o140755, 0o644)
#: Calls that are judged by one argument: how many are before it, the error, what gets it, what passes.
JUDGED = {
    **{name: (at, errno.EPERM, *SET_ID) for name, at in {"chmod": 1, "fchmod": 1, "fchmodat": 2, "creat": 1}.items()},
    "fchmodat2": (2, errno.EPERM, *SET_ID),
    "mknod": (1, errno.EPERM, *NODES),
    "mknodat": (2, errno.EPERM, *NODES),
    # Nobody keeps others from their files: F_SETLEASE, F_NOTIFY, F_SETDELEG.
    "fcntl": (1, errno.EINVAL, (1024, 1026, 1040, 0xFFFFFFFF_00000400), (*range(17), 1025, *range(1030, 1035))),
    # No device is left where something was: RENAME_WHITEOUT.
    "renameat2": (4, errno.EINVAL, (4, 5, 0x1_0000_0004), (0, 1, 2)),
    # Nobody types into a terminal. TCGETS, TIOCGWINSZ, FIONREAD and FIOCLEX pass.
    "ioctl": (1, errno.EPERM, (0x5412, 0x541C, 0x5423, 0x541D, 0xFFFFFFFF_00005412), (0x5401, 0x5413, 0x541B, 0x5451)),
    # A personality can be asked for, and no more.
    "personality": (0, errno.EPERM, (0x400000, 0x40000, 8, 0xFFFFFFFE), (0xFFFFFFFF, 0)),
    "prctl": (0, errno.EINVAL, (22, 24, 28, 35, 59, 0x59616D61, 999), (1, 4, 15, 36, 38)),
}


@pytest.mark.parametrize("name", JUDGED)
def test_one_argument_decides(machine: Machine, name: str) -> None:
    at, error, refused, passed = JUDGED[name]
    if has(machine, name):
        assert {ask(machine, name, *(7,) * at, value) for value in refused} == {error}
        assert {ask(machine, name, *(7,) * at, value) for value in passed} == {0}


@pytest.mark.parametrize(("name", "at"), [("open", 1), ("openat", 2)])
def test_set_id_bits_of_new_files_are_refused(machine: Machine, name: str, at: int) -> None:
    if not has(machine, name):
        return
    before = (7,) * at
    for flags in (0o100, 0o100 | 0o2, 0o20000000, 0o20200000, 0o101 | 0o2000000, 0x1_0000_0000 | 0o100):
        assert ask(machine, name, *before, flags, 0o4755) == errno.EPERM
        assert ask(machine, name, *before, flags, 0o2700) == errno.EPERM
        assert ask(machine, name, *before, flags, 0o777) == 0
    assert ask(machine, name, *before, 0o2, 0o4755) == 0  # no file is made, so nothing reads the mode


def test_clone_makes_no_namespaces(machine: Machine) -> None:
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert ask(machine, "clone", flag) == ask(machine, "clone", flag | 17) == errno.EPERM
    assert ask(machine, "clone", 0x8000 | 17) == errno.EPERM  # CLONE_PARENT
    assert ask(machine, "clone", 17) == 0  # fork
    assert ask(machine, "clone", 0x3D0F00) == 0  # a thread
    assert ask(machine, "clone", 0x4000 | 0x100 | 17) == 0  # vfork, as posix_spawn makes it


USES = ("connect", "bind", "listen", "accept", "accept4")


def test_no_sockets_without_a_network(machine: Machine) -> None:
    for family in range(64):
        for kind in (1, 2, 3, 5, 0x80801):
            assert ask(machine, "socket", family, kind) == errno.EPERM
    assert {ask(machine, name, 3) for name in USES} == {errno.EPERM}
    for kind in (1, 5, 1 | 0o2000000, 1 | 0o4000):
        assert ask(machine, "socketpair", 1, kind) == 0
    assert ask(machine, "socketpair", 1, 2) == errno.EPERM  # could be connected to another one
    assert {ask(machine, "socketpair", family, 1) for family in (2, 10, 16, 30, 40)} == {errno.EPERM}


def test_some_sockets_with_a_network(machine: Machine) -> None:
    def socket(family: int, kind: int, protocol: int = 0) -> int:
        return ask(machine, "socket", family, kind, protocol, sockets=True)

    for family in (2, 10):
        for kind in (1, 2, 1 | 0o2004000):
            assert {socket(family, kind, protocol) for protocol in (0, 6, 17)} == {0}
            assert {socket(family, kind, protocol) for protocol in (1, 58, 132, 262)} == {errno.EPERM}
        assert {socket(family, kind) for kind in (3, 4, 5, 6, 10)} == {errno.EPERM}
    assert {socket(1, kind) for kind in (1, 2, 5, 0x80001)} == {errno.EPERM}  # a path may be a program's of the host
    assert {socket(16, 3, protocol) for protocol in range(1, 23)} == {errno.EPERM}
    assert socket(16, 3) == socket(16, 2) == 0  # NETLINK_ROUTE, for libc
    others = set(range(64)) - {1, 2, 10, 16}
    assert {socket(family, kind) for family in others for kind in (1, 2, 3, 5)} == {errno.EAFNOSUPPORT}
    assert socket(0x1_0000_0000 | 40, 1) == errno.EAFNOSUPPORT
    assert {ask(machine, name, 3, sockets=True) for name in USES} == {0}
    assert ask(machine, "socketpair", 1, 1, sockets=True) == 0
    assert ask(machine, "socketpair", 1, 2, sockets=True) == errno.EPERM
    assert ask(machine, "socketpair", 2, 1, sockets=True) == errno.EPERM


def test_a_fork_server_can_do_what_it_needs_and_all_that_its_calls_can(machine: Machine) -> None:
    for sockets in (False, True):
        usual, servers = rules(sockets=sockets), rules(sockets=sockets, server=True)
        changed = {name for name in usual if usual[name] != servers[name]}
        assert changed == {"clone", "mount", "prctl"}
        code = load(program(machine, sockets=sockets, server=True))

        def let_through(name: str, *args: int, code: list[tuple[int, int, int, int]] = code) -> bool:
            return verdict(run(code, NUMBERS[machine][name], args, ARCHITECTURES[machine])) == 0

        of_a_call = 0x20000000 | 0x00020000 | 0x08000000  # CLONE_NEWPID, NEWNS, NEWIPC
        assert let_through("clone", of_a_call | 17)
        assert let_through("clone", 17)
        for other in (0x10000000, 0x40000000, 0x04000000, 0x02000000, 0x8000):  # NEWUSER, NEWNET, NEWUTS, NEWCGROUP
            assert not let_through("clone", of_a_call | other | 17)
        assert let_through("mount", 0, 0, 0, 1 | 2 | 4 | 8)  # read-only, nosuid, nodev, noexec
        assert let_through("mount", 0, 0, 0, 4096 | 16384)  # a place shown elsewhere, with all in it
        for flag in (32, 8192, 1 << 17, 1 << 18, 1 << 19, 1 << 20):
            assert not let_through("mount", 0, 0, 0, 4096 | flag)
        assert let_through("prctl", 22)
        assert let_through("prctl", 24)
        assert not let_through("prctl", 28)  # PR_SET_SECUREBITS
        for name in ("unshare", "setns", "umount2", "pivot_root", "chroot", "ptrace", "open_tree", "move_mount"):
            assert not let_through(name)


def test_where_paths_and_processes_are_the_hosts_nothing_reaches_them_that_landlock_is_not_asked_about(
    machine: Machine,
) -> None:
    code = load(program(machine, sockets=False, bare=True))

    def found(name: str, *args: int) -> int:
        return verdict(run(code, NUMBERS[machine][name], args, ARCHITECTURES[machine]))

    usual, bare = rules(sockets=False), rules(sockets=False, bare=True)
    changed = {name for name in usual if usual[name] != bare[name]} - {"ioctl"}
    assert usual.keys() == bare.keys()
    # FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR, FS_IOC_ENABLE_VERITY, FICLONE; TIOCSTI as everywhere
    for command in (0x40086602, 0x401C5820, 0x40806685, 0x40049409, 0x5412, 0xFFFFFFFF_40086602):
        assert found("ioctl", 3, command) == errno.ENOTTY
    assert {found("ioctl", 3, command) for command in (0x5401, 0x5413, 0x541B, 0x5421, 0x5451)} == {0}
    for name in filter(lambda name: has(machine, name), changed):
        for args in ((7, 7, 7), (0x1_0000_0007, 7, 7), (0xFFFFFFFF, 0, 0)):
            assert found(name, *args) in (errno.EPERM, errno.EOPNOTSUPP), name
    for_itself = {name for name in changed if has(machine, name) and found(name, 0, 0) == 0}
    assert for_itself == {
        "prlimit64", "setpriority", "sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler",
    }  # fmt: skip
    assert {found("setpriority", which, who) for which, who in ((1, 0), (2, 0), (0, 7), (2, 7))} == {errno.EPERM}
    of_files = {name for name in changed if any(part in name for part in ("chmod", "chown", "utime", "xattr"))}
    assert of_files == {
        name for name in (*ALLOWED, "chmod", "fchmod", "fchmodat", "fchmodat2")
        if any(part in name for part in ("chmod", "chown", "utime", "xattr"))
    }  # fmt: skip
    assert changed - of_files - for_itself == {"inotify_add_watch"}

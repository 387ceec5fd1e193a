"""The filters of MCP workers and of their template, run in an interpreter."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from goondan.toolhost.launcher.allow_list import NotAllowed
from goondan.toolhost.launcher.program import _check_program
from goondan.toolhost.launcher.requests import AllowList, Run
from goondan.toolhost.policy.seccomp import ARCHITECTURES, NUMBERS, Machine, own_program
from tests.unit.toolhost.bpf_machine import load, run, verdict

MACHINES: tuple[Machine, ...] = ("x86_64", "aarch64")
WORKER = {machine: load(own_program("worker", machine)) for machine in MACHINES}
TEMPLATE = {machine: load(own_program("template", machine)) for machine in MACHINES}
ANYTHING = 0x7FFF1234
THREAD = 0x3D0F00  # what libc starts one with
FORK = 0x1200011  # what libc's fork asks for: CLONE_CHILD_SETTID, CLONE_CHILD_CLEARTID, SIGCHLD
PDEATHSIG, SET_SECCOMP = 1, 22


def ask(filters: dict[Machine, list[tuple[int, int, int, int]]], machine: Machine, name: str, *args: int) -> int:
    """The errno that the call fails with, 0 when it is let through."""
    return verdict(run(filters[machine], NUMBERS[machine][name], args, ARCHITECTURES[machine]))


@pytest.mark.parametrize("machine", MACHINES)
def test_neither_makes_a_socket_starts_a_program_or_touches_a_process(machine: Machine) -> None:
    for filters in (WORKER, TEMPLATE):
        for name in ("socket", "connect", "bind", "listen", "accept4", "sendmmsg"):
            assert ask(filters, machine, name, socket.AF_UNIX, socket.SOCK_STREAM) == errno.EPERM
        for name in ("execve", "kill", "tgkill", "ptrace", "process_vm_readv", "pidfd_send_signal", "pidfd_getfd"):
            assert ask(filters, machine, name) in (errno.ENOSYS, errno.EPERM), name
        for flags in (os.O_WRONLY, os.O_CREAT, os.O_RDWR | os.O_TMPFILE):
            assert ask(filters, machine, "openat", ANYTHING, ANYTHING, flags) == errno.EACCES
        assert ask(filters, machine, "socketpair", socket.AF_UNIX, socket.SOCK_STREAM) == 0
        for name in ("recvmsg", "sendmsg", "epoll_ctl", "getrandom", "futex"):
            assert ask(filters, machine, name) == 0


@pytest.mark.parametrize("machine", MACHINES)
def test_only_the_template_forks(machine: Machine) -> None:
    assert ask(TEMPLATE, machine, "clone", FORK) == 0
    assert ask(WORKER, machine, "clone", FORK) == errno.EPERM
    assert ask(WORKER, machine, "clone", THREAD) == 0
    for flags in (FORK | 0x10000000, FORK | 0x8000):  # a user namespace, a child of the tool host
        assert ask(TEMPLATE, machine, "clone", flags) == errno.EPERM
    for option in (PDEATHSIG, SET_SECCOMP):
        assert ask(TEMPLATE, machine, "prctl", option) == 0
        assert ask(WORKER, machine, "prctl", option) == errno.EPERM
    assert ask(TEMPLATE, machine, "pidfd_open") == 0
    assert ask(WORKER, machine, "pidfd_open") == errno.ENOSYS


ALLOWED: AllowList = {
    "user": 1, "jails": (100, 199), "instances": (300, 399), "stages": [], "closed": [], "top": [], "home": "",
    "enclosed": [], "filters": [], "groups": [], "beside": None, "guarded": [],
}  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ["mcp", "0"],
        ["mcp"],
        [],
        ["mcp", "99"],
        ["mcp", "100", "x"],
        ["mcp", "1"],
        ["150"],
        ["../mcp", "150"],
        ["", "150"],
    ],
)
def test_a_tool_host_cannot_have_the_template_run_as_somebody_else(arguments: list[str]) -> None:
    _check_program(Run(program="worker", arguments=["mcp", "150"]), ALLOWED)
    _check_program(Run(program="proxy", arguments=[]), ALLOWED)
    with pytest.raises(NotAllowed):
        _check_program(Run(program="worker", arguments=arguments), ALLOWED)
    with pytest.raises(NotAllowed):
        _check_program(Run(program="proxy", arguments=["150"]), ALLOWED)

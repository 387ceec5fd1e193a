"""What one supervisor hands over to the next: values through a memory file, and the exec itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import msgspec
import pytest

from goondan.kernel.grants.powers import OwnModel
from goondan.kernel.lock import KernelRecord
from goondan.kernel.premises import Held
from goondan.kernel.spawn import memory_file
from goondan.kernel.supervisor import handover as handovers
from goondan.kernel.supervisor.command_socket import Waiting
from goondan.kernel.supervisor.handover import Handover
from goondan.kernel.supervisor.options import Options, resuming
from tests.checks import refuses, there


def handed(fds: list[int]) -> Handover:
    record = KernelRecord(pid=1, bundle="/b", run_dir="/r", state_dir="/s", started_at="2026-01-01T00:00:00.000Z")
    held = Held(folder_fd=fds[0], lock_fd=fds[1], alive_fd=fds[2], run_dir_fd=fds[3], run_dir="/r", record=record)
    return Handover(
        held=held,
        listener_fd=fds[4],
        waiting=[Waiting(fd=fds[5], rest=b'{"op"', asked=b'{"op":"hold"}', holds=True)],
        plan=b"\x80",
        powers=[OwnModel()],
        plan_before=b"\x81",
        powers_before=[],
        reason="why",
        umask=0o022,
        started_at=1.5,
        restarts=3,
    )


def test_what_is_handed_over_arrives_as_it_was() -> None:
    given = handed([10, 11, 12, 13, 14, 15])
    assert handovers.read(memory_file("h", msgspec.msgpack.encode(given))) == given
    assert given.descriptors == [10, 11, 12, 13, 14, 15]


def test_who_stays_goes_on_with_what_ran() -> None:
    stayed = handovers.stay(handed([10, 11, 12, 13, 14, 15]), OSError(12, "no memory"))
    assert (stayed.plan, stayed.powers) == (b"\x81", [])
    assert there(stayed.error).code == "E_RESTART_FAILED"


def test_what_is_no_handover_is_said() -> None:
    with refuses("E_USAGE"):
        handovers.read(memory_file("h", b"\xc1"))


def test_an_exec_that_fails_leaves_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    fds = [os.memfd_create("x") for _ in range(6)]
    before = set(os.listdir("/proc/self/fd"))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    refused = handovers.execute(handed(fds), ["--bundle", "/b"], [])
    assert refused.errno == 2
    assert [os.get_inheritable(fd) for fd in fds] == [False, False, True, False, False, False]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    assert set(os.listdir("/proc/self/fd")) == before
    for fd in fds:
        os.close(fd)


def test_signals_wait_for_the_next_program() -> None:
    """SIGTERM at the moment of the exec ends nothing: it is pending in the new program, which is blocked for it."""
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(os.getcwd())!r})
from goondan.kernel import spawn
from goondan.kernel.supervisor import handover
from tests.unit.kernel.supervisor.test_handover import handed
spawn.command = lambda module, arguments: [sys.executable, "-c", {_NEXT!r}, *arguments]
fds = [os.memfd_create("x") for _ in range(6)]
execve = os.execve
def late(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    execve(*arguments)
os.execve = late
print(os.getpid(), flush=True)
handover.execute(handed(fds), [], [])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    pid, same, pending, opened = done.stdout.split()
    assert (done.returncode, pid, pending, opened) == (0, same, "True", "6"), done.stderr


_NEXT = """
import os, signal, sys, msgspec
print(os.getpid(), signal.SIGTERM in signal.sigpending())
with open(int(sys.argv[-1]), "rb") as source:
    given = msgspec.msgpack.decode(source.read())
fds = [given["held"][name] for name in ("folder_fd", "lock_fd", "alive_fd", "run_dir_fd")]
fds += [given["listener_fd"], given["waiting"][0]["fd"]]
print(sum(os.path.exists(f"/proc/self/fd/{fd}") for fd in fds))
"""


def test_the_next_command_line_has_what_was_granted_and_nothing_that_was_agreed_to() -> None:
    options = Options(
        bundle="/b", state_dir="/s", run_dir="/r", ready_fd=5, parent_fd=6, shared=True, allow_net=["a:1"],
        policy="/p", trust=True, agreed_fd=7, accept_loss=True,
    )  # fmt: skip
    assert resuming(options) == [
        *("--bundle", "/b", "--run-dir", "/r", "--parent-fd", "6", "--policy", "/p", "--shared", "--allow-net", "a:1")
    ]

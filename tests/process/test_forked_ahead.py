"""Programs that the supervisor forks before it knows anything: they get what an exec gives, and no more."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from goondan.kernel import ahead, lock, paths
from goondan.kernel.cli import EXIT_INTERRUPTED, attach, execute, supervisor_ahead
from goondan.kernel.cli.state import BundleTarget
from goondan.kernel.start import INSPECTION, SUPERVISOR
from tests.kernel_fixture import Sandbox, wait_until

#: A program, and a process that forks it ahead, starts it, and says how it ended.
PROGRAM = """\
import fcntl, json, os, signal, sys
def main():
    fds = [fd for fd in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{fd}")]
    inherited = [fd for fd in fds if os.get_inheritable(fd)]
    modes = [(fd, fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE) for fd in sorted(fds)]
    print(json.dumps([sys.argv, dict(os.environ), modes, inherited, os.getsid(0) == os.getpid(), os.getcwd(),
        [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))], signal.getsignal(signal.SIGHUP) is signal.SIG_DFL]))
    return 3
"""
PARENT = """\
import os, signal, sys
from goondan.kernel import ahead
sys.path.append(sys.argv[1])
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
stray = os.dup(0)
os.set_inheritable(stray, True)
forked = ahead.Ahead({"program": ["program"]})
(waiting,) = (int(pid) for pid in open("/proc/self/task/%d/children" % os.getpid()).read().split())
assert waiting in forked and os.getpid() not in forked
"""
START = """\
log = os.open(sys.argv[1] + "/log", os.O_CREAT | os.O_WRONLY)
read, write = os.pipe()
os.dup2(write, 47)
os.dup2(read, 131)
words, env = ["--word", os.fsdecode(b"w\\xff")], {"LANG": "C.UTF-8", "LC_ALL": os.fsdecode(b"\\xfe")}
pid = forked.start("program", words, env=env, output_fd=log, pass_fds=[131, 47])
assert pid == waiting
"""
#: What a fork does not take whole is no request, however much its socket holds.
TOO_LONG = """\
import socket
forked._waiting["program"][1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
more = {f"LC_{n}": "x" * 100_000 for n in range(3)}
"""
#: Where there is none, it is executed.
EXECUTED = """\
ahead.command = lambda module, words: [sys.executable, "-I", "-c", "import sys; sys.exit(len(sys.argv))", *words]
pid = forked.start("program", ["a", "b"], env={}, output_fd=2, pass_fds=[])
assert pid != waiting
"""
END = "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"


def run(folder: Path, *code: str) -> list[str]:
    (folder / "program.py").write_text(PROGRAM)
    program = [sys.executable, "-I", "-c", "".join((PARENT, *code)), str(folder)]
    environment = {"PATH": os.defpath, "KEY": "k"}
    return subprocess.run(program, capture_output=True, check=True, env=environment, text=True).stdout.split()


def test_one_has_what_an_exec_would_have_given_it(tmp_path: Path) -> None:
    assert run(tmp_path, START, END) == ["3"]
    argv, environment, fds, inherited, leads, folder, blocked, hangup = json.loads((tmp_path / "log").read_text())
    assert argv == ["program", "--word", "w\udcff"]
    assert environment == {"LANG": "C.UTF-8", "LC_ALL": "\udcfe"}
    assert [fd for fd, _ in fds] == [0, 1, 2, 47, 131]
    assert [mode for _, mode in fds[3:]] == [os.O_WRONLY, os.O_RDONLY]
    assert inherited == [0, 1, 2]
    assert (leads, folder, blocked, hangup) == (True, "/", [], True)


def test_one_that_is_not_needed_ends(tmp_path: Path) -> None:
    assert run(tmp_path, "forked.close(); pid = waiting\n", END) == ["0"]


def test_one_ends_with_its_parent(tmp_path: Path) -> None:
    (pid,) = run(tmp_path, "print(waiting, flush=True); os.kill(os.getpid(), signal.SIGTERM); os._exit(0)\n")
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


@pytest.mark.parametrize("gone", ["os.kill(waiting, 9); os.waitpid(waiting, 0)\n", "forked.close()\n"])
def test_a_program_of_which_none_waits_is_executed(tmp_path: Path, gone: str) -> None:
    assert run(tmp_path, gone, EXECUTED, END) == ["3"]


def test_a_program_with_more_than_a_fork_takes_is_executed(tmp_path: Path) -> None:
    assert run(tmp_path, TOO_LONG, EXECUTED.replace("env={}", "env=more"), END) == ["3"]


def test_a_second_start_is_an_exec(tmp_path: Path) -> None:
    assert run(tmp_path, START, EXECUTED, END) == ["3"]


def test_one_that_cannot_be_forked_is_executed(tmp_path: Path) -> None:
    no_fork = (
        "def no_fork(): raise BlockingIOError\nos.fork = no_fork; forked = ahead.Ahead({'program': ['program']})\n"
    )
    assert run(tmp_path, no_fork, EXECUTED, END) == ["3"]


def test_one_that_may_not_be_needed_imports_at_its_start(tmp_path: Path) -> None:
    later = "forked.close(); later = ahead.Ahead({'program': []})\n"
    start = START.replace("forked", "later").replace("== waiting", "!= waiting")
    assert run(tmp_path, later, start, END) == ["3"]
    unneeded = later.replace("program", "no_such_program") + "pid = later._waiting['no_such_program'][0]\n"
    assert run(tmp_path, unneeded, "later.close_unneeded()\n", END) == ["0"]


def test_what_is_forked_and_imported_before_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "Ahead", dict)
    always = {program: [program] for program in ahead.PROGRAMS}
    first = dict(ahead.fork_programs(str(tmp_path), soon=False))  # type: ignore[call-overload]
    assert first == always | {INSPECTION: []}
    locks = lock.lock(str(tmp_path))
    for fd in (locks.folder_fd, locks.lock_fd, locks.alive_fd):
        os.close(fd)
    again = dict(ahead.fork_programs(str(tmp_path), soon=True))  # type: ignore[call-overload]
    assert again == always | {ahead.FORK_SERVER: [ahead.AGENTS]}


def has(pid: int, word: bytes) -> bool:
    """Whether a process has a word in memory that it can write to."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for start, end in re.findall(r"^(\w+)-(\w+) rw.. \S+ \S+ \S+ +(?!\[vvar|/dev)", maps, re.M):
            memory.seek(int(start, 16))
            if word in memory.read(int(end, 16) - int(start, 16)):
                return True
    return False


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int | None]]:
    """Starts a supervisor for a command; its pid, or None if none was started."""
    (tmp_path / "goondan.yaml").write_text("")
    monkeypatch.setenv("GOONDAN_STATE_ROOT", str(tmp_path / "state"))

    def start() -> int | None:
        supervisor_ahead.start(str(tmp_path))
        return next((pid for pid, _ in supervisor_ahead._waiting), None)

    yield start
    supervisor_ahead.end()


def test_a_supervisor_that_a_command_does_not_take_ends_with_it(waiting: Callable[[], int | None]) -> None:
    pid = waiting()
    supervisor_ahead.end()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid or 0, 0)
    pid = waiting()
    supervisor_ahead._waiting.pop()[1].close()  # as when the command is killed
    assert os.waitpid(pid or 0, 0)[1] == 0


def test_a_supervisor_that_has_died_meanwhile_is_executed(
    waiting: Callable[[], int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = waiting()
    os.kill(pid or 0, signal.SIGKILL)
    os.waitpid(pid or 0, 0)
    monkeypatch.setattr(ahead, "start_program", lambda argv, **_: len(argv))
    assert supervisor_ahead.take().start(SUPERVISOR, ["word"], env={}, output_fd=2, pass_fds=()) == 5
    assert not supervisor_ahead._waiting


def test_where_a_kernel_has_a_record_or_there_is_no_bundle_no_supervisor_waits(
    waiting: Callable[[], int | None], tmp_path: Path
) -> None:
    folder = Path(paths.state_dir(str(tmp_path))) / paths.FOLDER
    folder.mkdir(parents=True)
    (folder / paths.RECORD).write_text("{}")
    assert waiting() is None
    (folder / paths.RECORD).unlink()
    (tmp_path / "goondan.yaml").unlink()
    supervisor_ahead.start(str(tmp_path / "goondan.yaml"))
    assert not supervisor_ahead._waiting


#: A supervisor that waits, and cannot import what it needs.
BROKEN = """\
import sys
from goondan.kernel.supervisor import __main__ as supervisor
def fails():
    raise ImportError("a library is broken")
supervisor.import_shared = fails
sys.argv = ["supervisor", supervisor.WAITS, sys.argv[1]]
sys.exit(supervisor.main())
"""


def test_why_one_that_waits_cannot_go_on_is_in_its_log(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        program = [sys.executable, "-I", "-c", BROKEN, str(theirs.fileno())]
        null = subprocess.DEVNULL
        process = subprocess.Popen(program, pass_fds=[theirs.fileno()], stdout=null, stderr=null)
    start = ahead.Ahead()
    start.add(SUPERVISOR, process.pid, ours.detach())
    with open(tmp_path / "log", "wb") as log:
        assert start.start(SUPERVISOR, [], env={}, output_fd=log.fileno(), pass_fds=()) == process.pid
    assert process.wait(20) == 1
    assert "a library is broken" in (tmp_path / "log").read_text()


def test_a_command_that_finds_a_kernel_after_all_keeps_no_supervisor(
    waiting: Callable[[], int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert waiting()
    monkeypatch.setattr(attach, "hold", lambda place: attach.Kernel(place, -1))
    attach.attach_or_start(BundleTarget("", ""), (), meanwhile=lambda: None)
    assert not supervisor_ahead._waiting


def test_a_signal_while_the_one_without_use_ends_is_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(supervisor_ahead, "end", interrupted)
    assert execute(["call", "bash__exec", "{}", "--bundle", str(tmp_path / "none.yaml")]) == EXIT_INTERRUPTED


@pytest.mark.skipif(os.geteuid() != 0, reason="their memory is closed to all but root")
def test_a_key_in_the_environment_of_a_kernel_is_in_no_other_process(kernel: Sandbox) -> None:
    kernel.env["SOME_KEY"] = "f4c1" + "-only-the-supervisor-" + "9ab2"
    started = kernel.popen("run", "--detach", forked=False)
    assert started.wait() == 0
    before = look_at(kernel)
    assert all(program.endswith(b"goondan.toolhost") is (role == "toolhost") for role, (_, program) in before.items())
    for role in ("broker", "toolhost", "forkserver"):
        os.kill(before[role][0], signal.SIGKILL)
    old = {pid for role, (pid, _) in before.items() if role != "supervisor"}
    wait_until(lambda: all(row["status"] == "running" and row["pid"] not in old for row in kernel.ps()))
    after = {role: program for role, (_, program) in look_at(kernel).items()}
    assert after.pop("supervisor") == SUPERVISOR.encode()  # it has waited for the command
    assert all(program.startswith(sys.executable.encode()) for program in after.values())
    assert kernel.call("echo here")["status"] == "ok"


def look_at(kernel: Sandbox) -> dict[str, tuple[int, bytes]]:
    """The pid and the first word of each program of a kernel, by role; each has a session of its own, and the
    supervisor alone has the key."""
    pids = {row["role"]: row["pid"] for row in kernel.ps()}
    for role, pid in pids.items():
        status = Path(f"/proc/{pid}/status").read_text()
        assert has(pid, kernel.env["SOME_KEY"].encode()) is (role == "supervisor"), role
        assert (f"PPid:\t{pids['supervisor']}\n" in status) is (role != "supervisor")
        assert f"NSsid:\t{pid}\n" in status
    return {role: (pid, Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]) for role, pid in pids.items()}

"""Keys and tokens stay in the memory of the processes that hold them: no core file, and no look by others of that user.

A caller whose shell allows cores starts everything here. The rights of other processes are tried, not looked up: a
process of the same user, and under root one without the power over others' memory, opens their files in /proc.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containment.ordinary_user import run_as_user
from tests.kernel_fixture import Sandbox, sandbox, wait_until

#: The kernel and who looks, as root: neither has CAP_SYS_PTRACE, with which every memory is open.
WITHOUT_POWER = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"] if os.geteuid() == 0 else []
#: Name in /proc -> whether others of the same user may look into it. docs/decisions/044 says why those that may.
OPEN = {
    "gdn-supervisor": False,
    "gdn-broker": False,
    "gdn-forksrv": True,
    "gdn-spare": True,
    "gdn-agent": False,
    "gdn-toolhost": False,
    "gdn-launcher": True,
}
#: The tool host's program, as far as it has started others: what they would get of the given descriptors.
BEFORE_OTHERS = """
import os, sys
from goondan.toolhost import __main__ as program

def start_others(*given, **more):
    print([os.get_inheritable(int(fd)) for fd in sys.argv[1:]])
    raise OSError("enough")

program.drop_privileges = start_others
program.main(["--endpoint", "ipc:///nobody", "--token-fd", sys.argv[1], "--env-fd", sys.argv[2]])
"""
#: A shell that allows cores starts what follows.
CORES = ["sh", "-c", 'ulimit -c "$(ulimit -H -c)"; exec "$@"', "sh"]
KEY = "sk-a-key-that-nobody-else-may-see"


@pytest.fixture(scope="module")
def running() -> Iterator[Sandbox]:
    """A kernel with an agent and a jail; its operator's environment holds a key."""
    with sandbox(extra_env={"OPENAI_API_KEY": KEY}) as made:
        start = [*CORES, *WITHOUT_POWER, sys.executable, "-I", "-m", "goondan.kernel.cli", "run", "--detach"]
        subprocess.run(start, env=made.env, cwd=made.home, check=True, stdout=subprocess.DEVNULL)
        assert made.gdn("send", '/bash__exec {"command": "true"}').status == 0
        wait_until(lambda: "gdn-spare" in named(made))  # the fork server has it a moment after the first agent
        yield made


def named(made: Sandbox) -> dict[str, int]:
    """A process of each kind."""
    found: dict[str, int] = {}
    for pid in made.processes():
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        if name.startswith("gdn-"):
            found.setdefault(name, pid)
    return found


def core_limits(pid: int) -> list[str]:
    """Soft and hard."""
    (line,) = [
        row for row in Path(f"/proc/{pid}/limits").read_text().splitlines() if row.startswith("Max core file size")
    ]
    return line.split()[4:6]


def can_look_into(pid: int) -> bool:
    """Whether another process of the same user may read what the process was started with, and what it has open."""
    code = "import os, sys; os.listdir(f'/proc/{sys.argv[1]}/fd'); os.readlink(f'/proc/{sys.argv[1]}/exe')"
    look = [*WITHOUT_POWER, sys.executable, "-I", "-S", "-c", code, str(pid)]
    done = subprocess.run(look, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or "PermissionError" in done.stderr, done.stderr
    return done.returncode == 0


def test_no_process_of_a_kernel_may_leave_a_core(running: Sandbox) -> None:
    wanted = set(OPEN) | ({"gdn-privileged"} if os.geteuid() == 0 else set())
    assert wanted <= set(named(running))
    for pid in running.processes():  # with all of a jail's, whose values may have been granted
        assert core_limits(pid) == ["0", "0"], Path(f"/proc/{pid}/comm").read_text()


def test_who_may_be_looked_into_is_as_written_down(running: Sandbox) -> None:
    def seen() -> dict[str, bool]:
        kinds = named(running)
        return {name: can_look_into(kinds[name]) for name in OPEN if name in kinds}

    wait_until(lambda: seen() == OPEN)  # a spare that was let go after the warm-up is closed for its last moment


def test_a_command_that_has_a_token_leaves_no_core_and_is_closed(running: Sandbox) -> None:
    talking = subprocess.Popen(
        [
            *(*CORES, *WITHOUT_POWER, sys.executable, "-I", "-m", "goondan.kernel.cli"),
            *("send", '/wait__seconds {"seconds": 20}'),
        ],
        env=running.env, cwd=running.home,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until(lambda: core_limits(talking.pid) == ["0", "0"])
        wait_until(lambda: not can_look_into(talking.pid))
    finally:
        talking.kill()
        talking.wait()


def test_it_can_still_see_what_it_needs_of_itself(short_tmp: Path) -> None:
    """A closed process reads its own files in /proc, also as an ordinary user."""
    code = (
        "import os\n"
        "from goondan.schemas.system.secrecy import close_memory\n"
        "close_memory()\n"
        "os.listdir('/proc/self/fd'), os.readlink('/proc/self/fd/1'), os.listdir('/proc/self/task')\n"
        "open(f'/proc/self/task/{os.getpid()}/children').read(), open('/proc/self/maps').read()\n"
        "fd = os.open('/', os.O_PATH)\n"
        "os.stat(f'/proc/self/fd/{fd}/etc'), os.close(os.open(f'/proc/self/fd/{fd}', os.O_RDONLY))\n"
        "os.stat('/proc/self/ns/net'), os.readlink('/proc/self/ns/user'), open('/proc/self/mounts').read()\n"
    )
    done = run_as_user(code, short_tmp)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("program", "number"),
    [
        ("supervisor", signal.SIGSEGV), ("broker", signal.SIGABRT), ("toolhost", signal.SIGSEGV),
        ("agent", signal.SIGABRT), ("forksrv", signal.SIGSEGV), ("gdn", signal.SIGABRT),
    ],
)  # fmt: skip
def test_a_crash_leaves_no_core(short_tmp: Path, kernel: Sandbox, program: str, number: signal.Signals) -> None:
    """Each by hand, as our child: so the system tells whether it has left one."""
    (short_tmp / "token").write_text(KEY)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = ["--endpoint", f"ipc://{short_tmp}/nobody.sock", "--token-file", str(short_tmp / "token")]
    words = {
        "supervisor": ["goondan.kernel.supervisor", "--bundle", str(kernel.bundle)],
        "broker": ["goondan.kernel.broker", "--bundle", str(kernel.bundle)],
        "toolhost": ["goondan.toolhost", *link],
        "agent": ["goondan.agentproc", *link],
        "forksrv": ["goondan.agentproc.start.forkserver", "--socket-fd", str(theirs.fileno())],
        "gdn": ["goondan.kernel.cli", "run"],
    }[program]
    with ours, theirs:
        process = subprocess.Popen(
            [*CORES, sys.executable, "-I", "-m", *words], env={**kernel.env, "OPENAI_API_KEY": KEY}, cwd=short_tmp,
            stdin=subprocess.PIPE, pass_fds=[theirs.fileno()],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert process.stdin is not None
        with process.stdin:
            if program == "gdn":
                wait_until(kernel.ps)  # it has started a kernel, and waits for what is typed
            else:
                wait_until(lambda: Path(f"/proc/{process.pid}/comm").read_text().strip() == f"gdn-{program}")
            process.send_signal(number)
            _, status = os.waitpid(process.pid, 0)
            process.returncode = -number
    assert os.WTERMSIG(status) == number
    assert not os.WCOREDUMP(status)
    assert [path.name for path in short_tmp.iterdir() if path.name.startswith("core")] == []
    kernel.wait_for_nothing()  # a kernel that `gdn` has started ends with it
    for left in kernel.run_dirs:  # a supervisor that has come so far leaves it to the next start
        shutil.rmtree(left)


def test_a_tool_host_passes_neither_token_nor_granted_values_on() -> None:
    (token, _), (granted, _) = pipes = os.pipe(), os.pipe()
    argv = [sys.executable, "-I", "-c", BEFORE_OTHERS, str(token), str(granted)]
    done = subprocess.run(argv, pass_fds=(token, granted), stdout=subprocess.PIPE, text=True)
    for end in (*pipes[0], *pipes[1]):
        os.close(end)
    assert done.stdout == "[False, False]\n"

"""A tool host that root has started, as whoever has taken it over: what is left to it, and what its helpers refuse."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from goondan.schemas.system.users import TOOLHOST_UID
from goondan.toolhost.policy.seccomp import NUMBERS

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root has powers to give up")

ROOT = Path(__file__).parents[2]

#: The real thing: what `python -m goondan.toolhost` does before its first jail. Then it answers one line each.
TAKEN_OVER = """
import ctypes, json, os, socket, sys, threading
from goondan.toolhost.drop_privileges import drop_privileges
powers, _ = drop_privileges()
powers.launcher.start()  # it does this when it is ready
libc = ctypes.CDLL(None, use_errno=True)

def call(number, *arguments):
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    done = libc.syscall(ctypes.c_long(number), *words)
    return f"done: {done}" if done >= 0 else os.strerror(ctypes.get_errno())

def attempt(action):
    try:
        return f"done: {action()}"
    except OSError as error:
        return error.strerror or str(error)

def ask(request, *fds):
    socket.send_fds(powers.launcher._channel, [json.dumps(request).encode()], list(fds))
    powers.launcher._channel.setblocking(True)
    return json.loads(powers.launcher._channel.recv(4096))

def answer():
    for line in sys.stdin:
        print(json.dumps(eval(line)), flush=True)

asking = threading.Thread(target=answer)  # what holds for the first thread holds for all
asking.start()
asking.join()
"""


class Taken:
    """A tool host that does what a test says."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def __call__(self, expression: str) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(expression.replace("\n", " ") + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@contextmanager
def taken_over(code: Path) -> Iterator[Taken]:
    """One whose own code is there."""
    process = subprocess.Popen(
        [sys.executable, "-c", TAKEN_OVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=code
    )
    with process:
        yield Taken(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0


@pytest.fixture(scope="module")
def taken() -> Iterator[Taken]:
    with taken_over(ROOT) as made:
        yield made


@pytest.fixture
def roots(short_tmp: Path) -> Path:
    """A file of root's that others may not touch."""
    path = short_tmp / "roots"
    path.write_text("root's")
    path.chmod(0o600)
    return path


def test_it_is_nobody_with_three_powers(taken: Taken) -> None:
    said = taken("open('/proc/thread-self/status').read()")
    status = dict(line.split(":\t", 1) for line in said.splitlines())
    assert status["Uid"].split() == status["Gid"].split() == [str(TOOLHOST_UID)] * 4
    assert (status["NoNewPrivs"], status["Seccomp"], status["Groups"].strip()) == ("1", "2", "")
    powers = {name: int(status[name], 16) for name in ("CapPrm", "CapEff", "CapInh", "CapBnd", "CapAmb")}
    three = 1 << 2 | 1 << 5 | 1 << 19
    assert powers == {"CapPrm": three, "CapEff": three, "CapInh": 0, "CapBnd": 0, "CapAmb": 0}


def test_what_is_roots_it_can_read_and_not_change(taken: Taken, roots: Path) -> None:
    assert taken(f"open({str(roots)!r}).read()") == "root's"  # docs/sandbox.md says so
    for action in (
        f"open({str(roots)!r}, 'r+')",
        f"open({str(roots.with_name('new'))!r}, 'w')",
        f"os.mkdir({str(roots.with_name('new'))!r})",
        f"os.unlink({str(roots)!r})",
        f"os.chmod({str(roots)!r}, 0o666)",
        f"os.chown({str(roots)!r}, {TOOLHOST_UID}, -1)",
        f"os.truncate({str(roots)!r}, 0)",
        f"os.rename({str(roots)!r}, {str(roots.with_name('other'))!r})",
        f"os.link({str(roots)!r}, {str(roots.with_name('other'))!r})",
        "open('/proc/1/mem', 'r+b')",
        "open('/proc/sys/kernel/hostname', 'w')",
        "open('/sys/kernel/uevent_helper', 'w')",
    ):
        said = taken(f"attempt(lambda: {action})")
        assert said in ("Permission denied", "Operation not permitted", "No such file or directory"), (action, said)
    assert roots.read_text() == "root's"
    assert roots.stat().st_uid == 0


#: Not in the tables of the filters, as nothing of ours may name them: x86_64, aarch64.
NEVER = {
    "init_module": (175, 105), "finit_module": (313, 273), "kexec_load": (246, 104), "reboot": (169, 142),
    "swapon": (167, 224), "settimeofday": (164, 170), "quotactl": (179, 60), "acct": (163, 89), "iopl": (172, 1000),
    "process_madvise": (440, 440), "fanotify_init": (300, 262), "clone3": (435, 435), "openat2": (437, 437),
}  # fmt: skip


def test_its_filter_refuses_what_would_make_more_of_its_powers(taken: Taken) -> None:
    machine = platform.machine()
    numbers = NUMBERS["x86_64" if machine == "x86_64" else "aarch64"]
    numbers = numbers | {name: pair[machine != "x86_64"] for name, pair in NEVER.items()}
    pid = os.getppid()
    calls: dict[str, tuple[Any, ...]] = {
        "ptrace": (16, pid, 0, 0),  # PTRACE_ATTACH
        "process_vm_readv": (pid, 0, 0, 0, 0, 0),
        "process_vm_writev": (pid, 0, 0, 0, 0, 0),
        "pidfd_getfd": (0, 0, 0),
        "kcmp": (pid, pid, 0, 0, 0),
        "open_by_handle_at": (-100, 0, 0),
        "name_to_handle_at": (-100, 0, 0, 0, 0),
        "mount": (0, 0, 0, 0, 0),
        "umount2": (0, 0),
        "open_tree": (-100, 0, 1),
        "move_mount": (-1, 0, -1, 0, 0),
        "mount_setattr": (-1, 0, 0, 0, 0),
        "fsopen": (0, 0),
        "pivot_root": (0, 0),
        "chroot": (0,),
        "unshare": (0x10000000,),
        "setns": (0, 0),
        "bpf": (0, 0, 0),
        "keyctl": (0, 0, 0, 0, 0),
        "add_key": (0, 0, 0, 0, 0),
        "perf_event_open": (0, 0, 0, 0, 0),
        "io_uring_setup": (1, 0),
        "userfaultfd": (0,),
        "personality": (0,),
        "setresuid": (0, 0, 0),
        "setresgid": (0, 0, 0),
        "setgroups": (0, 0),
        "capset": (0, 0),
        "mknodat": (-100, 0, 0, 0),
        "linkat": (0, 0, -100, 0, 0x1000),
        "execve": (0, 0, 0),
        "execveat": (0, 0, 0, 0, 0),
        "clone": (17, 0, 0, 0, 0),
        "mmap": (0, 4096, 7, 0x22, -1, 0),
    }
    calls |= dict.fromkeys(NEVER, (0, 0, 0, 0, 0))
    for name, arguments in calls.items():
        said = taken(f"call({numbers[name]}, {', '.join(map(str, arguments))})")
        # Each of them fails in another way, or works, where no filter is: with EFAULT, EBADF, EINVAL.
        assert said in ("Operation not permitted", "Function not implemented"), (name, said)


def test_no_program_makes_it_mightier(taken: Taken) -> None:
    program = shutil.which("su") or "/bin/sh"
    assert taken(f"attempt(lambda: os.execv({program!r}, ['su']))") == "Operation not permitted"
    assert taken("attempt(os.fork)") == "Operation not permitted"


JAIL: dict[str, Any] = {
    "argv": ["/bin/true"], "env": {}, "folder": None, "places": [0, 1, 2], "stage": "/run", "stages": [],
    "fallbackOwner": None, "enclosure": None, "joins": [], "niceness": 0, "counted": False,
}  # fmt: skip


def launch(taken: Taken, places: str = "", **changes: Any) -> dict[str, Any]:
    """What the launcher says to such a jail; `places` are expressions for descriptors of its stages."""
    request = JAIL | {"uid": taken("powers.uids.bounds[0]")} | changes
    answer: dict[str, Any] = taken(f"ask({request!r}, 2, 2, 2, {places})")
    return answer


def stage(index: int, *, read_only: bool = False, unmapped: str = "refused") -> dict[str, Any]:
    return {"at": f"/run/{index}", "readOnly": read_only, "owned": True, "folder": True, "unmapped": unmapped}


def test_the_launcher_makes_jails_and_nothing_else_for_it(taken: Taken) -> None:
    for changes in (
        {"uid": None},
        {"uid": 0},
        {"uid": 1000},
        {"uid": TOOLHOST_UID},
        {"fallbackOwner": 0},
        {"stage": "/etc"},
        {"stage": None},
        {"stages": [stage(0, read_only=True) | {"at": "/etc/made"}]},
        {"joins": ["/etc/nologin"]},
        {"joins": ["/proc/sys/kernel/randomize_va_space"]},
        {"joins": ["/sys/fs/cgroup/cgroup.procs"]},
        {"niceness": -20},
    ):
        said = launch(taken, places="os.open('/usr', os.O_PATH)" if "stages" in changes else "", **changes)
        assert "error" in said and "pid" not in said, (changes, said)
    assert not Path("/etc/made").exists()
    assert taken("ask({'program': 'listen', 'arguments': ['1']})")["error"]
    assert taken("ask({'program': 'proxy', 'arguments': ['1']})")["error"]
    made = launch(taken)
    assert "pid" in made, made
    assert taken(f"os.waitpid({made['pid']}, 0)[1]") == 0


@pytest.mark.parametrize(
    "path",
    ["/", "/etc", "/etc/ssl", "/usr/local", "HOME", "/boot", "/home", "/tmp", "/proc/1", "/sys", "OURS",
     "PYTHON", "ELSEWHERE"],
)  # fmt: skip
def test_no_jail_of_it_writes_to_what_trusted_programs_are(taken: Taken, short_tmp: Path, path: str) -> None:
    mounted = None
    if path == "OURS":
        path = str(ROOT / "toolhost" / "egress")
    elif path == "HOME":
        path = os.path.realpath(os.path.expanduser("~"))
    elif path == "PYTHON":
        path = sys.prefix
    elif path == "ELSEWHERE":  # a folder of the system, by another name
        mounted = short_tmp / "elsewhere"
        mounted.mkdir()
        subprocess.run(["mount", "--bind", "/etc", mounted], check=True)
        path = f"{mounted}/ssl"
    elif not Path(path).exists():
        pytest.skip("there is none here")
    try:
        said = launch(taken, f"os.open({path!r}, os.O_PATH)", stages=[stage(0)])
        assert "never writable" in said["error"], said
    finally:
        if mounted is not None:
            subprocess.run(["umount", "-l", mounted], check=True)


def test_it_gives_nothing_away_but_an_instances_folder(taken: Taken, roots: Path) -> None:
    given = [stage(0, unmapped="given")]
    owner = 0x78000000
    said = launch(taken, f"os.open({str(roots.parent)!r}, os.O_PATH)", stages=given, fallbackOwner=owner)
    assert "no instance's folder" in said["error"]
    assert roots.parent.stat().st_uid == 0


def test_its_privileged_helper_does_what_it_is_for_and_no_more(taken: Taken, short_tmp: Path) -> None:
    def refused(what: str) -> None:
        name, _, arguments = what.partition("(")
        said = taken(f"attempt(lambda: powers.do({name!r}, {arguments})")
        assert not said.startswith("done"), (what, said)

    state = short_tmp / "state"
    refused("claim_state('/etc', 'toolhosts', 'x')")
    refused("claim_state('/', 'toolhosts', 'x')")
    refused("make_workdir('instances/a/k/workspace')")  # of no state yet
    (state / "toolhosts" / "old").mkdir(parents=True)
    notes = state / "toolhosts" / "old" / "notes"
    notes.write_text("an older version's")
    (short_tmp / "outside").touch()
    os.link(short_tmp / "outside", state / "toolhosts" / "old" / "linked")
    (state / "toolhosts" / "old" / "sent").symlink_to("/etc/passwd")
    assert taken(f"attempt(lambda: powers.do('claim_state', {str(state)!r}, 'toolhosts', 'x'))") == "done: None"
    owners = {path.name: path.lstat().st_uid for path in (state / "toolhosts").rglob("*")}
    mine = TOOLHOST_UID
    assert owners == {"x": mine, "old": mine, "notes": mine, "linked": 0, "sent": 0}
    assert (Path("/etc/passwd").stat().st_uid, state.stat().st_uid) == (0, 0)
    assert taken(f"open({str(notes)!r}, 'w').write('ours')") == 4
    refused(f"claim_state({str(short_tmp / 'other')!r}, 'toolhosts', 'x')")
    refused(f"claim_state({str(state)!r}, 'toolhosts', '../../x')")
    refused("make_workdir('../x')")
    refused("make_workdir('instances/a/k/workspace/../../../../blobs')")
    refused("make_workdir('toolhosts/x/workspace')")
    assert taken("attempt(lambda: powers.do('make_workdir', 'instances/a/k/workspace'))") == "done: None"
    made = state / "instances" / "a" / "k" / "workspace"
    assert (made.stat().st_uid, made.stat().st_mode & 0o777) == (0, 0o700)
    refused("make_placeholders('/etc')")
    refused(f"make_placeholders({os.path.realpath(os.path.expanduser('~'))!r})")
    refused("remove_placeholder('/etc/ssl')")
    refused("_beside(1)")
    refused("__init__({}, 0)")
    refused("set_niceness(1, 5)")
    refused("held_by(1, [0])")
    refused("make_group('../x')")
    work = short_tmp / "work"
    work.mkdir()
    os.chown(work, 4242, 4243)
    names = taken(f"powers.do('make_placeholders', {str(work)!r})")
    assert sorted(names) == sorted(str(path) for path in work.iterdir())
    assert {(path.stat().st_uid, path.stat().st_gid) for path in work.iterdir()} == {(4242, 4243)}
    (work / ".venv" / "used").mkdir()
    for name in names:
        taken(f"attempt(lambda: powers.do('remove_placeholder', {name!r}))")
    assert [path.name for path in work.iterdir()] == [".venv"]
    (short_tmp / "link").symlink_to("/root")
    refused(f"make_placeholders({str(short_tmp / 'link')!r})")
    # From here on nothing of the state may be written to but instances' folders.
    for path, words in ((state, "no instance's"), (state / "toolhosts", "no instance's"), (made, None)):
        said = launch(taken, f"os.open({str(path)!r}, os.O_PATH)", stages=[stage(0)])
        assert ("error" in said) == (words is not None), (path, said)
        if words is None:
            assert taken(f"os.waitpid({said['pid']}, 0)[1]") == 0
        else:
            assert words in said["error"]


def test_bubblewrap_is_root_only_where_it_must_be(taken: Taken) -> None:
    """It is said once, when it is known whether this host has user namespaces; and it is bubblewrap, in its root."""
    enclosure = {"shown": ["/usr"], "links": [], "texts": [], "home": "/home", "homeBytes": 1 << 20}
    places = [0, 1, 2, 5, 7]
    uid = taken("powers.uids.bounds[0]")
    fds = ", ".join(["os.memfd_create('x')"] * len(places))
    asked = JAIL | {"uid": uid, "enclosure": enclosure, "places": places}
    assert "root directory that bubblewrap gets" in taken(f"ask({asked!r}, {fds})")["error"]
    assert taken("attempt(lambda: powers.do('settle', False))") == "done: None"
    assert "user namespaces" in launch(taken, enclosure=enclosure)["error"]
    assert taken("attempt(lambda: powers.do('settle', True))") == "done: None"
    assert "user namespaces" in launch(taken, enclosure=enclosure)["error"]


def test_what_is_no_request_of_a_tool_host_is_refused_and_the_launcher_goes_on(taken: Taken) -> None:
    for unknown in (
        {},
        {"hold": 1, "make": True},
        {"program": "proxy"},
        {"program": "proxy", "arguments": [], "as": 0},
    ):
        assert "no request of a tool host" in taken(f"ask({unknown!r}, 2)")["error"]
    assert "no program of a tool host" in taken("ask({'program': 'sh', 'arguments': []}, 2)")["error"]


#: In a jail that is none: no bubblewrap, no Landlock, its user is all that keeps it.
PLANTS = """
cd /run/0
for at in deep/er/toolhost/egress deep/er/schemas free; do touch $at/planted; done
mv deep/er/toolhost deep/er/away; mv deep/er deep/away; mv deep away; mv free moved
"""


def test_what_is_ours_stays_read_only_in_a_folder_around_it(short_tmp: Path) -> None:
    """A workdir may hold a checkout. Here nothing in the plan of its jail keeps it from what it likes."""
    work = short_tmp / "work"
    shutil.copytree(ROOT / "goondan", work / "deep" / "er" / "goondan", symlinks=True)
    for name in ("schemas", "toolhost"):
        shutil.copytree(ROOT / name, work / "deep" / "er" / name, ignore=shutil.ignore_patterns("vectors", "base"))
    (work / "deep" / "er" / "features").mkdir()
    (work / "free").mkdir()
    with taken_over(work / "deep" / "er") as there:
        jail = {"argv": ["/bin/sh", "-c", PLANTS], "stages": [stage(0)]}
        made = launch(there, f"os.open({str(work)!r}, os.O_PATH)", **jail)
        assert "pid" in made, made
        there(f"os.waitpid({made['pid']}, 0)[1]")
    assert sorted(path.name for path in work.iterdir()) == ["deep", "moved"]
    assert (work / "moved" / "planted").exists()
    assert (work / "deep" / "er" / "toolhost" / "egress" / "proxy.py").exists()
    assert not list((work / "deep").rglob("planted"))


def test_a_root_that_cannot_become_another_gives_up_the_rest() -> None:
    """As in a container without that power: jails are made all the same."""
    program = (
        "from goondan.toolhost.drop_privileges import *; drop_privileges(); print(open('/proc/self/status').read())"
    )
    argv = ["setpriv", "--bounding-set=-dac_read_search", sys.executable]
    done = subprocess.run([*argv, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    status = dict(line.split(":\t", 1) for line in done.stdout.splitlines() if ":\t" in line)
    assert (status["Uid"].split(), status["NoNewPrivs"], status["Seccomp"]) == (["0"] * 4, "1", "2")
    assert int(status["CapPrm"], 16) == int(status["CapEff"], 16) == 1 << 1 | 1 << 5 | 1 << 19
    assert {int(status[name], 16) for name in ("CapInh", "CapBnd", "CapAmb")} == {0}
    argv += ["-m", "goondan.toolhost.survey"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    found = json.loads(done.stdout)
    assert (found["root"], found["user"], found["tier"]) == (True, 0, "full")


def test_what_it_asks_for_a_jail_of_its_own_is_done(taken: Taken) -> None:
    pid = launch(taken, argv=["/bin/sleep", "60"])["pid"]
    try:
        until = time.monotonic() + 10
        while (said := taken(f"attempt(lambda: powers.do('set_niceness', {pid}, 7))")) != "done: None":
            assert said.endswith("none of a jail's") and time.monotonic() < until, said  # it is still root's
        assert taken(f"powers.do('held_by', {pid}, [0, 1, 999])") == 0  # it has no sockets
        assert taken("attempt(lambda: powers.do('held_by', os.getpid(), [0]))").endswith("none of a jail's")
        autogroup = Path(f"/proc/{pid}/autogroup")
        if autogroup.exists():
            assert autogroup.read_text().endswith("nice 7\n")
        assert taken(f"attempt(lambda: powers.do('set_niceness', {pid}, -7))").startswith("the niceness")
        tree = taken("(lambda tree: tree and tree.cpu)(powers.tree)")
        if tree is not None:
            group = f"{Path(tree).parent}/goondan-jail.{taken.process.pid}.99"
            if taken("attempt(lambda: powers.do('make_group', 99))") == "done: None":
                assert Path(group).stat().st_uid == Path(group, "cpu.shares").stat().st_uid == TOOLHOST_UID
                assert taken("attempt(lambda: powers.do('remove_group', 99))") == "done: None"
                assert not Path(group).exists()
    finally:
        assert taken(f"attempt(lambda: os.kill({pid}, 9))") == "done: None"
        taken(f"os.waitpid({pid}, 0)[1]")

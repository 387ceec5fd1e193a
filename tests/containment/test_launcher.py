"""The launcher: as root every jail is a user of its own, and nothing on disk changes hands; limits of each jail."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import platform
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from goondan.schemas.bundle.launch import Filesystem, Limits, SandboxSpec
from goondan.schemas.system.users import DEFAULT
from goondan.toolhost.launcher import staging, syscalls
from goondan.toolhost.launcher.requests import Launch, Stage
from goondan.toolhost.policy.limits import processes_of_a_namespace
from goondan.toolhost.privileges import launcher_link
from goondan.toolhost.privileges.powers import Uids, instance_uid
from goondan.toolhost.watch.procfs import process_status
from tests.toolhost_fixture import POWERS, Bench, bench, make_tool

SOURCE = """
import os, resource, subprocess, threading, time
def write(ctx, input):
    os.makedirs("d/e"); open("d/e/f", "w").write("x"); os.symlink("f", "d/e/l"); os.chmod("d", 0o700)
    return [os.getuid(), os.stat(".").st_uid, os.stat("d/e/f").st_uid, open(input["read"]).read()]
def set_id(ctx, input):
    import shutil; shutil.copy("/bin/sh", "sh"); out = []
    attempts = [lambda: os.chmod("sh", 0o4755), lambda: os.chmod("sh", 0o2755),
                lambda: os.close(os.open("new", os.O_CREAT | os.O_WRONLY, 0o4755)),
                lambda: os.mknod("node", 0o104755), lambda: subprocess.run(["chmod", "u+s", "sh"], check=True),
                lambda: subprocess.run(["cp", "--preserve=mode", "/usr/bin/passwd", "p"], check=True)]
    for attempt in attempts:
        try: attempt(); out.append("done")
        except (OSError, subprocess.CalledProcessError): out.append("refused")
    return out
def limits(ctx, input):
    return {name: resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in input["names"]}
def memory(ctx, input):
    try: return len(bytearray(input["bytes"]))
    except MemoryError: return "refused"
def big(ctx, input):
    try:
        with open("big", "wb") as f:
            for _ in range(input["mb"]): f.write(bytes(1 << 20))
    except OSError as error: return [error.errno, os.stat("big").st_size]
def keys(ctx, input):
    try: text = open("/proc/keys").read()
    except PermissionError: text = ""  # covered, where jails are the operator's own user
    return [text, os.getsid(0), os.getpgid(0)]
def leave(ctx, input):
    try: os.setsid()
    except PermissionError: pass
    pid = os.fork()
    if pid == 0:
        try: os.setsid(); os._exit(1)
        except PermissionError: os._exit(0)
    return os.waitpid(pid, 0)[1]
handlers = {k: v for k, v in list(globals().items()) if callable(v)}
"""
NAMES = ("write", "set_id", "limits", "memory", "big", "keys", "leave")

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give jails users of their own")


@pytest.fixture
def place(short_tmp: Path) -> Path:
    (short_tmp / "work").mkdir(mode=0o700)
    (short_tmp / "secret").write_text("read grant")
    (short_tmp / "secret").chmod(0o600)
    return short_tmp


def jail_status(made: Bench) -> list[dict[str, str]]:
    """/proc/PID/status of every process of the only jail."""
    (slot,) = made.host.sessions.pool.sessions()
    return [process_status(pid) for pid in made.live_of(slot).jail.processes()]


@root_only
async def test_a_jail_is_a_user_of_its_own_and_its_files_are_the_owners(place: Path) -> None:
    """Every folder above is closed to others, and so are the tool's files and the grant."""
    tool = make_tool(place, SOURCE, *NAMES, sandbox=SandboxSpec(filesystem=Filesystem(read=[str(place / "secret")])))
    (place / "tool-t").chmod(0o700)
    (place / "tool-t" / "handler.py").chmod(0o600)
    async with bench(tool) as made:
        result = await made.call("t__write", {"read": str(place / "secret")}, workdir=place / "work")
        assert result["output"] == [1000, 1000, 1000, "read grant"]
        statuses = jail_status(made)
        uids = {int(uid) for status in statuses for uid in status["Uid"].split()}
        gids = {int(gid) for status in statuses for gid in status["Gid"].split()}
        assert len(statuses) == 2 and len(uids) == 1 and uids == gids
        assert min(uids) >= 0x70000000
        assert {status["Groups"] for status in statuses} == {""}
    for path in (place / "work" / "d", place / "work" / "d" / "e" / "f", place / "work" / "d" / "e" / "l"):
        assert (path.lstat().st_uid, path.lstat().st_gid) == (0, 0)


@root_only
async def test_a_workdir_stays_its_owners(place: Path) -> None:
    os.chown(place / "work", 4242, 4343)
    async with bench(make_tool(place, SOURCE, *NAMES)) as made:
        result = await made.call("t__write", {"read": "/etc/passwd"}, workdir=place / "work")
        assert result["output"][:3] == [1000, 1000, 1000]
    made_file = (place / "work" / "d" / "e" / "f").stat()
    assert (made_file.st_uid, made_file.st_gid) == (4242, 4343)


@root_only
async def test_jails_side_by_side_are_different_users(place: Path) -> None:
    one, two = (make_tool(place, SOURCE, *NAMES, name=name) for name in "ab")
    async with bench(one, two) as made:
        for name in "ab":
            assert (await made.call(f"{name}__keys", workdir=place / "work"))["status"] == "ok"
        uids = [made.live_of(slot).jail.uid for slot in made.host.sessions.pool.sessions()]
        assert len(set(uids)) == 2
    assert not set(uids) & POWERS.uids._taken


async def test_no_set_id_file_can_be_left(place: Path) -> None:
    async with bench(make_tool(place, SOURCE, *NAMES)) as made:
        found = (await made.call("t__set_id", workdir=place / "work"))["output"]
    assert found[:5] == ["refused"] * 5
    left = {path.name: path.stat().st_mode for path in (place / "work").iterdir()}
    assert "sh" in left
    assert [name for name, mode in left.items() if mode & (stat.S_ISUID | stat.S_ISGID)] == []


async def test_limits(place: Path) -> None:
    limits = Limits(memory_mb=200, processes=20, open_files=99, file_mb=3)
    async with bench(make_tool(place, SOURCE, *NAMES, sandbox=SandboxSpec(limits=limits))) as made:

        async def call(name: str, **args: Any) -> Any:
            return (await made.call(f"t__{name}", args, workdir=place / "work"))["output"]

        names = ["CORE", "DATA", "FSIZE", "NOFILE", "NPROC"]
        processes = processes_of_a_namespace(made.facts.groups, limits)
        wanted = dict(zip(names, (0, 200 << 20, 3 << 20, 99, processes), strict=True))
        assert await call("limits", names=names) == {name: [value, value] for name, value in wanted.items()}
        assert await call("big", mb=10) == [27, 3 << 20]  # EFBIG
        assert await call("memory", bytes=300 << 20) == "refused"
        assert await call("memory", bytes=50 << 20) == 50 << 20
        assert await call("memory", bytes=1) == 1  # still working


async def test_a_jail_has_one_session_and_a_keyring_of_its_own(place: Path) -> None:
    async with bench(make_tool(place, SOURCE, *NAMES)) as made:
        text, session, _ = (await made.call("t__keys", workdir=place / "work"))["output"]
        assert all("_ses: empty" in line for line in text.splitlines())  # none of whoever started us
        assert session in (0, 1)  # begun outside of the jail's pid namespace, or by its first process
        assert (await made.call("t__leave", workdir=place / "work"))["output"] == 0
        # By sessions the scheduler shares processors out where there are no control groups.
        assert (await made.call("t__keys", workdir=place / "work", instance_key="other"))["status"] == "ok"
        jails = [made.live_of(slot).jail for slot in made.host.sessions.pool.sessions()]
        sessions = [{os.getsid(pid) for pid in jail.processes()} for jail in jails]
        assert [len(found) for found in sessions] == [1, 1]
        assert len(set.union(*sessions, {os.getsid(0), os.getsid(POWERS.launcher.pid)})) == 4


SEARCH = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
found = libc.syscall(ctypes.c_long(int(sys.argv[1])), 10, -3, b"user", sys.argv[2].encode(), 0)  # KEYCTL_SEARCH
print("found" if found > 0 else ctypes.get_errno())
"""


async def test_what_the_launcher_starts_has_none_of_our_keys() -> None:
    """A jail's own /proc/keys does not show keys of users that it does not know: this one looks for itself."""
    libc = ctypes.CDLL(None, use_errno=True)
    keyctl, add_key = syscalls._OLD[platform.machine()]["keyctl"], {"x86_64": 248, "aarch64": 217}[platform.machine()]
    name = f"gdn-test-{os.getpid()}"
    libc.syscall(ctypes.c_long(keyctl), 1, None)  # KEYCTL_JOIN_SESSION_KEYRING: not that of whoever runs the tests
    key = libc.syscall(ctypes.c_long(add_key), b"user", name.encode(), b"secret", ctypes.c_size_t(6), -3)
    if key < 0:
        pytest.skip(f"no key can be made here: {os.strerror(ctypes.get_errno())}")
    argv = [sys.executable, "-I", "-S", "-c", SEARCH, str(keyctl), name]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "found\n"
    request: Launch = {
        "argv": argv, "env": {}, "folder": "/", "places": [0, 1, 2], "stage": None, "stages": [], "uid": None,
        "fallbackOwner": None, "enclosure": None, "joins": [], "niceness": 0, "counted": False,
    }  # fmt: skip
    POWERS.launcher.close()  # the next one inherits our session's keyring
    reading, writing = os.pipe()
    with open(os.devnull, "rb") as null, open(reading, encoding="ascii") as output:
        answer, _ = await POWERS.launcher.ask(request, [null.fileno(), writing, writing])
        os.close(writing)
        said = output.read()
    os.waitpid(answer["pid"], 0)
    libc.syscall(ctypes.c_long(keyctl), 3, key)  # KEYCTL_REVOKE
    assert said == f"{errno.ENOKEY}\n"


def targets(entry: Path) -> list[str]:
    """Where a link leads; nowhere when it is gone meanwhile."""
    try:
        return [os.readlink(entry)]
    except FileNotFoundError:
        return []


async def test_the_launcher_is_one_thread_with_one_socket(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no link to the bus, and nothing of who started it."""
    monkeypatch.setenv("HOST_SECRET", "x")
    leak = os.open("/etc/passwd", os.O_RDONLY)
    os.set_inheritable(leak, True)
    POWERS.launcher.close()
    try:
        async with bench(make_tool(place, SOURCE, *NAMES)) as made:
            assert (await made.call("t__keys", workdir=place / "work"))["status"] == "ok"
    finally:
        os.close(leak)
    proc = Path(f"/proc/{POWERS.launcher.pid}")
    assert process_status(POWERS.launcher.pid)["Threads"] == "1"
    assert (proc / "environ").read_bytes() == b""
    until = time.monotonic() + 10
    while True:  # it closes what it was sent when it has answered, and may be making an idmap for the next jail
        beside_the_log = {target for entry in (proc / "fd").iterdir() if entry.name != "2" for target in targets(entry)}
        kept = [target for target in beside_the_log if not target.startswith(("user:[", "/dev/null"))]  # for idmaps
        if len(kept) == 1 or time.monotonic() > until:
            break
        await asyncio.sleep(0.01)
    assert len(kept) == 1 and kept[0].startswith("socket:"), kept


async def test_a_launcher_that_was_killed_is_started_again(place: Path) -> None:
    async with bench(make_tool(place, SOURCE, *NAMES)) as made:
        assert (await made.call("t__keys", workdir=place / "work"))["status"] == "ok"
        before = POWERS.launcher.pid
        os.kill(before, signal.SIGKILL)
        assert (await made.call("t__keys", workdir=place / "work", instance_key="other"))["status"] == "ok"
        assert POWERS.launcher.pid != before
        await POWERS.offload.settled()
        assert not Path(f"/proc/{before}").exists()


@root_only
async def test_without_idmaps_an_instance_has_a_user_and_its_workdir_is_given_to_it(
    short_tmp: Path, unmappable: Path
) -> None:
    """The tool and its interpreter's environment are shown as they are; a folder of somebody's own is refused."""
    state = unmappable / "state"
    own = state / "instances" / "coder" / "k1" / "workspace"
    (own / "old" / "deep").mkdir(parents=True)
    (own / "old" / "link").symlink_to("/etc/passwd")
    one, two = (make_tool(unmappable, SOURCE, *NAMES, name=name) for name in "ab")
    (unmappable / "named").mkdir()
    (unmappable / "secret").write_text("read grant")
    async with bench(one, two, state_dir=state) as made:
        for name in "ab":
            result = await made.call(f"{name}__write", {"read": "/etc/passwd"}, workdir=own)
            assert result["status"] == "ok", result
            shutil.rmtree(own / "d")
        uids = {made.live_of(slot).jail.uid for slot in made.host.sessions.pool.sessions()}
        assert len(uids) == 2  # the numbers that they would have had
        users = {
            status["Uid"]
            for slot in made.host.sessions.pool.sessions()
            for status in map(process_status, made.live_of(slot).jail.processes())
        }
        assert users == {"\t".join([str(instance_uid(str(own), DEFAULT))] * 4)}
        refused = await made.call("a__write", {"read": "/etc/passwd"}, workdir=unmappable / "named")
        assert refused["error"]["code"] == "E_SANDBOX_UNAVAILABLE"
        assert f"{unmappable / 'named'} belongs to user 0" in refused["error"]["message"]
        assert "an idmapped mount (mount_setattr: " in refused["error"]["message"]
        assert f"chown -R {instance_uid(str(unmappable / 'named'), DEFAULT)}:" in refused["error"]["suggestion"]
    owners = {path.lstat().st_uid for path in [own, *own.rglob("*")]}
    assert owners == {instance_uid(str(own), DEFAULT)}
    assert os.stat("/etc/passwd").st_uid == 0
    assert (unmappable / "named").stat().st_uid == 0


def test_instances_have_different_users() -> None:
    uids = [instance_uid(f"/state/{n}", DEFAULT) for n in range(1000)]
    assert len(set(uids)) > 990
    assert min(uids) >= 0x78000000 and max(uids) <= 0x7FFFFFFE
    assert instance_uid("/state/1", DEFAULT) == uids[1]
    assert not set(uids) & {Uids(pid, DEFAULT).take() for pid in range(70_000)}


@root_only
def test_a_place_that_cannot_be_mapped_is_named() -> None:
    """/proc cannot have its owners mapped, like some network file systems."""
    fd = os.open("/proc/sys", os.O_PATH)
    stage: Stage = {"at": "/run/0", "readOnly": True, "owned": True, "folder": True, "unmapped": "refused"}
    with pytest.raises(OSError, match=r"/proc/sys belongs to user 0, .*mount_setattr"):
        staging.copy([stage], [fd], 0x70000000, None, staging.UserNamespaces())
    os.close(fd)


def test_the_calls_that_python_has_no_name_for_say_what_failed() -> None:
    with pytest.raises(OSError, match="open_tree"):
        syscalls.copy_tree(-5, recursive=False)
    with pytest.raises(OSError, match="move_mount"):
        syscalls.attach(-5, "/nonexistent")


async def test_calls_that_wait_for_a_launch_are_calls_like_others(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that says nothing is ended and another one asked; meanwhile others' calls go on."""
    async with bench(make_tool(place, SOURCE, *NAMES)) as made:
        assert (await made.call("t__keys", workdir=place / "work"))["status"] == "ok"
        before = POWERS.launcher.pid
        monkeypatch.setattr(launcher_link, "ANSWER_S", 1.5)
        os.kill(before, signal.SIGSTOP)
        cancelled, answer = made.start("t__keys", workdir=place / "work", instance_key="cancelled")
        _, late = made.start("t__keys", workdir=place / "work", instance_key="late", deadline_ms=100)
        _, patient = made.start("t__keys", workdir=place / "work", instance_key="patient")
        made.cancel(cancelled)
        assert (await answer)["error"]["code"] == "E_CANCELLED"
        assert (await made.call("t__keys", workdir=place / "work"))["status"] == "ok"
        told = (await late)["error"]
        assert (told["code"], "before it could start" in told["message"]) == ("E_TOOL_TIMEOUT", True)
        assert POWERS.launcher.pid == before, "nobody has waited for it in the loop"
        assert (await patient)["status"] == "ok"
        assert POWERS.launcher.pid != before


async def test_a_launcher_that_is_lost_twice_fails_the_calls_with_one_clear_error(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = launcher_link._send

    def to_one_that_is_stopped(channel: socket.socket, data: bytes, fds: list[int]) -> None:
        os.kill(POWERS.launcher.pid, signal.SIGSTOP)
        send(channel, data, fds)

    monkeypatch.setattr(launcher_link, "_send", to_one_that_is_stopped)
    monkeypatch.setattr(launcher_link, "ANSWER_S", 0.05)
    async with bench(make_tool(place, SOURCE, *NAMES)) as made:
        error = (await made.call("t__keys", workdir=place / "work"))["error"]
        assert (error["code"], "has not answered" in error["message"]) == ("E_SANDBOX_UNAVAILABLE", True)
        assert made.host.sessions.jail_count == 0
        monkeypatch.setattr(launcher_link, "_send", send)
        monkeypatch.setattr(launcher_link, "ANSWER_S", 10.0)
        assert (await made.call("t__keys", workdir=place / "work"))["status"] == "ok"


KILLED_WHILE_IT_MAKES_A_NAMESPACE = """
import os
from goondan.toolhost.launcher import syscalls, staging

make = syscalls.child_in_user_namespace

def told():
    pid = make()
    if pid:
        print(pid, flush=True)
    return pid

syscalls.child_in_user_namespace = told
staging.write_text = lambda *path_and_text: os.kill(os.getpid(), 9)
staging._make(os.getuid(), os.getgid(), 1000)
"""


async def test_a_launcher_that_is_killed_leaves_nobody_behind() -> None:
    command = [sys.executable, "-c", KILLED_WHILE_IT_MAKES_A_NAMESPACE]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=10
    )  # whoever is left holds it up
    assert done.returncode == -9, done.stderr
    status = Path(f"/proc/{int(done.stdout)}/status")
    until = time.monotonic() + 5
    while status.exists() and "\nState:\tZ" not in status.read_text():  # one that nobody has reaped has ended as well
        assert time.monotonic() < until, "it still runs"
        await asyncio.sleep(0.01)

"""Another user of this machine against the kernel: squatted and changed directories, a broker and peers of theirs.

As root the attacker is a process of another user. As an ordinary user the same processes are told to expect a broker of
somebody else, which is what they look at.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from goondan.kernel import lock
from goondan.kernel.premises import Premises
from goondan.schemas.system.users import TOOLHOST_UID
from goondan.schemas.transport.link import Link
from goondan.schemas.wire.codec import encode, to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import Frame, Hello
from goondan.schemas.wire.tokens import TokenClass
from tests.kernel_fixture import BUNDLE, ROOT
from tests.process.bare_broker import bare_broker

STRANGER = 40_001
#: A group that nobody is known to be in.
STRANGERS = 40_777
#: How long a peer is given to be welcomed, where it must not be (seconds).
REFUSED_S = 2.0
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="the attacker is a process of another user")


def supervisor(home: Path, run_dir: Path) -> subprocess.CompletedProcess[str]:
    """`python -m goondan.kernel.supervisor` with a runtime directory named by hand; it stops when it is ready."""
    (home / "goondan.yaml").write_text(BUNDLE)
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "GOONDAN_STATE_ROOT": str(home / "state"),
        "GOONDAN_TRUST": "1",
    }
    arguments = ["--bundle", str(home / "goondan.yaml"), "--run-dir", str(run_dir), "--parent-fd", "0"]
    return subprocess.run(
        [sys.executable, "-m", "goondan.kernel.supervisor", *arguments],
        cwd=ROOT,
        env=env,
        input="",  # the end of the parent
        capture_output=True,
        text=True,
        timeout=30,
    )


@pytest.fixture
def shared(short_tmp: Path) -> Path:
    """A directory like /tmp, and a folder of ours beside it."""
    (short_tmp / "tmp").mkdir()
    (short_tmp / "tmp").chmod(0o1777)
    (short_tmp / "roots").mkdir(mode=0o700)
    short_tmp.chmod(0o711)
    return short_tmp


# --- directories


@as_root
def test_nothing_is_made_through_a_link_of_another_user(shared: Path) -> None:
    """The link leads to a folder of root's now, and to one of theirs when the sockets are used."""
    link = shared / "tmp/goondan-0"
    link.symlink_to(shared / "roots")
    os.lchown(link, STRANGER, STRANGER)
    done = supervisor(shared, link / "kernel")
    assert done.returncode == 1 and "E_RUN_DIR" in done.stderr
    assert f"link that belongs to uid {STRANGER}" in done.stderr
    assert os.listdir(shared / "roots") == []


@as_root
@pytest.mark.parametrize("mode", [0o775, 0o777])
def test_nothing_is_made_in_a_directory_that_others_can_change(shared: Path, mode: int) -> None:
    """With a umask of 002 and a shared group, folders are 0775: whoever is in the group can put another one there."""
    (shared / "team").mkdir()
    os.chown(shared / "team", 0, STRANGERS)
    (shared / "team").chmod(mode)
    done = supervisor(shared, shared / "team/kernel")
    assert done.returncode == 1 and "E_RUN_DIR" in done.stderr
    assert os.listdir(shared / "team") == []


@as_root
@pytest.mark.parametrize("squat", ["link", "folder", "link below"])
def test_a_kernel_goes_elsewhere_when_another_user_was_there_first(
    shared: Path, squat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("GOONDAN_STATE_ROOT", str(shared / "state"))
    usual = shared / "tmp/goondan-0"
    if squat == "link":
        usual.symlink_to(shared / "roots")
    else:
        usual.mkdir(mode=0o755)
    if squat == "link below":
        (usual / "x").symlink_to(shared / "roots")
    os.lchown(usual, STRANGER, STRANGER)
    state_dir = str(shared / "state/workspaces/d")
    premises = Premises.enter("/b", state_dir, base=str(shared / "tmp"))
    assert premises.run_dir.startswith(f"{usual}-")
    assert f"uid {STRANGER}" in premises.unused[0]
    record = lock.read_record(state_dir)
    assert record is not None and record.run_dir == premises.run_dir
    with pytest.raises(GoondanError, match="E_KERNEL_RUNNING"):
        Premises.enter("/b", state_dir, base=str(shared))  # another place makes no second kernel
    assert premises.is_quiet()
    premises.settle()
    premises.leave()
    assert os.listdir(shared / "tmp") == ["goondan-0"] and os.listdir(shared / "roots") == []


@as_root
def test_the_folder_of_the_lock_is_nobody_elses(shared: Path) -> None:
    state = shared / "tmp/state"
    state.mkdir()
    os.chown(state, STRANGER, STRANGER)
    with pytest.raises(GoondanError, match="E_STATE") as caught:
        lock.lock(str(state))
    assert caught.value.info.suggestion and os.listdir(state) == []
    with pytest.raises(GoondanError, match="E_STATE"):
        lock.read_record(str(state))


# --- a broker of another user


@contextmanager
def foreign_broker(path: Path, entry: Path, uid: int) -> Iterator[subprocess.Popen[str]]:
    """It listens on `path`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.process.foreign_broker", str(path), str(uid), str(entry)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def heard(process: subprocess.Popen[str]) -> bool:
    """Whether somebody has said hello to it, and so told it a token."""
    assert process.stdout is not None
    return bool(select.select([process.stdout], [], [], 0)[0])


def agent(home: Path, path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """An agent process, as it is started by hand. It ends at once when it is not welcomed, or told to."""
    (home / "token").write_text("a.token")
    (home / "token").chmod(0o600)
    ready_r, ready_w = os.pipe()
    process = subprocess.Popen(
        [
            *(
                sys.executable,
                "-m",
                "goondan.agentproc",
                "--endpoint",
                f"ipc://{path}",
                "--token-file",
                str(home / "token"),
            ),
            *("--ready-fd", str(ready_w), *arguments),
        ],
        cwd=ROOT,
        pass_fds=[ready_w],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(ready_w)
    try:
        assert select.select([ready_r], [], [], 20)[0], "it is not ready, does not say why, and has not ended"
        if os.read(ready_r, 4096) == b"\n":  # else it is on its way out, with a status of its own
            process.terminate()
        out, err = process.communicate(timeout=30)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)
    finally:
        os.close(ready_r)
        process.kill()


def extension(folder: Path) -> tuple[Path, Path]:
    """A module that leaves a mark when it is loaded, and the mark."""
    mark = folder / "loaded"
    entry = folder / "theirs.py"
    entry.write_text(f"open({str(mark)!r}, 'w').close()\n\n\ndef register(api):\n    pass\n")
    return entry, mark


@as_root
def test_an_agent_says_nothing_to_a_socket_of_another_user(shared: Path) -> None:
    """They have put a folder of theirs where the runtime directory was."""
    theirs = shared / "tmp/goondan-0"
    theirs.mkdir(mode=0o777)
    os.chown(theirs, STRANGER, STRANGER)
    entry, mark = extension(shared)
    with foreign_broker(theirs / "agents.sock", entry, STRANGER) as broker:
        done = agent(shared, theirs / "agents.sock")
        assert not mark.exists() and not heard(broker), done.stderr
        assert done.returncode == 1 and "E_BROKER_UNTRUSTED" in done.stderr


@as_root
def test_an_agent_says_nothing_to_a_socket_of_another_user_in_a_folder_that_all_may_add_to(shared: Path) -> None:
    entry, mark = extension(shared)
    with foreign_broker(shared / "tmp/agents.sock", entry, STRANGER) as broker:
        done = agent(shared, shared / "tmp/agents.sock")
        assert not mark.exists() and not heard(broker), done.stderr
        assert done.returncode == 1 and f"belongs to uid {STRANGER}" in done.stderr


@as_root
def test_an_agent_loads_nothing_that_a_process_of_another_user_names(shared: Path) -> None:
    """Should they have got in front of everything else: the socket is root's, and in root's directory."""
    entry, mark = extension(shared)
    with foreign_broker(shared / "tmp/agents.sock", entry, STRANGER) as broker:
        os.rename(shared / "tmp/agents.sock", shared / "roots/agents.sock")
        os.chown(shared / "roots/agents.sock", 0, 0)
        done = agent(shared, shared / "roots/agents.sock")
        assert not mark.exists() and not heard(broker), done.stderr
        assert done.returncode == 1 and f"a process of uid {STRANGER} listens" in done.stderr


def test_an_agent_obeys_the_broker_of_the_user_that_its_launch_names(short_tmp: Path) -> None:
    entry, mark = extension(short_tmp)
    with foreign_broker(short_tmp / "agents.sock", entry, os.geteuid()) as broker:
        done = agent(short_tmp, short_tmp / "agents.sock", "--broker-uid", str(STRANGER))
        assert not mark.exists() and not heard(broker), done.stderr
        assert done.returncode == 1 and "E_BROKER_UNTRUSTED" in done.stderr
        done = agent(short_tmp, short_tmp / "agents.sock")
        assert mark.exists() and heard(broker), done.stderr  # this one is its own


async def test_a_link_asks_for_no_welcome_where_others_can_change_the_place(short_tmp: Path) -> None:
    (short_tmp / "open").mkdir()
    (short_tmp / "open").chmod(0o777)
    link = Link(f"ipc://{short_tmp}/open/clients.sock", "t.t", on_frame=print)
    with pytest.raises(GoondanError, match="E_BROKER_UNTRUSTED") as caught:
        await link.start()
    assert caught.value.info.suggestion == f"chmod go-w {short_tmp}/open"


# --- peers of another user

#: Says hello as whoever it becomes, and says what came back.
PEER = """
import os, sys
import zmq
path, uid, hello, wait_ms = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3]), int(sys.argv[4])
if uid != os.geteuid():
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
socket = zmq.Context().socket(zmq.DEALER)
socket.setsockopt(zmq.LINGER, 0)
socket.connect(f"ipc://{path}")
socket.send(hello)
print("welcome" if socket.poll(wait_ms) and b"welcome" in socket.recv() else "nothing", flush=True)
os._exit(0)
"""


def greeted(path: str, token: str, uid: int, wait_s: float) -> str:
    hello = encode(Frame("hello", id="h", payload=to_raw(Hello(token, os.urandom(4).hex()))))
    done = subprocess.run(
        [sys.executable, "-c", PEER, path, str(uid), hello.hex(), str(int(wait_s * 1000))],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout.strip()


@as_root
def test_a_stolen_token_opens_nothing_for_another_user() -> None:
    """Should they reach the socket: by a descriptor that they were handed, or a mode that somebody changed."""
    with bare_broker() as broker:
        broker.run_dir.chmod(0o711)
        classes: tuple[TokenClass, ...] = ("client", "agent", "toolhost", "control")
        for cls in classes:
            path = broker.endpoint(cls).removeprefix("ipc://")
            os.chmod(path, 0o666)
            claims = {"agent": "coder", "instance_key": "k"} if cls == "agent" else {}
            token = broker.token(cls, **claims)
            assert greeted(path, token, STRANGER, REFUSED_S / 2) == "nothing", cls
            host = "welcome" if cls == "toolhost" else "nothing"
            assert greeted(path, token, TOOLHOST_UID, 10 if cls == "toolhost" else REFUSED_S / 2) == host, cls
            assert greeted(path, broker.token(cls, **claims), 0, 10) == "welcome" or cls == "toolhost", cls


def test_the_brokers_own_user_is_let_in() -> None:
    with bare_broker() as broker:
        path = broker.endpoint("client").removeprefix("ipc://")
        assert greeted(path, broker.token("client"), os.geteuid(), 10) == "welcome"

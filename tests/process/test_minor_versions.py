"""Clients and kernels of different minors of the protocol work with each other.

`tests/frozen` keeps the client for Python of each released minor (scripts/freeze_client.py); that of a minor before its
release is the client as it is. It works with the kernel as it is, and with one that says more: a proxy adds fields and
types that nobody knows. The client as it is works with a kernel of that minor: the proxy takes away what had no name
then, in both directions. So does a check without sockets: the client as it is keeps the sequences of then.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from goondan.schemas.wire.codec import encode_value, from_raw, to_raw
from goondan.schemas.wire.frames import Frame, Hello, Welcome
from tests.kernel_fixture import ROOT, Sandbox, sandbox
from tests.process.bare_broker import bare_broker

MINORS = sorted((ROOT / "tests" / "frozen").iterdir())
TODAY = ROOT / "clients" / "python"
#: What a payload is, by the type of its frame, and the parts of it that are structs.
PAYLOADS = {"hello": "Hello", "welcome": "Welcome", "event": "AgentEvent", "error": "ErrorPayload", "credit": "Credit"}
PAYLOADS["runtime.event"] = "RuntimeEvent"
PARTS = {"answer": "Answer", "usage": "Usage", "error": "ErrorPayload", "wait": "Wait"}

#: Everything that a client does, in an interpreter of its own: two packages of one name are not for one process.
SESSION = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[1])
import goondan_client
from goondan_client import GoondanError, connect
assert goondan_client.__file__.startswith(sys.argv[1])

async def main():
    said = {}
    async with connect(run_dir=sys.argv[2]) as gdn:
        answer = await gdn.ask("main", '/bash__exec {"command": "echo 42"}', instance="versions")
        said["ask"] = [answer.text, answer.status]
        items = [item async for item in gdn.stream("main", '/bash__exec {"command": "echo 43"}', instance="versions")]
        said["stream"] = [items[-1].text, "tool.called" in {item.kind for item in items}]
        event_id = await gdn.send("main", '/bash__exec {"command": "sleep 60"}', instance="versions")
        said["cancel"] = await gdn.cancel(event_id=event_id)
        said["call"] = (await gdn.call("bash__exec", {"command": "echo 44"})).output["stdout"]
        said["large"] = (await gdn.ask("main", "x" * 1_500_000, instance="versions")).status
        said["instances"] = len(await gdn.instances()) > 0
        said["approvals"] = await gdn.approvals()
        try:
            await gdn.ask("nobody", "hi")
        except GoondanError as error:
            said["refused"] = error.code
    print(json.dumps(said))

asyncio.run(main())
"""
EXPECTED = {
    "ask": ["42", "completed"],
    "stream": ["43", True],
    "cancel": "cancelled",
    "call": "44\n",
    "large": "completed",
    "instances": True,
    "approvals": [],
    "refused": "E_AGENT_NOT_FOUND",
}

#: Gets a frame, and whether it is for the client. Gives the frames that go on.
Change = Callable[[dict[str, Any], bool], list[dict[str, Any]]]


def said_more(frame: dict[str, Any], to_client: bool) -> list[dict[str, Any]]:
    """A kernel of a later minor: new fields everywhere, and a new type before each frame."""
    if not to_client:
        return [frame]
    more = {**frame, "mood": {"is": "good"}, "zeta": 7}
    if isinstance(more.get("payload"), dict) and frame["type"] != "reply":
        more["payload"] = _with_more(more["payload"])
    return [{"type": "weather", "id": "w", "payload": {"sun": True}}, more]


def _with_more(value: dict[str, Any]) -> dict[str, Any]:
    return {**{k: _with_more(v) if k in PARTS and isinstance(v, dict) else v for k, v in value.items()}, "novel": [1]}


def said_less(minor: Path) -> Change:
    """A kernel of that minor: what had no name then is not said, and not heard."""
    names = json.loads((minor / "names.json").read_text(encoding="utf-8"))

    def known(value: Any, struct: str) -> Any:
        if not isinstance(value, dict):
            return value
        kept = {key: item for key, item in value.items() if key in names["fields"][struct]}
        return {key: known(item, PARTS[key]) if key in PARTS else item for key, item in kept.items()}

    def change(frame: dict[str, Any], to_client: bool) -> list[dict[str, Any]]:
        if frame["type"] not in names["types"]:
            return []
        kept = {key: value for key, value in frame.items() if key in names["fields"]["Frame"]}
        if "payload" in kept and frame["type"] in PAYLOADS:
            kept["payload"] = known(kept["payload"], PAYLOADS[frame["type"]])
        return [kept]

    return change


@contextmanager
def proxy(run_dir: Path, place: Path, change: Change) -> Iterator[Path]:
    """A runtime directory like `run_dir`, whose socket passes everything on, changed."""
    (place / "client.token").touch(0o600)
    (place / "client.token").write_text((run_dir / "client.token").read_text())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    front = context.socket(zmq.ROUTER)
    front.bind(f"ipc://{place}/clients.sock")
    stopped = context.socket(zmq.PAIR)
    stopped.bind("inproc://stop")
    thread = threading.Thread(target=_pass_on, args=(context, front, stopped, run_dir, change))
    thread.start()
    try:
        yield place
    finally:
        with context.socket(zmq.PAIR) as stop:
            stop.connect("inproc://stop")
            stop.send(b"")
            thread.join()
        context.term()


def _pass_on(context: Any, front: Any, stopped: Any, run_dir: Path, change: Change) -> None:
    backs: dict[bytes, Any] = {}
    poller = zmq.Poller()
    for socket in (front, stopped):
        poller.register(socket, zmq.POLLIN)
    while stopped not in (ready := dict(poller.poll())):
        if front in ready:
            ident, data = front.recv_multipart()
            if ident not in backs:
                back = backs[ident] = context.socket(zmq.DEALER)
                back.setsockopt(zmq.PROBE_ROUTER, 1)
                back.connect(f"ipc://{run_dir}/clients.sock")
                poller.register(back, zmq.POLLIN)
            for frame in change(msgspec.msgpack.decode(data), False) if data else []:
                backs[ident].send(encode_value(frame))
        for ident, back in backs.items():
            if back in ready:
                for frame in change(msgspec.msgpack.decode(back.recv()), True):
                    front.send_multipart([ident, encode_value(frame)])
    for socket in (front, stopped, *backs.values()):
        socket.close(linger=0)


@pytest.fixture(scope="module")
def swarm() -> Iterator[Sandbox]:
    with sandbox() as made:
        made.detach()
        yield made


def client_of(minor: Path) -> Path:
    """Where the client of that minor is."""
    return minor if (minor / "goondan_client").is_dir() else TODAY


def session(package: Path, run_dir: Path) -> dict[str, Any]:
    """What a client in `package` was told."""
    command = [sys.executable, "-I", "-c", SESSION, str(package), str(run_dir)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert said.returncode == 0, said.stderr
    found: dict[str, Any] = json.loads(said.stdout)
    return found


@pytest.mark.feature("approvals")
@pytest.mark.parametrize("minor", MINORS, ids=lambda minor: minor.name)
def test_a_client_of_that_minor_works_with_this_kernel(minor: Path, swarm: Sandbox) -> None:
    assert session(client_of(minor), swarm.run_dirs[0]) == EXPECTED


@pytest.mark.feature("approvals")
@pytest.mark.parametrize("minor", MINORS, ids=lambda minor: minor.name)
def test_a_client_of_that_minor_works_with_a_kernel_that_says_more(
    minor: Path, swarm: Sandbox, short_tmp: Path
) -> None:
    with proxy(swarm.run_dirs[0], short_tmp, said_more) as place:
        assert session(client_of(minor), place) == EXPECTED


@pytest.mark.feature("approvals")
@pytest.mark.parametrize("minor", MINORS, ids=lambda minor: minor.name)
def test_this_client_works_with_a_kernel_of_that_minor(minor: Path, swarm: Sandbox, short_tmp: Path) -> None:
    with proxy(swarm.run_dirs[0], short_tmp, said_less(minor)) as place:
        assert session(TODAY, place) == EXPECTED


@pytest.mark.parametrize("minor", MINORS, ids=lambda minor: minor.name)
def test_no_name_of_that_minor_has_gone(minor: Path) -> None:
    """Within a version nothing is taken away."""
    from scripts.freeze_client import names

    then, now = json.loads((minor / "names.json").read_text(encoding="utf-8")), names()
    assert set(then["types"]) <= set(now["types"])
    for struct, fields in then["fields"].items():
        assert set(fields) <= set(now["fields"][struct]), struct


def test_hello_finds_the_version_that_both_speak() -> None:
    with bare_broker() as broker:
        for versions, found in (([1], 1), ([1, 2], 1), ([7, 2, 1], 1), ([2], None), ([], None)):
            peer = broker.raw("client")
            hello = Hello(broker.token("client"), "inc", versions=versions)
            # A field that is at its default is absent, and an empty list is none of one.
            plain = {**from_raw(to_raw(hello), dict), "versions": versions}
            answer = peer.ask(Frame("hello", id="h", payload=to_raw(plain)))
            if found is None:
                assert answer.type == "error" and b"E_VERSION" in bytes(answer.payload)
            else:
                assert from_raw(answer.payload, Welcome).version == found
            with suppress(zmq.ZMQError):
                peer.close()
            broker.peers.remove(peer)

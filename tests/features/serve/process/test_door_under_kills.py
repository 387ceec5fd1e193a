"""Fifty clients stream through a door while the door, the broker and agents are killed at once: each message has one
answer, and each client has in the end exactly what is stored, each piece once.

`make test` runs a small sample by a seed; `make chaos` the whole.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from http.client import HTTPException
from typing import Final

import pytest

from tests.features.serve.process.test_gdn_serve import told_by
from tests.features.serve.streams import Api, Heard
from tests.kernel_fixture import BUNDLE, Sandbox, sandbox
from tests.process.model_servers import server

CHAOS: Final = "GOONDAN_CHAOS_KILLS" in os.environ
CLIENTS: Final = 50 if CHAOS else 6
KILLS: Final = 6 if CHAOS else 1
#: How long all of it may take (seconds).
PATIENCE_S: Final = 240.0 if CHAOS else 50.0
CALL: Final = 'call bash__exec {"command":"sleep 0.3; echo done"}'
TEXT: Final = f"again 40 first |{CALL}|again 40 second |{CALL}|again 40 third "
TOKENS: Final = "chaos operate chaos-token-0123456 *\n"


class Door:
    """A door at one port, which is killed and started again."""

    def __init__(self, kernel: Sandbox) -> None:
        self.kernel = kernel
        (kernel.home / "tokens").write_text(TOKENS)
        (kernel.home / "tokens").chmod(0o600)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.start()

    def start(self) -> None:
        told = ("--port", str(self.port), "--token-file", str(self.kernel.home / "tokens"), "--json")
        self.process = self.kernel.popen("serve", *told)
        told_by(self.process)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def kernel() -> Iterator[Sandbox]:
    with server("gated_llm") as model:
        spec = f'{{provider: openai, model: m, endpoint: "{model}/v1", apiKey: k}}'
        with sandbox(BUNDLE.replace("{provider: embedded}", spec)) as made:
            made.detach()
            yield made


def streamed(api: Api, name: str, heard: Heard, until: float) -> None:
    """One message, whatever happens to its streams."""
    sent = {"text": TEXT, "instance": name}
    while heard.answer is None and time.monotonic() < until:
        try:
            with api.stream("/messages", sent, after=heard.position, idempotency_key=name) as events:
                for event in events:
                    heard.take(event)
        except (OSError, HTTPException, ValueError):  # the door is gone, or was in the middle of an event
            time.sleep(0.1)
        except AssertionError as refused:
            if "503" not in str(refused):  # no kernel just now
                raise
            time.sleep(0.2)


def killed(kernel: Sandbox, door: Door, rng: random.Random) -> None:
    """The door, the broker and some agents, at once."""
    victims = [row["pid"] for row in kernel.ps() if row["pid"] and row["role"] == "broker"]
    agents = [row["pid"] for row in kernel.ps() if row["pid"] and row["role"] == "agent"]
    for pid in [*victims, *rng.sample(agents, min(len(agents), 1 + len(agents) // 2))]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    door.kill()
    door.start()


@pytest.mark.timeout(300)
def test_every_client_has_one_answer_and_each_piece_once(kernel: Sandbox) -> None:
    seed = int(os.environ.get("GOONDAN_CHAOS_SEED", "7"))
    rng, until = random.Random(seed), time.monotonic() + PATIENCE_S
    door = Door(kernel)
    heard = {f"client-{number}": Heard() for number in range(CLIENTS)}
    failed: list[BaseException] = []

    def run(name: str) -> None:
        try:
            streamed(Api(door.port, "chaos-token-0123456"), name, heard[name], until)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in heard]
    for thread in threads:
        thread.start()
    for _ in range(KILLS):
        time.sleep(rng.uniform(0.4, 2.0))
        killed(kernel, door, rng)
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    try:
        assert not failed, failed[0]
        for name, one in heard.items():
            stored = kernel.gdn("instance", "export", "main", name).json["messages"]
            assert one.answer is not None and one.answer["status"] == "completed", (seed, name, one.answer)
            assert [message["data"]["role"] for message in stored].count("user") == 1, (seed, name)
            said = [message["data"]["content"] for message in stored if message["data"]["role"] == "assistant"]
            texts = ["".join(part["text"] for part in parts if part["type"] == "text") for parts in said]
            assert [one.texts[step] for step in sorted(one.texts)] == texts, (seed, name)
            calls = [part["toolCallId"] for parts in said for part in parts if part["type"] == "tool-call"]
            assert [call for call, end in one.calls if end == "called"] == calls, (seed, name)
            assert sorted(call for call, end in one.calls if end != "called") == sorted(calls), (seed, name)
            assert one.answer["response"] == texts[-1]
    finally:
        door.process.terminate()
        door.process.communicate()

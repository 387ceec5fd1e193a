"""Broker, tool host and agent, each started on its own by hand: the supervisor is a convenience, not a condition."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from goondan.schemas.transport import SOCKETS
from goondan.schemas.transport.link import Link
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.frames import AgentEvent, Frame, ReplyTo
from tests.kernel_fixture import BUNDLE, ROOT

READY_S = 15.0


@contextmanager
def program(*arguments: str, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A program that says itself when it is ready, and ends when it is told to."""
    ready_r, ready_w = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-m", *arguments, "--ready-fd", str(ready_w)], pass_fds=[ready_w], env=env, cwd=ROOT
    ) as process:
        os.close(ready_w)
        try:
            assert select.select([ready_r], [], [], READY_S)[0], f"{arguments[0]} was not ready in time"
            assert os.read(ready_r, 1) == b"\n", f"{arguments[0]} ended before it was ready"
            yield process
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            os.close(ready_r)
            process.kill()


def token_file(run_dir: Path, env: dict[str, str], *arguments: str) -> str:
    """A token made by hand, in a file of its own."""
    made = subprocess.run(
        [sys.executable, "-m", "goondan.kernel.broker.token", "--run-dir", str(run_dir), *arguments],
        env=env,
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    path = run_dir.parent / f"token-{'-'.join(arguments)}"
    path.write_bytes(made.stdout)
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def by_hand(short_tmp: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A broker started by hand: its runtime directory and the environment of all that join it."""
    bundle = short_tmp / "goondan.yaml"
    bundle.write_text(BUNDLE, encoding="utf-8")
    run_dir = short_tmp / "run"
    env = {**os.environ, "GOONDAN_STATE_ROOT": str(short_tmp / "state"), "XDG_RUNTIME_DIR": str(short_tmp)}
    with program("goondan.kernel.broker", "--bundle", str(bundle), "--run-dir", str(run_dir), env=env):
        yield run_dir, env


def endpoint(run_dir: Path, cls: str) -> str:
    return f"ipc://{run_dir}/{SOCKETS[cls]}"


async def ask(run_dir: Path, text: str, event_id: str) -> AgentEvent:
    """Send a text to `main` as a client, and wait for the answer."""
    link = Link(endpoint(run_dir, "client"), (run_dir / "client.token").read_text(), on_frame=print)
    await link.start()
    try:
        event = AgentEvent(id=event_id, type="user.message", created_at="2026-01-01T00:00:00Z", input=text)
        frame = Frame("event", event_id=event_id, to="main", instance_key="k", payload=to_raw(event))
        frame.reply_to = ReplyTo("client", f"corr-{event_id}")
        answer = await asyncio.wait_for(link.ask(frame), 20)
        return from_raw(answer.payload, AgentEvent)
    finally:
        await link.close()


def test_what_is_not_started_stays_wanted_and_nothing_is_lost(by_hand: tuple[Path, dict[str, str]]) -> None:
    """The event waits for its agent; the agent's call waits for its tool host; both come late and it is answered."""
    run_dir, env = by_hand
    host_token = token_file(run_dir, env, "toolhost")
    agent_token = token_file(run_dir, env, "agent", "main", "--instance", "k")
    assert (run_dir / "kernel.secret").stat().st_mode & 0o077 == 0

    async def late() -> AgentEvent:
        asked = asyncio.create_task(ask(run_dir, "/bash__exec command=pwd", "e2"))
        with ExitStack() as stack:

            def start() -> None:
                agents, tools = endpoint(run_dir, "agent"), endpoint(run_dir, "toolhost")
                stack.enter_context(
                    program("goondan.agentproc", "--endpoint", agents, "--token-file", agent_token, env=env)
                )
                stack.enter_context(
                    program("goondan.toolhost", "--endpoint", tools, "--token-file", host_token, env=env)
                )

            await asyncio.to_thread(start)
            return await asked

    answer = asyncio.run(late()).answer
    assert answer is not None
    assert "/instances/main/k/workspace" in (answer.response or "")


def test_a_second_broker_for_the_same_bundle_is_refused(by_hand: tuple[Path, dict[str, str]]) -> None:
    run_dir, env = by_hand
    bundle = str(run_dir.parent / "goondan.yaml")
    second = subprocess.run(
        [sys.executable, "-m", "goondan.kernel.broker", "--bundle", bundle, "--run-dir", str(run_dir)],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert second.returncode == 1
    assert "E_KERNEL_RUNNING" in second.stderr
    assert "Traceback" not in second.stderr

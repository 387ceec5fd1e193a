"""Cancelling: from a command, a signal or a terminal down to the processes of a jail, with a real kernel."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bundles import documents
from tests.kernel_fixture import BUNDLE, Sandbox, sandbox, wait_until
from tests.process.model_servers import server
from tests.process.terminal import Terminal, finished

TOOL = "---\n" + documents(
    "Tool slow {entry: ./slow.py, exports: [{name: hang, description: Never ends by itself., "
    "parameters: {type: object}}, {name: walk, description: Ends when told., parameters: {type: object}}]}",
)
#: `hang` hears nothing: not that it is cancelled, nor does its child; `walk` says how far it is.
MODULE = """\
import os, subprocess, sys, time

def hang(ctx, input):
    subprocess.Popen(["sleep", "613"])
    open(os.path.join(ctx.workdir, "started"), "w").close()
    time.sleep(600)

def walk(ctx, input):
    ctx.progress(1, 4, "a quarter")
    while not os.path.exists(os.path.join(ctx.workdir, "go")):
        time.sleep(0.02)
    return "there"

handlers = {"hang": hang, "walk": walk}
"""
HANG = "call slow__hang {}|never said"


@pytest.fixture(scope="module")
def running() -> Iterator[Sandbox]:
    """A kernel whose model is a program, and a tool that takes its time."""
    with server("gated_llm") as base:
        spec = f'{{provider: openai, model: m, endpoint: "{base}/v1", apiKey: k}}'
        bundle = BUNDLE.replace("{provider: embedded}", spec).replace("[Tool/bash]", "[Tool/bash, Tool/slow]")
        with sandbox(bundle + TOOL) as made:
            (made.home / "slow.py").write_text(MODULE)
            made.detach()
            yield made


def started(workdir: Path) -> None:
    """The handler runs, and so does its child."""
    wait_until((workdir / "started").exists)


def assert_gone(kernel: Sandbox) -> None:
    """Nothing of the handler is left."""
    wait_until(lambda: "sleep 613" not in " ".join(kernel.processes().values()), what="the jail's processes ended")


def error_code(document: Any) -> str:
    return str(document["error"]["code"])


def test_a_cancelled_turn_ends_down_to_its_jail_and_the_next_one_works(running: Sandbox, tmp_path: Path) -> None:
    event = running.gdn("send", "--no-wait", "--workdir", str(tmp_path), HANG).out.strip()
    waiting = running.gdn("send", "--no-wait", "waits behind it").out.strip()
    started(tmp_path)
    assert running.gdn("cancel", waiting).out == f"cancelled {waiting}\n"
    cancelled = running.gdn("cancel", "--agent", "main", "--json")
    assert (cancelled.status, cancelled.json) == (0, {"eventId": event, "status": "cancelled"})
    assert_gone(running)
    assert running.gdn("send", "after").out == "after\n"
    told = running.gdn("trace", event, "--json").json
    assert (told["status"], error_code(told), told["finishReason"]) == ("failed", "E_CANCELLED", "cancelled")
    assert [(call["status"], call["code"]) for call in told["steps"][0]["tools"]] == [("error", "E_CANCELLED")]
    again = running.gdn("cancel", event, "--json")
    assert (again.status, again.json) == (0, {"eventId": event, "status": "cancelled"})
    unknown = running.gdn("cancel", "--agent", "main", "--json")
    assert (unknown.status, error_code(unknown.json)) == (1, "E_EVENT_NOT_FOUND")


def test_a_cancel_survives_the_broker_and_is_answered_when_the_turn_has_ended(running: Sandbox, tmp_path: Path) -> None:
    event = running.gdn("send", "--no-wait", "--instance", "b", "--workdir", str(tmp_path), HANG).out.strip()
    started(tmp_path)
    agent = next(r["pid"] for r in running.ps() if r["role"] == "agent" and r["instanceKey"] == "b")
    broker = running.pid("broker")
    os.kill(agent, signal.SIGSTOP)
    try:
        cancelling = running.popen("cancel", event, "--json")
        os.kill(broker, signal.SIGKILL)
        wait_until(lambda: any(r["role"] == "broker" and r["pid"] not in (None, broker) for r in running.ps()))
        assert cancelling.poll() is None
    finally:
        os.kill(agent, signal.SIGCONT)
    status, out = finished(cancelling)
    assert (status, json.loads(out)) == (0, {"eventId": event, "status": "cancelled"})
    assert_gone(running)
    assert running.gdn("send", "--instance", "b", "after").out == "after\n"


def test_sigterm_to_call_cancels_its_call(running: Sandbox, tmp_path: Path) -> None:
    call = running.popen("call", "slow__hang", "--workdir", str(tmp_path), "--json")
    started(tmp_path)
    call.send_signal(signal.SIGTERM)
    status, out = finished(call)
    assert (status, error_code(json.loads(out))) == (143, "E_CANCELLED")
    assert_gone(running)


def test_a_signal_to_a_batch_cancels_what_is_open_and_every_line_has_its_result(
    running: Sandbox, tmp_path: Path
) -> None:
    line = {"tool": "slow__hang", "args": {}, "workdir": str(tmp_path)}
    batch = running.popen("call", "--batch", "-", stdin=subprocess.PIPE)
    assert batch.stdin is not None
    batch.stdin.write(b"".join(json.dumps({**line, "id": n, "instance": f"i{n}"}).encode() + b"\n" for n in range(2)))
    batch.stdin.flush()
    started(tmp_path)
    batch.send_signal(signal.SIGINT)
    out, _ = batch.communicate(timeout=30)
    results = {line["id"]: line["result"] for line in map(json.loads, out.splitlines())}
    assert (batch.returncode, [error_code(results[n]) for n in (0, 1)]) == (130, ["E_CANCELLED", "E_CANCELLED"])
    assert_gone(running)


def test_ctrl_c_cancels_what_was_sent_and_sigterm_leaves_it_to_the_agent(running: Sandbox, tmp_path: Path) -> None:
    send = running.popen("send", "--json", "--instance", "s", "--workdir", str(tmp_path), HANG)
    started(tmp_path)
    send.send_signal(signal.SIGINT)
    status, out = finished(send)
    assert (status, error_code(json.loads(out))) == (130, "E_CANCELLED")
    assert_gone(running)
    text = ["--event-id", "kept", "--instance", "s", "--workdir", str(tmp_path), "call slow__walk {}|arrived"]
    send = running.popen("send", *text)
    agent = wait_until(lambda: "running" in running.gdn("trace", "kept").out)
    assert agent
    send.send_signal(signal.SIGTERM)
    assert finished(send)[0] == 143
    (tmp_path / "go").touch()
    assert running.gdn("send", *text).out == "arrived\n"


def test_call_shows_what_a_tool_says_of_its_work_on_a_terminal_only(running: Sandbox, tmp_path: Path) -> None:
    call = ["call", "slow__walk", "--workdir", str(tmp_path)]
    with Terminal(running, *call, stdout=subprocess.PIPE) as terminal:
        terminal.read_until("working, slow__walk, 25% a quarter, ")
        (tmp_path / "go").touch()
        assert json.loads(finished(terminal.process)[1])["output"] == "there"
        terminal.wait()
        assert terminal.shown.endswith(b"\r\x1b[K"), "the line is cleared"
    (tmp_path / "go").unlink()
    piped = running.popen(*call)
    with Terminal(running, *call, "--json", stdout=subprocess.PIPE) as terminal:
        wait_until(lambda: sum("slow" in row["name"] for row in running.ps() if row["role"] == "worker") >= 1)
        (tmp_path / "go").touch()
        assert json.loads(finished(terminal.process)[1])["output"] == "there"
        terminal.wait()
        assert terminal.shown == b""
    out, err = piped.communicate(timeout=30)
    assert (json.loads(out)["output"], err) == ("there", b"")

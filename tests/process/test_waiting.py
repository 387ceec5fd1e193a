"""What a person is told while a turn waits: for a model server that is silent or refuses connections, for another
agent, for an extension. One kernel; each test has agents of its own.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.bundles import documents
from tests.kernel_fixture import Sandbox, sandbox, wait_until
from tests.process.terminal import Terminal

BUNDLE = documents(
    "Model console {provider: embedded}",
    'Model silent {provider: openai, model: m, endpoint: "http://127.0.0.1:SILENT/v1"}',
    'Model gone {provider: openai, model: m, endpoint: "http://127.0.0.1:GONE/v1", retry: {busyS: 5}}',
    "Model wrong {provider: openai, model: m, endpoint: BASE/nowhere/v1}",
    "Model busy {provider: openai, model: m, endpoint: BASE/busy/v1}",
    "Extension slow {entry: ext/slow.py}",
    "Agent planner {modelConfig: {modelRef: Model/console}, tools: [Tool/bash, Tool/agents]}",
    "Agent mute {modelConfig: {modelRef: Model/silent}}",
    "Agent lost {modelConfig: {modelRef: Model/gone}}",
    "Agent astray {modelConfig: {modelRef: Model/wrong}}",
    "Agent patient {modelConfig: {modelRef: Model/busy}}",
    "Agent guarded {modelConfig: {modelRef: Model/console}, tools: [Tool/bash], extensions: [{ref: Extension/slow}]}",
    "Swarm swarm {entryAgent: Agent/planner, agents: [{ref: Agent/planner}, {ref: Agent/mute}, {ref: Agent/lost}, "
    "{ref: Agent/astray}, {ref: Agent/patient}, {ref: Agent/guarded}]}",
)
SLOW = """\
import asyncio
from pathlib import Path

def register(api):
    async def hold(ctx):
        while not Path("FLAG").exists():
            await asyncio.sleep(0.05)
        return ctx

    api.pipelines.mutate("step.pre", hold)
"""


#: The paths that NoModel was asked for.
ASKED: list[str] = []


class NoModel(BaseHTTPRequestHandler):
    """A server without models: 404, and 429 for what is busy."""

    def do_POST(self) -> None:
        self.send_response(429 if self.path.startswith("/busy") else 404)
        self.send_header("Retry-After", "50")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        ASKED.append(self.path)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Sandbox]:
    with ExitStack() as stack:
        silent = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
        gone = socket.create_server(("127.0.0.1", 0))
        elsewhere = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), NoModel))
        threading.Thread(target=elsewhere.serve_forever, daemon=True).start()
        stack.callback(elsewhere.shutdown)
        text = BUNDLE.replace("SILENT", str(silent.getsockname()[1])).replace("GONE", str(gone.getsockname()[1]))
        gone.close()
        running = stack.enter_context(sandbox(text.replace("BASE", f"http://127.0.0.1:{elsewhere.server_port}")))
        folder = running.bundle.parent / "ext"
        folder.mkdir()
        (folder / "slow.py").write_text(SLOW.replace("FLAG", str(running.home / "go on")))
        running.detach()
        yield running


def waits(kernel: Sandbox, kind: str) -> dict[str, Any]:
    """The wait of this kind, once there is one."""

    def look() -> Any:
        rows = kernel.gdn("ps", "--why", "--json").json["waits"]
        return next((row for row in rows if row["kind"] == kind), None)

    found: dict[str, Any] = wait_until(look, what=f"a wait of the kind {kind}")
    return found


def line_of(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr is not None
    return process.stderr.readline().decode().rstrip("\n")


@pytest.mark.feature("waits")
def test_a_model_server_that_says_nothing_is_told_without_a_terminal_and_by_ps(kernel: Sandbox) -> None:
    asking = kernel.popen("send", "mute", "hello", "--event-id", "m1")
    line = line_of(asking)
    told = re.fullmatch(
        r"gdn: mute/default \(step 1\) waits for its model openai/m at http://127\.0\.0\.1:\d+/v1: "
        r"nothing came for (\d+)s \(try 1\)",
        line,
    )
    assert told is not None, line
    assert 2 <= int(told[1]) < 15
    row = waits(kernel, "model")
    assert (row["agent"], row["eventId"], row["attempt"], row["step"]) == ("mute", "m1", 1, 1)
    assert row["forMs"] >= 2000
    assert "nothing came for" in kernel.gdn("ps", "--why").out
    kernel.gdn("cancel", "m1")
    asking.communicate()
    assert kernel.gdn("ps", "--why").out == "nobody waits\n"


@pytest.mark.feature("waits")
def test_a_model_server_that_refuses_connections_is_told_with_its_tries_and_the_advice_fits(kernel: Sandbox) -> None:
    asking = kernel.popen("send", "lost", "hello")
    told = line_of(asking)
    assert re.search(r"no connection: Connection refused; try \d in \ds", told), told
    _, rest = asking.communicate()
    assert asking.returncode == 1
    assert "Nothing listens there: start the model server" in rest.decode()


def test_a_wrong_path_is_told_as_one(kernel: Sandbox) -> None:
    failed = kernel.gdn("send", "astray", "hello")
    assert "404" in failed.err
    assert "Check the path of the Model's endpoint" in failed.err


@pytest.mark.feature("gates", "usage", "waits")
def test_what_was_learned_of_a_server_is_shown_and_forgotten(kernel: Sandbox) -> None:
    asking = kernel.popen("send", "patient", "hello", "--event-id", "p1")
    row = waits(kernel, "model")
    assert row["before"] == 0
    assert 30_000 < row["heldMs"] <= 50_000
    assert re.search(r"waits for its model: held back for \d+s by the limit of its server", line_of(asking))
    learned = (
        r"the server of Model/busy: asked with care, learned \d+s ago: it refused 1 request, the last one \d+s ago"
    )
    assert re.search(learned, kernel.gdn("ps").out)
    assert re.search(learned, kernel.gdn("usage").out)
    assert kernel.gdn("usage", "--json").json["learnedLimits"][0]["refusals"] == 1
    asked = len(ASKED)
    assert re.match(f"forgotten: {learned}", kernel.gdn("ps", "--forget-limits").out)
    wait_until(lambda: len(ASKED) > asked, what="the request goes out at once")
    kernel.gdn("cancel", "p1")
    asking.communicate()


@pytest.mark.feature("waits")
def test_the_terminal_shows_what_another_agent_does_and_behind_whom_it_is_queued(kernel: Sandbox) -> None:
    asked = {"target": "mute", "input": "hello", "instanceKey": "n"}
    with Terminal(kernel, "send", "/agents__request " + json.dumps(asked), "--event-id", "t1") as terminal:
        terminal.read_until("mute/n (step 1) waits for its model openai/m")
        asked["input"] = "second"
        with Terminal(
            kernel, "send", "/agents__request " + json.dumps(asked), "--instance", "two", "--event-id", "t2"
        ) as second:
            second.read_until("queued behind 1 message of mute/n")
            kernel.gdn("cancel", "t2")
        kernel.gdn("cancel", "t1")


@pytest.mark.feature("waits")
def test_an_extension_that_hangs_is_told_with_its_point_and_since_when(kernel: Sandbox) -> None:
    asking = kernel.popen("send", "guarded", "/bash__exec command=true", "--event-id", "g1")
    row = waits(kernel, "extension")
    assert (row["agent"], row["extension"], row["point"]) == ("guarded", "slow", "step.pre")
    assert 2000 <= row["forMs"] < 15_000
    assert "waits for the extension slow, which hangs at step.pre" in line_of(asking), asking.communicate()
    assert "waits for the extension slow, which hangs at step.pre" in kernel.gdn("ps", "--why").out
    shown = wait_until(lambda: "hung" in (out := kernel.gdn("trace", "g1").out) and out)
    assert "extension slow hung at step.pre and has not gone on" in shown
    (kernel.home / "go on").touch()
    asking.communicate()
    assert asking.returncode == 0
    shown = kernel.gdn("trace", "g1").out
    assert re.search(r"extension slow hung at step\.pre for [\d.]+ s", shown), shown

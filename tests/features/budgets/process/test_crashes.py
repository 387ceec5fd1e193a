"""A budget of 60 calls over a lead with five workers at once, while agents, the broker and at last everything are
killed: never more than 60 calls happen, and never fewer than 52 before the stop.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.kernel_fixture import Sandbox, sandbox, wait_until

CALLS = 60
LEAST = 52
WORKERS = 5
#: How long the model thinks (seconds): so that calls of all workers are under way when something is killed.
THINKS_S = 0.03

MARK = """\
import os


def add(ctx, input):
    with open(os.path.join(ctx.workdir, "marks"), "a") as marks:
        marks.write("x\\n")
    return "done"


handlers = {"add": add}
"""

BUNDLE = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: main}
spec: {provider: openai, model: scripted, endpoint: "BASE", params: {max_tokens: 100}}
---
apiVersion: goondan.ai/v1
kind: Tool
metadata: {name: mark}
spec:
  entry: ./mark/mark.py
  exports: [{name: add, parameters: {type: object}}]
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: lead}
spec:
  modelConfig: {modelRef: Model/main}
  tools: [Tool/agents]
  extensions: [{ref: Extension/budget, config: {limits: {calls: 60}}}]
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: worker}
spec:
  modelConfig: {modelRef: Model/main}
  tools: [Tool/mark]
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: swarm}
spec:
  entryAgent: Agent/lead
  agents: [{ref: Agent/lead}, {ref: Agent/worker}]
  policy: {maxStepsPerTurn: 1000}
"""


class Endless:
    """A model that never comes to an end by itself: the lead asks five workers, and each of them asks for tools."""

    def __init__(self) -> None:
        self.base = ""
        self.requests = 0
        self._lock = threading.Lock()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self.requests += 1
            number = self.requests
        time.sleep(THINKS_S)
        offered = {tool["function"]["name"] for tool in body["tools"]}
        if "mark__add" in offered:
            return calls([(f"c{number}-{at}", "mark__add", {}) for at in range(1 + number % 3)])
        asked = [{"target": "worker", "instanceKey": f"w{at}", "input": "work"} for at in range(WORKERS)]
        return calls([(f"c{number}-{at}", "agents__request", args) for at, args in enumerate(asked)])


def calls(asked: list[tuple[str, str, dict[str, Any]]]) -> dict[str, Any]:
    made = [
        {"index": at, "id": name, "type": "function", "function": {"name": tool, "arguments": json.dumps(args)}}
        for at, (name, tool, args) in enumerate(asked)
    ]
    return {"role": "assistant", "tool_calls": made}


@contextmanager
def endless() -> Iterator[Endless]:
    model = Endless()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            message = model.answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            usage = {"prompt_tokens": 10, "completion_tokens": 5}
            choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
            data = json.dumps({"object": "chat.completion", "choices": [choice], "usage": usage}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def handle(self) -> None:
            with suppress(OSError):  # who asked was killed
                super().handle()

        def log_message(self, *arguments: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    model.base = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield model
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sandbox, Endless]]:
    with endless() as model, sandbox(BUNDLE.replace("BASE", model.base)) as made:
        (made.home / "mark").mkdir()
        (made.home / "mark" / "mark.py").write_text(MARK)
        yield made, model


def marks(kernel: Sandbox) -> int:
    """Tool calls that really happened."""
    files = [path for folder in kernel.state_dirs for path in folder.glob("instances/worker/*/workspace/marks")]
    return sum(len(Path(path).read_text().splitlines()) for path in files)


def worker_pids(kernel: Sandbox) -> list[int]:
    return [row["pid"] for row in kernel.ps() if row["role"] == "agent" and row["name"] == "worker" and row["pid"]]


def happened(kernel: Sandbox, model: Endless) -> int:
    """Calls that really happened: of models, in jails, and those of the lead, which ask the workers."""
    return model.requests + marks(kernel) + WORKERS


def tree_of(kernel: Sandbox) -> dict[str, Any]:
    (tree,) = kernel.gdn("budget", "--json").json["trees"]
    found: dict[str, Any] = tree
    return found


def test_sixty_calls_are_sixty_calls_whatever_is_killed(swarm: tuple[Sandbox, Endless]) -> None:
    kernel, model = swarm
    kernel.detach()
    sender = kernel.popen("send", "--json", "go")
    for count, victim in ((15, "worker"), (24, "broker"), (33, "worker"), (42, "supervisor")):
        wait_until(lambda count=count: happened(kernel, model) >= count, 30, f"{count} calls")
        os.kill(worker_pids(kernel)[0] if victim == "worker" else kernel.pid(victim), signal.SIGKILL)
    out, err = sender.communicate(timeout=60)
    assert json.loads(out or err)["error"]["code"] == "E_KERNEL_LOST", "everything dies with the supervisor"
    kernel.wait_for_nothing()
    kernel.detach()
    wait_until(lambda: tree_of(kernel)["endedMs"] is not None, 30, "the work goes on, and ends")
    tree = tree_of(kernel)
    (budget,) = tree["budgets"]
    trace = kernel.gdn("trace", tree["rootEvent"], "--json").out
    made = happened(kernel, model)
    # Calls that had begun when their jails died were made as well; nobody can say whether these have left a mark.
    unknown = len(re.findall(r'"code": ?"E_TOOL_(?:OUTCOME_UNKNOWN|CRASHED)"', trace))
    assert made <= CALLS, (model.requests, marks(kernel), budget)
    assert made + unknown >= LEAST, (model.requests, marks(kernel), unknown, budget)
    assert budget["spent"]["calls"] == CALLS
    assert budget["held"]["calls"] == 0
    assert budget["by"]["lead"]["toolCalls"] == WORKERS
    shown = kernel.gdn("budget", tree["rootEvent"]).out
    assert "calls: 60 of 60 spent" in shown
    assert "    worker: calls " in shown
    assert "the budget of agent 'lead' is spent: 60 of 60 calls" in trace
    assert trace.count("E_BUDGET_SPENT") > WORKERS, "each refusal is shown, and the lead was told of each"
    assert happened(kernel, model) == made, "nothing of the tree goes on"
    refused = kernel.gdn("denied", "--by", "budget", "--json").json
    assert "worker" in {row["agent"] for row in refused}
    assert all("limits.calls of the agent's Extension/budget" in row["allow"] for row in refused)

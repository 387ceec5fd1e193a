"""Pending results through the real kernel: polled, told by themselves, and never lost without a word."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.bundles import documents
from tests.kernel_fixture import BUNDLE, Sandbox, sandbox, wait_until

TOOL = (
    documents(
        "Tool slow {entry: tools/slow.py, exports: [{name: start}, {name: later}, {name: fails}, {name: stays}, "
        "{name: dies}, {name: nested}, {name: block}]}",
    )
    + "---\n"
)
CODE = """\
import asyncio, os, threading, time
from goondan_tool import Pending

forty = threading.Barrier(40)

def start(ctx, input):
    def work():
        until = ctx.workdir + "/go"
        while not os.path.exists(until): time.sleep(0.01)
        return {"done": ctx.tool_call_id is not None}
    return Pending(input.get("handle", "job"), work)

async def later(ctx, input):
    async def work():
        await asyncio.sleep(0.05)
        return "later"
    return Pending("async-job", work())

def fails(ctx, input):
    def work(): raise ValueError("it broke")
    return Pending("bad-job", work)

def stays(ctx, input): return Pending("elsewhere")

def dies(ctx, input): return Pending("dying", lambda: os._exit(3))

def nested(ctx, input): return Pending("outer", lambda: Pending("inner"))

def block(ctx, input):
    def work():
        forty.wait(30)  # none goes on before forty are there
        return "met"
    return Pending(input["handle"], work)

handlers = {f.__name__: f for f in (start, later, fails, stays, dies, nested, block)}
"""
WITH_TOOL = TOOL + BUNDLE.replace("tools: [Tool/bash]", "tools: [Tool/bash, Tool/slow, Tool/tool-result]")


@pytest.fixture(scope="module")
def kernel() -> Iterator[Sandbox]:
    """One for all: each test has an instance of its own, and those that kill something leave it working."""
    with sandbox(WITH_TOOL) as made:
        (made.home / "tools").mkdir()
        (made.home / "tools" / "slow.py").write_text(CODE)
        made.detach()
        yield made


class Talk:
    """One instance of the agent."""

    def __init__(self, kernel: Sandbox, key: str) -> None:
        self.kernel = kernel
        self.key = key

    def say(self, text: str) -> str:
        """What it answers."""
        result = self.kernel.gdn("send", text, "--instance", self.key)
        assert result.status == 0, result.err
        return result.out

    @property
    def folder(self) -> Path:
        """Where it keeps its files."""
        (found,) = self.kernel.home.glob(f"state/workspaces/*/instances/main/{self.key}")
        return found

    def go(self) -> None:
        """Let the work end."""
        (self.folder / "workspace" / "go").touch()

    def called(self) -> int:
        """How many tool calls it has made."""
        with closing(sqlite3.connect(f"file:{self.folder}/conversation.db?mode=ro", uri=True)) as db:
            (count,) = db.execute("SELECT count(*) FROM runtime_events WHERE type = 'tool.called'").fetchone()
        return int(count)

    def told(self) -> list[str]:
        """What tools have said to the agent by themselves."""
        with closing(sqlite3.connect(f"file:{self.folder}/conversation.db?mode=ro", uri=True)) as db:
            rows = db.execute("SELECT message FROM base UNION ALL SELECT message FROM events").fetchall()
        messages: list[Any] = [msgspec.msgpack.decode(row[0]) for row in rows if row[0] is not None]
        by_tools = [m["data"] for m in messages if m["source"]["type"] == "tool"]
        return [data["content"] for data in by_tools if data["role"] == "user"]

    def wait_for(self, text: str) -> None:
        """Until one of these messages has `text`."""
        wait_until(lambda: any(text in told for told in self.told()), what=text)


@pytest.mark.requirement("RESULT-03", "RESULT-04")
def test_polling_tells_pending_then_the_result_and_then_nothing_comes_by_itself(kernel: Sandbox) -> None:
    talk = Talk(kernel, "polled")
    calls = ("slow__start", "slow__start handle=other", "slow__start", "slow__stays", "tool-result__get handle=never")
    asked = talk.say("\n".join(f"/{call}" for call in calls))
    assert asked.count("pending, handle") == 3
    assert "is in use" in asked
    assert "E_TOOL_OUTCOME_UNKNOWN" in asked
    assert "pending, handle slow/job" in talk.say("/tool-result__get handle=slow/job waitMs=100")
    before = talk.called()
    waiting = kernel.popen("send", "/tool-result__get handle=slow/job waitMs=15000", "--instance", talk.key)
    wait_until(lambda: talk.called() > before, what="the call that waits")
    assert kernel.gdn("call", "bash__exec", '{"command":"true"}').status == 0, "others work meanwhile"
    talk.go()
    out, _ = waiting.communicate(timeout=30)
    assert b'"done": true' in out
    assert '"done": true' in talk.say("/tool-result__get handle=slow/job"), "it is kept for those who ask again"
    talk.wait_for("result slow/other of")
    assert len(talk.told()) == 1, "what was polled for does not come by itself as well"


def test_a_deleted_instance_takes_its_pending_work_with_it(kernel: Sandbox) -> None:
    talk = Talk(kernel, "deleted")
    assert "pending, handle slow/job" in talk.say("/slow__start")
    folder = talk.folder
    refused = kernel.gdn("instance", "delete", "main", talk.key, "--json")
    assert refused.json["error"]["code"] == "E_INSTANCE_BUSY"
    assert "goes on in the background ('slow/job')" in refused.json["error"]["message"]
    assert kernel.gdn("instance", "delete", "main", talk.key, "--force").status == 0
    assert not [row for row in kernel.ps() if row["instanceKey"] == talk.key]
    assert kernel.gdn("call", "bash__exec", '{"command":"true"}').status == 0  # what the end of the work said is over
    assert not folder.exists(), "nobody told a new instance of it"


@pytest.mark.requirement("RESULT-04")
def test_results_that_nobody_polls_for_come_by_themselves(kernel: Sandbox) -> None:
    talk = Talk(kernel, "told")
    ends = {"later": "async-job", "fails": "bad-job", "nested": "outer", "dies": "dying"}
    for export, handle in ends.items():
        assert f"pending, handle slow/{handle}" in talk.say(f"/slow__{export}")
        talk.wait_for(f"result slow/{handle} of")
    by_handle = {text.split()[3]: text for text in talk.told()}
    assert '"output":"later"' in by_handle["slow/async-job"]
    assert "it broke" in by_handle["slow/bad-job"]
    assert "E_TOOL_CRASHED" in by_handle["slow/dying"]
    assert "E_TOOL_BAD_OUTPUT" in by_handle["slow/outer"]
    assert len(talk.told()) == 4, "each once"


def test_two_hundred_pieces_that_block_run_forty_at_a_time(kernel: Sandbox) -> None:
    talk = Talk(kernel, "load")
    said = talk.say("\n".join(f"/slow__block handle=p{number}" for number in range(200)))
    assert said.count("pending, handle") == 200
    wait_until(lambda: len(talk.told()) == 200)
    assert [told for told in talk.told() if '"met"' not in told] == []


def test_work_outlives_agent_and_broker(kernel: Sandbox) -> None:
    talk = Talk(kernel, "outlived")
    talk.say("/slow__start")
    agents = [row["pid"] for row in kernel.ps() if row["role"] == "agent" and row["name"] == "main"]
    for pid in [*agents, kernel.pid("broker")]:
        os.kill(pid, signal.SIGKILL)
    talk.go()
    talk.wait_for('"done":true')


def test_work_that_dies_with_its_tool_host_is_said_to_be_of_unknown_outcome(kernel: Sandbox) -> None:
    talk = Talk(kernel, "lost")
    talk.say("/slow__start")
    os.kill(kernel.pid("toolhost"), signal.SIGKILL)
    talk.wait_for("E_TOOL_OUTCOME_UNKNOWN")
    assert "E_TOOL_OUTCOME_UNKNOWN" in talk.say("/tool-result__get handle=slow/job")
    assert len(talk.told()) == 1

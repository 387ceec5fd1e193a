"""How the processes of a running kernel are told to leave: the frames themselves, as the agent's process sees them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.bundles import documents
from tests.kernel_fixture import BUNDLE, Sandbox, sandbox, wait_until

EXTENSION = (
    documents(
        "Extension tap {entry: tap.py}",
    )
    + "---\n"
)
USES_IT = EXTENSION + BUNDLE.replace(
    "  tools: [Tool/bash]", "  tools: [Tool/bash]\n  extensions: [{ref: Extension/tap}]"
)
#: Writes every frame that the agent's process sends or gets into a file of its state, one a line.
TAP = """\
import asyncio
import json
import os
import time

from goondan.schemas.transport.link import Link


def register(api):
    root = os.environ["GOONDAN_STATE_ROOT"]
    path = f"{root}/extensions/{api.extension.metadata.name}/{api.instance_key}.jsonl"

    def note(way, frame):
        row = {"way": way, "type": frame.type, "stage": frame.stage, "id": frame.id, "from": frame.from_}
        row |= {"to": frame.to, "inReplyTo": frame.in_reply_to, "eventId": frame.event_id}
        if frame.type == "shutdown":
            import msgspec
            row["payload"] = msgspec.msgpack.decode(frame.payload)
        with open(path, "a") as out:
            out.write(json.dumps(row) + "\\n")

    def recording(cls, name, way):
        plain = getattr(cls, name)

        def wrapped(self, frame, *rest, **more):
            result = plain(self, frame, *rest, **more)
            note(way, frame)
            return result

        setattr(cls, name, wrapped)

    recording(Link, "send", "out")
    recording(Link, "post", "out")
    recording(Link, "start_call", "out")
    import gc
    link = next(thing for thing in gc.get_objects() if isinstance(thing, Link) and thing.ready)
    heard = link._on_frame

    def hear(frame):
        note("in", frame)
        heard(frame)

    link._on_frame = hear
    if api.instance_key == "busy":  # it has acknowledged, and is there yet when the broker itself leaves
        close = link.close

        async def closes_late(linger):
            await asyncio.sleep(0.3)
            await close(linger)

        link.close = closes_late

    async def step(ctx):
        if api.instance_key == "stuck":
            note("in", ctx_frame())
            time.sleep(60)
        return await ctx.next()

    def ctx_frame():
        from goondan.schemas.wire.frames import Frame
        return Frame("stuck")

    api.pipeline.register("step", step)
"""


def tapped(kernel: Sandbox, instance: str) -> list[dict[str, Any]]:
    """The frames of an instance's process, oldest first."""
    [state] = kernel.state_dirs
    path = Path(state) / "extensions" / "tap" / f"{instance}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.requirement("IPC-01", "IPC-03", "IPC-07", "STATE-07")
def test_a_stop_tells_every_agent_in_a_frame_and_each_acknowledges_before_it_ends() -> None:
    with sandbox(USES_IT) as kernel:
        (kernel.home / "tap.py").write_text(TAP)
        kernel.detach()
        assert kernel.gdn("send", "hello", "--instance", "idle").status == 0
        asking = kernel.popen("send", "/bash__exec command='sleep 30'", "--instance", "busy", "--event-id", "b1")
        wait_until(lambda: any(row["type"] == "tool.call" for row in tapped(kernel, "busy")))
        assert kernel.gdn("stop").status == 0
        asking.wait(30)
        for instance in ("idle", "busy"):
            rows = tapped(kernel, instance)
            [told] = [row for row in rows if row["type"] == "shutdown"]
            assert (told["way"], told["from"], told["to"]) == ("in", "orchestrator", "main")
            assert told["payload"] == {"gracePeriodMs": 2500, "reason": "orchestrator_shutdown"}
            acknowledged = rows[-1]
            assert (acknowledged["way"], acknowledged["type"]) == ("out", "shutdown_ack"), rows
            assert (acknowledged["from"], acknowledged["to"]) == ("main", "orchestrator")
            assert acknowledged["inReplyTo"] == told["id"]
            released = [row["eventId"] for row in rows if (row["type"], row["stage"]) == ("ack", "release")]
            assert released == (["b1"] if instance == "busy" else [])
        assert "did not leave in time" not in kernel.log("supervisor")


@pytest.mark.requirement("IPC-07")
def test_an_agent_that_does_not_answer_is_killed_after_its_grace() -> None:
    with sandbox(USES_IT) as kernel:
        (kernel.home / "tap.py").write_text(TAP)
        kernel.detach()
        kernel.popen("send", "hello", "--instance", "stuck")
        wait_until(lambda: any(row["type"] == "stuck" for row in tapped(kernel, "stuck")))
        began = time.monotonic()
        assert kernel.gdn("stop").status == 0
        assert 2.5 < time.monotonic() - began < 9
        assert "agents did not leave in time" in kernel.log("supervisor")
        assert "not even SIGKILL" not in kernel.log("supervisor")


def test_agents_leave_though_the_broker_that_was_to_tell_them_is_gone() -> None:
    with sandbox(USES_IT) as kernel:
        (kernel.home / "tap.py").write_text(TAP)
        kernel.detach()
        assert kernel.gdn("send", "hello", "--instance", "idle").status == 0
        broker = kernel.pid("broker")
        os.kill(broker, signal.SIGSTOP)  # it is there and says nothing: the order to drain is lost in it
        stopping = kernel.popen("stop")
        wait_until(lambda: "stopping: " in kernel.log("supervisor"))
        os.kill(broker, signal.SIGKILL)
        assert stopping.wait(30) == 0
        assert "agents did not leave in time" not in kernel.log("supervisor")


def test_a_waiting_send_is_told_that_its_message_is_kept_and_the_next_start_finishes_it() -> None:
    with sandbox() as kernel:
        mark = kernel.home / "work"
        mark.mkdir()
        kernel.detach()
        told = kernel.gdn("send", "/bash__exec command='sleep 1.2; echo done'", "--instance", "idle")
        assert (told.status, told.out, told.err) == (0, "done\n", ""), "who finds an idle agent hears of no queue"
        # The first run waits for ever, the one after the restart finds the mark and ends at once.
        line = """/bash__exec command='if [ -e mark ]; then echo resumed; else touch mark; sleep 60; fi'"""
        words = ("send", line, "--event-id", "kept-1", "--workdir", str(mark))
        waiting = kernel.popen(*words, "--json")
        wait_until((mark / "mark").exists)
        behind = kernel.popen("send", "hello", "--event-id", "kept-2")
        assert behind.stderr is not None
        assert b"main/default is busy; 1 message before yours" in behind.stderr.readline()
        assert kernel.gdn("stop").status == 0
        out, _ = waiting.communicate(timeout=30)
        assert waiting.returncode == 1
        error = json.loads(out)["error"]
        assert error["code"] == "E_KERNEL_STOPPED"
        assert "the message kept-1 is kept, and its turn goes on at the next start" in error["message"]
        assert "--event-id kept-1" in error["suggestion"]
        assert behind.wait(30) == 1
        assert b"the message kept-2 is kept" in behind.stderr.read()

        left = kernel.gdn("trace", "kept-1", "--json")
        (call,) = left.json["steps"][0]["tools"]
        assert (left.json["status"], call["status"], "running" in left.out) == ("interrupted", "interrupted", False)

        kernel.detach()  # nobody asks again, and both turns run

        def is_over() -> bool:
            told = kernel.gdn("trace", "kept-2", "--json")
            return told.status == 0 and bool(told.json["status"] == "completed")

        wait_until(is_over)
        answer = kernel.gdn("send", "hello", "--event-id", "kept-2", "--json")
        assert (answer.status, answer.json["status"]) == (0, "completed")
        first = kernel.gdn(*words, "--json")
        assert first.json["status"] == "completed", first.out
        assert first.json["traceId"] == left.json["traceId"], "also when it was resumed, and is asked for again"

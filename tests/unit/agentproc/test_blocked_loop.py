"""Which code blocked an agent's event loop: what is written meanwhile, who reads it, and what is told."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from goondan.agentproc.start import blocked_loop
from goondan.agentproc.start.blocked_loop import (
    BLOCKED_FILE,
    BLOCKED_S,
    Blocked,
    LoopWatch,
    StackFrame,
    blocked_error,
    read_story,
)
from goondan.agentproc.turn.runner import TurnRunner
from goondan.kernel.broker.state.mailbox import LEASE_S
from goondan.schemas.bundle.launch import ExtensionSpec
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says
from tests.unit.agentproc.turns import Make, the_answer

STORY = """7f51 e1
Timeout (0:00:20)!
Thread 0x00007f52 (most recent call first):
  File "/lib/queue.py", line 1 in get
Thread 0x00007f51 (most recent call first):
  File "/lib/socket.py", line 10 in recv
  File "/bundle/ext/guard.py", line 7 in check
  File "/lib/asyncio/events.py", line 84 in _run
Thread 0x00007f53 (most recent call first):
  File "/bundle/ext/other.py", line 3 in wait
"""


def extension(name: str, entry: str, **more: Any) -> ExtensionSpec:
    return ExtensionSpec(name=name, entry=entry, resource={}, **more)


def test_it_is_written_about_before_the_agent_is_ended_and_not_while_it_renews() -> None:
    assert BLOCKED_S < LEASE_S
    assert BLOCKED_S > 10.0


def test_the_stack_is_that_of_the_loops_thread() -> None:
    blocked = read_story(STORY)
    assert blocked is not None
    assert blocked.event_id == "e1"
    assert [place.function for place in blocked.stack] == ["recv", "check", "_run"]


@pytest.mark.parametrize("text", ["", "7f51 e1\n", "7f99 e1\n" + STORY, "rubbish", "\n\n\n", STORY[:40]])
def test_what_says_nothing_blames_nobody(text: str) -> None:
    assert read_story(text) is None


def test_the_innermost_frame_of_an_extension_is_blamed() -> None:
    blocked = read_story(STORY)
    assert blocked is not None
    own = [extension("other", "/bundle/ext/other.py"), extension("guard", "/bundle/ext/guard.py")]
    error = blocked_error(blocked, own)
    assert error.code == "E_MIDDLEWARE"
    assert error.message == "extension guard blocked its agent, which was ended: guard.py, line 7, in check"
    imported = [extension("big", "/bundle/ext/main.py", modules={"guard.py": "0" * 64})]
    assert "extension big" in blocked_error(blocked, imported).message
    nobody = blocked_error(blocked, [extension("other", "/bundle/ext/other.py")])
    assert (nobody.code, "recv in /lib/socket.py" in nobody.message) == ("E_AGENT_FAILED", True)


def test_a_path_that_is_no_ascii_is_found() -> None:
    blocked = Blocked("e1", [StackFrame("/b/\\ud655\\uc7a5.py", "3", "f")])
    assert "extension 확장" in blocked_error(blocked, [extension("확장", "/b/확장.py")]).message


def test_a_loop_that_goes_on_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_loop, "BLOCKED_S", 0.05)
    watch = LoopWatch(str(tmp_path))
    watch.begin("e1")
    deadline = time.monotonic() + 5
    while "test_a_loop" not in (tmp_path / BLOCKED_FILE).read_text() and time.monotonic() < deadline:
        time.sleep(0.5)  # this is what blocking is; what Python runs meanwhile cannot be read without danger
    assert read_story((tmp_path / BLOCKED_FILE).read_text()) is not None
    watch.go_on()
    assert read_story((tmp_path / BLOCKED_FILE).read_text()) is None
    watch.close()
    assert (tmp_path / BLOCKED_FILE).read_text() == ""
    assert LoopWatch(str(tmp_path)).take() is None


def test_a_process_that_is_killed_while_it_blocks_is_explained_once(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from goondan.agentproc.start import blocked_loop\n"
        "blocked_loop.BLOCKED_S = 0.05\n"
        "watch = blocked_loop.LoopWatch(sys.argv[1])\n"
        "watch.begin('e1')\n"
        "def culprit():\n"
        "    print('blocks', flush=True)\n"
        "    time.sleep(60)\n"
        "culprit()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert process.stdout is not None
    process.stdout.readline()
    deadline = time.monotonic() + 10
    while "culprit" not in (tmp_path / BLOCKED_FILE).read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    process.stdout.close()
    blocked = LoopWatch(str(tmp_path)).take()
    assert blocked is not None
    assert (blocked.event_id, blocked.stack[0].function) == ("e1", "culprit")
    assert LoopWatch(str(tmp_path)).take() is None


def test_a_file_that_cannot_be_made_is_done_without(tmp_path: Path) -> None:
    os.symlink(tmp_path / "elsewhere", tmp_path / BLOCKED_FILE)
    watch = LoopWatch(str(tmp_path))
    watch.begin("e1")
    watch.close()
    assert watch.take() is None
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("event_id", ["e1", "another"])
async def test_the_turn_that_was_ended_fails_with_the_extensions_name_and_others_go_on(
    make: Make, link: FakeLink, tmp_path: Path, event_id: str
) -> None:
    own = extension("guard", "/bundle/ext/guard.py")
    first: TurnRunner = make(FakeLink(), FakeModel(says("ignored")))
    folder = Path(first.instance.place.instance_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / BLOCKED_FILE).write_text(STORY.replace("e1", event_id, 1))
    runner = make(link, FakeModel(says("fine"), says("fine")), extensions=[own])
    await runner.run(event_frame("e1", "go"))
    answer = the_answer(link)
    if event_id == "e1":
        assert (answer.status, answer.error and answer.error.code) == ("failed", "E_MIDDLEWARE")
        assert "extension guard blocked its agent" in str(answer.error)
    else:
        assert answer.status == "completed"
    await runner.run(event_frame("e2", "go on"))
    assert link.answers()[-1].status == "completed"

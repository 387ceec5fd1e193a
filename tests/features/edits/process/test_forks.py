"""`gdn instance fork` with a real kernel: real tool calls, an instance at work, and a process that is killed."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

from tests.kernel_fixture import PATIENCE_S, Sandbox, sandbox, wait_until


def test_forks_of_an_instance_at_work() -> None:
    with sandbox() as kernel:
        kernel.detach()
        assert kernel.gdn("send", "hello", "--instance", "old").status == 0
        worked = kernel.gdn("send", "/bash__exec command='echo x > kept; ls'", "--instance", "old", "--json").json
        turn = worked["turnId"]
        kernel.popen("send", "/bash__exec command='sleep 30'", "--instance", "old", "--event-id", "works")
        wait_until(
            lambda: kernel.gdn("instance", "show", "main", "old", "--json").json["lastTurn"]["status"] == "running"
        )
        whole = messages(kernel, "old")
        assert len(whole) == 6

        made = kernel.gdn("instance", "fork", "main", "old", "new")
        assert (made.status, made.out) == (0, "main/new begins with 6 messages of main/old\n")
        assert messages(kernel, "new") == whole
        assert "kept" not in kernel.gdn("send", "/bash__exec command=ls", "--instance", "new").out, "its workdir is new"
        step = kernel.gdn("instance", "fork", "main/old", "step", "--turn", turn, "--step", "2", "--json")
        assert (step.status, step.json) == (0, {"copied": 5})
        assert messages(kernel, "step") == whole[:5]
        first = kernel.gdn("instance", "fork", "main", "new", "first", "--turn", turn, "--json")
        assert first.json == {"copied": 2, "message": "/bash__exec command='echo x > kept; ls'"}
        assert kernel.gdn("send", "Go on.", "--instance", "step").status == 0
        assert kernel.gdn("instance", "undo", "main", "step", "--json").json["left"] == 5
        assert messages(kernel, "old") == whole

        check_refusals(kernel, turn)
        check_kill(kernel, whole)
        assert kernel.gdn("cancel", "works").status == 0


def check_refusals(kernel: Sandbox, turn: str) -> None:
    """What can be no fork. An agent that the bundle no longer has is one of them."""
    folder = Path(kernel.gdn("instance", "show", "main", "first", "--json").json["folder"])
    shutil.copytree(folder, folder.parent.parent / "gone" / "default")
    for code, *arguments in (
        ("E_USAGE", "main", "old", "new"),
        ("E_USAGE", "main", "old", "a\nb"),
        ("E_USAGE", "main", "old", "other", "--step", "1"),
        ("E_USAGE", "_operator", "default", "other"),
        ("E_TURN_NOT_FOUND", "main", "old", "other", "--turn", turn, "--step", "9"),
        ("E_TURN_NOT_FOUND", "main", "old", "other", "--turn", "t0"),
        ("E_INSTANCE_NOT_FOUND", "main", "nobody", "other"),
        ("E_AGENT_NOT_FOUND", "gone", "default", "other"),
    ):
        if arguments[0] == "_operator":
            kernel.call("true")
        refused = kernel.gdn("instance", "fork", *arguments, "--json")
        assert (refused.status != 0, refused.json["error"]["code"]) == (True, code), (arguments, refused.json)
    assert messages(kernel, "other") == []


def check_kill(kernel: Sandbox, whole: list[object]) -> None:
    """`other` has a file without messages. Its process dies while it waits to write there; the next one makes it."""
    path = Path(kernel.gdn("instance", "show", "main", "other", "--json").json["folder"]) / "conversation.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as held:
        held.execute("BEGIN IMMEDIATE")
        forking = kernel.popen("instance", "fork", "main", "old", "other", "--json")
        pid = wait_until(lambda: working(kernel))
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pid not in {row["pid"] for row in kernel.ps()})
        assert held.execute("SELECT count(*) FROM base").fetchone() == (0,)
        held.execute("ROLLBACK")
    said, _ = forking.communicate(timeout=PATIENCE_S)
    assert (forking.returncode, said) == (0, b'{"copied":6}\n'), said
    assert messages(kernel, "other") == whole


def working(kernel: Sandbox) -> int | None:
    """The process of `other`, once it has the event."""
    shown = kernel.gdn("instance", "show", "main", "other", "--json").json
    return shown["pid"] if [event["state"] for event in shown["events"]] == ["leased"] else None


def messages(kernel: Sandbox, key: str) -> list[object]:
    """The conversation of an instance."""
    found: list[object] = kernel.gdn("instance", "export", "main", key).json["messages"]
    return found

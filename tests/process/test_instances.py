"""`gdn instance list` and `show`, with and without a kernel."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kernel_fixture import PATIENCE_S, Sandbox, sandbox, wait_until
from tests.process.terminal import Terminal


@pytest.mark.feature("edits")
def test_instances_are_listed_and_shown_with_and_without_a_kernel() -> None:
    with sandbox() as kernel:
        assert kernel.gdn("instance", "list").out == "there are no instances yet\n"
        kernel.detach()
        for key in ("one", "zwei/\u00fc"):
            assert kernel.gdn("send", "hello", "--instance", key).status == 0
        kernel.call("true")  # of an agent of its own, which is no agent of the bundle
        listed = kernel.gdn("instance", "list", "--json").json
        assert [(row["agent"], row["instanceKey"], row["status"]) for row in listed] == [
            ("main", "zwei/\u00fc", "running"),
            ("main", "one", "running"),
        ]
        assert all(row["bytes"] > 0 for row in listed)
        assert kernel.gdn("instance", "list", "--agent", "nobody", "--json").json == []

        kernel.popen("send", "/bash__exec command='sleep 30'", "--instance", "one", "--event-id", "works")
        wait_until(lambda: kernel.gdn("instance", "show", "main", "one", "--json").json["events"])
        asker = kernel.popen("send", "hello", "--instance", "one", "--event-id", "waits", "--json")
        shown = wait_until(
            lambda: len((now := kernel.gdn("instance", "show", "main", "one", "--json").json)["events"]) == 2 and now
        )
        assert {(event["eventId"], event["state"]) for event in shown["events"]} == {
            ("works", "leased"),
            ("waits", "accepted"),
        }
        assert shown["pid"] in {row["pid"] for row in kernel.ps()}
        assert shown["lastTurn"]["status"] == "running"
        assert "works" in kernel.gdn("instance", "show", "main", "one").out
        elsewhere = replace(kernel, env={**kernel.env, "GOONDAN_STATE_ROOT": str(kernel.home / "elsewhere")}, here=None)
        kernels = elsewhere.gdn("ps", "--all", "--json").json
        assert kernel.ps()[0]["pid"] in {row["pid"] for row in kernels if row["stateDir"] == str(kernel.state_dirs[0])}
        assert str(kernel.state_dirs[0]) in elsewhere.gdn("ps", "--all").out
        assert "_operator is you" in kernel.gdn("ps").out

        busy = kernel.gdn("instance", "reset", "main", "one", "--yes", "--json")
        assert (busy.status, busy.json["error"]["code"]) == (1, "E_INSTANCE_BUSY")
        check_conversation(kernel)
        check_deletion(kernel, asker)
        assert kernel.gdn("restart", "--fresh").status == 0
        fresh = kernel.gdn("instance", "show", "main", "zwei/\u00fc", "--json").json
        assert fresh["conversation"].get("messages", 0) == 0, "right at once, though nobody has opened the file"
        assert kernel.gdn("stop").status == 0
        listed = kernel.gdn("instance", "list", "--json").json
        assert {(row["instanceKey"], row["status"]) for row in listed} == {
            ("one", "dormant"),
            ("zwei/\u00fc", "dormant"),
        }
        rested = kernel.gdn("instance", "show", "main", "zwei/\u00fc", "--json").json
        assert (rested["status"], rested["pid"], rested["events"]) == ("dormant", None, [])
        assert rested["lastTurn"]["status"] == "completed"
        lines = kernel.gdn("instance", "list").out.splitlines()
        assert lines[0].split() == ["STATUS", "BYTES", "WRITTEN", "INSTANCE"]
        assert any(line.endswith("  main/one") for line in lines)
        assert (
            kernel.gdn("instance", "list", "--agent", "_operator").out.splitlines()[-1].startswith("_operator is you")
        )
        assert kernel.gdn("instance", "show", "main/zwei/\u00fc", "--json").json == rested
        missing = kernel.gdn("instance", "show", "main", "none", "--json")
        assert (missing.status, missing.json["error"]["code"]) == (1, "E_INSTANCE_NOT_FOUND")
        unheard = kernel.gdn("instance", "delete", "main", "one", "--json")
        assert (unheard.status, unheard.json["error"]["code"]) == (1, "E_KERNEL_NOT_RUNNING")


def check_conversation(kernel: Sandbox) -> None:
    """What one instance has said is shown, exported, taken back and removed."""
    whose = ("main", "zwei/\u00fc")
    assert kernel.gdn("send", "/bash__exec command='echo x > kept'", "--instance", whose[1]).status == 0
    exported = kernel.gdn("instance", "export", *whose).json
    assert [message["data"]["role"] for message in exported["messages"]] == [
        *("user", "assistant", "user", "assistant", "tool", "assistant")
    ]
    numbers = kernel.gdn("instance", "show", *whose, "--json").json["conversation"]
    first, last = exported["messages"][0]["createdAt"], exported["messages"][-1]["createdAt"]
    assert (numbers["messages"], numbers["since"], numbers["last"]) == (6, first, last)
    assert f"6, from {first} to {last}" in kernel.gdn("instance", "show", *whose).out

    undone = kernel.gdn("instance", "undo", *whose, "--json").json
    assert (undone["removed"], undone["left"], undone["turnId"]) == (4, 2, numbers["lastTurnId"])
    assert kernel.gdn("instance", "export", *whose).json["messages"] == exported["messages"][:2]
    reset = kernel.gdn("instance", "reset", *whose, "--yes")
    assert (reset.status, reset.out) == (0, "main/zwei/\u00fc begins again; 2 messages were removed\n")
    nothing = kernel.gdn("instance", "undo", *whose, "--json")
    assert (nothing.status, nothing.json["error"]["code"]) == (1, "E_UNDO_REFUSED")
    assert "kept" in kernel.gdn("send", "/bash__exec command=ls", "--instance", whose[1]).out


def check_deletion(kernel: Sandbox, asker: subprocess.Popen[bytes]) -> None:
    """`one` works on an event with a tool call, and another event waits; both have askers."""
    folder = Path(kernel.gdn("instance", "show", "main", "one", "--json").json["folder"])
    kernel.gdn("send", "hello", "--instance", "two")
    refused = kernel.gdn("instance", "delete", "main", "one", "--json")
    assert (refused.status, refused.json["error"]["code"]) == (1, "E_INSTANCE_BUSY")
    assert "it works on 'works'" in refused.json["error"]["message"]
    assert "'waits'" in refused.json["error"]["message"]
    assert folder.is_dir()

    pid = kernel.gdn("instance", "show", "main", "one", "--json").json["pid"]
    deletions = [kernel.popen("instance", "delete", "main", "one", "--force", "--json") for _ in range(2)]
    for deletion in deletions:
        said, _ = deletion.communicate(timeout=PATIENCE_S)
        assert json.loads(said) == {"agent": "main", "instanceKey": "one", "state": "deleted"}
    assert not folder.exists()
    rows = kernel.ps()
    assert pid not in {row["pid"] for row in rows}
    assert not [row for row in rows if row["role"] == "worker" and row["instanceKey"] == "one"], "its jail lives"
    said, _ = asker.communicate(timeout=PATIENCE_S)
    assert b"E_INSTANCE_DELETED" in said
    assert [row["instanceKey"] for row in kernel.gdn("instance", "list", "--json").json] == ["two", "zwei/\u00fc"]

    # Its name begins anew. The id of its old event is known, and gets the answer that it got.
    again = kernel.gdn("send", "/bash__exec command='sleep 30'", "--instance", "one", "--event-id", "works", "--json")
    assert again.json["error"]["code"] == "E_INSTANCE_DELETED"
    assert not folder.exists()
    assert kernel.gdn("send", "hello", "--instance", "one").status == 0
    assert folder.is_dir()
    with Terminal(kernel, "instance", "delete", "main", "two") as asked:
        assert "Delete main/two, with its conversation (" in asked.read_until("[y/N] ")
        asked.type("n\n")
        assert asked.wait() == 1
        assert "E_CANCELLED" in asked.rest()
    assert "two" in {row["instanceKey"] for row in kernel.gdn("instance", "list", "--json").json}
    with Terminal(kernel, "instance", "delete", "main", "two", "--yes") as unasked:
        assert unasked.wait() == 0
        assert unasked.rest().strip() == "deleted main/two"
    kernel.gdn("send", "hello", "--instance", "two")
    with Terminal(kernel, "instance", "delete", "main", "two") as asked:
        asked.read_until("[y/N] ")
        asked.type("y\n")
        assert asked.wait() == 0
    kernel.gdn("send", "hello", "--instance", "two")
    assert kernel.gdn("instance", "delete", "main", "two").out == "deleted main/two\n"  # no terminal: nobody to ask
    nobody = kernel.gdn("instance", "delete", "main", "nobody", "--json")
    assert (nobody.status, nobody.json["error"]["code"]) == (1, "E_INSTANCE_NOT_FOUND")
    wait_until(lambda: not os.listdir(folder.parents[2] / "deleted"))

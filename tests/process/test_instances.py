"""`gdn instance list` and `show`, with and without a kernel."""

from __future__ import annotations

from tests.kernel_fixture import sandbox, wait_until


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
        kernel.popen("send", "hello", "--instance", "one", "--event-id", "waits")
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
        assert any(line.endswith("  main/one") for line in lines)
        missing = kernel.gdn("instance", "show", "main", "none", "--json")
        assert (missing.status, missing.json["error"]["code"]) == (1, "E_INSTANCE_NOT_FOUND")

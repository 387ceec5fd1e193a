"""`gdn ps --why` and crash loops in `gdn ps`, on running kernels."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from tests.kernel_fixture import BUNDLE, Sandbox, sandbox, wait_until

TWO = BUNDLE.replace(
    "kind: Swarm",
    """kind: Agent
metadata: {name: helper}
spec:
  modelConfig: {modelRef: Model/console}
  tools: [Tool/bash]
---
apiVersion: goondan.ai/v1
kind: Swarm""",
).replace("agents: [{ref: Agent/main}]", "agents: [{ref: Agent/main}, {ref: Agent/helper}]")
TWO = TWO.replace("  tools: [Tool/bash]", "  tools: [Tool/bash, Tool/agents]", 1)


def waits(kernel: Sandbox) -> dict[tuple[str, str], dict[str, Any]]:
    """(kind, agent) -> the wait."""
    answer = kernel.gdn("ps", "--why", "--json").json
    assert answer["cycles"] == answer["stuck"] == []
    return {(row["kind"], row["agent"]): row for row in answer["waits"]}


@pytest.mark.feature("waits")
def test_who_waits_for_whom_and_since_when() -> None:
    with sandbox(TWO) as kernel:
        kernel.detach()
        assert kernel.gdn("ps", "--why").out == "nobody waits\n"
        asked = {"target": "helper", "input": "/bash__exec command='sleep 30'", "instanceKey": "h"}
        kernel.popen("send", "/agents__request " + json.dumps(asked), "--event-id", "asks")
        wait_until(lambda: ("tool", "helper") in waits(kernel))
        kernel.popen("send", "hello", "--event-id", "behind")
        found = wait_until(lambda: (now := waits(kernel)) and ("turn", "main") in now and now)
        answer = found["answer", "main"]
        assert (answer["eventId"], answer["target"], answer["targetKey"]) == ("asks", "helper", "h")
        assert found["tool", "helper"]["tools"] == ["bash__exec"]
        assert found["turn", "main"]["messages"] == 1
        assert found["turn", "main"]["eventId"] == "asks"
        before = answer["forMs"]
        later = wait_until(lambda: (row := waits(kernel)["answer", "main"])["forMs"] > before + 300 and row)
        assert later["targetEventId"] == answer["targetEventId"]
        shown = kernel.gdn("ps", "--why").out
        assert "main/default waits for the answer of helper/h" in shown
        assert "main/default is busy with asks; 1 message behind it" in shown
        os.kill(kernel.pid("broker"), signal.SIGKILL)  # what is asked for is known from the journal
        back = wait_until(lambda: (now := waits(kernel)) and ("answer", "main") in now and now)
        assert later["forMs"] <= back["answer", "main"]["forMs"] < 60_000


def test_what_ends_again_and_again_is_shown_as_a_crash_loop() -> None:
    with sandbox() as kernel:
        kernel.detach()

        def host() -> dict[str, Any]:
            return next(row for row in kernel.ps() if row["role"] == "toolhost")

        for count in range(3):
            assert (host()["status"] == "crash-loop") is False
            row = wait_until(lambda: (row := host())["status"] == "running" and row)
            os.kill(row["pid"], signal.SIGKILL)
            wait_until(lambda pid=row["pid"]: host()["pid"] != pid, what=f"death {count}")
        assert host()["status"] == "crash-loop"
        assert host()["lastExit"] == "signal SIGKILL"
        assert "crash-loop" in kernel.gdn("ps").out

"""Every program of a kernel writes JSON lines if that is wished, and `gdn logs` shows them as before."""

from __future__ import annotations

import json
import os
import signal

from tests.kernel_fixture import sandbox, wait_until


def test_all_logs_are_json_lines_and_gdn_logs_reads_them() -> None:
    with sandbox(extra_env={"GOONDAN_LOG_FORMAT": "json"}) as kernel:
        kernel.detach()
        assert kernel.call("echo hello; echo problem >&2")["status"] == "ok"
        assert kernel.gdn("send", "/bash__exec command=true").status == 0
        os.kill(kernel.pid("broker"), signal.SIGKILL)
        wait_until(lambda: kernel.log("supervisor").count('"broker is ready"') == 2)
        shown = kernel.gdn("logs")
        assert kernel.gdn("stop").status == 0
        found = {}
        for path in kernel.home.glob("state/workspaces/*/logs/*.log"):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            for line in lines:
                assert line.keys() == {"time", "level", "role", "name", "message", "fields"}
                assert line["level"] in ("debug", "info", "warning", "error")
                assert path.stem.startswith(line["role"])
            found[path.stem] = lines
    assert {"supervisor", "broker"} <= found.keys()
    assert any(line["message"].startswith("broker ended: ") for line in found["supervisor"])
    text = next(line for line in shown.out.splitlines() if "broker ended: " in line)
    assert "supervisor" in text
    assert "{" not in text

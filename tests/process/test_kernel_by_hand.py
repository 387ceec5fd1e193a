"""Broker, tool host and agent started by hand, without a supervisor: `gdn` finds them and uses them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernel_fixture import ROOT, Sandbox, wait_until


def start(kernel: Sandbox, *argv: str, token: str | None = None) -> subprocess.Popen[bytes]:
    """Start a program of the system; with a token on stdin's descriptor when it needs one."""
    options = [] if token is None else ["--token-fd", "0"]
    with (kernel.home / "by-hand.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *argv, *options],
            env={**kernel.env, "PYTHONPATH": str(ROOT)},
            cwd=kernel.home,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
    kernel.running.append(process)
    assert process.stdin is not None
    process.stdin.write((token or "").encode())
    process.stdin.close()
    return process


def mint(kernel: Sandbox, run_dir: Path, *kind: str) -> str:
    made = subprocess.run(
        [sys.executable, "-m", "goondan.kernel.broker.token", "--run-dir", str(run_dir), *kind],
        env={**kernel.env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return made.stdout


@pytest.mark.feature("doctor")
def test_a_turn_without_a_supervisor(kernel: Sandbox) -> None:
    broker = start(kernel, "goondan.kernel.broker", "--bundle", str(kernel.bundle))
    run_dir: Path = wait_until(lambda: [d for d in kernel.run_dirs if (d / "clients.sock").exists()])[0]
    token = mint(kernel, run_dir, "toolhost")
    host = start(kernel, "toolhost", "--endpoint", f"ipc://{run_dir}/tools.sock", token=token)
    by_hand = [broker, host]
    for name, key in (("main", "default"), ("_operator", "default")):
        token = mint(kernel, run_dir, "agent", name, "--instance", key)
        by_hand.append(start(kernel, "agentproc", "--endpoint", f"ipc://{run_dir}/agents.sock", token=token))

    result = kernel.gdn("send", f"/bash__exec {json.dumps({'command': 'echo $((6*7))'})}")
    assert (result.status, result.err) == (0, ""), (result, (kernel.home / "by-hand.log").read_text())
    assert "42" in result.out
    assert kernel.call("echo by hand")["output"]["stdout"] == "by hand\n"

    rows = {(row["role"], row["name"]): row for row in kernel.gdn("ps", "--json").json}
    expected = {("broker", "broker"), ("toolhost", "1"), ("agent", "main"), ("agent", "_operator")}
    assert rows.keys() == expected
    assert {row["status"] for row in rows.values()} == {"external"}
    assert rows["broker", "broker"]["pid"] == broker.pid
    assert [row.get("runDir") for row in rows.values() if "runDir" in row] == [str(run_dir)]
    assert rows["toolhost", "1"]["pid"] == host.pid

    seen = {finding["check"]: finding["message"] for finding in kernel.gdn("doctor", "--json").json["findings"]}
    assert f"by hand serves this bundle (pid {broker.pid})" in seen["running"]

    refused = kernel.gdn("stop", "--json")
    assert (refused.status, refused.json["error"]["code"]) == (1, "E_KERNEL_RUNNING")
    second = kernel.gdn("run", "--json", input="")
    assert (second.status, second.json["error"]["code"]) == (1, "E_KERNEL_RUNNING")

    for process in by_hand:
        process.send_signal(signal.SIGTERM)
    # Orderly, though the token came on standard input: what was opened next had its number, and the event loop aborted.
    assert [process.wait(timeout=30) for process in by_hand] == [0, 0, 0, 0]
    assert kernel.gdn("stop").status == 0  # clears up what the broker left

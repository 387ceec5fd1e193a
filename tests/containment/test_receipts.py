"""Receipts of real calls: what the host saw, whatever the tool says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from goondan.toolhost.policy.limits import mechanisms
from tests.toolhost_fixture import bench, make_tool

SOURCE = """
import os, time
def burn(ctx, input):
    end = time.process_time() + input["s"]
    while time.process_time() < end: pass
    return {"receipt": {"jail": {"tier": "forged"}}}
def hold(ctx, input): kept = bytearray(input["mb"] << 20); time.sleep(0.06); return len(kept)
def quick(ctx, input): return 1
def fails(ctx, input): raise ValueError("no")
def dies(ctx, input): os.kill(os.getpid(), 9)
def sleeps(ctx, input): time.sleep(30)
handlers = {k: v for k, v in list(globals().items()) if callable(v)}
"""
NAMES = ("burn", "hold", "quick", "fails", "dies", "sleeps")


async def test_a_receipt_with_every_result(short_tmp: Path) -> None:
    (short_tmp / "w").mkdir()
    async with bench(make_tool(short_tmp, SOURCE, *NAMES)) as made:

        async def call(name: str, args: Any = None, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
            made.receipts.clear()
            result = await made.call(f"t__{name}", args, workdir=short_tmp / "w", **options)
            (receipt,) = made.receipts.values()
            return result, receipt

        _, receipt = await call("quick")
        walls = ["namespaces", "seccomp", "landlock", "uid", "limits"]
        assert receipt["jail"]["tier"] == "full"
        assert receipt["jail"]["walls"] == [wall for wall in walls if wall != "uid" or os.geteuid() == 0]
        assert receipt["jail"]["limits"] == mechanisms(made.facts.groups)
        assert 0 < receipt["call"]["wallMs"] < 10_000
        assert "exit" not in receipt["jail"]
        result, receipt = await call("burn", {"s": 0.2})
        assert result["output"] == {"receipt": {"jail": {"tier": "forged"}}}
        assert receipt["jail"]["tier"] == "full"
        assert receipt["jail"]["cpuMs"] >= 190
        assert receipt["call"]["wallMs"] >= 190  # the loop's clock stands still within one of its turns
        _, receipt = await call("hold", {"mb": 40})
        _, receipt = await call("fails")
        assert receipt["jail"]["peakMemoryKb"] >= 40_000  # though it is free again
        result, receipt = await call("dies")
        assert result["error"]["code"] == "E_TOOL_CRASHED"
        assert receipt["jail"]["exit"] == "ended by SIGKILL"
        assert receipt["jail"]["peakMemoryKb"] >= 40_000
        result, receipt = await call("sleeps", deadline_ms=300)
        assert result["error"]["code"] == "E_TOOL_TIMEOUT"
        assert receipt["jail"]["exit"] == "a call ran out of time"
        assert receipt["call"]["wallMs"] >= 200


async def test_what_no_jail_had_has_no_receipt(short_tmp: Path) -> None:
    async with bench(make_tool(short_tmp, SOURCE, *NAMES)) as made:
        assert (await made.call("t__nothing"))["status"] == "error"
        assert made.receipts == {}

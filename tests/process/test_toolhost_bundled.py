"""The bundled tools json-query, text-transform and wait in a jail: what is too much for a result, and giving up."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from goondan.kernel.bundle.documents import base_tools
from goondan.kernel.bundle.rules.plan import tool_spec
from goondan.schemas.bundle.launch import ToolSpec
from tests.toolhost_fixture import bench, small_outputs


def specs() -> list[ToolSpec]:
    return [small_outputs(tool_spec(base_tools()[name])) for name in ("json-query", "text-transform", "wait")]


async def test_values_that_no_result_can_hold(tmp_path: Path) -> None:
    """One structured error each, and the jail goes on serving."""
    async with bench(*specs()) as made:
        limit = "E_TOOL_LIMIT"
        deep = "[" * 200 + "]" * 200
        wide = "[" + "0.1," * 200_000 + "0]"
        text = "a" * 300_000
        calls: list[tuple[str, dict[str, Any], str]] = [
            ("json-query__query", {"data": deep}, "E_TOOL_BAD_OUTPUT"),
            ("json-query__query", {"data": "[" * 400_000}, "E_TOOL"),
            ("json-query__query", {"data": '{"a":' * 100_000}, "E_TOOL"),
            ("json-query__query", {"data": wide}, limit),
            ("json-query__flatten", {"data": f"[{wide}]"}, limit),
            ("json-query__pick", {"data": '{"a":' + deep + "}", "keys": ["a"] * 1000}, "E_TOOL_BAD_OUTPUT"),
            (
                "text-transform__replace",
                {"text": text, "search": "a", "replacement": text, "all": True},
                limit,
            ),
            ("text-transform__split", {"text": "한" * 300_000, "delimiter": ""}, limit),
            ("text-transform__join", {"parts": [1e308] * 90_000, "delimiter": text[:5000]}, limit),
            ("text-transform__case", {"text": "ﬃ" * 200_000, "to": "upper"}, limit),
            ("wait__seconds", {"seconds": 1e308}, "E_TOOL"),
            ("wait__seconds", {"seconds": 60}, "E_TOOL_TIMEOUT"),  # the fixture gives a call 20 s
        ]
        for tool, args, code in calls:
            began = time.monotonic()
            result = await made.call(tool, args, workdir=tmp_path)
            assert result["status"] == "error", (tool, code)
            assert result["error"]["code"] == code, (tool, result)
            assert result["error"]["suggestion"]
            assert len(result["error"]["message"]) <= 1000
            assert time.monotonic() - began < 15, "it waits until the call's time is over"
        assert made.host.sessions.jail_count == 3
        flat = await made.call("json-query__flatten", {"data": deep, "depth": 1e308}, workdir=tmp_path)
        assert flat["output"] == {"depth": 1e308, "count": 0, "result": []}


async def test_a_cancelled_wait_ends_soon(tmp_path: Path) -> None:
    async with bench(*specs()) as made:
        await made.call("wait__seconds", {"seconds": 0}, workdir=tmp_path)
        call_id, waiter = made.start("wait__seconds", {"seconds": 15}, workdir=tmp_path)
        await made.call("wait__seconds", {"seconds": 0.05}, workdir=tmp_path)
        began = time.monotonic()
        made.cancel(call_id)
        result = await waiter
        assert result["error"]["code"] == "E_CANCELLED"
        assert time.monotonic() - began < 12

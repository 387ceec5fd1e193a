"""Recorded parity of the bundled tool `bash`: every case through a real jail, by the host that serves agents."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from goondan.kernel.bundle.documents import base_tools
from goondan.kernel.bundle.rules.plan import tool_spec
from goondan.schemas.bundle.launch import ToolSpec
from tests.contract.recorded import cases, check, check_deviations, differences, fill, set_up
from tests.toolhost_fixture import Bench, bench

CASES = cases("bash")


def spec(open_catalog: bool) -> ToolSpec:
    """The bundled tool; without parameters where the case was recorded against an open catalog."""
    tool = tool_spec(base_tools()["bash"])
    if not open_catalog:
        return tool
    exports = [msgspec.structs.replace(export, parameters=None) for export in tool.exports]
    return msgspec.structs.replace(tool, exports=exports)


@pytest.fixture
def place(short_tmp: Path) -> Path:
    """A fresh workdir inside an otherwise empty folder."""
    workdir = short_tmp / "work"
    workdir.mkdir()
    return workdir


async def answer(made: Bench, case: dict[str, Any], workdir: Path) -> list[str]:
    places = {"WORKDIR": str(workdir), "PARENT": str(workdir.parent)}
    case = fill(case, places)
    set_up(case.get("setup", {}), workdir)
    began = time.monotonic()
    result = await made.call(case["tool"], case["args"], workdir=workdir)
    return differences(case, result, workdir, (time.monotonic() - began) * 1000)


@pytest.mark.requirement("BASH-01", "BASH-02", "BASH-03", "BASH-04", "BASH-05", "BASH-06", "BASH-07", "BASH-08")
@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
async def test_recorded(case: dict[str, Any], place: Path) -> None:
    async with bench(spec(case.get("catalog") == "open"), environment=case.get("setup", {}).get("env", {})) as made:
        found = await answer(made, case, place)
    check(case, found)


def test_few_cases_deviate() -> None:
    check_deviations("bash")


async def test_the_calls_of_one_instance_share_a_warm_jail(place: Path) -> None:
    async with bench(spec(False)) as made:
        results = await asyncio.gather(
            *(made.call("bash__exec", {"command": "echo $$"}, workdir=place) for _ in range(4))
        )
        assert [result["status"] for result in results] == ["ok"] * 4
        assert made.host.sessions.jail_count == 1


@pytest.mark.requirement("BASH-09", "ERROR-09")
def test_the_manifest() -> None:
    tool = tool_spec(base_tools()["bash"])
    assert tool.error_message_limit == 1200
    assert [export.name for export in tool.exports] == ["exec", "script"]
    properties = {e.name: list((e.parameters or {})["properties"]) for e in tool.exports}
    assert properties == {
        "exec": ["command", "cwd", "timeoutMs", "env"],
        "script": ["path", "args", "shell", "timeoutMs", "env"],
    }
    assert all((e.parameters or {})["additionalProperties"] is False for e in tool.exports)

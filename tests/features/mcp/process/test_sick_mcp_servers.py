"""What is said of a sick MCP server, to the person and to the model: the place, the cause, and a next step that works.

One tool host serves all of them. Each has a twin beside it on which the next step was taken.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from msgspec.structs import replace

from goondan.agentproc.providers.history import result_text
from goondan.schemas.bundle.launch import ToolSpec
from goondan.schemas.wire.errors import CODES, FOR_MODELS
from goondan.schemas.wire.frames import ToolError, ToolResult
from tests.mcp_fixture import Asker, make_server
from tests.toolhost_fixture import bench

CASES: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "sick_mcp_servers.yaml").read_text())
#: A bench and its servers are the module's, and so is the loop that they live in.
in_module = pytest.mark.asyncio(loop_scope="module")


def servers(folder: Path) -> list[ToolSpec]:
    made: list[ToolSpec] = []
    for case in CASES:
        for name, how in ((case["name"], case["sick"]), (f"{case['name']}-mended", case["mended"])):
            source, last = how.get("source", ""), how.get("last", "serve()")
            options = {key: how[key] for key in ("idle_s", "env") if key in how}
            made.append(make_server(folder, source, name=name, last=last, **options))
            if "command" in how and (server := made[-1].server) is not None:
                made[-1] = replace(made[-1], server=replace(server, command=how["command"]))
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Asker]:
    async with bench(*servers(tmp_path_factory.mktemp("servers"))) as made:
        yield Asker(made)


def test_there_are_ten() -> None:
    assert len(CASES) == 10


@in_module
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
async def test_the_place_the_cause_and_a_next_step_that_works(asker: Asker, case: dict[str, Any]) -> None:
    # The first one waits for the template of the workers as well.
    result = await asker.bench.call(f"{case['name']}__{case['tool']}", {}, deadline_ms=50_000, within_s=55.0)
    assert result["status"] == "error", result
    told = result["error"]
    error = ToolError(message=told["message"], name=told["name"], code=told["code"], suggestion=told["suggestion"])
    assert error.code == case["code"] and error.suggestion is not None
    attached = {one.server for one in asker.bench.host.sessions.servers.attached()}
    assert error.code != "E_MCP_CONNECT" or case["name"] not in attached
    assert case["says"] in error.message
    assert case["step"] in error.suggestion
    shown = result_text(ToolResult(status="error", error=error))
    assert case["says"] in shown and FOR_MODELS.get(case["code"], CODES[case["code"]]) in shown
    assert "gdn " not in shown
    mended = await asker.bench.call(f"{case['name']}-mended__{case['tool']}", {})
    assert mended["status"] == "ok", mended

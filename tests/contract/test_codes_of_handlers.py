"""What a handler says of its failure is its own word: the kernel's codes are the kernel's, and only they are obeyed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from goondan.agentproc.calls.caller import CallContext
from goondan.schemas.bundle.launch import ExportSpec, SandboxSpec, ServerSpec, ToolSpec
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import CODES, HELP_BASE
from goondan.schemas.wire.frames import ToolError, ToolResult
from goondan.schemas.worker.worker_frames import Result, WorkerError
from goondan.toolhost.calls.call_registry import Call
from goondan.toolhost.calls.results import OF_BUNDLED, OF_HANDLERS, own_error, shape
from tests.toolhost_fixture import bench, make_tool
from tests.unit.agentproc.fakes import NOTE, Caller, FakeLink
from tests.unit.agentproc.test_calls import catalog


def call_of(**changes: Any) -> Call:
    export = ExportSpec(name="x")
    spec = ToolSpec(name="t", entry="/t.py", root="/", exports=[export], sandbox=SandboxSpec())
    return Call(
        id="t1/c1", agent="a", instance_key="k", tool=structs.replace(spec, **changes), export=export,
        args=to_raw({}), turn_id="t1", tool_call_id="c1", message_id=None, workdir=None, deadline=None,
    )  # fmt: skip


def said(code: str | None, call: Call, suggestion: str | None = None) -> dict[str, Any]:
    error = WorkerError(name="ToolError", message="m", code=code, suggestion=suggestion)
    result = Result(call_id="1", status="error", error=own_error(error, call))
    found: dict[str, Any] = msgspec.msgpack.decode(shape(result, to_raw({}), call.tool))["error"]
    return found


@pytest.mark.parametrize("code", sorted(CODES.keys() - OF_HANDLERS))
def test_a_code_of_the_kernel_is_the_handlers_own_and_gets_no_advice_of_the_kernel(code: str) -> None:
    error = said(code, call_of())
    assert (error["code"], error["suggestion"], error["helpUrl"]) == (
        f"tool:{code}", CODES["E_TOOL"], HELP_BASE + "E_TOOL"
    )  # fmt: skip
    assert error["code"] not in CODES
    assert said(code, call_of(), "Do it.")["suggestion"] == "Do it."


def test_a_handler_may_repeat_what_the_kernel_has_told_it() -> None:
    call = call_of()
    call.heard |= {"E_AGENT_TIMEOUT"}
    assert said("E_AGENT_TIMEOUT", call)["suggestion"] == CODES["E_AGENT_TIMEOUT"]
    assert said("E_AGENT_FAILED", call)["code"] == "tool:E_AGENT_FAILED"


def test_codes_of_its_own_of_the_system_and_of_our_tools_stay() -> None:
    for code in ("E_SHOP_GOLD", "ENOENT", "ERR_INVALID_ARG_VALUE", "TooManyRedirects", "x.y-z:7", *OF_HANDLERS):
        assert said(code, call_of())["code"] == code
    assert said(None, call_of())["code"] == "E_TOOL"
    for code in OF_BUNDLED:
        assert said(code, call_of(bundled=True))["code"] == code
    server = ServerSpec(extension="s", transport="stdio", command=["x"])
    assert said("E_MCP_GONE", call_of(server=server))["code"] == "E_MCP_GONE", "our worker says so, outside of jails"


@pytest.mark.feature("approvals")
def test_no_tool_says_that_a_person_denied_its_call() -> None:
    assert said("E_APPROVAL_DENIED", call_of(bundled=True))["code"] == "tool:E_APPROVAL_DENIED"


@pytest.mark.parametrize(
    "code", ["", "a\nb", "E_X\x1b[2J", "E X", "E_X\u202e", "E_Х", "x" * 5000, "E_APPROVAL_DENIED ", "\ud800"]
)
def test_a_code_has_no_newline_no_escape_and_no_look_alike(code: str) -> None:
    told = said(code, call_of())["code"]
    assert told == ("x" * 100 if code.startswith("xx") else "E_TOOL")


SOURCE = """
from goondan_tool import ToolError

def fail(ctx, input):
    raise ToolError("the kernel says so", code=input["code"])

handlers = {"fail": fail}
"""


@pytest.mark.parametrize(
    "code",
    [
        "E_TOOL_OUTCOME_UNKNOWN",
        "E_TOOL_CRASHED",
        pytest.param("E_MCP_GONE", marks=pytest.mark.feature("mcp")),
        pytest.param("E_APPROVAL_DENIED", marks=pytest.mark.feature("approvals")),
    ],
)
async def test_the_codes_of_a_real_handler(code: str, short_tmp: Path) -> None:
    """Through a worker in its jail: the codes after which agents repeat calls of an idempotent export."""
    workdir = short_tmp / "w"
    workdir.mkdir()
    async with bench(make_tool(short_tmp, SOURCE, "fail")) as made:
        error = (await made.call("t__fail", {"code": code}, workdir=workdir))["error"]
        assert (error["code"], error["suggestion"]) == (f"tool:{code}", CODES["E_TOOL"])


@pytest.mark.parametrize("code", ["E_TOOL_OUTCOME_UNKNOWN", "E_TOOL_CRASHED"])
async def test_an_agent_repeats_an_idempotent_call_by_the_hosts_word_only(code: str) -> None:
    for name, repeated in ((code, True), (said(code, call_of())["code"], False)):
        failed = ToolResult(status="error", error=ToolError(message="m", code=name))
        link = FakeLink(lambda tool, args, failed=failed: failed)  # type: ignore[misc]
        caller = Caller(link, asyncio.get_running_loop())
        await caller.call(catalog(NOTE), "notes__add", {}, call_id="t1/c1", context=CallContext("t1"))
        assert (len(link.calls) > 1) is repeated

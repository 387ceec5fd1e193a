"""What MCP clients are told of tools and results."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp_types import CallToolResult, Tool

from goondan.features.mcp_serve.command.rules.offering import (
    ERROR,
    PENDING,
    RECEIPT,
    call_result,
    failure,
    has_files,
    named,
    offered,
    tool_entry,
)
from goondan.schemas.wire.frames import OperatorTool

TOOLS = [OperatorTool(name=name) for name in ("bash__exec", "bash__script", "wait__seconds")]
_KEYS = st.sampled_from(["content", "type", "text", "structuredContent", "x"])
_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(-1e9, 1e9) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner),
    max_leaves=10,
)  # fmt: skip


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ((), []),
        (("*",), ["bash__exec", "bash__script", "wait__seconds"]),
        (("bash__*", "nothing"), ["bash__exec", "bash__script"]),
        (("BASH__*",), []),
        (("exec",), []),
    ],
)
def test_only_what_a_pattern_names_is_offered(patterns: tuple[str, ...], names: list[str]) -> None:
    assert [tool.name for tool in offered(TOOLS, patterns)] == names


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"type": "object", "properties": {"a": {}}},
        {"anyOf": [{"required": ["a"]}]},
        {"type": ["object", "null"]},
    ],
)
def test_every_schema_is_one_of_an_object(parameters: dict[str, Any] | None) -> None:
    entry = tool_entry("a__b", OperatorTool(name="a__b", description="what", parameters=parameters, idempotent=True))
    assert entry["inputSchema"]["type"] == "object"
    tool = Tool.model_validate(entry)
    assert (tool.name, tool.description) == ("a__b", "what")
    assert tool.annotations is not None
    assert tool.annotations.idempotent_hint


def test_short_names_are_used_where_nothing_else_is_called_so() -> None:
    tools = [OperatorTool(name=name) for name in ("a__exec", "b__exec", "c__run", "run", "d__go", "e__x__y")]
    assert {name: tool.name for name, tool in named(tools, short=True).items()} == {
        "a__exec": "a__exec", "b__exec": "b__exec", "c__run": "c__run", "run": "run", "go": "d__go", "x__y": "e__x__y"
    }  # fmt: skip
    assert list(named(tools, short=False)) == [tool.name for tool in tools]


@given(_values)
def test_any_output_is_an_answer_of_the_protocol(output: Any) -> None:
    answer = CallToolResult.model_validate(call_result({"status": "ok", "output": output, "receipt": {"call": {}}}))
    assert not answer.is_error
    assert answer.content or isinstance(output, dict)
    assert answer.meta is not None
    assert answer.meta[RECEIPT] == {"call": {}}


def test_blocks_of_a_server_pass_through() -> None:
    output = {"content": [{"type": "image", "data": "aGk=", "mimeType": "image/png"}], "structuredContent": {"a": 1}}
    answer = CallToolResult.model_validate(call_result({"status": "ok", "output": output}))
    assert answer.content[0].type == "image"
    assert answer.structured_content == {"a": 1}
    (text,) = CallToolResult.model_validate(
        call_result({"status": "ok", "output": {"content": [{"type": "x"}]}})
    ).content
    assert text.type == "text"


def test_files_beside_the_output_stand_where_the_tool_gave_them() -> None:
    picture = {"type": "image", "mimeType": "image/png", "file": 1}
    page = {"type": "resource", "resource": {"uri": "a:/b.pdf", "mimeType": "application/pdf", "file": 2}}
    result = {"status": "ok", "output": {"content": [picture, page]}}
    assert has_files(result)
    answer = call_result(result, files=["aGk=", "aG8="])
    CallToolResult.model_validate(answer)
    assert answer["content"][0]["data"] == "aGk="
    assert answer["content"][1]["resource"]["blob"] == "aG8="
    named = {"file": 1, "lines": [{"file": True, "uri": "a:/b"}]}  # no tool's file: what it is stands in no key
    assert call_result({"status": "ok", "output": named}, files=["aGk="])["structuredContent"] == named
    assert not has_files({"status": "ok", "output": {"text": "no files"}})
    assert not has_files({"status": "error", "error": {"code": "E_TOOL", "file": 1}})


@given(_values)
def test_a_number_of_no_file_stays(output: Any) -> None:
    assert call_result({"status": "ok", "output": output}, files=["aGk="]) == call_result(
        {"status": "ok", "output": output}
    )


def test_an_error_has_its_code_for_models_and_for_programs() -> None:
    error = {"code": "E_TOOL_TIMEOUT", "message": "too late", "suggestion": "Try less."}
    answer = call_result({"status": "error", "error": error, "receipt": {"jail": {}}}, {"turnId": "t"})
    assert answer["isError"]
    assert answer["content"][0]["text"] == "too late [E_TOOL_TIMEOUT]\nTry less."
    assert answer["_meta"][ERROR]["code"] == "E_TOOL_TIMEOUT"
    assert answer["_meta"][RECEIPT] == {"jail": {}}
    assert failure({})["_meta"][ERROR] == {"code": "E_TOOL"}


def test_pending_work_has_its_handle() -> None:
    answer = call_result({"status": "pending", "handle": "slow/job"})
    assert answer["structuredContent"] == {"status": "pending", "handle": "slow/job"}
    assert answer["_meta"][PENDING] == {"handle": "slow/job"}

"""What MCP clients are told of tools and results, and which requests reach the server at all."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp_types import CallToolResult, Tool

from goondan.features.mcp.command.rules.offering import (
    ERROR,
    MAX_BODY,
    PENDING,
    RECEIPT,
    Gate,
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


# --- the gate

GATE = Gate(4321, "a-token-of-some-length")
GOOD = {"host": "127.0.0.1:4321", "authorization": "Bearer a-token-of-some-length"}


def judged(path: str = "/mcp", more: list[tuple[str, str]] | None = None, **changed: str | None) -> int:
    headers = {**GOOD, **{name.replace("_", "-"): value for name, value in changed.items()}}
    pairs = [(name.encode(), value.encode()) for name, value in headers.items() if value is not None]
    refusal = GATE.judge(path, [*pairs, *((name.encode(), value.encode()) for name, value in more or [])])
    return 200 if refusal is None else refusal.status


def test_who_has_the_token_and_names_this_host_comes_in() -> None:
    assert judged() == 200
    for host in ("localhost:4321", "LOCALHOST:4321", "[::1]:4321"):
        assert judged(host=host) == 200
    assert judged(origin="http://127.0.0.1:4321") == 200
    assert judged(content_length=str(MAX_BODY)) == 200


@pytest.mark.parametrize(
    "host",
    [None, "", "evil.example", "evil.example:4321", "127.0.0.1", "127.0.0.1:4322", "127.0.0.1:43210",
     "127.0.0.1:4321.evil.example", "localhost:4321@evil.example", "127.0.0.1:4321,evil.example"],
)  # fmt: skip
def test_another_host_is_refused(host: str | None) -> None:
    assert judged(host=host) == 421


def test_two_hosts_are_refused() -> None:
    assert judged(more=[("Host", "127.0.0.1:4321")]) == 421


@pytest.mark.parametrize(
    "origin",
    ["null", "http://evil.example", "https://127.0.0.1:4321", "http://127.0.0.1", "http://127.0.0.1:43210", "http://localhost:4321.evil.example",
     "http://localhost:4321/", ""],
)  # fmt: skip
def test_pages_of_other_origins_are_refused(origin: str) -> None:
    assert judged(origin=origin) == 403
    assert judged(origin="http://127.0.0.1:4321", more=[("origin", origin)]) == 403


@pytest.mark.parametrize(
    "given_",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer a-token-of-some-lengt",
        "Bearer a-token-of-some-length2",
        "Basic a-token-of-some-length",
        "a-token-of-some-length",
    ],
)
def test_without_the_token_nobody_comes_in(given_: str | None) -> None:
    assert judged(authorization=given_) == 401


def test_two_tokens_are_none() -> None:
    assert judged(more=[("Authorization", GOOD["authorization"])]) == 401


@pytest.mark.parametrize("length", [str(MAX_BODY + 1), "9" * 40, "-1", "1e3", "0x10", ""])
def test_a_body_that_is_too_large_or_of_no_length_is_not_read(length: str) -> None:
    assert judged(content_length=length) == 413


@pytest.mark.parametrize("path", ["/", "/mcp/", "//mcp", "/mcp/../x", "/token", ""])
def test_other_paths_are_not_served(path: str) -> None:
    assert judged(path) == 404

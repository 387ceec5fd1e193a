"""The console: commands to calls, results to text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.agentproc.machine.messages import Message, MessageSource, ToolData, ToolResultPart, UserData
from goondan.agentproc.machine.turn import AskedCall
from goondan.agentproc.providers.base import asked_call
from goondan.agentproc.providers.embedded import HELP, MAX_SHOWN, answer, parse, show_results
from goondan.schemas.bundle.launch import CatalogItem
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import tool_error
from goondan.schemas.wire.frames import ToolResult
from tests.unit.agentproc.fakes import BASH, NOTE

TOOLS = [BASH, NOTE]
AT = "2026-01-01T00:00:00.000Z"


def said(text: str, tools: list[CatalogItem] = TOOLS) -> str:
    parsed = parse(text, tools)
    assert isinstance(parsed, str)
    return parsed


def called(text: str, tools: list[CatalogItem] = TOOLS) -> list[tuple[str, Any]]:
    parsed = parse(text, tools)
    assert not isinstance(parsed, str), parsed
    return [(call.name, call.args) for call in parsed]


def shown(value: Any, tool: str = "x__y") -> str:
    return show_results([ToolResultPart("c", tool, ToolResult(status="ok", output=to_raw(value)))])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('/bash__exec {"command":"echo $((6*7))"}', [("bash__exec", {"command": "echo $((6*7))"})]),
        ("/bash__exec", [("bash__exec", {})]),
        ("  /bash__exec   {}  ", [("bash__exec", {})]),
        ('/bash__exec command="ls -la" timeoutMs=100', [("bash__exec", {"command": "ls -la", "timeoutMs": 100})]),
        ("/bash__exec command=42", [("bash__exec", {"command": "42"})]),
        ("/notes__add n=1 b=true s=text e=", [("notes__add", {"n": 1, "b": True, "s": "text", "e": ""})]),
        ('/notes__add {"a":1}\n/bash__exec command=ls', [("notes__add", {"a": 1}), ("bash__exec", {"command": "ls"})]),
        ('/notes__add {\n  "a": [1,\n 2]\n}\n\n/notes__add {}', [("notes__add", {"a": [1, 2]}), ("notes__add", {})]),
        ("/no__such x=1", [("no__such", {"x": 1})]),
        ('/notes__add {"a":"\\ud800"}', [("notes__add", {"a": "\ufffd"})]),
        ('/notes__add {"a":18446744073709551616}', [("notes__add", {"a": 1.8446744073709552e19})]),
    ],
)
def test_commands_become_calls(text: str, calls: list[tuple[str, Any]]) -> None:
    assert called(text) == calls


def test_parallel_calls_have_ids_of_their_own() -> None:
    parsed = parse("/notes__add\n/notes__add\n/notes__add", TOOLS)
    assert not isinstance(parsed, str)
    assert len({call.id for call in parsed}) == 3


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('/bash__exec {"command": "x"', ["no JSON", "^", 'Write it as  /bash__exec {"command": "…"}']),
        ('/bash__exec {"command": nope}', ["no JSON", "^"]),
        ('/bash__exec {"timeoutMs": NaN}', ["no JSON", "NaN"]),
        ('/bash__exec {"timeoutMs": 1e999}', ["no JSON", "1e999"]),
        ('/bash__exec {"command":"x"} trailing', ["text behind", "trailing"]),
        ('/bash__exec command="x', ["no closing quotation", "Write it as"]),
        ("/bash__exec ls", ["'ls' is no key=value", "Write it as"]),
        ("/bash", ["no command /bash", "Did you mean /bash__exec"]),
        ("/frobnicate", ["no command /frobnicate", "/tools"]),
        ("/notes__add\nhello", ["no command: hello"]),
        ("hello", ["embedded console", "set it in goondan.yaml"]),
        ("", ["embedded console"]),
        ("/", ["embedded console"]),
        ("/help", ["embedded console"]),
        ("@", ["@AGENT"]),
        ("@coder", ["@AGENT"]),
        ("@coder do it", ["'coder' was not asked", "E_TOOL_NOT_IN_CATALOG", "gdn send coder"]),
        ("/notes__add {\"a\":" + "[" * 100_000, ["no JSON"]),
    ],
)  # fmt: skip
def test_what_is_no_call_is_answered_with_help(text: str, parts: list[str]) -> None:
    reply = said(text)
    for part in parts:
        assert part in reply


def test_tools_are_listed_with_one_line_each() -> None:
    listing = said("/tools").splitlines()
    assert listing[0] == "2 tools:"
    assert listing[1].split() == ["/bash__exec", "Run", "a", "command", "in", "the", "workspace."]
    long = CatalogItem(name="a__b", description="word\n" * 200)
    assert len(said("/tools", [long]).splitlines()[1]) < 130
    assert "no tools" in said("/tools", [])


def test_another_agent_is_asked_when_the_catalog_allows_it() -> None:
    tools = [CatalogItem(name="agents__request")]
    assert called("@coder list the files", tools) == [
        ("agents__request", {"target": "coder", "input": "list the files"})
    ]


def test_a_process_is_shown_as_what_it_printed() -> None:
    good = {"stdout": "42\n", "stderr": "", "exitCode": 0, "signal": None, "timedOut": False}
    assert shown(good) == "42"
    assert shown({**good, "stdout": ""}) == "(no output)"
    bad = {**good, "stdout": "a\n", "stderr": "oh no\n", "exitCode": 3}
    assert shown(bad) == "a\nstderr:\noh no\n(exit code 3)"
    late = {**good, "exitCode": -1, "signal": "SIGTERM", "timedOut": True, "stdout": ""}
    assert shown(late) == "(timed out)\n(ended by SIGTERM)"


def test_other_results_are_shown_as_text_or_json() -> None:
    assert shown("plain") == "plain"
    assert shown({"a": [1, "é"]}) == '{\n  "a": [\n    1,\n    "é"\n  ]\n}'
    assert shown(None) == "null"
    assert shown({"response": "yes"}, "agents__request") == "yes"
    pending = ToolResultPart("c", "x__y", ToolResult(status="pending", handle="h1"))
    assert show_results([pending]) == "pending, handle h1"
    assert len(shown("x" * 100_000)) < MAX_SHOWN + 100


def test_errors_show_message_code_suggestion_and_page() -> None:
    error = tool_error("E_TOOL", "boom", name="ValueError", suggestion="Try again.")
    text = show_results([ToolResultPart("c", "x__y", ToolResult(status="error", error=error))])
    assert text.splitlines() == [
        "x__y failed: boom [E_TOOL]",
        "Suggestion: Try again.",
        "Help: gdn explain E_TOOL",
    ]


def test_several_results_are_numbered() -> None:
    parts = [ToolResultPart(str(n), f"x__{n}", ToolResult(status="ok", output=to_raw(n))) for n in (1, 2)]
    assert show_results(parts) == "[1] x__1\n1\n\n[2] x__2\n2"


def test_the_answer_follows_the_last_user_message() -> None:
    user = Message("1", UserData('/notes__add {"a":1}'), AT, MessageSource("user"))
    result = ToolResultPart("call_1", "notes__add", ToolResult(status="ok", output=to_raw("kept")))
    tool = Message("2", ToolData([result]), AT, MessageSource("tool"))
    assert [call.name for call in answer([user], TOOLS).calls] == ["notes__add"]
    assert answer([user, tool], TOOLS).text == "kept"
    assert [call.name for call in answer([user, tool, user], TOOLS).calls] == ["notes__add"]
    assert answer([], TOOLS).text == HELP


@given(st.text(st.characters(codec="utf-8"), max_size=60) | st.from_regex(r"/[a-z_]{0,9} ?[{a-z=\"'\[\]0-9 \n]*"))
def test_any_input_is_calls_or_text(text: str) -> None:
    parsed = parse(text, TOOLS)
    if isinstance(parsed, str):
        assert parsed
    else:
        assert parsed
        assert all("__" in call.name and isinstance(call.args, dict) for call in parsed)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", AskedCall("1", "x__y", {})),
        ('{"a": 1}', AskedCall("1", "x__y", {"a": 1})),
        ({"a": "\ud83d"}, AskedCall("1", "x__y", {"a": "\ufffd"})),
        ("[1]", AskedCall("1", "x__y", [1], "they are no JSON object")),
        ("1" * 400, AskedCall("1", "x__y", {}, "a number is too large")),
    ],
)
def test_arguments_of_a_vendor_are_made_fit_for_the_wire(arguments: Any, expected: AskedCall) -> None:
    assert asked_call("1", "x__y", arguments) == expected


def test_unreadable_arguments_say_why() -> None:
    assert "no JSON" in str(asked_call("1", "x__y", '{"a": ').broken)
    assert asked_call("1", "x__y", "[" * 100_000).broken == "they are nested too deep"
    assert "NaN" in str(asked_call("1", "x__y", '{"a": NaN}').broken)


def test_what_pending_work_came_to_is_shown_and_is_no_command() -> None:
    at, by_tool = "2026-01-01T00:00:00Z", MessageSource("tool", "slow__start")
    told = Message("m9", UserData("/tools"), at, by_tool)
    assert answer([told], []).text == "/tools"
    asked = Message("m1", UserData("/notes__add a=1"), at, MessageSource("user"))
    assert answer([asked, told], [NOTE]).calls != []

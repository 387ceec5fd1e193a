"""The command line itself: help, usage errors, tables; no kernel is started here."""

from __future__ import annotations

import datetime
import json
import sys
import types
from pathlib import Path
from typing import Any

import click
import pytest

from goondan.features import Feature
from goondan.kernel.cli import commands, execute
from goondan.kernel.cli.commands import helps, processes
from goondan.kernel.cli.commands.call import check_grant, error_result, tool_result
from goondan.kernel.cli.commands.processes import process_lines
from goondan.kernel.cli.output import answer_document
from goondan.kernel.supervisor_client import ProcessInfo
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload, fail
from goondan.schemas.wire.frames import Answer


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bundle that no kernel runs, with a state and a runtime directory of its own."""
    monkeypatch.setenv("GOONDAN_STATE_ROOT", str(tmp_path / "state"))
    path = tmp_path / "goondan.yaml"
    path.write_text("{}\n")
    return str(path)


@pytest.mark.parametrize("name", ["run", "send", "call", "cancel", "ps", "stop"])
def test_every_command_has_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert "--bundle PATH" in text
    assert "--json" in text


def test_who_waits_for_whom_needs_a_feature_and_its_name_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(bundle: str | None, question: dict[str, Any]) -> dict[str, Any]:
        raise fail("E_FRAME_INVALID", "admin knows the ops cancel, events and, for operators, peers")

    monkeypatch.setattr(processes, "ask_broker", refuse)
    assert execute(["ps", "--why", "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "E_FEATURE_MISSING"
    assert "`waits`" in error["message"]


@pytest.mark.parametrize("group", ["tool", "extension", pytest.param("mcp", marks=pytest.mark.feature("mcp"))])
def test_the_commands_of_a_group_have_their_help(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute([group]) == 2
    listed = " ".join(capsys.readouterr().err.split())  # long lines are wrapped
    assert helps()[group] in listed
    assert helps(group)
    for name, words in helps(group).items():
        assert words in listed
        assert execute([group, name, "--help"]) == 0
        assert f"gdn {group} {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["certify", "client"],
        ["certify", "worker", "--entry"],
        ["frobnicate"],
        ["ps", "extra"],
        ["send"],
        ["send", "--timeout", "soon", "hello"],
        ["send", "--timeout", "0", "hello"],
        ["send", "--timeout", "nan", "hello"],
        ["send", "--timeout", "inf", "hello"],
        ["send", "--timeout", "1e308", "hello"],
        ["cancel", "event", "--timeout", "nan"],
        ["send", "one", "two", "three"],
        *(
            [*words, "main/one", *rest, "other"]
            for words, rest in (
                (("send",), ("text", "--instance")),
                (("trace", "--agent"), ("--instance",)),
                (("cancel", "--agent"), ("--instance",)),
                (("config", "list", "--agent"), ("--instance",)),
                (("config", "show"), ("--instance",)),
                (("config", "propose"), ("[]", "--instance")),
                *(((("instance", name)), ()) for name in ("show", "export", "undo", "reset", "delete")),
            )
        ),
        ["instance", "delete", "main"],
        ["send", "--event-id", "", "hello"],
        ["cancel"],
        ["cancel", "event", "--agent", "main"],
        ["cancel", "\udcff"],
        ["call"],
        ["call", "bash__exec", "--batch", "-"],
        ["call", "bash__exec", "not json"],
        ["call", "bash__exec", "[]"],
        ["call", "bash__exec", "{}", "--workdir", "/nonexistent/dir"],
        ["call", "bash__exec", "{}", "--workdir", ""],
        ["call", "bash__exec", "{}", "--instance", ""],
        ["call", "bash__exec", "{}", "--allow-net", "everything"],
        ["call", "--batch", "/nonexistent/file"],
        ["tool", "frobnicate"],
        ["tool", "show"],
        ["tool", "test", "./tool.yaml", "--bundle", "."],
        ["tool", "test", "--allow-net", "everything"],
    ],
)
def test_bad_usage_is_one_structured_error_and_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute([*arguments, "--json"]) == 2
    printed = capsys.readouterr()
    error = json.loads(printed.out)["error"]
    assert error["code"] == "E_USAGE"
    assert error["suggestion"]
    assert error["helpUrl"].endswith("/E_USAGE")
    assert printed.err == ""
    assert execute(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "[E_USAGE]" in printed.err
    assert "Traceback" not in printed.err


def test_a_bundle_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["ps"], ["stop"], ["send", "x"], ["call", "t"], ["run"]):
        assert execute([*arguments, "--bundle", "/nonexistent.yaml"]) == 2
    assert capsys.readouterr().err.count("[E_CONFIG_NOT_FOUND]") == 5


def test_without_a_kernel(bundle: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["ps", "--json", "--bundle", bundle]) == 0
    assert execute(["stop", "--json", "--bundle", bundle]) == 0
    assert execute(["send", "--json", "--bundle", bundle, "hello"]) == 1
    ps, stop, send = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert ps == []
    assert stop == {"stopped": False}
    assert send["error"]["code"] == "E_KERNEL_NOT_RUNNING"


def test_a_bug_of_ours_is_one_error_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr("goondan.kernel.cli.commands.processes.locate", broken)
    assert execute(["ps", "--json"]) == 1
    printed = capsys.readouterr()
    error = json.loads(printed.out)["error"]
    assert error["code"] == "E_INTERNAL"
    assert "ZeroDivisionError: boom at test_cli_commands.py" in error["message"]
    assert printed.err == ""


@pytest.mark.parametrize(("raised", "status"), [(KeyboardInterrupt(), 130), (BrokenPipeError(32, "x"), 141)])
def test_interrupts_and_lost_readers_are_quiet(
    raised: BaseException, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*_: object) -> None:
        raise raised

    monkeypatch.setattr("goondan.kernel.cli.commands.processes.locate", leave)
    monkeypatch.setattr("goondan.kernel.cli._reader_is_gone", lambda: 141)
    assert execute(["ps"]) == status
    printed = capsys.readouterr()
    assert (printed.out, printed.err.strip()) == ("", "")


@pytest.mark.parametrize("grant", ["example.com:443", "127.0.0.1:8080", "[::1]:80", "*.example.com:443"])
def test_grants(grant: str) -> None:
    check_grant(grant)


@pytest.mark.parametrize(
    "grant", ["", "host", ":80", "host:", "host:0", "host:65536", "host:http", "host:١", "::1:80", "0x7f.1:80"]
)
def test_what_is_no_grant(grant: str) -> None:
    with pytest.raises(GoondanError, match="HOST:PORT"):
        check_grant(grant)


def info(**fields: Any) -> ProcessInfo:
    values: dict[str, Any] = {
        "role": "agent",
        "name": "coder",
        "instance_key": "u1",
        "pid": 12,
        "status": "running",
        "since": "2026-11-21T10:00:00.000Z",
        "restarts": 0,
        "last_exit": None,
    }
    return ProcessInfo(**{**values, **fields})


def test_the_table_of_ps() -> None:
    now = datetime.datetime(2026, 11, 21, 12, 30, tzinfo=datetime.UTC)
    rows = [
        info(role="supervisor", name="supervisor", instance_key=None, since="2026-11-20T10:00:00Z"),
        info(pid=None, status="waiting", restarts=3, last_exit="signal SIGKILL", since="2026-11-21T12:29:59Z"),
        info(instance_key="a\x1b[31mb", since="not a time"),
    ]
    assert process_lines(rows, now) == [
        "ROLE        NAME        INSTANCE    PID  STATUS   SINCE  RESTARTS  LAST EXIT",
        "supervisor  supervisor  -           12   running  1d     0         -",
        "agent       coder       u1          -    waiting  1s     3         signal SIGKILL",
        "agent       coder       a\\x1b[31mb  12   running  -      0         -",
    ]


def test_the_tool_result_of_an_answer() -> None:
    result = {"status": "ok", "output": {"n": 2**63, "t": "é"}}
    assert tool_result(Answer(turn_id="t", status="completed", output=to_raw(result))) == result
    with pytest.raises(GoondanError, match="E_AGENT_SPAWN_FAILED"):
        tool_result(Answer(turn_id="", status="failed", error=error_payload("E_AGENT_SPAWN_FAILED", "no")))
    for empty in (Answer(turn_id="t", status="completed"), Answer(turn_id="t", status="completed", output=to_raw(1))):
        with pytest.raises(GoondanError, match="without a tool result"):
            tool_result(empty)


def test_documents() -> None:
    answer = Answer(turn_id="t1", status="completed", response="hi", finish_reason="stop", trace_id="a" * 32)
    assert answer_document("e1", answer) == {
        "eventId": "e1",
        "turnId": "t1",
        "traceId": "a" * 32,
        "status": "completed",
        "response": "hi",
        "finishReason": "stop",
    }
    cut = Answer(turn_id="t1", status="completed", response="h", finish_reason="length", cut_off=True, reasoning="hm")
    assert answer_document("e1", cut)["cutOff"] is True
    assert "reasoning" not in answer_document("e1", cut)
    assert answer_document("e1", cut, reasoning=True)["reasoning"] == "hm"
    error = error_payload("E_MAX_STEPS", "too many")
    assert answer_document("e1", Answer(turn_id="t", status="failed", error=error))["error"] is error
    assert error_result(fail("E_USAGE", "x"))["status"] == "error"


def test_a_feature_brings_commands_of_its_own_and_into_a_group_of_the_core(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def one() -> None:
        """Say one."""
        print("one")

    brought = types.ModuleType("goondan.features.counting.command")
    vars(brought)["COMMANDS"] = {"count": one, "tool count": one}
    monkeypatch.setitem(sys.modules, brought.__name__, brought)
    row = Feature("counting", ("command",), commands={"count": "Count all.", "tool count": "Count tools."})
    monkeypatch.setattr(commands, "FEATURES", (row,))
    assert [execute(["count"]), execute(["tool", "count"])] == [0, 0]
    assert capsys.readouterr().out == "one\none\n"
    assert (execute(["--help"]), execute(["tool", "--help"])) == (0, 0)
    shown = capsys.readouterr().out
    assert "Count all." in shown
    assert "Count tools." in shown
    assert execute(["counting"]) == 2

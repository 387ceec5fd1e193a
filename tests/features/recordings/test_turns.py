"""An agent instance is recorded, and repeats the run: its model is not asked, and its tools do not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from goondan.agentproc.machine.messages import (
    AssistantData,
    Message,
    MessageSource,
    TextPart,
    ToolCallPart,
    ToolData,
    ToolResultPart,
    UserData,
)
from goondan.agentproc.machine.turn import AskedCall
from goondan.agentproc.providers.base import ModelAnswer, ModelRequest, Usage
from goondan.features.approvals.wire import read_policy
from goondan.features.recordings.agent.replayed import (
    Replayed,
    model_answer,
    recorded_answer,
    recorded_result,
    request_of,
    tool_result,
)
from goondan.features.recordings.agent.tape import TapedTurn
from goondan.features.recordings.command import collect, make
from goondan.features.recordings.wire import RecordingsPart, ReplaySpec
from goondan.features.recordings.wire.texts import DIFFERENCE_FILE
from goondan.schemas.bundle.launch import CatalogItem, ModelSpec
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import GoondanError, fail, tool_error
from goondan.schemas.wire.frames import Blob, FilePart, Source, ToolResult
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, ok, says, wants
from tests.unit.agentproc.turns import Make, the_answer

CLIENT = Source("client", "operator")
RUN = "1234"
SPEC = ModelSpec(provider="openai", model="m", api_key="s3cret-key")
REPLAY = ModelSpec(provider="replay")
RECORDS = {"recordings": to_raw(RecordingsPart(record=RUN))}


def repeats(path: str, **changes: Any) -> dict[str, Any]:
    """The parts of a specification that repeats this recording."""
    return {"recordings": to_raw(RecordingsPart(replay=ReplaySpec(recording=path, **changes)))}


def message(data: Any, *, source: str = "user", name: str | None = None) -> Message:
    return Message("m", data, "2026-01-01T00:00:00Z", MessageSource(source, name))  # type: ignore[arg-type]


def request(*messages: Message, **changes: Any) -> ModelRequest:
    return ModelRequest(agent="coder", model=SPEC, messages=list(messages), **{"tools": [], "step": 1, **changes})


async def talk(make_runner: Make, link: FakeLink, script: FakeModel | None, *texts: str, **changes: Any) -> Any:
    """Say these texts to one instance; the link has its answers."""
    runner = make_runner(link, script, **changes)
    for number, text in enumerate(texts, 1):
        await runner.run(event_frame(f"e{number}", text, source=CLIENT))
    return runner


async def recorded(make_runner: Make, tmp_path: Path, model: FakeModel, *texts: str, **changes: Any) -> str:
    """The path of the recording of this run."""
    link = FakeLink(lambda tool, args: ok({"ran": args, "key": "s3cret-key"}))
    runner = await talk(make_runner, link, model, *texts, parts=RECORDS, model=SPEC, **changes)
    await runner.close()
    made = make(collect(str(tmp_path), RUN), "recorded-1", "coder", lambda text: text)
    path = tmp_path / "run.jsonl"
    path.write_bytes(made.data)
    for left in (tmp_path / "instances" / "coder" / "k").iterdir():
        if left.is_file():
            left.unlink()  # a replay begins without a history
    return str(path)


def refuse(tool: str, args: Any) -> ToolResult:
    raise AssertionError(f"{tool} ran in a replay")


def script() -> FakeModel:
    return FakeModel(wants(("c1", "bash__exec", {"command": "ls"})), says("one file"), says("bye"))


async def test_a_recorded_run_is_repeated_without_its_model_and_without_its_tools(make: Make, tmp_path: Path) -> None:
    path = await recorded(make, tmp_path, script(), "list", "thanks")
    assert "s3cret" not in Path(path).read_text()
    link = FakeLink(refuse)
    await talk(make, link, None, "list", "thanks", model=REPLAY, parts=repeats(path))
    assert [(answer.status, answer.response) for answer in link.answers()] == [
        ("completed", "one file"),
        ("completed", "bye"),
    ]
    assert link.calls == []


@pytest.mark.parametrize(
    ("said", "system", "what"),
    [
        (["list", "thank you"], "s", "turn 2: what the turn was asked differs: recorded 'thanks', came 'thank you'"),
        (["list", "thanks"], "t", "turn 1, step 1: entry 1 of the request (system) differs: recorded 'system: s'"),
        (["list", "thanks", "more"], "s", "turn 3: the number of turns differs: recorded '2 turns', came 'turn 3'"),
    ],
)
async def test_the_first_difference_fails_the_turn_and_is_written_down(
    make: Make, tmp_path: Path, said: list[str], system: str, what: str
) -> None:
    path = await recorded(make, tmp_path, script(), "list", "thanks", system="s")
    link = FakeLink(refuse)
    await talk(make, link, None, *said, model=REPLAY, parts=repeats(path), system=system)
    failed = next(answer for answer in link.answers() if answer.status == "failed")
    assert failed.error is not None and failed.error.code == "E_REPLAY_DIFFERS"
    assert what in failed.error.message
    found = json.loads((tmp_path / "instances" / "coder" / "k" / DIFFERENCE_FILE).read_bytes())
    assert found["difference"]["agent"] == "coder"


async def test_a_call_that_was_not_recorded_does_not_run(make: Make, tmp_path: Path) -> None:
    path = await recorded(make, tmp_path, script(), "list", "thanks")
    text = Path(path).read_text().replace('"tool":"bash__exec","args":{"command":"ls"}', '"tool":"bash__exec"')
    Path(path).write_text(text)
    link = FakeLink(refuse)
    await talk(make, link, None, "list", model=REPLAY, parts=repeats(path))
    error = the_answer(link).error
    assert error is not None and error.code == "E_REPLAY_DIFFERS"
    found = json.loads((tmp_path / "instances" / "coder" / "k" / DIFFERENCE_FILE).read_bytes())["difference"]
    assert (found["what"], found["came"]) == ("a tool call", 'bash__exec {"command": "ls"}')


async def test_an_error_of_the_model_is_repeated(make: Make, tmp_path: Path) -> None:
    model = FakeModel(fail("E_MODEL_FAILED", "401 for s3cret-key"))
    path = await recorded(make, tmp_path, model, "list")
    link = FakeLink(refuse)
    await talk(make, link, None, "list", model=REPLAY, parts=repeats(path))
    error = the_answer(link).error
    assert error is not None
    assert (error.code, error.message) == ("E_MODEL_FAILED", "401 for ***")


@pytest.mark.parametrize(
    ("answer", "only_calls", "status"),
    [
        (wants(("other", "bash__exec", {"command": "ls"})), False, "completed"),
        (wants(("c1", "bash__exec", {"command": "rm"})), False, "failed"),
        (ModelAnswer(text="so", calls=[AskedCall("c", "bash__exec", {"command": "ls"})]), False, "failed"),
        (ModelAnswer(text="so", calls=[AskedCall("c", "bash__exec", {"command": "ls"})]), True, "completed"),
        (says("nothing"), True, "failed"),
    ],
)
async def test_another_model_is_asked_and_its_answers_are_compared(
    make: Make, tmp_path: Path, answer: ModelAnswer, only_calls: bool, status: str
) -> None:
    path = await recorded(make, tmp_path, script(), "list", "thanks")
    link = FakeLink(refuse)
    model = FakeModel(answer, says("one file"))
    parts = repeats(path, only_calls=only_calls)
    await talk(make, link, model, "list", model=SPEC, parts=parts, system="another prompt")
    assert (the_answer(link).status, link.calls) == (status, [])
    assert model.requests[0].system == "another prompt"


@pytest.mark.parametrize(
    ("tool", "runs"),
    [
        ("agents__request", True),
        ("handoff__request", True),
        ("todo__add", True),
        ("todo__drop", False),
        ("agents__spawn", True),
        ("self-restart__request", False),
    ],
)
async def test_nothing_runs_in_a_replay_that_a_person_decided_about(
    make: Make, tmp_path: Path, tool: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[TapedTurn] = []
    begin = TapedTurn.__init__

    def begun(self: TapedTurn, *given: Any) -> None:
        begin(self, *given)
        turns.append(self)

    monkeypatch.setattr(TapedTurn, "__init__", begun)
    policy, _ = read_policy("p", {"rules": [{"tools": ["todo__drop", "agents__*"], "action": "ask"}]})
    path = await recorded(make, tmp_path, script(), "list", "thanks")
    link = FakeLink(refuse)
    parts = {**repeats(path), "approvals": to_raw([policy])}
    runner = await talk(make, link, None, "list", model=REPLAY, parts=parts)
    assert turns[-1].runs(tool, {}) is runs
    cwd = {"cwd": "/home"}
    assert turns[-1].runs(tool, cwd) is (runs and tool != "agents__spawn"), "no folder is the recording's"
    call = {"tool": "bash__exec", "args": {"command": "ls"}}
    await runner.run(event_frame("op", call, kind="operator.call"))
    assert link.calls == [], "an operator has nothing run either"
    assert not turns[-1].runs(tool, {})


async def test_what_an_operator_calls_is_no_part_of_a_recording(make: Make, tmp_path: Path) -> None:
    link = FakeLink(lambda tool, args: ok(1))
    runner = make(link, FakeModel(says("hi")), parts=RECORDS, model=SPEC)
    call = {"tool": "bash__exec", "args": {"command": "ls"}}
    await runner.run(event_frame("e1", call, kind="operator.call"))
    await runner.run(event_frame("e2", "hello", source=CLIENT))
    await runner.close()
    (noted,) = collect(str(tmp_path), RUN)
    assert [type(line.part).__name__ for line in noted] == ["RecordedTurn", "RecordedStep", "RecordedTurn"]
    assert collect(str(tmp_path), RUN) == [], "it is deleted"


def test_an_instance_that_was_not_recorded_stands_for_the_default_one(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    turn = {"kind": "turn", "agent": "coder", "instance": "default", "turn": 1, "input": "hi"}
    path.write_text("\n".join(json.dumps(line) for line in ({"kind": "recording", "format": 1}, turn)))
    Replayed(ReplaySpec(recording=str(path)), "coder", "other", str(tmp_path)).begin(1, "hi", ())
    with pytest.raises(GoondanError, match=r"agent writer \(other\), turn 1: the number of turns"):
        Replayed(ReplaySpec(recording=str(path)), "writer", "other", str(tmp_path)).begin(1, "hi", ())


# --- forms ----------------------------------------------------------------------------------------------------------


def test_a_request_is_a_list_of_texts() -> None:
    results = ToolData(
        [
            ToolResultPart("c1", "a__b", ok({"at": "/w/x", "n": 1})),
            ToolResultPart("c2", "a__b", ToolResult(status="pending", handle="h")),
            ToolResultPart("c3", "a__b", ToolResult(status="error", error=tool_error("E_TOOL", "no", name="X"))),
        ]
    )
    calls: list[TextPart | ToolCallPart] = [TextPart("so"), ToolCallPart("c1", "a__b", {"y": 1, "x": 2})]
    picture = FilePart(Blob("0" * 32, "5e" * 32, 9), "image/png", "a.png")
    asked = request(
        message(UserData("hi at 2026-01-01T00:00:00Z", [picture])),
        message(AssistantData(calls), source="assistant"),
        message(results, source="tool", name="a__b"),
        system="be kind",
        blocks=[{"type": "note"}],
        tools=[CatalogItem(name="a__b"), CatalogItem(name="c__d")],
    )
    made = request_of(asked, (("/w", "<workdir>"),))
    assert made.tools == ["a__b", "c__d"]
    assert made.entries == [
        "system: be kind",
        f"user: hi at <time> [image/png 9 bytes, sha256:{'5e' * 32}]",
        'assistant: so → a__b {"x": 2, "y": 1}',
        'tool a__b: ok {"at": "<workdir>/x", "n": 1}',
        "tool a__b: pending",
        "tool a__b: error E_TOOL: no",
        'block: {"type": "note"}',
    ]


@pytest.mark.parametrize(
    ("before", "name", "kept"),
    [
        (None, "wait__for", True),
        (AssistantData([TextPart("done")]), "wait__for", True),
        (ToolData([]), "wait__for", False),
        (ToolData([]), "agents__request", True),
    ],
)
def test_the_end_of_a_tools_pending_work_within_a_turn_is_not_compared(before: Any, name: str, kept: bool) -> None:
    told = message(UserData("it has ended"), source="tool", name=name)
    messages = [told] if before is None else [message(before), told]
    assert ("user: it has ended" in request_of(request(*messages), ()).entries) is kept


def test_answers_and_results_come_back_as_they_were() -> None:
    answer = ModelAnswer(
        text="t",
        calls=[AskedCall("c", "a__b", {"x": 1}), AskedCall("d", "a__b", {}, "no JSON")],
        reasoning="because",
        finish_reason="length",
        cut_off=True,
        model="m-1",
        usage=Usage(1, 2, 3, 0),
        metadata={"vendor": {"signature": "x"}},
    )
    again = model_answer(recorded_answer(answer), lambda value: value)
    assert again.metadata is None
    assert recorded_answer(again) == recorded_answer(answer)
    for result in (
        ok({"a": [1, None]}),
        ToolResult(status="pending", handle="h"),
        ToolResult(status="error", error=tool_error("E_TOOL", "no", name="X")),
    ):
        assert tool_result(recorded_result(result), lambda value: value) == result


@pytest.mark.parametrize(
    "result", [{}, {"status": "fine"}, {"status": "error"}, {"status": "ok", "output": 1 << 80}, {"status": "pending"}]
)
def test_a_broken_result_is_none(tmp_path: Path, result: dict[str, Any]) -> None:
    lines = [
        {"kind": "recording", "format": 1},
        {"kind": "turn", "agent": "coder", "instance": "default", "turn": 1},
        {"kind": "call", "agent": "coder", "instance": "default", "turn": 1, "step": 1, "id": "c", "tool": "a__b"},
    ]
    lines[2] |= {"args": {}, "result": result}
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    replayed = Replayed(ReplaySpec(recording=str(path)), "coder", "default", str(tmp_path))
    replayed.begin(1, "", ())
    assert replayed.result(1, "a__b", {}) is None

"""A turn as updates of a session: nothing of it is missing, and nothing comes twice."""

from __future__ import annotations

from typing import Any

import pytest
from acp.schema import PromptResponse, SessionNotification
from hypothesis import given, settings
from hypothesis import strategies as st

from goondan.features.acp.command.rules import updates
from goondan.features.acp.command.rules.updates import AGAIN, Telling, call_of, kind_of, outcome, replayed
from goondan.schemas.wire.errors import error_payload
from goondan.schemas.wire.frames import Answer
from goondan.schemas.wire.runtime_events import RuntimeEvent
from goondan.schemas.wire.usage import Usage
from tests.checks import refuses

WORKDIR = "/srv/shop"


def text(piece: str, at: int, *, step: int = 1, again: bool = False) -> RuntimeEvent:
    return RuntimeEvent(kind="text", step=step, text=piece, at=at, again=again)


def tool(kind: Any, call: str = "c1", *, step: int = 1, **more: Any) -> RuntimeEvent:
    return RuntimeEvent(kind=kind, step=step, tool_call_id=call, tool_name="bash__exec", **more)


def answered(response: str | None, steps: int = 1, **more: Any) -> Answer:
    return Answer(turn_id="T", status="completed", response=response, finish_reason="stop", steps=steps, **more)


def model(*parts: str | tuple[str, str, Any], reasoning: str = "", number: int = 1) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "tool-call", "toolCallId": part[0], "toolName": part[1], "args": part[2]}
        for part in parts
    ]
    metadata = {"reasoning": reasoning} if reasoning else {}
    data = {"role": "assistant", "content": content}
    return {"id": f"T.{number}", "data": data, "source": {"type": "assistant"}, "metadata": metadata}


def result(call: str, output: Any = "ok", number: int = 2, name: str = "bash__exec", **more: Any) -> dict[str, Any]:
    told = {"status": "error" if "error" in more else "ok", "output": output, **more}
    part = {"type": "tool-result", "toolCallId": call, "toolName": name, "result": told}
    return {"id": f"T.{number}", "data": {"role": "tool", "content": [part]}, "source": {"type": "tool"}}


def asked(words: str, number: int = 0, **more: Any) -> dict[str, Any]:
    data = {"role": "user", "content": words, **more}
    return {"id": f"T.{number}", "data": data, "source": {"type": "user"}}


def spoken(told: list[dict[str, Any]], kind: str = "agent_message_chunk") -> str:
    return "".join(update["content"]["text"] for update in told if update["sessionUpdate"] == kind)


def assert_fits_the_protocol(told: list[dict[str, Any]]) -> None:
    for update in told:
        shown = SessionNotification.model_validate({"sessionId": "s", "update": update})
        assert shown.model_dump(by_alias=True, exclude_unset=True, mode="json")["update"] == update


def test_pieces_are_passed_on_as_they_come() -> None:
    telling = Telling("t", WORKDIR)
    told = telling.hear(text("Hel", 0)) + telling.hear(text("lo", 3))
    assert [update["content"]["text"] for update in told] == ["Hel", "lo"]
    assert telling.end(answered("Hello"), []) == []
    assert_fits_the_protocol(told)


def test_what_was_lost_comes_from_the_answer() -> None:
    telling = Telling("t", WORKDIR)
    assert spoken(telling.hear(text("Hel", 0))) == "Hel"
    assert telling.hear(text("world", 6)) == []
    assert telling.hear(text("!", 11)) == []
    assert spoken(telling.end(answered("Hello world!"), [])) == "lo world!"


@settings(max_examples=40)
@given(
    st.text(min_size=1, max_size=40),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), max_size=12),
    st.integers(0, 12),
)
def test_nothing_is_missing_and_nothing_comes_twice(whole: str, pieces: list[tuple[int, int]], read: int) -> None:
    """Whatever pieces come, in whatever order, and whenever the stored message is read."""
    telling, told = Telling("t", WORKDIR), []
    for number, (at, size) in enumerate(pieces):
        if number == read:
            told += telling.stored([model(whole)])
        told += telling.hear(text(whole[at : at + size], at))
    told += telling.end(answered(whole), [model(whole)])
    assert spoken(told) == whole


def test_a_step_that_is_asked_again_begins_anew() -> None:
    telling = Telling("t", WORKDIR)
    told = telling.hear(text("The sky is", 0)) + telling.hear(text("No", 0, again=True)) + telling.hear(text(".", 2))
    assert spoken(told + telling.end(answered("No."), [])) == f"The sky is{AGAIN}No."


def test_a_turn_that_begins_again_voids_the_step_that_ran() -> None:
    telling = Telling("t", WORKDIR)
    told = telling.hear(text("The", 0)) + telling.hear(RuntimeEvent(kind="turn.started", again=True))
    told += telling.hear(text("No.", 0)) + telling.end(answered("No."), [])
    assert spoken(told) == f"The{AGAIN}No."


def test_older_pieces_of_a_step_that_was_read_are_no_news() -> None:
    telling = Telling("t", WORKDIR)
    assert spoken(telling.stored([model("No.")])) == "No."
    assert telling.hear(text("The sky is blue", 0)) == []
    assert telling.hear(text("x", 0, again=True)) == []


def test_an_answer_that_a_layer_has_changed_is_said() -> None:
    telling = Telling("t", WORKDIR)
    telling.hear(text("secret", 0))
    assert spoken(telling.end(answered("***"), [])) == f"{AGAIN}***"


def test_reasoning_goes_its_own_way() -> None:
    telling = Telling("t", WORKDIR)
    told = telling.hear(RuntimeEvent(kind="reasoning", step=1, text="Hm", at=0)) + telling.hear(text("Yes", 0))
    told += telling.end(answered("Yes", reasoning="Hm, well"), [])
    assert spoken(told) == "Yes"
    assert spoken(told, "agent_thought_chunk") == "Hm, well"


def test_a_call_is_told_with_what_the_stored_message_has_of_it() -> None:
    telling = Telling("t", WORKDIR)
    called = tool("tool.called")
    assert telling.wants_stored(called)
    message = model("I look.", ("c1", "file-system__read", {"path": "src/a.py"}))
    told = telling.stored([asked("?"), message]) + telling.hear(called)
    assert [update.get("status") for update in told] == [None, "pending", "in_progress"]
    assert told[1]["locations"] == [{"path": "/srv/shop/src/a.py"}]
    assert told[1]["kind"] == "read"
    ended = telling.stored([asked("?"), message, result("c1", "content")]) + telling.hear(tool("tool.completed"))
    assert ended == [
        {
            "sessionUpdate": "tool_call_update",
            "toolCallId": "t.1.c1",
            "status": "completed",
            "content": [{"type": "content", "content": {"type": "text", "text": "content"}}],
        }
    ]
    assert telling.stored([asked("?"), message, result("c1", "content")]) == []
    assert_fits_the_protocol(told + ended)


def test_a_result_that_is_stored_late_is_told_late() -> None:
    telling = Telling("t", WORKDIR)
    telling.hear(tool("tool.called", arguments="command=ls"))
    assert [update["status"] for update in telling.hear(tool("tool.failed"))] == ["failed"]
    error = {"message": "no such command", "code": "E_TOOL"}
    told = telling.stored([model(("c1", "bash__exec", {})), result("c1", None, error=error)])
    assert told[-1]["content"][0]["content"]["text"] == "no such command"


def test_a_step_whose_events_were_all_lost_comes_before_the_next_one() -> None:
    telling = Telling("t", WORKDIR)
    telling.hear(RuntimeEvent(kind="step.started", step=1))
    begun = RuntimeEvent(kind="step.started", step=2)
    assert telling.wants_stored(begun)
    first = [model("One.", ("c1", "bash__exec", {})), result("c1")]
    told = telling.stored(first) + telling.hear(begun) + telling.hear(text("Two.", 0, step=2))
    told += telling.end(answered("Two.", steps=2), [*first, model("Two.", number=3)])
    assert spoken(told) == "One.Two."
    assert [update.get("status") for update in told if "toolCallId" in update] == ["pending", "completed"]


def test_a_turn_of_which_nothing_was_heard_is_told_at_its_end() -> None:
    stored = [asked("?"), model("One.", ("c1", "bash__exec", {})), result("c1"), model("Two.", number=3)]
    told = Telling("t", WORKDIR).end(answered("Two.", steps=2), stored)
    assert spoken(told) == "One.Two."


def test_a_conversation_that_an_extension_has_shortened_is_not_told_from_its_messages() -> None:
    told = Telling("t", WORKDIR).end(answered("Two.", steps=2), [model("Two.", number=3)])
    assert spoken(told) == "Two."


def test_waiting_and_progress_of_a_call() -> None:
    telling = Telling("t", WORKDIR)
    told = telling.hear(tool("tool.waits")) + telling.hear(tool("tool.progress", done=2.0, total=5.0, message="a\x1bb"))
    assert [update["status"] for update in told] == ["pending", "pending", "in_progress"]
    assert told[-1]["content"][0]["content"]["text"] == "a\\x1bb"
    assert_fits_the_protocol(told)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bash__exec", "execute"),
        ("file-system__read", "read"),
        ("file-system__write", "edit"),
        ("file-system__list", "read"),
        ("http-fetch__get", "fetch"),
        ("code__run", "execute"),
        ("files__searchFiles", "search"),
        ("files__move_file", "move"),
        ("files__deleteFile", "delete"),
        ("agents__request", "other"),
        ("", "other"),
    ],
)
def test_kinds_of_calls(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_an_edit_is_told_as_a_difference_that_stays() -> None:
    args = {"path": "a.txt", "old_string": "one", "new_string": "two"}
    call = call_of("c", "files__edit", args, WORKDIR)
    assert call["content"] == [{"type": "diff", "path": "/srv/shop/a.txt", "oldText": "one", "newText": "two"}]
    written = call_of("c", "file-system__write", {"path": "/srv/b.txt", "content": "x"}, WORKDIR)
    assert written["content"] == [{"type": "diff", "path": "/srv/b.txt", "oldText": None, "newText": "x"}]
    assert "content" not in call_of("c", "file-system__write", {"path": "b", "content": "x", "append": True}, WORKDIR)
    assert "content" not in call_of("c", "file-system__write", {"path": "b", "content": "x" * 70000}, WORKDIR)
    message = model(("c1", "file-system__write", {"path": "b", "content": "x"}))
    told = Telling("t", WORKDIR).stored([message, result("c1", {}, name="file-system__write")])
    assert told[-1] == {"sessionUpdate": "tool_call_update", "toolCallId": "t.1.c1", "status": "completed"}
    assert_fits_the_protocol(told)


@pytest.mark.parametrize("args", [None, [1], {"path": 3}, {"path": ""}, {"path": "a\0b"}, {"path": "https://x/y"}])
def test_arguments_that_name_no_file_have_no_location(args: Any) -> None:
    assert "locations" not in call_of("c", "file-system__read", args, WORKDIR)


def test_what_is_long_is_shortened() -> None:
    long = "x" * (updates.MAX_RESULT + 7)
    told = Telling("t", WORKDIR).stored([model(("c1", "bash__exec", {"command": long * 3})), result("c1", long)])
    assert "rawInput" not in told[0]
    assert len(told[0]["title"]) <= updates.MAX_TITLE
    assert told[1]["content"][0]["content"]["text"].endswith("[…]")


def test_a_conversation_is_replayed_in_order() -> None:
    turn = [
        asked("Hi", files=[{"name": "a.png"}]),
        model("Yes.", ("c1", "bash__exec", {}), reasoning="Hm"),
        result("c1"),
    ]
    later = {**asked("And?"), "id": "U.0"}
    told = list(replayed([*turn, model("Done.", number=3), later, {**model("No."), "id": "U.1"}], WORKDIR))
    kinds = [update["sessionUpdate"] for update in told]
    assert kinds == [
        "user_message_chunk",
        "agent_thought_chunk",
        "agent_message_chunk",
        "tool_call",
        "tool_call_update",
        "agent_message_chunk",
        "user_message_chunk",
        "agent_message_chunk",
    ]
    assert told[0]["content"]["text"] == "Hi\n[a.png]"
    assert told[3]["toolCallId"] == told[4]["toolCallId"] == "T.1.c1"
    assert_fits_the_protocol(told)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (answered("x"), "end_turn"),
        (answered("x", cut_off=True), "max_tokens"),
        (Answer(turn_id="T", status="completed", response="", finish_reason="content_filter"), "refusal"),
        (Answer(turn_id="T", status="failed", finish_reason="max_steps"), "max_turn_requests"),
        (Answer(turn_id="T", status="failed", error=error_payload("E_CANCELLED", "gone")), "cancelled"),
    ],
)
def test_why_a_turn_ended(answer: Answer, reason: str) -> None:
    assert outcome(answer) == {"stopReason": reason}


def test_a_turn_that_failed_has_no_result() -> None:
    with refuses("E_AGENT_FAILED"):
        outcome(Answer(turn_id="T", status="failed", error=error_payload("E_AGENT_FAILED", "no")))


def test_usage_in_the_words_of_the_protocol() -> None:
    told = outcome(answered("x", usage=Usage(input_tokens=5, output_tokens=3, reasoning_tokens=1, model_calls=1)))
    assert (told["usage"]["totalTokens"], told["usage"]["thoughtTokens"]) == (8, 1)
    PromptResponse.model_validate(told)

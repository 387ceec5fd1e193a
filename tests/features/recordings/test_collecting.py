"""One recording of what the instances of a run have written down: cleaned, numbered, sorted, the same each time."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from goondan.features.recordings.command import Course, Made, compare_answer, course_of, first, make, missing
from goondan.features.recordings.wire import (
    Noted,
    Part,
    RecordedAnswer,
    RecordedCall,
    RecordedFile,
    RecordedStep,
    RecordedTurn,
    Stopped,
    read_lines,
    whole_requests,
)
from goondan.features.recordings.wire.texts import Difference, FoundDifference
from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.wire.frames import Answer

KEY = "recorded-1234"


def turn(agent: str, number: int = 1, **changes: Any) -> RecordedTurn:
    given = {"outside": 1, "status": "completed", "response": "done", **changes}
    return RecordedTurn(agent=agent, instance=KEY, turn=number, input=f"do {number}", **given)


def step(agent: str, number: int = 1, at: int = 1, **changes: Any) -> RecordedStep:
    given = {"entries": ["user: do"], "answer": RecordedAnswer(text="done"), **changes}
    return RecordedStep(agent=agent, instance=KEY, turn=number, step=at, **given)


def call(agent: str, call_id: str, **changes: Any) -> RecordedCall:
    given = {"result": {"status": "ok", "output": "x"}, **changes}
    return RecordedCall(agent=agent, instance=KEY, turn=1, step=1, id=call_id, tool="a__b", **given)


def noted(*parts: Any, since: int = 1) -> list[Noted]:
    return [Noted(at, part) for at, part in enumerate(parts, since)]


def made(*instances: list[Noted], secret: str = "s3cret") -> Made:
    return make(instances, KEY, "main", lambda text: text.replace(secret, "***"))


def parts_of(recording: Made) -> list[Part]:
    return read_lines(recording.data, "made", lambda part: True)[1]


def test_the_runs_own_instance_is_the_default_one_wherever_it_stands() -> None:
    told = call("main", "c", args={"instanceKey": f"{KEY}-b"}, result={"status": "ok", "output": {KEY: [f"at {KEY}"]}})
    (one, two) = parts_of(made(noted(turn("main"), told)))
    assert (one.instance, two.instance) == ("default", "default")
    assert isinstance(two, RecordedCall)
    assert (two.args, two.result["output"]) == ({"instanceKey": "default-b"}, {"default": ["at default"]})


def test_no_secret_is_written_and_a_long_text_is_cut_only_behind_it() -> None:
    long = "tool a__b: ok " + "s3cret " * 1000
    result = {"status": "ok", "output": {"s3cret": "s3cret"}}
    answer = RecordedAnswer(text="my s3cret")
    steps = [step("main", entries=[long, "s3cret"], answer=answer), step("main", at=2, shared=1, entries=["last"])]
    recording = made(noted(turn("main", response="s3cret"), *steps, call("main", "c", args="s3cret", result=result)))
    assert b"s3cret" not in recording.data
    whole = [
        request.entries for _, request in whole_requests(p for p in parts_of(recording) if isinstance(p, RecordedStep))
    ]
    assert whole[0][0] == whole[1][0]
    assert len(whole[0][0]) < 2200 and "(4014 characters, sha256:" in whole[0][0], "counted without the secret"


def test_a_later_incarnation_repeats_nothing_and_turns_without_a_model_leave_no_gap() -> None:
    begun = turn("main", 3, status=None, response=None)
    again = step("main", 3, answer=RecordedAnswer(text="again"))
    parts = parts_of(
        made(
            noted(begun, step("main", 3), call("main", "c", result={"status": "error"}), begun, again, turn("main", 3))
        )
    )
    assert [(type(part).__name__, part.turn) for part in parts if not hasattr(part, "server")] == [
        ("RecordedTurn", 1),
        ("RecordedStep", 1),
    ], "the call belongs to a turn that nobody has written down"
    assert isinstance(parts[0], RecordedTurn) and parts[0].status == "completed"
    assert isinstance(parts[1], RecordedStep) and parts[1].answer == RecordedAnswer(text="again")


def test_the_files_of_a_message_stand_where_its_turn_ends() -> None:
    picture = RecordedFile("image/png", b"s3cret\x00", "a.png")
    begun = turn("main", status=None, response=None, files=[picture])
    (part,) = parts_of(made(noted(begun, turn("main"))))
    assert isinstance(part, RecordedTurn)
    assert (part.status, part.files) == ("completed", [picture]), "bytes are no text"


def test_messages_from_outside_are_numbered_as_they_came() -> None:
    recording = made(
        noted(turn("b", 1), turn("b", 2), since=20),
        noted(turn("a", 1), turn("a", 2, outside=0), turn("a", 3), since=10),
    )
    found = {(p.agent, p.turn): p.outside for p in parts_of(recording) if isinstance(p, RecordedTurn)}
    assert found == {("a", 1): 1, ("a", 2): 0, ("a", 3): 2, ("b", 1): 3, ("b", 2): 4}
    assert [t.outside for t in course_of(parts_of(recording)).sent] == [1, 2, 3, 4]


def test_the_same_run_makes_the_same_file_in_whatever_order_instances_are_found() -> None:
    instances = [noted(turn(name), step(name), call(name, "c"), since=at) for at, name in enumerate("dacb")]
    first_file = made(*instances).data
    random.Random(3).shuffle(instances)
    assert made(*instances).data == first_file


def test_what_a_replay_will_not_do_is_said() -> None:
    assert made(noted(turn("main"))).warnings == []
    (earlier,) = made(noted(turn("main", 2))).warnings
    assert "had a conversation before" in earlier
    (open_turn,) = made(noted(turn("main", status=None, response=None))).warnings
    assert "had not ended" in open_turn


def test_a_run_that_could_not_be_written_whole_makes_no_file() -> None:
    with pytest.raises(GoondanError, match="not all of the run could be recorded: no room") as caught:
        made(noted(turn("main"), Stopped("no room")))
    assert caught.value.code == "E_STATE"


def test_the_counts_of_a_recording() -> None:
    recording = made(noted(turn("main"), step("main"), call("main", "c"), call("main", "d")), noted(turn("b")))
    assert (recording.turns, recording.steps, recording.calls, recording.agents) == (2, 1, 2, ["b", "main"])
    course = course_of(parts_of(recording))
    assert (course.requests, course.calls, course.turns.total()) == (1, 2, 2)


# --- the course of a replay -----------------------------------------------------------------------------------------


def test_the_answer_to_a_message_is_compared_without_times_and_folders() -> None:
    asked = replace(turn("main"), instance="default", response="at <time> in <workdir>/a and <state>/b")
    text = "at 2026-01-01T00:00:00Z in /s/instances/main/default/workspace/a and /s/b"
    assert compare_answer(asked, Answer(turn_id="t", status="completed", response=text), "/s") is None
    found = compare_answer(asked, Answer(turn_id="t", status="completed", response="no"), "/s")
    assert found is not None and (found.what, found.came) == ("its answer", "no")
    failed = Answer(turn_id="t", status="failed", error=error_payload("E_MODEL_FAILED", "x"))
    found = compare_answer(asked, failed, "/s")
    assert found is not None and (found.what, found.expected, found.came) == (
        "the end of the turn",
        "completed",
        "failed",
    )
    expected = replace(asked, status="failed", response=None, error="E_MODEL_FAILED")
    assert compare_answer(expected, failed, "/s") is None


def test_the_difference_that_was_met_first_counts() -> None:
    one = Difference(agent="b", instance="default", turn=1, step=1, what="it", expected="x", came="y")
    other = replace(one, agent="a")
    assert first([]) is None
    assert first([FoundDifference(2, other), FoundDifference(1, one)]) is one


def test_a_turn_that_nobody_waits_for_is_missed() -> None:
    course: Course = course_of([turn("main"), turn("b", outside=0)])
    ended = course.turns.copy()
    assert missing(course, ended) is None
    ended["b", KEY] = 0
    assert missing(course, ended) == ("b", KEY)

"""The file of a recorded run: what is written is read again, and a hostile file is refused with its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from goondan.features.recordings import wire as recordings
from goondan.features.recordings.wire import (
    NOTHING,
    Noted,
    Part,
    RecordedAnswer,
    RecordedCall,
    RecordedModelCall,
    RecordedStep,
    RecordedTurn,
    Recording,
    Request,
    encode,
    encode_noted,
    in_order,
    parts_of,
    read_lines,
    read_noted,
    read_recording,
    whole_requests,
)
from goondan.schemas.wire.errors import GoondanError

HEAD = Recording(1, "main")
TURN = RecordedTurn(agent="main", instance="default", turn=1, input="hi", outside=1, status="completed", response="ho")
STEP = RecordedStep(
    agent="main",
    instance="default",
    turn=1,
    step=1,
    entries=["user: hi", "user: you"],
    tools=["a__b"],
    answer=RecordedAnswer(calls=[RecordedModelCall(id="c", name="a__b", args={"x": [1]})], usage={"input_tokens": 3}),
)
CALL = RecordedCall(
    agent="main", instance="default", turn=1, step=1, id="c", tool="a__b", args={"x": [1]}, result={"status": "ok"}
)


def written(*parts: Part) -> bytes:
    return b"".join(map(encode, (HEAD, *parts)))


def refusal(data: bytes) -> str:
    with pytest.raises(GoondanError) as caught:
        read_lines(data, "run.jsonl", lambda part: True)
    assert caught.value.code == "E_CONFIG_INVALID_VALUE"
    return caught.value.info.message


def test_what_is_written_is_read_again() -> None:
    head, parts = read_lines(written(TURN, STEP, CALL), "run.jsonl", lambda part: True)
    assert (head, parts) == (HEAD, [TURN, STEP, CALL])


def test_only_wanted_parts_are_kept() -> None:
    other = replace(TURN, agent="other")
    _, parts = read_lines(written(TURN, other), "run.jsonl", lambda part: part.agent == "other")
    assert parts == [other]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is empty"),
        (b"\n", "line 1"),
        (b"hello\n", "line 1"),
        (encode(TURN), "the first line, and no other, is a `recording`"),
        (written() + encode(HEAD), "the first line, and no other"),
        (encode(Recording(2)), "it has format 2, this version reads 1"),
        (written() + b'{"kind":"step"}\n', "line 2"),
        (written() + b'{"kind":"nothing"}\n', "line 2"),
        (written() + encode(TURN)[:20], "line 2"),
        (written() + encode(STEP).replace(b'"input_tokens":3', b'"input_tokens":99999999999999999999'), "line 2"),
        (written() + encode(replace(STEP, window=4096)).replace(b"4096", b"-1"), "line 2"),
    ],
)
def test_what_is_no_recording_is_refused_with_the_line(data: bytes, why: str) -> None:
    assert why in refusal(data)


def test_a_recording_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "MAX_LINES", 2)
    assert "more than 2 lines" in refusal(written(TURN, STEP))
    monkeypatch.setattr(recordings, "MAX_LINE_BYTES", 100)
    assert "line 2 is longer than" in refusal(written(TURN))
    monkeypatch.setattr(recordings, "MAX_FILE_BYTES", 10)
    assert "it is larger than" in refusal(written())


@pytest.mark.parametrize("depth", [60, 70, 900, 100_000])
def test_values_nest_no_deeper_than_on_the_wire(depth: int) -> None:
    deep = json.dumps({"kind": "call", "agent": "a", "instance": "i", "turn": 1, "step": 1, "id": "c", "tool": "t__u"})
    line = f'{deep[:-1]},"args":{"[" * depth}{"]" * depth},"result":{{}}}}\n'.encode()
    if depth == 60:
        assert len(read_lines(written() + line, "x", lambda part: True)[1]) == 1
    else:
        assert "line 2" in refusal(written() + line)


def test_a_line_that_was_cut_by_the_end_of_an_agent_is_left_out() -> None:
    noted = [Noted(1, TURN), Noted(2, STEP)]
    data = b"".join(map(encode_noted, noted))
    assert read_noted(data) == noted
    assert read_noted(data[:-30]) == noted[:1]


def test_a_file_is_no_pipe_and_has_a_name_in_its_error(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    for name, code in (("pipe", "E_CONFIG_INVALID_VALUE"), ("missing", "E_CONFIG_NOT_FOUND")):
        with pytest.raises(GoondanError, match=name) as caught:
            read_recording(str(tmp_path / name))
        assert caught.value.code == code


ENTRIES = st.lists(st.sampled_from(["system: s", "user: a", "assistant: b"]), max_size=5)
TOOLS = st.lists(st.sampled_from(["a__b", "c__d"]), max_size=2)


@given(st.lists(st.tuples(ENTRIES, TOOLS, st.booleans()), max_size=8))
def test_requests_are_whole_again(requests: list[tuple[list[str], list[str], bool]]) -> None:
    before, steps = NOTHING, []
    for number, (entries, tools, aside) in enumerate(requests, 1):
        request = Request(entries, tools)
        shared, left, named = parts_of(request, NOTHING if aside else before)
        steps.append(replace(STEP, step=number, aside=aside, shared=shared, entries=left, tools=named))
        before = before if aside else request
    assert [(whole.entries, whole.tools) for _, whole in whole_requests(steps)] == [pair[:2] for pair in requests]


@pytest.mark.parametrize("shared", [-1, 3, 1 << 60])
def test_a_step_shares_no_more_than_there_is(shared: int) -> None:
    with pytest.raises(GoondanError, match="shared is"):
        list(whole_requests([STEP, replace(STEP, step=2, shared=shared)]))


def test_lines_are_sorted_by_instance_turn_and_step() -> None:
    later: list[Any] = [replace(STEP, turn=2), replace(TURN, turn=2), CALL, STEP, replace(TURN, agent="a"), TURN]
    assert sorted(later, key=in_order) == [later[4], TURN, STEP, CALL, later[1], later[0]]

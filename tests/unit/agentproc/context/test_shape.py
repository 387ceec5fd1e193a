"""What of a conversation is shown: cuts, shortened results, and what stands in their place."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from goondan.agentproc.machine.context_shape import (
    LEAST_RESULT,
    Shape,
    View,
    begin_of,
    find_cut,
    long_results,
    shortened,
    shown_sizes,
    squeezed,
    within,
)
from goondan.agentproc.machine.estimate import AROUND, PICTURE, MessageSizes, message_size, text_size
from goondan.agentproc.machine.messages import (
    AssistantData,
    Message,
    MessageSource,
    TextPart,
    ToolCallPart,
    ToolData,
    ToolResultPart,
    UserData,
    is_presentable,
)
from goondan.agentproc.providers.history import result_text
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import Blob, FilePart, ToolResult


def message(name: str, data: Any) -> Message:
    return Message(name, data, "2026-01-01T00:00:00.000Z", MessageSource("user"))


def result(call: str, output: Any) -> Message:
    part = ToolResultPart(call, "bash__exec", ToolResult(status="ok", output=to_raw(output)))
    return message(f"r-{call}", ToolData([part]))


def shown_text(m: Message) -> str:
    assert isinstance(m.data, ToolData)
    return result_text(m.data.content[0].result)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Sound ones: turns of a user, with steps of some calls each."""
    made: list[Message] = []
    for turn in range(draw(st.integers(1, 5))):
        made.append(message(f"u{turn}", UserData("y" * draw(st.integers(1, 200)))))
        for step in range(draw(st.integers(0, 4))):
            ids = [f"c{turn}.{step}.{number}" for number in range(draw(st.integers(0, 3)))]
            parts = [ToolCallPart(i, "bash__exec", {"command": i}) for i in ids]
            made.append(message(f"a{turn}.{step}", AssistantData([TextPart("z" * draw(st.integers(0, 200))), *parts])))
            made += [result(call, draw(st.sampled_from(["o", "ü", "o" * 900, ["x"] * 500]))) for call in ids]
    return made


@given(conversations(), st.integers(0, 4000), st.none() | st.integers(1, 20))
def test_a_cut_tears_no_call_from_its_result_and_keeps_no_more_than_there_is_room(
    messages: list[Message], room: int, most: int | None
) -> None:
    sizes = list(map(message_size, messages))
    cut = find_cut(messages, sizes, 0, room, most)
    kept = messages[cut:]
    assert kept
    assert is_presentable(messages[:cut])
    assert is_presentable(kept)
    group = next((n for n in range(len(kept) - 1, -1, -1) if not isinstance(kept[n].data, ToolData)), 0)
    if group > 0:  # more than the last call with its results
        assert sum(sizes[cut:]) <= room
        assert most is None or len(kept) <= most


@given(conversations(), st.integers(0, 4000), st.data())
def test_what_is_shown_is_sound_has_the_opening_and_its_size(
    messages: list[Message], room: int, data: st.DataObject
) -> None:
    sizes = list(map(message_size, messages))
    cut = find_cut(messages, sizes, 0, room)
    opening = data.draw(st.sampled_from([m.id for m in messages if isinstance(m.data, UserData)]))
    shape = Shape(messages[cut - 1].id if cut else "", cut)
    shape = Shape(shape.through, cut, "", long_results(messages, sizes, shape, LEAST_RESULT))
    view = View()
    shown = view.of(messages, shape, opening)
    assert begin_of(messages, shape) == cut
    assert is_presentable(shown)
    assert opening in [m.id for m in shown]
    assert view.of(messages, shape, opening) == shown
    assert all(a is b for a, b in zip(shown, view.of(messages, shape, opening), strict=True)), "so it is written once"
    if cut:
        assert isinstance(shown[0].data, UserData)
        assert f"{cut} messages before this are left out" in shown[0].data.content
    before = [m for m in messages[:cut] if m.id == opening]
    said = sum(map(message_size, [*before, *messages[cut:]])) if not shape.shortened else None
    if said is not None and not cut:
        assert sum(map(message_size, shown)) == said


@given(st.text(max_size=3000) | st.lists(st.text(max_size=50), max_size=60), st.integers(LEAST_RESULT, 2000))
def test_a_shortened_result_has_its_beginning_its_end_and_how_the_rest_is_read(output: Any, most: int) -> None:
    whole = result("c", output)
    short = shown_text(shortened(whole, most))
    text = shown_text(whole)
    if text_size(text) <= most:
        assert short == text
        return
    assert text_size(short) <= most + AROUND + 40
    head, mark, tail = short.partition("\n[… ")
    assert mark
    assert text.startswith(head)
    assert text.endswith(tail.rpartition("…]\n")[2])
    assert f'tool-result__read {{"id": "r-c", "from": {len(head)}}}' in tail


@given(conversations(), st.integers(0, 6000))
def test_results_are_squeezed_as_much_as_is_needed_the_longest_first(messages: list[Message], over: int) -> None:
    sizes = list(map(message_size, messages))
    caps = squeezed(messages, sizes, over)
    after = shown_sizes(messages, sizes, Shape(shortened=caps))
    rest = [m for m in messages if isinstance(m.data, ToolData) and m.id not in caps]
    assert sum(after) <= sum(sizes) - over or all(cap == LEAST_RESULT for cap in caps.values())
    assert all(message_size(m) <= min(caps.values(), default=10**9) + AROUND for m in rest)


def test_what_was_left_out_is_shown_again_when_the_conversation_does_not_have_it_any_more() -> None:
    messages = [message("u", UserData("x"))]
    assert begin_of(messages, Shape(through="gone", left_out=9)) == 0
    assert View().of(messages, Shape(through="gone", left_out=9), "u") == messages


def test_messages_are_measured_once() -> None:
    messages = [message("u", UserData("hello")), result("c", "x" * 10)]
    sizes = MessageSizes()
    assert sizes.of(messages) == [AROUND + 5, AROUND + 11]
    assert sizes.of([*messages, message("v", UserData("ü"))]) == [AROUND + 5, AROUND + 11, AROUND + 2]
    assert sizes.of([message("u", UserData("hi"))]) == [AROUND + 2]


@given(st.text(), st.integers(-1, 50), st.booleans())
def test_a_piece_of_a_text_is_within_its_bytes(text: str, size: int, from_end: bool) -> None:
    piece = within(text, size, from_end=from_end)
    assert text_size(piece) <= max(size, 0)
    assert text.endswith(piece) if from_end else text.startswith(piece)


def test_files_count_apart_from_the_text_beside_them() -> None:
    blob = Blob("0" * 32, "0" * 64, 800_000)
    picture, pages = FilePart(blob, "image/png"), FilePart(blob, "application/pdf")
    assert message_size(message("u", UserData("hi", [picture, pages]))) == AROUND + 2 + PICTURE + 100_000
    part = ToolResultPart("c", "eye__look", ToolResult(status="ok", output=to_raw("x" * 90_000)), [picture])
    seen = message("r", ToolData([part]))
    size = message_size(seen)
    assert shown_sizes([seen], [size], Shape(shortened={"r": 1000})) == [1000 + AROUND + PICTURE]
    assert squeezed([seen], [size], 50_000)["r"] < 41_000
    short = shortened(seen, 1000).data
    assert isinstance(short, ToolData)
    assert short.content[0].files == [picture]
    few = message(
        "f", ToolData([ToolResultPart("d", "eye__look", ToolResult(status="ok", output=to_raw("x")), [picture])])
    )
    assert long_results([few], [message_size(few)], Shape(), 500) == {}, "its text is short"

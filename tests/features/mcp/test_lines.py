"""What a server writes, as messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goondan.features.mcp.jail.protocol import bounds
from goondan.features.mcp.jail.protocol.bounds import NOT_LET_THROUGH, Answered, Asked, Flood, Lines, Noise, Told, parse

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=30)
@given(st.lists(json_values, max_size=4), st.integers(1, 9))
def test_lines_are_the_same_however_they_are_cut(values: list[Any], step: int) -> None:
    data = b"".join(
        json.dumps({"jsonrpc": "2.0", "id": at, "result": {"value": value}}).encode() + b"\n"
        for at, value in enumerate(values)
    )
    reader = Lines(0.0)
    found = [message for at in range(0, len(data), step) for message in reader.feed(data[at : at + step], 0.0)]
    assert (
        found == Lines(0.0).feed(data, 0.0) == [Answered(at, {"value": value}, None) for at, value in enumerate(values)]
    )


@given(st.binary(max_size=200))
def test_whatever_is_written_is_some_message_and_never_an_exception(data: bytes) -> None:
    for message in Lines(0.0).feed(data + b"\n", 0.0):
        assert isinstance(message, Answered | Asked | Told | Noise)


@given(json_values)
def test_any_json_is_some_message(value: Any) -> None:
    assert isinstance(parse(json.dumps(value).encode()), Noise)
    message = {"jsonrpc": "2.0", "id": value, "method": value, "params": value, "result": value, "error": value}
    assert isinstance(parse(json.dumps(message).encode()), Answered | Asked | Told | Noise)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"jsonrpc":"2.0","id":1,"result":{"a":1}}', Answered(1, {"a": 1}, None)),
        (b'{"jsonrpc":"2.0","id":"1","result":{}}', Answered("1", {}, None)),
        (b'{"jsonrpc":"2.0","id":null,"error":{"code":-32700}}', Answered(None, None, {"code": -32700})),
        (b'{"jsonrpc":"2.0","id":7,"method":"ping"}', Asked(7, "ping", None)),
        (b'{"jsonrpc":"2.0","method":"x","params":{}}', Told("x", {})),
    ],
)
def test_messages_of_each_kind(line: bytes, message: bounds.Message) -> None:
    assert parse(line) == message


@pytest.mark.parametrize(
    "line",
    [
        b"Server running on stdio",
        b"[]",
        b'[{"jsonrpc":"2.0","id":1,"result":{}}]',
        b'{"id":1,"result":{}}',
        b'{"jsonrpc":"2.0","id":true,"result":{}}',
        b'{"jsonrpc":"2.0","id":1.0,"result":{}}',
        b'{"jsonrpc":"2.0","id":null,"result":{}}',
        b'{"jsonrpc":"2.0","method":5}',
        b'{"jsonrpc":"2.0","method":"x","params":[]}',
        b"\xff\xfe",
        '{"jsonrpc":"2.0","method":"x"}'.encode("utf-16"),
        '{"jsonrpc":"2.0","method":"x"}'.encode("utf-32-be"),
    ],
)
def test_lines_that_are_noise(line: bytes) -> None:
    assert isinstance(parse(line), Noise)


@pytest.mark.parametrize(
    "line",
    [
        b'{"jsonrpc":"2.0","id":3,"result":{"x":' + b"[" * 5000 + b"]" * 5000 + b"}}",
        b'{"jsonrpc":"2.0","id":3,"result":{"x":' + b"[" * 100 + b"]" * 100 + b"}}",
        b'{"jsonrpc":"2.0","id":3,"result":{"x":[' + b",".join([b"1"] * 200_000) + b"]}}",
        b'{"jsonrpc":"2.0","id":3,"result":{"x":NaN}}',
        b'{"jsonrpc":"2.0","id":3,"result":{"x":[1e999,-1e999]}}',
        b'{"jsonrpc":"2.0","id":3,"result":"no map"}',
        b'{"jsonrpc":"2.0","result":{"x":"\xff"},"id":3}',
        b'{"jsonrpc":"2.0","id":3,"result":{"x":1}',
    ],
)
def test_an_answer_that_is_not_let_through_fails_its_request(line: bytes) -> None:
    message = parse(line)
    assert isinstance(message, Answered)
    assert message.id == 3
    assert message.error is not None
    assert message.error["code"] == NOT_LET_THROUGH


def test_half_a_character_is_mended_and_does_not_cost_the_answer() -> None:
    message = parse(b'{"jsonrpc":"2.0","id":3,"result":{"text":"cut \\ud83d"}}')
    assert message == Answered(3, {"text": "cut \N{REPLACEMENT CHARACTER}"}, None)


def test_a_line_without_an_end_is_a_flood() -> None:
    reader = Lines(0.0)
    piece = b"x" * (1 << 20)
    for _ in range(bounds.MAX_MESSAGE_BYTES >> 20):
        reader.feed(piece, 0.0)
    with pytest.raises(Flood, match="bytes"):
        reader.feed(b"x", 0.0)


def test_the_longest_line_is_let_through() -> None:
    head, tail = b'{"jsonrpc":"2.0","id":1,"result":{"text":"', b'"}}'
    line = head + b"x" * (bounds.MAX_MESSAGE_BYTES - len(head) - len(tail)) + tail
    reader = Lines(0.0)
    messages = [m for at in range(0, len(line), 65536) for m in reader.feed(line[at : at + 65536], 0.0)]
    messages += reader.feed(b"\n", 0.0)
    assert isinstance(messages[0], Answered)
    with pytest.raises(Flood):
        Lines(0.0).feed(line + b" \n", 0.0)


def test_so_many_messages_that_nobody_asked_for_are_a_flood_and_answers_are_none() -> None:
    reader = Lines(0.0)
    told = b'{"jsonrpc":"2.0","method":"notifications/message"}\n'
    reader.feed(told * bounds.UNASKED_BURST, 0.0)
    reader.feed(told * bounds.UNASKED_PER_S, 1.0)
    reader.feed(b'{"jsonrpc":"2.0","id":1,"result":{}}\n' * 1000, 1.0)
    with pytest.raises(Flood, match="nobody asked for"):
        reader.feed(told, 1.0)


def test_so_many_bytes_that_nobody_asked_for_are_a_flood() -> None:
    reader = Lines(0.0)
    noise = b"x" * (1 << 20) + b"\n"
    for _ in range(bounds.UNASKED_BYTES_BURST >> 20):
        reader.feed(noise, 0.0)
    with pytest.raises(Flood, match="nobody asked for"):
        reader.feed(noise, 0.0)


@given(st.text())
def test_a_text_for_people_has_no_hidden_letters_and_its_size(given: str) -> None:
    shown = bounds.text(given, 50)
    assert len(shown) <= 50
    assert not any(ord(c) < 32 and c not in "\t\n" for c in shown)
    assert not any(
        0xE0000 <= ord(c) <= 0xE007F or 0x202A <= ord(c) <= 0x202E or 0xD800 <= ord(c) <= 0xDFFF for c in shown
    )
    assert "\n" not in bounds.line(given, 50)
    shown.encode()


@pytest.mark.parametrize("letter", ["\u200b", "\u2063", "\xad", "\u3164", "\U000e0041", "\U000e0101", "\ufff9"])
def test_letters_that_nobody_sees_reach_no_model(letter: str) -> None:
    assert bounds.text(f"add{letter}s", 50) == "adds"
    assert not bounds.is_name(f"add{letter}")
    assert bounds.text("👩\u200d🔬 ❤\ufe0f", 50) == "👩\u200d🔬 ❤\ufe0f"


@pytest.mark.parametrize(
    ("url", "may"),
    [
        ("https://login.example/x?state=1", True),
        ("http://localhost:8080/", True),
        ("https://bank.example@evil.example/", False),
        ("https://b\u0430nk.example/", False),
        ("https://bank.example\\@evil.example/", False),
        ("https://x.example/\u200b", False),
        ("https:///x", False),
        ("http://[::1", False),
        ("javascript:alert(1)", False),
        ("file:///etc/passwd", False),
    ],
)
def test_pages_that_a_person_may_be_asked_to_open(url: str, may: bool) -> None:
    assert bounds.is_page(url) is may


@given(json_values, st.integers(0, 6), st.integers(0, 20))
def test_a_value_passes_exactly_when_it_has_the_levels_and_values(value: Any, depth: int, values: int) -> None:
    def levels(item: Any) -> int:
        inner = item.values() if isinstance(item, dict) else item if isinstance(item, list) else None
        return 0 if inner is None else 1 + max(map(levels, inner), default=0)

    def count(item: Any) -> int:
        if isinstance(item, dict):
            return 2 * len(item) + sum(map(count, item.values()))
        return len(item) + sum(map(count, item)) if isinstance(item, list) else 0

    try:
        bounds.check(value, depth=depth, values=values)
    except bounds.Excess:
        assert levels(value) > depth or count(value) > values
    else:
        assert levels(value) <= depth
        assert count(value) <= values

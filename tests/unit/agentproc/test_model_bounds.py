"""What a model's server cannot do: cost more than its bytes, be kept without bound, pass a keepalive off as content."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable
from typing import Any

import pytest

from goondan.agentproc.providers.anthropic import Reader as AnthropicReader
from goondan.agentproc.providers.faults import Fault
from goondan.agentproc.providers.openai import Reader as OpenAIReader
from goondan.agentproc.providers.reader import EventTooLarge, SseDecoder


def test_many_data_lines_cost_no_more_than_their_bytes() -> None:
    """One line a chunk, as a server may send them. It took minutes when every chunk added up all lines before it."""
    decoder, began = SseDecoder(), time.process_time()
    for _ in range(40_000):
        assert decoder.feed(b"data: x\n") == []
    ((_, data),) = decoder.feed(b"\n")
    assert time.process_time() - began < 2
    assert len(data) == 79_999


def test_lines_without_a_byte_are_bounded() -> None:
    decoder = SseDecoder(max_event_lines=100)
    assert decoder.feed(b"data\n" * 100) == []
    with pytest.raises(EventTooLarge, match="100 lines"):
        decoder.feed(b"data:\n")


@pytest.mark.parametrize(
    "event",
    [
        {"type": "ping"},
        {"choices": [{"index": 0, "delta": {}}]},
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": ""}},
        {"choices": [], "usage": {"prompt_tokens": 3}},
    ],
)
def test_what_keeps_a_connection_alive_is_no_content(event: Any) -> None:
    for reader in (AnthropicReader("m"), OpenAIReader("m")):
        for _ in range(3):
            read_all(reader, [event])
        assert reader.content == 0


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "a"},
        {"reasoning_content": "a"},
        {"reasoning": "a"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
    ],
)
def test_text_reasoning_and_arguments_are_content(delta: Any) -> None:
    reader = OpenAIReader("m")
    for _ in range(2):
        before = reader.content
        read_all(reader, [{"choices": [{"index": 0, "delta": delta}]}])
        assert reader.content > before


def read_all(reader: AnthropicReader | OpenAIReader, events: Iterable[Any]) -> None:
    for event in events:
        reader.read([(b"", json.dumps(event).encode())])


def test_what_is_kept_of_an_answer_is_bounded_wherever_it_stands() -> None:
    """A name in pieces of one letter took a minute; fields that go back with a call were not counted at all."""
    names = [
        {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"name": n}}]}}]} for n in "ab"
    ]
    signed = {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "signature": "s" * 100_000}]}}]}
    with pytest.raises(Fault, match="whose name has more than"):
        read_all(OpenAIReader("m"), itertools.islice(itertools.cycle(names), 5000))
    with pytest.raises(Fault, match="an answer of more than"):
        read_all(OpenAIReader("m"), [signed] * 12)
    block = {"type": "redacted_thinking", "data": "x" * 600_000}
    starts = [{"type": "content_block_start", "index": index, "content_block": block} for index in range(2)]
    with pytest.raises(Fault, match="an answer of more than"):
        read_all(AnthropicReader("m"), starts)

"""schemas/WORKER.md says what the code does: fields, numbers, bytes, and the two ends of the protocol."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec import Raw

from goondan.schemas.wire import questions
from goondan.schemas.worker import worker_frames
from goondan.schemas.worker.worker_frames import Result
from goondan.toolhost.calls import asks, call_inputs, machine, results, untrusted
from goondan.toolhost.calls.session import MAX_CALLS_PER_JAIL
from goondan.toolhost.inside import running, wire, worker
from goondan.toolhost.serving import sessions

PAGE = (Path(__file__).parents[2] / "schemas" / "WORKER.md").read_text(encoding="utf-8")
FRAMES = [*get_args(worker_frames.HostFrame), *get_args(worker_frames.WorkerFrame)]


@pytest.mark.parametrize("frame", FRAMES, ids=[frame.__name__ for frame in FRAMES])
def test_every_frame_and_field_is_described(frame: Any) -> None:
    config = frame.__struct_config__
    start = PAGE.index(f"\n### `{config.tag}`")
    section = PAGE[start : PAGE.find("\n### ", start + 5)]
    fields = set(frame.__struct_encode_fields__)
    assert {name for name in fields if f"`{name}`" not in section} == set()
    listed = set(re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE))
    errors = set(worker_frames.WorkerError.__struct_encode_fields__)
    assert listed <= fields | (errors if frame is Result else {"id"})


def test_the_numbers() -> None:
    said = " ".join(PAGE.split())
    for text in (
        f"Version: {worker_frames.WORKER_PROTOCOL}.",
        f"descriptor {worker_frames.WORKER_FD}",
        f"at most {worker_frames.MAX_WORKER_FRAME >> 20} MiB",
        f"plus {untrusted.FRAME_SLACK >> 10} KiB",
        f"Keep the {call_inputs.WORKER_MESSAGES} newest messages",
        f"up to {MAX_CALLS_PER_JAIL}",
        f"more than {untrusted.MAX_OUTPUT_DEPTH} levels",
        f"more than {untrusted.MAX_ELEMENTS:,} values",
        f"more than {untrusted.NEWS_BURST:,} `log`, `progress`, `ask`, `news` and `login` frames, or "
        f"{untrusted.NEWS_BYTES_BURST >> 20} MiB",
        f"{untrusted.NEWS_PER_S:,} and {untrusted.NEWS_BYTES_PER_S >> 20} MiB refill",
        f"{worker.LOG_BURST:,} lines at once and {worker.LOG_PER_S} a second",
        f"1 to {results.MAX_HANDLE:,} printable characters",
        f"more than {sessions.MAX_UNREAD >> 20} MiB of answers",
        f"may have {questions.MAX_OPEN} questions open, ask {asks.MAX_ASKED:,} in all",
        f"in all, and say {asks.MAX_INPUT:,} bytes of `input`",
        f"in one and {asks.MAX_SAID >> 20} MiB in all; an answer has at most {questions.MAX_ANSWER_BYTES >> 20} MiB",
        f"{questions.MAX_INNER_CALLS:,} in all, with {asks.MAX_SAID_TO_TOOLS >> 20} MiB of `value`",
        f"{questions.TIMEOUT_MS:,} when left out",
        f"up to {asks.MAX_NAME} characters",
        f"{machine.CANCEL_GRACE_S:g} seconds later",
        f"after {machine.EXIT_GRACE_S:g} seconds",
    ):
        assert text in said, text


def test_both_ends_agree() -> None:
    assert worker.PROTOCOL == worker_frames.WORKER_PROTOCOL
    assert wire.FD == worker_frames.WORKER_FD
    assert wire.MAX_FRAME == worker_frames.MAX_WORKER_FRAME
    assert worker.MAX_MESSAGES == call_inputs.WORKER_MESSAGES
    assert wire.MAX_DEPTH == untrusted.MAX_OUTPUT_DEPTH
    assert worker.LOG_BURST < untrusted.NEWS_BURST
    assert worker.LOG_PER_S < untrusted.NEWS_PER_S


def test_the_bytes_of_the_example() -> None:
    block = PAGE[PAGE.index("The result as bytes:") :].split("```")[1]
    data = bytes.fromhex("".join(line[:47] for line in block.splitlines()))  # what they mean stands behind
    result = Result(call_id="1", status="ok", output=Raw(msgspec.msgpack.encode({"price": 3})))
    body = msgspec.msgpack.encode(result)
    assert data == len(body).to_bytes(4, "little") + body
    ((decoded,),) = (untrusted.Channel(1000, 0.0).feed(data, 0.0),)
    assert isinstance(decoded, Result)


def test_only_a_worker_that_is_alone_ends_what_is_left() -> None:
    """This process is no jail's: kill(-1) would end everything that its user runs."""
    left = running.Orphans()
    left.enable()
    assert not left.enabled

"""Hostile model servers: they hold no turn, and get no key of another form."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from goondan.agentproc.http.connection import Client, Connection, Patience, Response
from goondan.agentproc.providers.faults import Fault
from goondan.kernel.bundle.rules.models import ModelFault, endpoint_fault, resolve_model
from goondan.kernel.cli.console.screen import shown
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.bundle.resources import ModelBody
from goondan.schemas.wire.frames import Answer
from tests.process.test_model_connection import Reader, Writer, body, serving
from tests.unit.agentproc.fakes import FakeLink, event_frame, ok
from tests.unit.agentproc.turns import Make, Runners, the_answer


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    """Makes runners over one state directory."""
    runners = Runners(tmp_path)
    yield runners.build
    await runners.close()


# --- answers that never come ----------------------------------------------------------------------------------------

OK_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: "


@pytest.mark.parametrize(
    ("start", "drip"),
    [
        (OK_HEAD, b"a"),
        (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
        (OK_HEAD + b"text/event-stream\r\n\r\n", b"\n"),
        (OK_HEAD + b"application/json\r\ncontent-length: 100000\r\n\r\n{", b" "),
        (b"HTTP/1.1 500 No\r\ncontent-length: 100000\r\n\r\n", b" "),
    ],
    ids=["head", "interim answers", "stream", "body", "refusal"],
)
@pytest.mark.parametrize("model", ["m", ""], ids=["asked", "asked for its name"])
async def test_what_drips_ends_at_the_limit_of_silence(make: Make, model: str, start: bytes, drip: bytes) -> None:
    async def trickle(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(start)
        for _ in itertools.count():
            writer.write(drip)
            await writer.drain()
            await asyncio.sleep(0.02)

    async with serving(trickle) as port, asyncio.timeout(20):
        spec = ModelSpec(provider="openai", model=model, endpoint=f"http://127.0.0.1:{port}")
        link = FakeLink(lambda tool, args: ok(1))
        await make(link, None, model=spec, stall_timeout_s=0.3).run(event_frame("e1", "go"))
    error = the_answer(link).error
    assert error is not None and error.code == "E_TURN_STALLED"


@pytest.mark.parametrize("before", [b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"])
async def test_a_head_that_has_begun_comes_to_its_end(before: bytes) -> None:
    """It would have an end, long before the silence is over."""

    async def trickle(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(before)
        await asyncio.sleep(0.4 if before else 0)  # an interim answer is whole: what follows may take its time
        for byte in OK_HEAD + b"x" * 200:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.write(b"\r\n\r\n")

    async with serving(trickle) as port, asyncio.timeout(20):
        with pytest.raises(Fault, match=r"no end of the answer's head for 0\.3 s") as caught:
            await body(Client(), f"http://127.0.0.1:{port}", Patience(head_s=0.3))
    assert caught.value.kind == "silent"


async def test_a_head_in_pieces_is_watched_until_its_end_only() -> None:
    response = Response(Connection(asyncio.get_running_loop()), Patience())
    for piece, watched in (
        (b"HTTP/1.1 103 Early", True),
        (b" Hints\r\n\r\n", False),
        (b"HTTP/1.1 200 OK\r\ncontent-le", True),
        (b"ngth: 2\r\n\r\n", False),
        (b"o", False),
    ):
        response.feed(piece)
        assert (response._late is not None) is watched, piece


# --- an address with a user in it -----------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["http://me:secret@127.0.0.1:1/v1", "https://me@h/v1", "http://:p@h", "http://@h"])
async def test_a_user_in_an_address_takes_no_keys_place(url: str) -> None:
    fault = endpoint_fault("the endpoint", url)
    assert fault is not None and "a user or a password in it" in fault[0] and "apiKey" in fault[1]
    assert "secret" not in "".join(fault)
    with pytest.raises(ModelFault, match="OPENAI_BASE_URL has a user"):
        resolve_model(ModelBody("auto"), {}, {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "k"})
    with pytest.raises(Fault, match="a user or a password in it") as caught:
        await Client().ask("POST", url, {"authorization": "Bearer k"}, (), Patience())
    assert caught.value.kind == "final"


# --- an answer that steers a terminal -------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [False, True])
async def test_an_answer_in_a_pipe_has_no_escape_sequences_unless_they_are_wanted(
    raw: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a\x1b]0;pwned\x07\tb\n\x9b31mc"

    async def ask(listener: object) -> Answer:
        return Answer(turn_id="t", status="completed", response=text)

    async def follow(screen: object) -> None:
        pass

    await shown(ask, follow, raw=raw)
    assert capsys.readouterr().out == (f"{text}\n" if raw else "a\\x1b]0;pwned\\x07\tb\n\\x9b31mc\n")

"""All providers against a server that answers wrongly in every way, over real connections."""

from __future__ import annotations

import asyncio
import base64
import logging
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import pytest

from goondan.agentproc.http import route, wire_of
from goondan.agentproc.http.connection import Patience
from goondan.agentproc.http.provider import HttpProvider
from goondan.agentproc.machine.messages import (
    AssistantData,
    Message,
    MessageSource,
    ToolCallPart,
    ToolResultPart,
    result_message,
)
from goondan.agentproc.providers.base import ModelAnswer, TextDelta
from goondan.agentproc.providers.faults import REPEATS
from goondan.agentproc.providers.reader import MAX_ANSWER_CHARS
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import ToolResult
from tests.kernel_fixture import ROOT
from tests.process.model_servers import AT, KEY, question, seen, server

#: How often a server is asked again that is always busy, with the usual patience and without luck.
BUSY = 10
ALL = pytest.mark.parametrize("provider", ["anthropic", "openai", "responses"])


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with server("misbehaving_llm") as url:
        yield url


class Listens:
    """Somebody who listens."""

    def __init__(self, take: Callable[[TextDelta], object]) -> None:
        self.wanted = 1
        self._take = take

    def __call__(self, delta: TextDelta) -> None:
        self._take(delta)


class Asker:
    """A provider that does not really wait between tries, and what it would have waited.

    `silent`: it soon takes a server for silent; `lenient`: only in its first try.
    """

    def __init__(self, provider: str, *, silent: bool = False, lenient: bool = False) -> None:
        self.provider = provider
        self.waits: list[float] = []
        self._lenient = lenient
        patience = Patience(connect_s=20.0, silence_s=0.15 if silent else 20.0, rest_s=0.2, refusal_s=0.3)
        self.model = HttpProvider(wire_of(provider).VENDOR(), patience=patience, sleep=self._sleep, chance=lambda: 0.0)

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        if self._lenient:
            self.model._patience = Patience()

    async def fails(self, base: str, model: str, code: str = "E_MODEL_FAILED") -> str:
        """The message of a call that must fail."""
        with pytest.raises(GoondanError) as caught:
            await self.model.complete(question(self.provider, base, model))
        info = caught.value.info
        assert info.code == code
        assert KEY not in str(info)
        assert len(info.message) < 1000
        assert "***" in info.message or "that is a 401" not in info.message  # a port may hold 401, too
        return info.message


Ask = Callable[..., Asker]


@pytest.fixture
async def ask() -> AsyncIterator[Ask]:
    made: list[Asker] = []

    def make(provider: str, **options: bool) -> Asker:
        made.append(Asker(provider, **options))
        return made[-1]

    yield make
    for asker in made:
        await asker.model.close()


# --- what is wrong once, and then well --------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize(
    "how",
    ["429", "500", "503", "529", "408", "drop", "half", "garbage", "html", "bad-event", "empty", "nothing", "silent",
     "stall", "stream-error"],
)  # fmt: skip
async def test_what_passes_is_asked_again(ask: Ask, base: str, provider: str, how: str) -> None:
    asker = ask(provider, silent=how in ("silent", "stall"), lenient=True)
    pieces: list[TextDelta] = []
    answer = await asker.model.complete(question(provider, base, f"{how}:1"), Listens(pieces.append))
    assert answer.text == "fine"
    assert len(asker.waits) == 1
    assert "".join([piece.text for piece in pieces if piece.again or piece.text == "fine"]) == "fine"


@ALL
@pytest.mark.parametrize(
    ("how", "words", "tries"),
    [
        ("401", "401 that is a 401, with", 1),
        ("403", "403 that is a 403", 1),
        ("404", "404 that is a 404", 1),
        ("400", "400 that is a 400", 1),
        ("429", "429 that is a 429", 1 + BUSY),
        ("529", "529 that is a 529", 1 + BUSY),
        ("429 wait=61", "asks to wait 61 s", 1),
        ("moved", "redirects to https://elsewhere.example/v1", 1),
        ("garbage", "no event stream but text/event-stream", 1 + REPEATS["broken"]),
        ("html", "no event stream but text/html: an HTML page, “Sign in”", 1 + REPEATS["broken"]),
        ("bad-event", "no JSON", 1 + REPEATS["broken"]),
        ("half", "half an answer", 1 + REPEATS["broken"]),
        ("empty", "an empty answer", 1 + REPEATS["broken"]),
        ("nothing", "an empty answer", 1 + REPEATS["broken"]),
        ("silent", "nothing for 0.15 s", 1 + REPEATS["silent"]),
        ("drop", "the connection was lost before an answer", 1 + BUSY),
        ("stream-error", "come back later", 1 + BUSY),
        ("huge", f"more than {MAX_ANSWER_CHARS} characters", 1),
        ("endless-event", "an event of more than", 1),
    ],
)  # fmt: skip
async def test_what_does_not_pass_fails_with_the_servers_words(
    ask: Ask, base: str, provider: str, how: str, words: str, tries: int
) -> None:
    asker = ask(provider, silent=how == "silent")
    message = await asker.fails(base, how, "E_MODEL_QUOTA" if "wait" in how else "E_MODEL_FAILED")
    assert words in message
    assert len(asker.waits) == tries - 1
    assert f"(tried {tries} times)" in message or tries == 1
    if "wait" not in how:
        assert asker.waits == [0.5, 1.0, 2.0, 4.0, *[8.0] * 6][: tries - 1]


@ALL
async def test_the_wait_that_a_server_asks_for_is_kept(ask: Ask, base: str, provider: str) -> None:
    asker = ask(provider)
    await asker.fails(base, "503 wait=7.5")
    assert asker.waits == [7.5] * 8


async def test_a_turn_without_time_is_not_kept_waiting(ask: Ask, base: str) -> None:
    asker = ask("openai")
    with pytest.raises(GoondanError, match="503"):
        await asker.model.complete(question("openai", base, "503 wait=7", timeout_s=5.0))
    assert asker.waits == []


async def test_nobody_listens_there(ask: Ask) -> None:
    asker = ask("openai")
    assert "no connection: Connection refused" in await asker.fails("http://127.0.0.1:1", "m")
    assert len(asker.waits) == BUSY
    message = await asker.fails("http://user:hidden@127.0.0.1:1", "m")
    assert "a user or a password in it" in message and "hidden" not in message
    assert len(asker.waits) == BUSY, "it is not tried again"


@pytest.mark.parametrize(
    ("how", "advice"),
    [
        ("401", "Check the Model's apiKey"),
        ("404", "Check the path of the Model's endpoint"),
        ("half", "If it is cut off again"),
        ("drop", "It ends connections without an answer"),
        ("silent", "It takes requests and does not answer"),
        ("html", "What answers there is no model server"),
        ("http://127.0.0.1:1", "Nothing listens there: start the model server"),
    ],
)
async def test_the_advice_fits_what_was_seen_of_the_server(ask: Ask, base: str, how: str, advice: str) -> None:
    there = (how, "m") if how.startswith("http") else (base, how)
    with pytest.raises(GoondanError) as caught:
        await ask("openai", silent=how == "silent").model.complete(question("openai", *there))
    assert advice in (caught.value.info.suggestion or "")


async def test_a_host_that_nobody_knows_is_told_as_one(ask: Ask, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(*asked: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(route, "_addresses", unknown)
    with pytest.raises(GoondanError, match="no connection: Name or service not known") as caught:
        await ask("openai").model.complete(question("openai", base, "m"))
    assert "Correct the host in the Model's endpoint" in (caught.value.info.suggestion or "")


@pytest.mark.parametrize("address", ["nonsense", "ftp://127.0.0.1", "http://[bad", "http://" + "a" * 300 + ".test"])
async def test_an_endpoint_that_is_none(ask: Ask, address: str) -> None:
    await ask("anthropic").fails(address, "m")


@pytest.mark.parametrize("form", ["upper", "spaced", "lines", "base64", "hex", "url", "backwards", "cut", "location"])
async def test_a_server_that_repeats_the_key_in_another_form_shows_nothing_of_it(
    ask: Ask, base: str, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        message = await ask("openai").fails(base, f"401 repeats={form}")
    assert "***" in message
    skeleton = "".join(letter for letter in message.partition("***")[2] if letter.isalnum()).lower()
    for shown in (KEY, KEY[::-1], KEY.encode().hex(), base64.b64encode(b"user:" + KEY.encode()).decode()):
        letters = "".join(letter for letter in shown if letter.isalnum()).lower()
        assert not any(letters[at : at + 8] in skeleton for at in range(len(letters) - 8))
    assert "sksecret" not in "".join(letter for letter in message if letter.isalnum()).lower()


@ALL
async def test_a_redirect_takes_the_key_nowhere(ask: Ask, base: str, provider: str) -> None:
    with server("misbehaving_llm") as elsewhere:
        # A host that asks for a request elsewhere gets a refusal, and the other host gets nothing at all.
        message = await ask(provider).fails(base, f"307 to={elsewhere}/v1")
        assert "redirects to" in message
        assert seen(elsewhere)["requests"] == []


@ALL
@pytest.mark.parametrize("model_name", ["well", ""])
async def test_a_key_that_belongs_to_another_server_is_not_sent(
    ask: Ask, base: str, provider: str, model_name: str
) -> None:
    request = question(provider, base, model_name)
    before = len(seen(base)["requests"])
    model = msgspec.structs.replace(request.model, key_origin="https://api.vendor.test:443")
    headed = msgspec.structs.replace(model, api_key=None, headers={"x-token": KEY})
    with pytest.raises(GoondanError, match="not sent: it is meant for https://api"):
        await ask(provider).model.complete(msgspec.structs.replace(request, model=headed))
    with pytest.raises(GoondanError, match="not sent: it is meant for https://api"):
        await ask(provider).model.complete(msgspec.structs.replace(request, model=model))
    assert len(seen(base)["requests"]) == before


async def test_a_key_that_cannot_be_sent_is_not_shown(ask: Ask, base: str) -> None:
    for key in ("sk-secret\nx-evil: 1", "sk-s\u00e9cret"):
        request = question("openai", base, "well")
        model = type(request.model)(provider="openai", model="well", endpoint=base, api_key=key)
        with pytest.raises(GoondanError) as caught:
            await ask("openai").model.complete(type(request)(agent="a", model=model, messages=[], tools=[], step=1))
        assert "characters that cannot be sent" in caught.value.info.message
        assert "secret" not in str(caught.value)


# --- well ------------------------------------------------------------------------------------------------------------


@ALL
async def test_text_arrives_in_pieces_and_whole(ask: Ask, base: str, provider: str) -> None:
    pieces: list[TextDelta] = []
    answer = await ask(provider).model.complete(question(provider, base, "well"), Listens(pieces.append))
    assert answer.text == "".join([piece.text for piece in pieces]) == "fine"
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (3, 2)
    assert not any(piece.again for piece in pieces)


@ALL
async def test_a_server_that_does_not_stream(ask: Ask, base: str, provider: str) -> None:
    answer = await ask(provider).model.complete(question(provider, base, "whole"))
    assert answer.text == "fine"


@ALL
async def test_a_server_that_refuses_what_it_does_not_know_is_sent_it_once(ask: Ask, base: str, provider: str) -> None:
    asker = ask(provider)
    request = question(provider, base, "strict")
    call = Message("t.1", AssistantData([ToolCallPart("c", "bash__exec", {})]), AT, MessageSource("assistant"))
    call.metadata.update(
        reasoning="hm", vendor={"provider": "openai", "model": "strict", "reasoning": "reasoning_content"}
    )
    result = result_message("t.2", ToolResultPart("c", "bash__exec", ToolResult(status="ok")), AT)
    request = msgspec.structs.replace(request, messages=[*request.messages, call, result])
    before = len(seen(base)["requests"])
    for _ in range(2):
        assert (await asker.model.complete(request)).text.startswith("told:")
    assert (len(seen(base)["requests"]) - before, asker.waits) == (3, [])


@ALL
async def test_calls_of_every_kind(ask: Ask, base: str, provider: str) -> None:
    async def asked(how: str) -> ModelAnswer:
        return await ask(provider).model.complete(question(provider, base, how))

    assert [(call.id, call.args) for call in (await asked("same-id")).calls] == [
        ("c1", {"command": "echo 1"}),
        ("c1", {"command": "echo 2"}),
    ]
    assert [call.name for call in (await asked("unknown-tool")).calls] == ["no.such"]
    (broken,), (listed,) = (await asked("broken-args")).calls, (await asked("list-args")).calls
    assert "no JSON" in str(broken.broken)
    assert listed.broken == "they are no JSON object"


@ALL
async def test_a_connection_is_used_again(ask: Ask, base: str, provider: str) -> None:
    asker = ask(provider)
    used = set()
    for _ in range(3):
        await asker.model.complete(question(provider, base, "well"))
        used.add(asker.model._client._kept)
    assert len(used) == 1 and None not in used


@ALL
async def test_a_cancelled_call_closes_its_connection(ask: Ask, base: str, provider: str) -> None:
    model = ask(provider).model
    begun = asyncio.Event()
    before = seen(base)["gone"].count("stall")
    task = asyncio.create_task(model.complete(question(provider, base, "stall"), Listens(lambda _: begun.set())))
    async with asyncio.timeout(20):
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while (await asyncio.to_thread(seen, base))["gone"].count("stall") == before:
            await asyncio.sleep(0.01)


@ALL
async def test_a_model_without_a_name_is_the_first_that_the_server_lists(ask: Ask, base: str, provider: str) -> None:
    asker = ask(provider)
    for _ in range(2):
        assert (await asker.model.complete(question(provider, base, ""))).text == "fine"
    *_, listing, first, second = seen(base)["requests"]
    assert listing["path"] == "/v1/models"
    assert f"Bearer {KEY}" == listing["headers"]["authorization"]
    assert [first["body"]["model"], second["body"]["model"]] == ["well", "well"]
    assert asker.waits == []


async def test_a_list_of_models_that_is_none(ask: Ask, base: str) -> None:
    asker = ask("anthropic")
    assert "a list without a model" in await asker.fails(f"{base}/none", "")
    garbled = await ask("anthropic").fails(f"{base}/garbage", "")
    assert f"model server GET {base}/garbage/v1/models: an answer that is no JSON" in garbled
    assert (await asker.model.complete(question("anthropic", f"{base}/503", ""))).text == "fine"
    assert len(asker.waits) == 1


async def test_retries_are_logged_without_the_key(ask: Ask, base: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        await ask("anthropic").fails(base, "500")
    assert "500 that is a 500" in caplog.text
    assert KEY not in "".join(record.getMessage() for record in caplog.records if record.name == "agentproc.model")


@pytest.mark.parametrize(("providers", "loaded"), [([], []), (["anthropic", "openai"], ["httptools"])])
def test_agents_share_the_model_code_that_they_will_use(providers: list[str], loaded: list[str]) -> None:
    """Loaded and warm in the fork server when an agent has such a model, and then still fit to be forked."""
    code = (
        "import os, sys, goondan.agentproc.start.forkserver\n"
        "from goondan.agentproc.start.warmup import warm_up\n"
        f"for _ in warm_up({providers}): pass\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'httptools', 'certifi'}))\n"
        "print(len(os.listdir('/proc/self/task')), [path for n in os.listdir('/proc/self/fd')"
        " if 'socket' in (path := os.path.realpath(f'/proc/self/fd/{n}'))])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    assert result.stdout == f"{loaded}\n1 []\n"


@ALL
async def test_a_refusal_that_never_ends_is_a_refusal(base: str, ask: Ask, provider: str) -> None:
    async with asyncio.timeout(20):
        assert "400" in await ask(provider).fails(base, "dripping-refusal")

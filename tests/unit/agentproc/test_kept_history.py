"""A conversation stays with its instance from turn to turn: a turn pays for what is new, and shows what is stored."""

from __future__ import annotations

import asyncio
import tempfile
import tracemalloc
from collections import deque
from collections.abc import Callable
from contextlib import closing
from operator import is_
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.http import wire_of
from goondan.agentproc.http.connection import Connection, Patience
from goondan.agentproc.machine import messages as conversation
from goondan.agentproc.machine.answers import turn_id
from goondan.agentproc.machine.estimate import message_size
from goondan.agentproc.machine.messages import (
    AssistantData,
    Message,
    MessageSource,
    TextPart,
    UserData,
    encode_message,
    fold,
    presentable,
)
from goondan.agentproc.providers import base, history
from goondan.agentproc.providers.base import FilesPlace, ModelAnswer, ModelRequest
from goondan.agentproc.turn.runner import TurnRunner
from goondan.schemas.bundle.launch import CatalogItem, ExtensionSpec, ModelSpec
from goondan.schemas.models.model_providers import BY_NAME
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import Blob, FilePart
from tests.python_calls import python_calls
from tests.unit.agentproc import vendor_formats as formats
from tests.unit.agentproc.fakes import BASH, FakeLink, FakeModel, event_frame, make_spec, says, wants
from tests.unit.agentproc.turns import Make, runner_of

AT = "2026-01-01T00:00:00.000Z"
PROVIDERS = sorted(BY_NAME)
LONG, SHORT = 10_000, 10


class Writing(FakeModel):
    """A model whose requests are written as its vendor's. `bodies` has them."""

    def __init__(self, provider: str, *script: ModelAnswer | Exception) -> None:
        super().__init__(*script)
        self.vendor = wire_of(provider).VENDOR()
        self.model = ModelSpec(provider=provider, model="m")
        self.bodies: list[bytes] = []

    async def complete(self, request: ModelRequest, *more: Any) -> ModelAnswer:
        request = structs.replace(request, model=self.model)
        self.bodies.append(b"".join(self.vendor.request(request).body))
        self.look_at(request)
        return await super().complete(request, *more)

    def forget(self) -> None:
        self.vendor.forget()

    def look_at(self, request: ModelRequest) -> None:
        """See a request that was written."""


def lengthen(store: ConversationStore, count: int) -> None:
    """Store so many messages of earlier turns."""
    store.adopt(1)
    with store.write():
        for number in range(count):
            said = AssistantData([TextPart("echo")]) if number % 2 else UserData("hello")
            message = Message(f"m{number}", said, AT, MessageSource("assistant" if number % 2 else "user"))
            store.execute("INSERT INTO base (id, message) VALUES (?, ?)", (message.id, encode_message(message)))


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_turn_behind_a_long_conversation_calls_as_much_as_behind_a_short_one(
    tmp_path: Path, provider: str
) -> None:
    calls = {}
    for count in (SHORT, LONG):
        model = Writing(provider, *[says("echo")] * 3)
        runner = runner_of(make_spec(str(tmp_path / str(count))), FakeLink(), model)
        lengthen(runner.instance.store, count)
        for turn in range(2):
            await runner.run(event_frame(f"e{turn}", "hello"))
        with python_calls() as called:
            await runner.run(event_frame("e2", "hello"))
        calls[count] = len(called)
        assert len(model.requests[-1].messages) == count + 5
        await runner.close()
    assert calls[LONG] <= calls[SHORT] + 10


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_request_copies_nothing_of_a_long_conversation(provider: str) -> None:
    vendor, sent, peak = wire_of(provider).VENDOR(), [], 0
    pair = UserData("x" * 200), AssistantData([TextPart("y" * 200)])
    before = formats.conversation(*[data for _ in range(LONG) for data in pair])
    messages = [*before, *formats.conversation(UserData("new"))]
    for shown in (before, messages):
        request = formats.asked(shown, provider)
        tracemalloc.start()
        sent.append(vendor.request(request).body)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert sum(map(len, sent[1])) > 400 * LONG > 50 * peak
    again = {id(piece) for piece in sent[0]}
    assert all(id(piece) in again or len(piece) < 2 * base.PIECE_BYTES for piece in sent[1])
    body = b"".join(sent[1])
    assert body == b"".join(wire_of(provider).VENDOR().request(formats.asked(messages, provider)).body)

    class Wire(asyncio.Transport):
        def writelines(self, data: Any) -> None:
            written.extend(data)

    written: list[bytes] = []
    connection = Connection(asyncio.get_running_loop())
    connection.connection_made(Wire())
    connection.begin_request(b"HEAD", sent[1], Patience(), lambda connection: None)
    assert written[0] == b"HEAD" and all(map(is_, written[1:], sent[1])), "they go to the socket as they are"


# --- what is shown is what is stored ----------------------------------------------------------------------------------

IDS = ("m0", "m1", "new")
say = st.tuples(st.just("say"), st.integers(0, 2))
emit = st.tuples(
    st.just("emit"),
    st.one_of(
        st.sampled_from(IDS).map(lambda name: {"type": "append", "message": {"id": name}}),
        st.sampled_from(IDS).map(lambda name: {"type": "remove", "targetId": name}),
        st.tuples(st.sampled_from(IDS), st.sampled_from(IDS)).map(
            lambda names: {"type": "replace", "targetId": names[0], "message": {"id": names[1]}}
        ),
        st.just({"type": "truncate"}),
    ),
)
other = st.sampled_from([("undo", None), ("reset", None), ("fails", None), ("elsewhere", None), ("view", None)])


@given(st.lists(st.one_of(say, emit, other), min_size=1, max_size=7), st.sampled_from(PROVIDERS))
@example([("say", 1), ("undo", None), ("say", 0), ("elsewhere", None), ("say", 0)], "anthropic")
def test_what_a_turn_shows_is_what_is_stored_whatever_came_between(steps: list[tuple[str, Any]], provider: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_turns(folder, steps, provider))


async def _turns(folder: str, steps: list[tuple[str, Any]], provider: str) -> None:
    model = Checked(provider)
    runner = runner_of(make_spec(folder), FakeLink(), model)
    model.runner = runner
    lengthen(runner.instance.store, 4)
    emitted: deque[Any] = deque()
    viewed: deque[bool] = deque()

    async def change(ctx: Any) -> Any:
        while emitted:
            ctx.emit_message_event(emitted.popleft())
        if viewed:
            viewed.popleft()
            ctx.view_messages(lambda shown: shown[1:])
        return await ctx.next()

    runner.instance.pipeline.register("step", change, extension="changes")
    epoch = 1
    for number, (kind, what) in enumerate(steps):
        if kind == "elsewhere":
            epoch += 2
            add_elsewhere(runner, epoch - 1, number)
        elif kind in ("undo", "reset"):
            await runner.run(event_frame(f"e{number}", None, kind=f"operator.{kind}", epoch=epoch))
        else:
            if kind == "emit":
                if "message" in what:
                    what["message"]["data"] = {"role": "user", "content": f"said {number}"}
                emitted.append(what)
            elif kind == "view":
                viewed.append(True)
            calls = [wants((f"c{n}", "bash__exec", {"command": "x"})) for n in range(what if kind == "say" else 0)]
            model.script = [*calls, ValueError("no answer") if kind == "fails" else says(f"answer {number}")]
            model.viewed = kind == "view"
            await runner.run(event_frame(f"e{number}", f"question {number}", epoch=epoch))
            assert not model.wrong
    await runner.close()


class Checked(Writing):
    """It compares each request with what is stored, and with the same request written by nobody who knew an earlier
    one.
    """

    def __init__(self, provider: str) -> None:
        super().__init__(provider)
        self.provider = provider
        self.runner: TurnRunner
        self.viewed = False
        self.wrong: list[Any] = []

    def look_at(self, request: ModelRequest) -> None:
        store = self.runner.instance.store
        with closing(ConversationStore(str(store.path.parent), durability="process")) as reader:
            (row,) = reader.running_turns()
            events = [stored.event for stored in reader.turn_events(row.turn_id)]
            whole = fold(reader.load_messages(), events)
        shown = presentable(whole[1:] if self.viewed else whole)
        sizes = self.runner.instance.context.sizes
        if request.messages != shown or sizes.total != sum(map(message_size, shown)):
            self.wrong.append((request.messages, shown))
        if self.bodies[-1] != b"".join(wire_of(self.provider).VENDOR().request(request).body):
            self.wrong.append(self.bodies[-1])


def add_elsewhere(runner: TurnRunner, epoch: int, number: int) -> None:
    """Another process has the instance for a turn."""
    with closing(ConversationStore(str(runner.instance.store.path.parent), durability="process")) as store:
        store.adopt(epoch)
        message = Message(f"x{number}", UserData("elsewhere"), AT, MessageSource("user"))
        with store.write(final=True):
            store.begin_turn(f"x{number}", f"t{number}", 1, AT)
            store.append(f"t{number}", 0, conversation.Append(message))
            store.finish_turn(f"x{number}", f"t{number}", "completed", AT, steps=1, answer=b"")


@pytest.mark.parametrize("place", [0, 1])
async def test_a_message_with_an_id_of_a_turn_that_is_still_to_come_is_replaced(make: Make, place: int) -> None:
    """Also when it is the message of an earlier turn."""
    model, link = FakeModel(says("one"), says("two")), FakeLink()
    runner = make(link, model)
    store = runner.instance.store
    await runner.run(event_frame("e0", "go"))
    name = turn_id(runner.instance.spec.name, runner.instance.instance_key, "e1")
    with store.write():
        taken = Message(f"{name}.{place}", UserData("taken"), AT, MessageSource("user"))
        store.execute("INSERT INTO base (id, message) VALUES (?, ?)", (taken.id, encode_message(taken)))
    store.forget_messages()
    await runner.run(event_frame("e1", "more"))
    assert [len(request.messages) for request in model.requests] == [1, 3 + place]
    runner.instance.store.close()
    known = [message.id for message in runner.instance.store.load_messages()]
    assert known[2:] == [f"{name}.{place}", f"{name}.{1 - place}"]


# --- what drops it ----------------------------------------------------------------------------------------------------


async def read_again(make: Make, monkeypatch: pytest.MonkeyPatch, **agent: Any) -> tuple[int, int]:
    """How many messages are read from the file, and how many are written into a request, in a second turn."""
    read, written = 0, 0
    decode, extend = conversation.decode_message, history.Entries.extend

    def decoded(data: bytes) -> Message:
        nonlocal read
        read += 1
        return decode(data)

    def extended(entries: Any, messages: list[Message]) -> Any:
        nonlocal written
        written += len(messages)
        return extend(entries, messages)

    runner = make(FakeLink(), Writing("openai", says("one"), says("two")), **agent)
    lengthen(runner.instance.store, SHORT)
    await runner.run(event_frame("e0", "go"))
    monkeypatch.setattr(conversation, "decode_message", decoded)
    monkeypatch.setattr(history.Entries, "extend", extended)
    await runner.run(event_frame("e1", "more"))
    return read, written


async def test_a_turn_reads_and_writes_what_is_new(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await read_again(make, monkeypatch) == (0, 2)


@pytest.mark.parametrize("limit", ["MAX_KEPT_MESSAGES", "MAX_KEPT_BYTES"])
async def test_a_very_long_conversation_is_not_kept(make: Make, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(conversation, limit, SHORT)
    assert await read_again(make, monkeypatch) == (SHORT + 2, SHORT + 3)


async def test_messages_that_an_extension_of_the_bundle_may_have_changed_in_place_are_read_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text("def register(api): pass\n")
    own = ExtensionSpec(name="own", entry=str(tmp_path / "own.py"), resource={"spec": {"config": {}}})
    assert await read_again(make, monkeypatch, extensions=[own]) == (SHORT + 2, SHORT + 3)


@pytest.mark.parametrize("own_code", [False, True])
async def test_what_is_not_kept_for_the_next_turn_no_provider_holds(make: Make, tmp_path: Path, own_code: bool) -> None:
    (tmp_path / "own.py").write_text("def register(api): pass\n")
    own = ExtensionSpec(name="own", entry=str(tmp_path / "own.py"), resource={"spec": {"config": {}}})
    spare = ModelSpec(provider="openai", model="m", document="spare")
    models = Writing("openai", fail("E_MODEL_FAILED", "gone")), Writing("openai", says("one"))
    runner = make(FakeLink(), models[0], extensions=[own] if own_code else [], fallback=[spare])
    runner.instance._others["spare"] = models[1]
    await runner.run(event_frame("e0", "go"))
    assert [len(model.bodies) for model in models] == [1, 1]
    assert [len(model.vendor._written._messages) for model in models] == ([0, 0] if own_code else [1, 1])


@pytest.mark.parametrize("first", [0, 1])
def test_a_conversation_that_cannot_be_written_is_written_anew(first: int) -> None:
    """Also a message before the one that is refused is in the next request."""
    nowhere = FilePart(Blob("nowhere", "0", 3), "image/png")
    said = formats.conversation(UserData("known"), UserData("LOST"), UserData("bad", [nowhere]))
    vendor = wire_of("openai").VENDOR()
    vendor.request(formats.asked(said[:first], "openai", files=PLACE))
    for _ in range(2):
        with pytest.raises(GoondanError, match="refers to a file"):
            vendor.request(formats.asked(said, "openai", files=PLACE))


def _asked(**changes: Any) -> ModelRequest:
    said = formats.conversation(UserData("go"), formats.calls(("c1", "x")), formats.result("c1"), UserData("on"))
    return formats.asked(said, "openai", **changes)


ODD = formats.conversation(UserData("go"), formats.calls(("c1", "a b")), formats.result("c1"))
PLACE = FilesPlace("/files", "@mark@")


@pytest.mark.parametrize(
    ("first", "change", "written"),
    [
        pytest.param(
            _asked(), lambda r: structs.replace(r, system="x", blocks=[{"type": "b", "text": "t"}]), 0, id="x"
        ),
        pytest.param(_asked(), lambda r: structs.replace(r, tools=[BASH, CatalogItem(name="more__x")]), 0, id="tools"),
        pytest.param(_asked(), lambda r: structs.replace(r, messages=r.messages[:3]), 3, id="shorter"),
        pytest.param(_asked(), lambda r: structs.replace(r, messages=r.messages[1:]), 3, id="cut"),
        pytest.param(
            _asked(), lambda r: structs.replace(r, messages=[*map(structs.replace, r.messages)]), 4, id="other"
        ),
        pytest.param(_asked(), lambda r: structs.replace(r, hidden_files=frozenset("f")), 4, id="files as words"),
        pytest.param(_asked(), lambda r: structs.replace(r, files=PLACE), 4, id="the first file"),
        pytest.param(_asked(), lambda r: structs.replace(r, model=ModelSpec(provider="openai")), 4, id="model"),
        pytest.param(
            structs.replace(_asked(), messages=ODD),
            lambda r: structs.replace(r, tools=[CatalogItem(name="a b")]),
            3,
            id="tools beside an odd name",
        ),
    ],
)
def test_what_is_written_anew_after_a_change(
    monkeypatch: pytest.MonkeyPatch, first: ModelRequest, change: Callable[[ModelRequest], ModelRequest], written: int
) -> None:
    vendor = wire_of("openai").VENDOR()
    vendor.request(first)
    aside = structs.replace(first, messages=formats.conversation(UserData("aside")), aside=True)
    vendor.request(aside)  # changes nothing
    count, extend = 0, history.Entries.extend

    def extended(entries: Any, messages: list[Message]) -> Any:
        nonlocal count
        count += len(messages)
        return extend(entries, messages)

    monkeypatch.setattr(history.Entries, "extend", extended)
    request = change(first)
    body = b"".join(vendor.request(request).body)
    assert count == written
    assert body == b"".join(wire_of("openai").VENDOR().request(request).body)

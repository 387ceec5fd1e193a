"""An instance begins with the messages of another one: over fake links and real conversation files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.machine.messages import (
    Append,
    AssistantData,
    Message,
    MessageSource,
    TextPart,
    UserData,
    presentable,
)
from goondan.agentproc.providers.base import ModelAnswer
from goondan.agentproc.turn.runner import TurnRunner
from goondan.features.edits.agent import Fork, before
from goondan.features.edits.wire import Forked
from goondan.schemas.bundle.address import blobs_dir, instance_dir
from goondan.schemas.wire.blobs import describe
from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import OPERATOR, OPERATOR_AGENT, FilePart, Source, ToolResult
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, make_spec, ok, says, wants
from tests.unit.agentproc.turns import runner_of, settle, until

PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)
AT = "2026-01-01T00:00:00.000Z"


class Instances:
    """Instances of one agent over one state directory, by their keys, each with its link and what its model says."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = str(state_dir)
        self.links: dict[str, FakeLink] = {}
        self.models: dict[str, FakeModel] = {}
        self.runners: dict[str, TurnRunner] = {}
        self._made: list[TurnRunner] = []
        self._count = 0

    def begin(self, key: str, *script: ModelAnswer | Exception, name: str = "coder") -> TurnRunner:
        """A process of an instance."""
        self.links[key], self.models[key] = FakeLink(lambda tool, _: ok("done")), FakeModel(*script)
        self.runners[key] = runner_of(make_spec(self.state_dir, name), self.links[key], self.models[key], key)
        self._made.append(self.runners[key])
        return self.runners[key]

    async def say(self, key: str, text: str, **header: Any) -> str:
        """A turn of an instance. Returns its id."""
        self._count += 1
        await self.runners[key].run(event_frame(f"e{self._count}", text, **header))
        return self.links[key].answers()[-1].turn_id

    async def fork(self, new: str, asked: Any, event_id: str = "f1", source: Source | None = OPERATOR) -> Forked | str:
        """What the instance `new` answers, or the code of its error."""
        frame = event_frame(event_id, asked, kind="operator.fork")
        frame.source = source
        await self.runners[new].run(frame)
        answer = self.links[new].answers()[-1]
        if answer.error is not None:
            return answer.error.code
        return from_raw(from_raw(answer.output or b"", ToolResult).output or b"", Forked)

    def stored(self, key: str) -> list[Message]:
        """The messages of an instance."""
        return self.runners[key].instance.store.load_messages()

    def files(self, key: str) -> set[str]:
        """The names of its pictures."""
        folder = f"{instance_dir(self.state_dir, 'coder', key)}/files"
        return set(os.listdir(folder)) if os.path.isdir(folder) else set()

    def picture(self) -> FilePart:
        """A picture that a client has laid down."""
        part = FilePart(describe(PNG, "5e" * 16), "image/png")
        Path(blobs_dir(self.state_dir)).mkdir(exist_ok=True)
        Path(blobs_dir(self.state_dir), part.blob.file).write_bytes(PNG)
        return part

    async def close(self) -> None:
        """End all processes."""
        for runner in self._made:
            await runner.close()


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[Instances]:
    made = Instances(tmp_path)
    yield made
    await made.close()


def said_in(messages: list[Message]) -> list[str]:
    return [message.data.content for message in messages if isinstance(message.data, UserData)]


async def test_a_fork_has_all_messages_goes_its_own_way_and_can_be_forked_and_taken_back(swarm: Instances) -> None:
    swarm.begin("old", says("one"), says("two"), says("and so on"))
    await swarm.say("old", "first")
    last = await swarm.say("old", "second")
    before_it = swarm.stored("old")
    swarm.begin("new", says("three"))
    assert await swarm.fork("new", {"from": "old"}) == Forked(4)
    assert swarm.stored("new") == before_it
    await swarm.say("new", "third")
    assert said_in(swarm.models["new"].requests[-1].messages) == ["first", "second", "third"]
    assert swarm.stored("old") == before_it
    await swarm.say("old", "goes on")
    assert said_in(swarm.stored("new")) == ["first", "second", "third"]

    swarm.begin("newer")
    assert await swarm.fork("newer", {"from": "new", "turnId": last}) == Forked(2, "second")
    assert said_in(swarm.stored("newer")) == ["first"]
    await swarm.runners["newer"].run(event_frame("u1", None, kind="operator.undo"))
    assert swarm.stored("newer") == []


async def test_a_step_begins_with_what_the_model_said_and_all_results_before_it_are_there(swarm: Instances) -> None:
    calls: list[Any] = [("a", "bash__exec", {"command": "x"}), ("b", "notes__add", {})]
    swarm.begin("old", says("zero"), wants(*calls), wants(calls[0]), says("three"), says("after"))
    await swarm.say("old", "hello")
    turn = await swarm.say("old", "work")
    await swarm.say("old", "more")
    whole = swarm.stored("old")
    kinds = ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert [one.source.type for one in whole[2:9]] == kinds
    for step, copied in ((1, 2), (2, 6), (3, 8)):
        new = f"new{step}"
        swarm.begin(new, says("again"))
        message = "work" if step == 1 else None
        assert await swarm.fork(new, {"from": "old", "turnId": turn, "step": step}) == Forked(copied, message)
        assert swarm.stored(new) == whole[:copied] == presentable(whole[:copied])
        await swarm.say(new, "Go on.")
        assert swarm.models[new].requests[-1].messages[:-1] == whole[:copied]
    swarm.begin("none")
    assert await swarm.fork("none", {"from": "old", "turnId": turn, "step": 4}) == "E_TURN_NOT_FOUND"
    assert swarm.stored("none") == []
    assert await swarm.fork("none", {"from": "old", "turnId": turn, "step": 2}, "f2") == Forked(6)


async def test_a_step_whose_model_failed_can_be_begun_again(swarm: Instances) -> None:
    swarm.begin(
        "old", wants(("a", "bash__exec", {"command": "x"})), fail("E_MODEL_REFUSED", "no"), fail("E_USAGE", "no")
    )
    turn = await swarm.say("old", "work")
    assert swarm.links["old"].answers()[-1].status == "failed"
    swarm.begin("new")
    assert await swarm.fork("new", {"from": "old", "turnId": turn, "step": 2}) == Forked(3)
    nothing = await swarm.say("old", "more")  # its model has said nothing at all
    swarm.begin("first")
    assert await swarm.fork("first", {"from": "old", "turnId": nothing}) == Forked(3, "more")
    swarm.begin("second")
    assert await swarm.fork("second", {"from": "old", "turnId": nothing, "step": 2}) == "E_TURN_NOT_FOUND"


async def test_of_a_busy_instance_the_turns_that_are_over_are_copied(swarm: Instances) -> None:
    runner = swarm.begin("old", says("one"), wants(("a", "bash__exec", {"command": "x"})), says("two"))
    await swarm.say("old", "first")
    swarm.links["old"].handler = lambda *_: None
    running = asyncio.ensure_future(runner.run(event_frame("busy", "second")))
    await until(swarm.links["old"].open_calls)
    (busy,) = runner.instance.store.running_turns()
    swarm.begin("new")
    assert await swarm.fork("new", {"from": "old", "turnId": busy.turn_id}) == "E_TURN_NOT_FOUND"
    assert await swarm.fork("new", {"from": "old"}, "f2") == Forked(2)
    await settle()
    swarm.links["old"].finish(swarm.links["old"].open_calls()[0], ok("late"))
    await running
    assert (len(swarm.stored("old")), len(swarm.stored("new"))) == (6, 2)
    assert swarm.links["old"].answers()[-1].response == "two"


async def test_pictures_come_along_and_outlive_the_instance_that_they_were_sent_to(swarm: Instances) -> None:
    part = swarm.picture()
    swarm.begin("old", says("a picture"), says("no"))
    await swarm.say("old", "look", files=[part], source=OPERATOR)
    turn = await swarm.say("old", "and?")
    swarm.begin("new", says("still a picture"))
    assert await swarm.fork("new", {"from": "old", "turnId": turn}) == Forked(2, "and?")
    os.unlink(f"{instance_dir(swarm.state_dir, 'coder', 'old')}/files/{part.blob.file}")
    assert swarm.files("new") == {part.blob.file}
    await swarm.say("new", "and?")
    assert swarm.models["new"].requests[-1].messages[0].data == UserData("look", [part])
    swarm.begin("late")
    assert await swarm.fork("late", {"from": "old"}) == "E_BLOB_MISSING"
    assert swarm.stored("late") == []


async def test_before_the_commit_there_is_nothing_and_after_it_the_same_fork(
    swarm: Instances, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = swarm.picture()
    swarm.begin("old", says("a picture"), says("more"))
    await swarm.say("old", "look", files=[part], source=OPERATOR)
    broken = swarm.begin("new")
    monkeypatch.setattr(broken.instance.store, "finish_turn", _no_disk)
    assert await swarm.fork("new", {"from": "old"}) == "E_STATE"
    assert (swarm.stored("new"), swarm.files("new")) == ([], {part.blob.file})
    swarm.begin("new")
    assert await swarm.fork("new", {"from": "nobody"}, "f2") == "E_INSTANCE_NOT_FOUND"
    assert swarm.files("new") == set(), "the next process has removed what no message names"
    assert await swarm.fork("new", {"from": "old"}) == Forked(2)
    await swarm.say("old", "more")
    swarm.begin("new")
    assert await swarm.fork("new", {"from": "old"}) == Forked(2), "delivered again, it is answered"
    assert (len(swarm.stored("new")), swarm.files("new")) == (2, {part.blob.file})


def _no_disk(*_: object, **__: object) -> None:
    raise fail("E_STATE", "the disk is gone")


async def test_only_an_instance_without_a_conversation_becomes_a_fork(swarm: Instances) -> None:
    swarm.begin("old", says("one"))
    swarm.begin("new", says("own"))
    await swarm.say("old", "first")
    await swarm.say("new", "mine")
    assert await swarm.fork("new", {"from": "old"}) == "E_USAGE"
    assert await swarm.fork("old", {"from": "old"}) == "E_USAGE"
    assert (said_in(swarm.stored("new")), said_in(swarm.stored("old"))) == (["mine"], ["first"])
    await swarm.runners["new"].run(event_frame("r1", None, kind="operator.reset"))
    assert await swarm.fork("new", {"from": "old"}, "f2") == Forked(2)
    lost = swarm.begin("lost").instance.store
    lost.adopt(1)
    with lost.write():
        lost.begin_turn("gone", "tgone", 1, AT)
        lost.append("tgone", 0, Append(Message("tgone.0", UserData("lost"), AT, MessageSource("user"))))
    assert await swarm.fork("lost", {"from": "old"}) == "E_USAGE"


async def test_a_fork_that_does_not_fit_is_refused_as_a_whole(swarm: Instances) -> None:
    swarm.begin("old", says("x" * (3 << 20)))
    await swarm.say("old", "first")
    place = instance_dir(swarm.state_dir, "coder", "new")
    instance = swarm.begin("new").instance
    instance.store.close()
    instance.store = ConversationStore(place, durability="process", max_bytes=6 << 20)
    assert await swarm.fork("new", {"from": "old"}) == "E_STORE_FULL"
    assert swarm.stored("new") == []


@pytest.mark.parametrize("key", ["", "x" * 300, "a\nb", "../old", "nobody"])
async def test_what_is_no_instance_is_not_found_and_not_made(swarm: Instances, key: str) -> None:
    swarm.begin("new")
    assert await swarm.fork("new", {"from": key}) == "E_INSTANCE_NOT_FOUND"
    assert sorted(os.listdir(f"{swarm.state_dir}/instances/coder")) == ["new"]


@pytest.mark.parametrize(
    "asked",
    [None, 7, {}, {"from": 7}, {"from": "old", "step": 0}, {"from": "old", "step": "1"}, {"from": "old", "turn": "t"}],
)
async def test_what_is_no_question_is_refused(swarm: Instances, asked: object) -> None:
    swarm.begin("new")
    assert await swarm.fork("new", asked) == "E_FRAME_INVALID"


@pytest.mark.parametrize("source", [None, Source("client", "client"), Source("agent", "other", "k")])
async def test_nobody_but_an_operator_may(swarm: Instances, source: Source | None) -> None:
    swarm.begin("old", says("one"))
    await swarm.say("old", "first")
    swarm.begin("new")
    assert await swarm.fork("new", {"from": "old"}, source=source) == "E_FORBIDDEN"
    assert swarm.stored("new") == []


async def test_the_operator_has_no_conversation(swarm: Instances) -> None:
    swarm.begin("new", name=OPERATOR_AGENT)
    assert await swarm.fork("new", {"from": "default"}) == "E_USAGE"


async def test_a_conversation_of_before_a_fresh_start_is_empty_for_a_fork_too(swarm: Instances) -> None:
    swarm.begin("old", says("one"))
    await swarm.say("old", "first")
    store = swarm.begin("new").instance.store
    store.generation = 1
    assert await swarm.fork("new", {"from": "old"}) == Forked(0)
    folder = instance_dir(swarm.state_dir, "coder", "old")
    renewed = ConversationStore(folder, durability="process", generation=1)
    assert renewed.load_messages() == []
    renewed.close()


def test_what_extensions_did_to_a_turn_does_not_move_its_steps() -> None:
    def of(turn: str, place: str, data: Any, kind: Any = "user") -> Message:
        return Message(f"{turn}.{place}", data, AT, MessageSource(kind))

    def answer(text: str) -> Any:
        return AssistantData([TextPart(text)])

    note, example = of("t1", "x:1", UserData("note"), "extension"), of("t1", "x:2", answer("example"), "assistant")
    own = [of("t1", "0", UserData("asked")), of("t1", "1", answer("no"), "assistant"), of("t1", "3", UserData("again"))]
    turn = [own[0], note, example, own[1], own[2], of("t1", "4", answer("yes"), "assistant")]
    rest = [of("t12", "0", UserData("other"))]
    assert before([*turn, *rest], Fork(source="k", turn_id="t1", step=2)) == (turn[:5], None)
    assert before([*turn, *rest], Fork(source="k", turn_id="t1")) == ([], "asked")
    assert before([*turn[1:], *rest], Fork(source="k", turn_id="t1")) == ([], "note")
    assert before([*turn, *rest], Fork(source="k", turn_id="t12")) == (turn, "other")
    with pytest.raises(GoondanError, match="E_TURN_NOT_FOUND"):
        before(turn, Fork(source="k", turn_id="t"))

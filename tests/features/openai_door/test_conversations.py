"""Which conversation a request goes on with: known, named, edited, regenerated, cut off, two at once, restarted."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.features.openai_door.door import known as known_file
from goondan.features.openai_door.door.known import Known
from goondan.features.openai_door.door.rules import conversations
from goondan.features.openai_door.door.rules.conversations import Place
from goondan.features.openai_door.door.rules.requests import Said
from goondan.features.openai_door.door.turns import instance_of_user
from goondan.schemas.bundle.address import is_instance_key
from goondan.schemas.wire.errors import GoondanError, fail
from tests.features.openai_door.conftest import FakeSwarm, completed, failed, pieces, until_cancelled


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def agent(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


async def test_a_conversation_goes_on_and_only_what_is_new_is_said(client: Any, swarm: FakeSwarm) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    first = await client.say(messages, "one")
    assert await client.say(messages, "two") == first
    assert await client.say(messages, "three") == first
    assert swarm.said[first] == [
        "Instructions of the program that this comes through:\n\nBe brief.\n\nThe message:\n\none",
        "two",
        "three",
    ]


async def test_two_conversations_that_begin_alike_are_two(client: Any, swarm: FakeSwarm) -> None:
    one: list[Any] = []
    two: list[Any] = []
    first, second = await client.say(one, "hi"), await client.say(two, "hi")
    assert first != second
    both = {await client.say(one, "and one"), await client.say(two, "and two")}
    assert both == {first, second}
    assert sorted(swarm.said.values()) == [["hi", "and one"], ["hi", "and two"]]


@pytest.mark.parametrize("change", [str.strip, lambda text: f"\r\n {text}\n", lambda text: text.replace("\n", "\r\n")])
async def test_an_answer_that_comes_back_in_another_form_is_known(client: Any, swarm: FakeSwarm, change: Any) -> None:
    async def talks(turn: Any) -> Any:
        for news in [*pieces("I look. \n"), *pieces("It is\n4. ", step=2)]:
            yield news
        yield completed("It is\n4. ")

    swarm.script = talks
    for content in ("I look. \n\n\nIt is\n4. ", "It is\n4. "):
        told = await client.chat([user("2+2")], stream=True)
        again = await client.chat([user("2+2"), agent(change(content)), user("sure?")])
        assert again["instance"] == told.headers["x-goondan-instance"]


async def test_an_edited_history_goes_on_in_a_new_instance_that_is_told_it(client: Any, swarm: FakeSwarm) -> None:
    messages: list[Any] = []
    first = await client.say(messages, "one")
    await client.say(messages, "two")
    edited = [*messages[:2], user("TWO")]
    other = (await client.chat(edited))["instance"]
    assert other != first
    [text] = swarm.said[other]
    lines = text.splitlines()
    assert [json.loads(line) for line in lines[2:4]] == [user("one"), agent("echo: one")]
    assert lines[4:] == ["", "The message:", "", "TWO"]
    edited.append(agent("echo: TWO"))
    assert await client.say(edited, "three") == other  # both branches go on
    assert await client.say(messages, "three") == first
    assert swarm.said[first] == ["one", "two", "three"]


async def test_a_regenerated_answer_is_another_branch(client: Any, swarm: FakeSwarm) -> None:
    messages: list[Any] = []
    first = await client.say(messages, "one")
    await client.say(messages, "two")
    branch = (await client.chat(messages[:-1]))["instance"]
    assert branch != first
    assert swarm.said[branch][0].endswith("The message:\n\ntwo")


async def test_the_owner_may_have_edits_refused(opened: Any, swarm: FakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOONDAN_OPENAI_EDITED", "refuse")
    client = opened(anew=True)
    messages: list[Any] = []
    await client.say(messages, "one")
    await client.say(messages, "two")
    told = await client.chat([*messages[:2], user("TWO")], status=409)
    assert told["error"]["code"] == "conversation_edited"
    # What a chat program asks besides is no edit: its instructions differ, or it has no history.
    title = {"role": "system", "content": "Make a title."}
    await client.chat([title, *messages, user("Title?")])
    await client.chat([user(f"Make a title for: {messages}")])
    response = await client.respond("one")
    await client.respond("two", previous_response_id=response["id"])
    told = await client.respond("TWO", previous_response_id=response["id"], status=409)
    assert told["error"]["param"] == "previous_response_id"
    monkeypatch.setenv("GOONDAN_OPENAI_EDITED", "refused")
    with pytest.raises(GoondanError, match="fork or refuse"):
        opened(anew=True)


async def test_requests_for_titles_leave_a_conversation_alone(client: Any, swarm: FakeSwarm) -> None:
    messages: list[Any] = []
    first = await client.say(messages, "one")
    title = {"role": "system", "content": "Make a title."}
    for asked in ([title, *messages, user("Title?")], [*messages, user("Title?")][2:]):
        assert (await client.chat(asked))["instance"] != first
    assert await client.say(messages, "two") == first
    assert swarm.said[first] == ["one", "two"]


async def test_user_and_header_name_the_conversation(client: Any, opened: Any, swarm: FakeSwarm) -> None:
    for text in ("one", "two"):
        told = await client.chat([{"role": "system", "content": "Be brief."}, user(text)], user="ann")
        assert told["instance"] == "ann@alice"
    assert swarm.said["ann@alice"][1] == "two"  # the same instructions are not told again
    assert (await opened("bob").chat([user("x")], user="ann"))["instance"] == "ann@bob"
    named = {"x-goondan-instance": "desk"}
    messages: list[Any] = []
    assert await client.say(messages, "one", headers=named) == "desk"
    assert await client.say(messages, "two", headers=named) == "desk"
    assert (await client.chat([*messages[:2], user("TWO")], headers=named))["instance"] != "desk"
    assert (await client.respond("three", user="ann"))["instance"] == "ann@alice"
    elsewhere = await client.chat([user("q"), agent("a"), user("go on")], headers={"x-goondan-instance": "moved"})
    assert elsewhere["instance"] == "moved"  # it is told a history of elsewhere
    assert '"content":"q"' in swarm.said["moved"][0]


async def test_two_at_once_on_one_conversation_wait_in_order(client: Any, swarm: FakeSwarm) -> None:
    gate = asyncio.Event()

    async def waits(turn: Any) -> Any:
        await gate.wait()
        yield completed(f"echo: {turn.message.input}")

    swarm.script = waits
    asked = [asyncio.ensure_future(client.chat([user(str(number))], user="ann")) for number in range(4)]
    while not swarm.said:
        await asyncio.sleep(0)
    gate.set()
    answers = await asyncio.gather(*asked)
    assert [told["choices"][0]["message"]["content"] for told in answers] == [f"echo: {number}" for number in range(4)]
    assert swarm.said == {"ann@alice": ["0", "1", "2", "3"]}


async def test_a_second_message_before_the_answer_to_the_first(client: Any, swarm: FakeSwarm) -> None:
    messages: list[Any] = []
    first = await client.say(messages, "one")
    gate = asyncio.Event()

    async def waits(turn: Any) -> Any:
        await gate.wait()
        yield completed(f"echo: {turn.message.input}")

    swarm.script = waits
    messages.append(user("two"))
    one = asyncio.ensure_future(client.chat([*messages]))
    while len(swarm.said[first]) < 2:
        await asyncio.sleep(0)
    two = asyncio.ensure_future(client.chat([*messages, user("three")]))
    await asyncio.sleep(0.01)
    gate.set()
    assert [(await task)["instance"] for task in (one, two)] == [first, first]
    assert swarm.said[first] == ["one", "two", "three"]


async def test_a_message_whose_turn_failed_is_said_again_in_its_place(client: Any, swarm: FakeSwarm) -> None:
    messages: list[Any] = []
    first = await client.say(messages, "one")
    script, swarm.script = swarm.script, until_fails
    told = await client.chat([*messages, user("two")], status=502)
    assert told["error"]["code"] == "E_MODEL_FAILED"
    swarm.script = script
    assert await client.say(messages, "two") == first
    assert swarm.said[first] == ["one", "two", "two"]


async def until_fails(turn: Any) -> Any:
    for news in pieces("so far"):
        yield news
    yield failed("E_MODEL_FAILED")


async def test_what_was_refused_leaves_the_conversation_where_it_was(client: Any, swarm: FakeSwarm) -> None:
    messages: list[Any] = []
    first = await client.say(messages, "one")
    swarm.refusal = fail("E_OVERLOADED", "full")
    await client.chat([*messages, user("other words")], status=503)
    await client.chat([user("new")], status=503)
    swarm.refusal = None
    assert await client.say(messages, "two") == first


async def test_a_part_of_a_cancelled_answer_is_known(client: Any, swarm: FakeSwarm) -> None:
    messages: list[Any] = []
    first = await client.say(messages, "one")
    messages.append(user("two"))
    script, swarm.script = swarm.script, until_cancelled
    body = {"model": "main", "messages": messages, "stream": True}
    asking = asyncio.ensure_future(client.http.post("/v1/chat/completions", json=body))
    while len(swarm.said[first]) < 2:
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)
    next(reversed(swarm.turns.values())).cancelled.set()
    await asking
    swarm.script = script
    assert (await client.chat([*messages, agent("other words"), user("three")]))["instance"] != first
    messages.append(agent("thinking"))
    assert await client.say(messages, "three") == first
    assert swarm.said[first] == ["one", "two", "three"]


async def test_it_all_survives_the_door(opened: Any, swarm: FakeSwarm) -> None:
    messages: list[Any] = []
    first = await opened().say(messages, "one")
    assert await opened(anew=True).say(messages, "two") == first
    response = await opened().respond("three")
    later = opened(anew=True)
    assert (await later.http.get(f"/v1/responses/{response['id']}")).json()["id"] == response["id"]
    assert (await later.respond("four", previous_response_id=response["id"]))["instance"] == response["instance"]


async def test_other_tokens_and_agents_are_other_conversations(client: Any, opened: Any, swarm: FakeSwarm) -> None:
    messages: list[Any] = []
    first = await client.say(messages, "one")
    assert await opened("bob").say([*messages], "two") != first
    assert await client.say([*messages], "two", model="other") != first
    response = await client.respond("one")
    bob = opened("bob")
    told = await bob.respond("two", previous_response_id=response["id"], status=400)
    assert told["error"]["code"] == "previous_response_not_found"
    for method in ("GET", "DELETE"):
        assert (await bob.http.request(method, f"/v1/responses/{response['id']}")).status_code == 404
    assert (await bob.http.post(f"/v1/responses/{response['id']}/cancel")).status_code == 404


async def test_responses_follow_each_other_and_fork(client: Any, swarm: FakeSwarm) -> None:
    one = await client.respond("one", instructions="Be brief.")
    two = await client.respond("two", instructions="Be brief.", previous_response_id=one["id"])
    assert two["instance"] == one["instance"]
    assert two["previous_response_id"] == one["id"]
    assert swarm.said[one["instance"]][1] == "two"
    other = await client.respond("TWO", previous_response_id=one["id"])
    assert other["instance"] != one["instance"]
    [text] = swarm.said[other["instance"]]
    assert [json.loads(line) for line in text.splitlines() if line.startswith("{")] == [user("one"), agent("echo: one")]
    three = await client.respond("three", previous_response_id=two["id"])
    assert three["instance"] == one["instance"]
    moved = await client.respond("x", previous_response_id=three["id"], model="other")
    assert swarm.said[moved["instance"]][0].count('"role"') == 6
    # By its own list of items, as chat completions.
    items = [user("one"), *(await client.respond([user("one")]))["output"], user("two")]
    assert '"role"' not in swarm.said[(await client.respond(items))["instance"]][-1]
    # What a forgotten response had said cannot be told.
    await client.http.delete(f"/v1/responses/{one['id']}")
    await client.respond("late", previous_response_id=two["id"], status=400)


TEXT = st.sampled_from(["a", "b", "c", "hi", " hi ", "x\r\ny", ""])
SAID = st.builds(Said, st.sampled_from(["system", "user", "assistant"]), TEXT)


@given(st.lists(SAID, max_size=8), st.lists(SAID, max_size=8))
def test_digests_are_equal_for_equal_beginnings_only(one: list[Said], two: list[Said]) -> None:
    start = conversations.beginning("alice", "main")
    first, second = conversations.chain(start, one), conversations.chain(start, two)
    plain = [[(said.role, conversations.plain(said.text)) for said in all_of] for all_of in (one, two)]
    for at in range(min(len(one), len(two)) + 1):
        assert (first[at] == second[at]) == (plain[0][:at] == plain[1][:at])
    assert len({*first}) == len(one) + 1


@given(st.lists(SAID, min_size=1, max_size=12), st.booleans())
def test_what_is_said_is_what_is_new(said: list[Said], answered: bool) -> None:
    said.append(Said("user", "the last"))
    for known in conversations.candidates(said):
        new = conversations.new_in(Place(1, "i", 1, None, None, answered), said, known)
        if not new:
            assert known == len(said)
            assert answered
        else:
            assert conversations.worded(new).endswith("the last")
    text = conversations.worded(said)
    assert text.endswith("the last")
    for one in said:
        assert one.text.strip() in text.replace("\\r\\n", "\r\n").replace("\\n", "\n")


@given(st.text(max_size=300), st.sampled_from(["alice", "b.c", "x-y", "a" * 64, "y"]))
def test_users_of_different_tokens_never_meet(name: str, caller: str) -> None:
    key = instance_of_user(caller, name)
    assert is_instance_key(key)
    assert all(instance_of_user(other, f"{name}@x") != key for other in ("y", "x-y", "x") if other != caller)


def test_the_table_is_bounded(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_file, "MAX_CONVERSATIONS", 5)
    monkeypatch.setattr(known_file, "MAX_BYTES", 600)
    monkeypatch.setattr(known_file, "SWEEP", 2)
    known = Known(str(tmp_path))
    for number in range(40):
        place = known.begin("k", "main", f"i{number}", None, b"r%d" % number, b"a%d" % number)
        known.end(place, [b"t%d" % number], answered=True)
        kept = known_file.Response(f"resp_{number}", place.number, 1, [], {"output": ["x" * 60]})
        known.keep("k", kept)
    db = known._db
    assert db is not None
    assert db.execute("SELECT count(*) FROM conversations").fetchone()[0] <= 7
    assert db.execute("SELECT sum(length(kept)) FROM responses").fetchone()[0] <= 1000
    assert db.execute("SELECT count(*) FROM tips").fetchone()[0] <= 14
    assert known.find("k", "main", b"t39")
    assert not known.find("k", "main", b"t1")


async def test_a_response_that_cannot_be_kept_holds_nobody_up(client: Any, swarm: FakeSwarm) -> None:
    deep: Any = {}
    for _ in range(900):
        deep = {"a": deep}
    for number, kept in ((10**30, 404), (1, 200)):
        told = await client.respond("one", user="ann", metadata={"n": number, "deep": deep})
        assert told["status"] == "completed"
        assert (await client.http.get(f"/v1/responses/{told['id']}")).status_code == kept
    assert swarm.said == {"ann@alice": ["one", "one"]}


async def test_a_response_is_looked_for_until_its_answer_is_read(client: Any, swarm: FakeSwarm, opened: Any) -> None:
    gate = asyncio.Event()

    async def waits(turn: Any) -> Any:
        await gate.wait()
        yield completed("done")

    swarm.script = waits
    begun = await client.respond("one", background=True)
    turn = swarm.turns[begun["id"].removeprefix("resp_")]
    later = opened(anew=True)

    async def turn_of(event_id: str, place: Any = None) -> Any:
        """The turn of a door that has not sent it: its answer comes a moment later."""
        found = type(turn)(turn.message)
        answer = turn.answered
        answer.add_done_callback(
            lambda done: asyncio.get_running_loop().call_later(0.01, found.answered.set_result, done.result())
        )
        return found

    swarm.turn = turn_of  # type: ignore[method-assign]
    assert (await later.http.get(f"/v1/responses/{begun['id']}")).json()["status"] == "in_progress"
    gate.set()
    told = (await later.http.get(f"/v1/responses/{begun['id']}")).json()
    assert (told["status"], told["output"][0]["content"][0]["text"]) == ("completed", "done")


def test_a_history_that_is_too_long_is_not_told(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_file, "MAX_REQUEST_BYTES", 10)
    known = Known(str(tmp_path))
    for number in range(9):
        response: dict[str, Any] = {"output": [], "previous_response_id": f"resp_{number - 1}" if number else None}
        known.keep("k", known_file.Response(f"resp_{number}", 1, number, [("user", "xxxx")], response))
    told = {}
    for number in (2, 8):
        kept = known.response("k", f"resp_{number}")
        assert kept is not None
        told[number] = known.up_to("k", kept)
    assert told == {2: [Said("user", "xxxx")] * 3, 8: None}


def test_a_file_that_is_damaged_in_its_middle_is_begun_anew(tmp_path: Any) -> None:
    known = Known(str(tmp_path))
    for number in range(400):
        known.begin("k", "main", f"i{number}", None, b"r%d" % number, b"a%d" % number)
    del known
    gc.collect()
    path = tmp_path / known_file.FILE
    whole = path.read_bytes()
    for spoiled in (whole[:4096] + b"\xff" * (len(whole) - 4096), whole[:8192], whole[:100]):
        path.write_bytes(spoiled)
        known = Known(str(tmp_path))
        known.find("k", "main", b"a7")
        place = known.begin("k", "main", "i", None, b"r", b"a")
        known.end(place, [b"t"], answered=True)
        assert [one.instance for one in known.find("k", "main", b"t")] == ["i"]
        del known
        gc.collect()


def test_a_file_that_is_broken_is_begun_anew(tmp_path: Any) -> None:
    (tmp_path / known_file.FILE).write_bytes(b"no database at all" * 400)
    known = Known(str(tmp_path))
    known.begin("k", "main", "i", None, None, b"a")
    assert (tmp_path / known_file.FILE).stat().st_mode & 0o777 == 0o600
    assert Known(str(tmp_path)).find("k", "main", b"a")

"""What a program is given for an answer: the value that it asked for, or one error."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from msgspec import Raw

from goondan_client import GoondanError
from goondan_client.client import BlockingClient, Client
from goondan_client.files import Place, check_place
from goondan_client.frames import Blob, Frame, Welcome, encode


@dataclass
class Weather:
    city: str
    degrees: float


@pytest.fixture
def client() -> Client:
    return Client(Place(run_dir="/nowhere"), 1.0)


def answered(**answer: Any) -> Frame:
    said = {"turnId": "t", "status": "completed", "response": "done", **answer}
    event = {"id": "e-1:answer", "type": "agent.response", "createdAt": "2026-11-24T09:30:08Z", "answer": said}
    return Frame("event", event_id="e-1:answer", payload=Raw(encode(event)))


def test_an_answer_has_the_type_that_was_asked_for(client: Client) -> None:
    answer = client._answer(answered(object={"city": "Seoul", "degrees": 21}), Weather)
    assert (answer.object, answer.text, answer.event_id, answer.kind) == (
        Weather("Seoul", 21.0),
        "done",
        "e-1",
        "answer",
    )
    assert client._answer(answered(object={"any": [1]}), None).object == {"any": [1]}
    for wrong in ({"object": {"city": "Seoul"}}, {}):
        with pytest.raises(GoondanError) as caught:
            client._answer(answered(**wrong), Weather)
        assert caught.value.code == "E_OUTPUT_INVALID" and caught.value.suggestion


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (
            {"status": "failed", "error": {"code": "E_MODEL_FAILED", "message": "no", "suggestion": "s"}},
            "E_MODEL_FAILED",
        ),
        ({"status": "failed"}, "E_AGENT_FAILED"),
        ({"status": "perhaps"}, "E_FRAME_INVALID"),
        ({"object": {"n": float("nan")}}, "E_FRAME_INVALID"),
        ({"object": b"bytes"}, "E_FRAME_INVALID"),
    ],
)
def test_what_is_no_answer_is_one_error(client: Client, answer: dict[str, Any], code: str) -> None:
    with pytest.raises(GoondanError) as caught:
        client._answer(answered(**answer), None)
    assert caught.value.code == code


def test_usage_is_the_sum_of_the_answers(client: Client) -> None:
    for used in (
        {"inputTokens": 10, "outputTokens": 2, "modelCalls": 1},
        {"inputTokens": 5, "outputTokens": 1, "modelCalls": 2, "cost": 0.5, "currency": "EUR"},
        {"inputTokens": 1, "outputTokens": 1, "modelCalls": 1, "cost": 0.25, "currency": "EUR"},
        {"inputTokens": 1, "outputTokens": 1, "modelCalls": 1, "cost": 9.0},
    ):
        client._answer(answered(usage=used), None)
    found = client.usage()
    assert (found.input_tokens, found.output_tokens, found.model_calls) == (17, 5, 5)
    assert (found.cost, found.currency) == (0.75, "EUR")


async def test_nothing_is_asked_without_a_connection(client: Client) -> None:
    for asking in (client.ask("a", "hi"), client.send("a", "hi"), client.cancel(event_id="e"), client.instances()):
        with pytest.raises(GoondanError) as caught:
            await asking
        assert caught.value.code == "E_LINK_CLOSED"


def test_an_error_says_when_to_try_again() -> None:
    error = GoondanError("E_OVERLOADED", "full", retry_after=0.5)
    assert (str(error), error.retry_after, error.suggestion) == ("E_OVERLOADED: full", 0.5, None)


async def ready(client: Client, blobs: Path) -> None:
    """Let it take questions, which go nowhere."""
    link = client._link
    link.machine.phase, link.machine.welcome = "absent", Welcome(1, "client/1", 9, str(blobs), "process")
    link._loop, link._scheduled = asyncio.get_running_loop(), True


async def test_a_refused_question_leaves_no_files(client: Client, tmp_path: Path) -> None:
    await ready(client, tmp_path)
    asking = asyncio.ensure_future(client.ask("a", "x" * 600_000, event_id="q"))
    while not client._link.machine._outbox:
        await asyncio.sleep(0.01)
    before = os.listdir(tmp_path)
    with pytest.raises(GoondanError) as caught:
        await client.ask("a", "x" * 600_000, event_id="q")
    assert (caught.value.code, os.listdir(tmp_path), len(before)) == ("E_FRAME_INVALID", before, 1)
    asking.cancel()


async def test_whatever_goes_wrong_with_an_answers_file_is_the_answer(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: Any) -> bytes:
        raise MemoryError

    await ready(client, tmp_path)
    monkeypatch.setattr("goondan_client.link.read_blob", no_memory)
    asking = asyncio.ensure_future(client.ask("a", "hi", event_id="q"))
    await asyncio.sleep(0)
    blob = Blob("0" * 32, "0" * 64, 2000)
    reading = client._link._reading = asyncio.ensure_future(
        client._link._read(Frame("event", event_id="q:answer", in_reply_to="q", blob=blob))
    )
    with pytest.raises(GoondanError, match="MemoryError") as caught:
        await asyncio.wait_for(asking, 5)
    assert caught.value.code == "E_BLOB_UNAVAILABLE"
    await reading
    assert client._link._reading is None, "the next frame is received"


async def test_a_question_has_a_place_and_a_trace(client: Client, tmp_path: Path) -> None:
    await ready(client, tmp_path)
    frame = await client._event("a", "user.message", "hi", {"workdir": "/w", "trace_id": "0" * 32})
    assert (frame["workdir"], frame["traceId"]) == ("/w", "0" * 32)
    assert not {"workdir", "traceId"} & set(await client._event("a", "user.message", "hi", {}))


class Idle(Client):
    """One without a kernel."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass


def test_closing_ends_what_other_threads_wait_for() -> None:
    gdn = BlockingClient(Idle(Place(run_dir="/nowhere"), 1.0))
    begun, ends = threading.Barrier(3), []

    async def endless() -> None:
        asyncio.get_running_loop().run_in_executor(None, begun.wait)
        await asyncio.Event().wait()

    def wait() -> None:
        with pytest.raises(GoondanError) as caught:
            gdn.wait_for(endless())
        ends.append(caught.value.code)

    waiting = [threading.Thread(target=wait, daemon=True) for _ in range(2)]
    for thread in waiting:
        thread.start()
    begun.wait(10)
    closing = [threading.Thread(target=gdn.close, daemon=True) for _ in range(4)]
    for thread in closing:
        thread.start()
    for thread in (*closing, *waiting):
        thread.join(10)
        assert not thread.is_alive()
    assert ends == ["E_LINK_CLOSED", "E_LINK_CLOSED"]
    wait()
    gdn.close()
    gdn._thread.join(10)
    assert not gdn._thread.is_alive() and len(ends) == 3


ME = SimpleNamespace(pw_name="me", pw_uid=os.geteuid(), pw_gid=4711)
YOU = SimpleNamespace(pw_name="you", pw_uid=os.geteuid() + 1, pw_gid=100)


@pytest.mark.parametrize(
    ("users", "listed", "mode", "acl", "is_trusted"),
    [
        ([ME, YOU], [], 0o770, [], True),
        ([ME, YOU], ["me"], 0o770, [], True),
        ([ME, YOU], ["me", "you"], 0o770, [], False),
        ([ME, YOU], ["unknown"], 0o770, [], False),
        ([ME, SimpleNamespace(pw_name="you", pw_uid=YOU.pw_uid, pw_gid=4711)], [], 0o770, [], False),
        ([YOU], [], 0o770, [], False),
        ([ME], None, 0o770, [], False),
        ([ME], [], 0o770, ["system.posix_acl_access"], False),
        ([ME], [], 0o770, None, False),
        ([ME], [], 0o772, [], False),
        ([YOU], ["you"], 0o1777, [], True),
        ([YOU], ["you"], 0o755, [], True),
    ],
)
def test_a_group_that_is_the_users_alone_may_change_a_directory(
    users: list[Any],
    listed: list[str] | None,
    mode: int,
    acl: list[str] | None,
    is_trusted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def group(_: int) -> SimpleNamespace:
        if listed is None:
            raise KeyError
        return SimpleNamespace(gr_mem=listed)

    def attributes(_: str) -> list[str]:
        if acl is None:
            raise OSError(errno.ENOTSUP, "not here")
        return acl

    for name, stand_in in (("pwd.getpwall", lambda: users), ("grp.getgrgid", group), ("os.listxattr", attributes)):
        monkeypatch.setattr(name, stand_in)
    run_dir = tmp_path / "above" / "run"
    run_dir.mkdir(mode=0o700, parents=True)
    gid = 4711 if os.geteuid() == 0 else -1
    os.chown(run_dir.parent, -1, gid)
    run_dir.parent.chmod(mode)
    if gid == -1:
        for user in users:
            if user.pw_gid == 4711:
                monkeypatch.setattr(user, "pw_gid", run_dir.parent.stat().st_gid)
    if is_trusted:
        check_place(str(run_dir))
    else:
        with pytest.raises(GoondanError) as caught:
            check_place(str(run_dir))
        assert caught.value.code == "E_BROKER_UNTRUSTED"

"""The size of a conversation is bounded: what does not fit is refused as a whole, and turns still end."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from goondan.agentproc.conversation.file import RESERVE_BYTES
from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.machine.messages import Append, Message, MessageSource, UserData, is_presentable
from goondan.agentproc.turn.instance import Instance
from goondan.agentproc.turn.runner import TurnRunner
from goondan.schemas.bundle.address import instance_dir
from goondan.schemas.wire.errors import GoondanError
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, make_spec, ok, says, wants
from tests.unit.agentproc.turns import the_answer

AT = "2026-01-01T00:00:00.000Z"
LIMIT = 16 << 20


def message(name: str, size: int) -> Append:
    return Append(Message(name, UserData("x" * size), AT, MessageSource("user")))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("conversation.db*") if not path.name.endswith("-shm"))


def opened(folder: Path) -> ConversationStore:
    store = ConversationStore(str(folder), durability="process", max_bytes=LIMIT)
    store.adopt(1)
    return store


@contextmanager
def full() -> Iterator[list[GoondanError]]:
    """Whether what is done inside was refused for want of room; any other error is raised."""
    refused: list[GoondanError] = []
    try:
        yield refused
    except GoondanError as error:
        if error.info.code != "E_STORE_FULL":
            raise
        refused.append(error)


turns = st.lists(st.tuples(st.lists(st.integers(0, 3 << 20), max_size=5), st.integers(0, 2 << 20)), max_size=6)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns)
def test_file_and_log_stay_within_the_limit_and_every_turn_ends(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[list[int], int]]
) -> None:
    folder = tmp_path_factory.mktemp("quota")
    stored: list[str] = []
    with closing(opened(folder)) as store:
        for number, (sizes, answer) in enumerate(turns):
            name, own = f"t{number}", []
            with full() as refused, store.write():
                store.begin_turn(name, name, 1, AT)
            if refused:
                continue
            with full() as refused:
                for position, size in enumerate(sizes):
                    with store.write():
                        store.append(name, position, message(f"{name}.{position}", size))
                    own.append(f"{name}.{position}")
                    assert size_of(folder) <= LIMIT
                with store.write(final=True):
                    store.finish_turn(name, name, "completed", AT, steps=1, answer=b"a" * answer)
            if refused:
                assert size_of(folder) <= LIMIT
                with store.write(final=True, reserve=True):
                    store.finish_turn(name, name, "failed", AT, steps=1, answer=b"full")
            stored += own
            assert size_of(folder) <= LIMIT
        assert [found.id for found in store.load_messages()] == stored
        assert store.running_turns() == []


def test_a_transaction_that_does_not_fit_leaves_everything_as_it_was(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as store:
        with store.write():
            store.begin_turn("e", "t", 1, AT)
            store.append("t", 0, message("0", 1000))
        with pytest.raises(GoondanError) as caught, store.write():
            store.append("t", 1, message("1", LIMIT))
        info = caught.value.info
        assert (info.code, "limit 16 MiB" in info.message) == ("E_STORE_FULL", True)
        assert "conversationMb" in (info.suggestion or "")
        assert [event.position for event in store.turn_events("t")] == [0]
        with store.write():
            store.append("t", 1, message("1", 1000))
        assert len(store.turn_events("t")) == 2


def test_a_reader_that_holds_the_log_up_does_not_make_it_grow_beyond_the_limit(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with store.write():
        store.begin_turn("e", "t", 1, AT)
    with closing(sqlite3.connect(tmp_path / "conversation.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM turns").fetchone()
        with full() as refused:
            for number in range(100):
                with store.write():
                    store.append("t", 0, message(f"again {number}", 1 << 20))
        assert refused
        assert size_of(tmp_path) <= LIMIT
    with store.write():
        store.append("t", 0, message("now", 1 << 20))
    store.close()


# --- turns ------------------------------------------------------------------------------------------------------------


def runner(folder: Path, link: FakeLink, model: FakeModel, limit: int = LIMIT) -> TurnRunner:
    spec = make_spec(str(folder))
    store = ConversationStore(instance_dir(str(folder), spec.name, "k"), durability="process", max_bytes=limit)
    return TurnRunner(Instance(spec, "k", link, store, provider=model))


async def test_results_that_do_not_fit_fail_the_turn_and_what_is_stored_is_whole(tmp_path: Path) -> None:
    """Two calls in a step, each with 2 MiB, until nothing fits any more."""
    link = FakeLink(lambda *_: ok("y" * (2 << 20)))
    steps = [wants((f"a{n}", "notes__add", {}), (f"b{n}", "notes__add", {})) for n in range(20)]
    first = runner(tmp_path, link, FakeModel(*steps))
    await first.run(event_frame("e1", "go"))
    answer = the_answer(link)
    assert (answer.status, answer.error and answer.error.code) == ("failed", "E_STORE_FULL")
    assert answer.steps > 0
    folder = Path(instance_dir(str(tmp_path), "coder", "k"))
    assert size_of(folder) <= LIMIT
    messages = first.instance.store.load_messages()
    assert is_presentable(messages)
    assert len(messages) > 3
    assert first.instance.store.running_turns() == []
    await first.close()

    again = FakeLink()
    repeated = runner(tmp_path, again, FakeModel())
    await repeated.run(event_frame("e1", "go", epoch=2))
    assert bytes(again.posted[-1].payload) == bytes(link.posted[-1].payload), "an end that is stored is answered again"
    await repeated.close()

    larger = FakeLink()
    raised = runner(tmp_path, larger, FakeModel(says("here")), 64 << 20)
    await raised.run(event_frame("e2", "more", epoch=3))
    assert the_answer(larger).response == "here"
    await raised.close()


@pytest.mark.parametrize("large", ["x" * LIMIT, "x" * (LIMIT - RESERVE_BYTES)])
async def test_a_message_that_does_not_fit_is_refused_and_a_smaller_one_taken(tmp_path: Path, large: Any) -> None:
    link = FakeLink()
    small = runner(tmp_path, link, FakeModel(says("fine")))
    await small.run(event_frame("e1", large))
    error = the_answer(link).error
    assert error is not None
    assert error.code == "E_STORE_FULL"
    await small.run(event_frame("e2", "go", epoch=2))
    assert link.answers()[-1].response == "fine"
    assert len(small.instance.store.load_messages()) == 2
    await small.close()


async def test_an_answer_that_does_not_fit_fails_its_turn(tmp_path: Path) -> None:
    link = FakeLink(lambda *_: ok("y" * (3 << 20)))
    model = FakeModel(wants(("a", "notes__add", {})), says("z" * (9 << 20)))
    only = runner(tmp_path, link, model)
    await only.run(event_frame("e1", "go"))
    error = the_answer(link).error
    assert error is not None
    assert error.code == "E_STORE_FULL"
    assert is_presentable(only.instance.store.load_messages())
    assert len(only.instance.store.load_messages()) == 3
    await only.close()

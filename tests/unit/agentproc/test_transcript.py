"""The messages of a running turn: what is shown is what is stored, in whatever order it came."""

from __future__ import annotations

import tempfile
from contextlib import closing
from itertools import count
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.conversation.transcript import Transcript
from goondan.agentproc.machine.messages import Append, Message, MessageSource, UserData, fold

AT = "2026-01-01T00:00:00.000Z"
#: Of an earlier message, of one of the turn that may come later, and of nobody else's.
IDS = ("t0.0", "t1.1", "t1.5", "t1.x.1", "new")


def message(message_id: str) -> Message:
    return Message(message_id, UserData(message_id), AT, MessageSource("user"))


own = st.integers(0, 5).map(
    lambda place: ("own", place)
)  # a place among those that are reserved and free, else a new one
events = st.one_of(
    st.sampled_from((None, *IDS)).map(lambda name: {"type": "append", "message": {} if name is None else {"id": name}}),
    st.sampled_from(IDS).map(lambda name: {"type": "remove", "targetId": name}),
    st.tuples(st.sampled_from(IDS), st.sampled_from(IDS)).map(
        lambda names: {"type": "replace", "targetId": names[0], "message": {"id": names[1]}}
    ),
    st.just({"type": "truncate"}),
)
given_by_extension = st.tuples(st.sampled_from(("x.1", "x.2")), events)


@given(st.lists(st.one_of(own, own, given_by_extension), max_size=12))
@example([("x.1", {"type": "append", "message": {"id": "t1.5"}}), ("own", 5)])
def test_what_is_shown_is_what_is_stored(steps: list[tuple[str, Any]]) -> None:
    positions = count()
    free = [next(positions) for _ in range(4)]
    with tempfile.TemporaryDirectory() as folder, closing(ConversationStore(folder, durability="process")) as store:
        store.adopt(1)
        with store.write():
            store.begin_turn("e0", "t0", 1, AT)
            store.append("t0", 0, Append(message("t0.0")))
        with store.write(final=True):
            store.finish_turn("e0", "t0", "completed", AT, steps=1, answer=b"")
        with store.write():
            store.begin_turn("e1", "t1", 1, AT)
        shown = Transcript(store, "t1", lambda: next(positions), lambda: AT)
        for kind, what in steps:
            if kind == "own":
                position = free.pop(what) if what < len(free) else next(positions)
                with store.write():
                    shown.append(position, message(f"t1.{position}"))
            else:
                if "message" in what:
                    what = {**what, "message": {**what["message"], "data": {"role": "user", "content": "said"}}}
                shown.emit(kind, "extension", what)
            stored = [row.event for row in store.turn_events("t1")]
            assert shown.own_messages == fold([], stored)
            assert shown.next_messages == fold(store.load_messages(), stored)

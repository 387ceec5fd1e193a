"""The messages of one running turn: those of earlier turns, and this turn's own events by their positions.

`NextMessages = BaseMessages + SUM(Events)`. The base is read at its first use. An event of an extension is stored
before `emit` returns. It has an origin: its extension's stage, and its number there. So when the middleware of a
resumed turn runs again, the event replaces the earlier one instead of being added twice.

Source: docs/design/turns.md section 3; requirements CALL-15, PIPELINE-02.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from goondan.agentproc.conversation.store import ConversationStore, StoredEvent
from goondan.agentproc.extensions.points.pipeline import MiddlewareError
from goondan.agentproc.machine.messages import Append, Grown, Message, MessageEvent, Replace, fold
from goondan.agentproc.machine.turn import BeginCall, Resume
from goondan.schemas.wire import errors, questions
from goondan.schemas.wire.codec import DECODE_ERRORS, check_depth, check_json, describe_decode_error, encode_value


class Transcript:
    """The messages of the turn `turn_id`. `take_position` gives the next free position of the turn."""

    def __init__(
        self, store: ConversationStore, turn_id: str, take_position: Callable[[], int], clock: Callable[[], str]
    ) -> None:
        self._store = store
        self._turn_id = turn_id
        self._take_position = take_position
        self._clock = clock
        self._base: list[Message] | None = None
        self._events: dict[int, MessageEvent] = {}
        self._origins: dict[str, int] = {}
        #: The messages after all events, and those of this turn only, as far as they are known.
        self._next: list[Message] | None = None
        self._own: list[Message] | None = []
        self._shown: Grown | None = None  # what `_next` is known to begin with
        self._last = -1  # the highest position
        self._given: set[str] = set()  # ids that extensions have given to messages
        self._grows = True  # nothing has happened but that messages of the turn came
        self.closed = False

    def restore(self, stored: Iterable[StoredEvent]) -> None:
        """Take over the events that an earlier incarnation stored of this turn."""
        for event in stored:
            self._keep(event.position, event.event, is_new=event.origin is None)
            if event.origin is not None:
                self._origins[event.origin] = event.position

    def append(self, position: int, message: Message) -> None:
        """Add a message of the turn itself (inside the store's `write`)."""
        event = Append(message)
        self._keep(position, event, is_new=True)
        self._store.append(self._turn_id, position, event)

    def emit(self, origin: str, source: str, event: Any) -> None:
        """Store an event of an extension named `source` at once.

        Raises MiddlewareError for an invalid message event and after the turn's end; GoondanError as the store does.
        """
        if self.closed:
            raise MiddlewareError("the turn is over; its conversation can no longer be changed")
        message_id = f"{self._turn_id}.{origin}"
        read = read_event(event, message_id=message_id, source=source, at=self._clock())
        is_new = origin not in self._origins and isinstance(read, Append) and read.message.id == message_id
        position = self._origins.get(origin)
        if position is None:
            position = self._origins[origin] = self._take_position()
        with self._store.write():
            self._store.append(self._turn_id, position, read, origin=origin)
        self._keep(position, read, is_new=is_new)

    def has_origin(self, origin: str) -> bool:
        """Whether the turn has an event of this origin."""
        return origin in self._origins

    @property
    def base_messages(self) -> list[Message]:
        """The messages that earlier turns left."""
        return list(self._load())

    @property
    def events(self) -> list[MessageEvent]:
        """The events of this turn, in the order of positions."""
        return [self._events[position] for position in sorted(self._events)]

    @property
    def next_messages(self) -> list[Message]:
        """The current messages of the conversation."""
        return list(self._current())

    def shown(self) -> Grown:
        """The same, for the next request. It knows the one before if nothing has happened but that messages came."""
        made = Grown(self._current())
        if self._shown is not None:
            self._shown.behind = None  # nobody needs those before
        made.behind, self._shown = self._shown, made
        return made

    @property
    def left(self) -> Grown | None:
        """The same, for the next turn; None: nobody has asked for them."""
        return None if self._next is None else self.shown()

    @property
    def own_messages(self) -> list[Message]:
        """The messages of this turn only."""
        if self._own is None:
            self._own = fold([], self.events)
        return list(self._own)

    # --- inside

    def _current(self) -> list[Message]:
        if self._next is None:
            base = self._load()
            if self._grows and self._own is not None:
                self._next = [*base, *self._own]
                self._shown = base.behind if isinstance(base, Grown) else None
            else:
                self._next = fold(base, self.events)
        return self._next

    def _load(self) -> list[Message]:
        if self._base is None:
            self._base = self._store.load_messages()
            taken = self._store.ids_of(self._turn_id)
            self._given.update(taken)
            self._grows = self._grows and not taken
        return self._base

    def _keep(self, position: int, event: MessageEvent, *, is_new: bool) -> None:
        """Remember an event. `is_new`: its message has an id of the turn, which no other has, unless an extension has
        given it to one. Such a message, if it comes last, is put behind what is known, so a step pays only for what is
        new.
        """
        self._events[position] = event
        if is_new and position > self._last and isinstance(event, Append) and event.message.id not in self._given:
            if self._own is not None:
                self._own.append(event.message)
            if self._next is not None:
                self._next.append(event.message)
        else:
            self._next = self._own = self._shown = None
            self._grows = False
            if isinstance(event, Append | Replace):
                self._given.add(event.message.id)
        self._last = max(self._last, position)


def read_event(event: Any, *, message_id: str, source: str, at: str) -> MessageEvent:
    """A message event as an extension gave it, with the missing fields of its message filled in. Raises
    MiddlewareError.
    """
    try:
        given = msgspec.convert(_filled_in(event, message_id, source, at), _KINDS) if isinstance(event, dict) else event
        # Encoded and decoded once: every later step must be able to read the stored message.
        data = encode_value(given)
        check_depth(data)
        read: MessageEvent = msgspec.msgpack.decode(data, type=_KINDS)
        check_json(msgspec.to_builtins(read), "it")
    except DECODE_ERRORS as error:
        raise MiddlewareError(f"no message event: {describe_decode_error(error)}") from None
    except errors.GoondanError as error:
        raise MiddlewareError(f"no message event: {error.info.message}") from None
    except TypeError as error:
        raise MiddlewareError(f"no message event: {error}") from None
    return read


_KINDS: Any = MessageEvent


def _filled_in(event: dict[str, Any], message_id: str, source: str, at: str) -> dict[str, Any]:
    message = event.get("message")
    if not isinstance(message, dict):
        return event
    data = message.get("data")
    if isinstance(data, dict) and data.get("role") == "assistant" and isinstance(data.get("content"), str):
        data = {**data, "content": [{"type": "text", "text": data["content"]}]}
    given = {"id": message_id, "createdAt": at, "source": {"type": "extension", "name": source}}
    return {**event, "message": {**given, **message, "data": data}}


def resumption(stored: Sequence[StoredEvent], operator: bool, asked: BeginCall | None = None) -> Resume:
    """The turn machine's input that restores the events of an earlier incarnation. `asked`: the operator's call."""
    own = [(s.position, s.event.message) for s in stored if isinstance(s.event, Append) and s.origin is None]
    told = max(
        (s.position for s in stored if s.origin is not None and s.origin.endswith(questions.ANSWER_SUFFIX)), default=-1
    )
    behind = bool(own) and told > own[-1][0]
    return Resume(own, operator, asked, max((s.position + 1 for s in stored), default=0), behind)

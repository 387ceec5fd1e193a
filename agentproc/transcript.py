"""The messages of one running turn: what earlier turns left, and this turn's own events by their positions.

`NextMessages = BaseMessages + SUM(Events)`. The base is read when somebody first asks for it. What extensions add is
stored before `emit` returns; each such event has an origin (its extension's stage, and the how-manieth there), so that
a resumed turn whose middleware runs again puts it in the same place instead of adding it twice.

Source: docs/design/turns.md section 3; requirements CALL-15, PIPELINE-02.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from agentproc.conversation import Append, Message, MessageEvent, fold
from agentproc.extensions.pipeline import MiddlewareError
from agentproc.store import ConversationStore, StoredEvent
from agentproc.turn import Resume
from schemas.codec import DECODE_ERRORS, check_depth, check_json, describe_decode_error, encode_value
from schemas.errors import GoondanError
from schemas.questions import ANSWER_SUFFIX


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
        self._only_appends = True
        self.closed = False

    def restore(self, stored: Iterable[StoredEvent]) -> None:
        """Take over what an earlier incarnation stored of this turn."""
        for event in stored:
            self._keep(event.position, event.event)
            if event.origin is not None:
                self._origins[event.origin] = event.position

    def append(self, position: int, message: Message) -> None:
        """A message of the turn itself (inside the store's `write`)."""
        event = Append(message)
        self._keep(position, event)
        self._store.append(self._turn_id, position, event)

    def emit(self, origin: str, source: str, event: Any) -> None:
        """An event of an extension named `source`, stored at once.

        Raises MiddlewareError for what is no message event and after the turn's end; GoondanError as the store does.
        """
        if self.closed:
            raise MiddlewareError("the turn is over; its conversation can no longer be changed")
        read = read_event(event, message_id=f"{self._turn_id}.{origin}", source=source, at=self._clock())
        position = self._origins.get(origin)
        if position is None:
            position = self._origins[origin] = self._take_position()
        with self._store.write():
            self._store.append(self._turn_id, position, read, origin=origin)
        self._keep(position, read)

    def has_origin(self, origin: str) -> bool:
        """Whether the turn has an event of this origin."""
        return origin in self._origins

    @property
    def base_messages(self) -> list[Message]:
        """What earlier turns left."""
        if self._base is None:
            self._base = self._store.load_messages()
        return list(self._base)

    @property
    def events(self) -> list[MessageEvent]:
        """What this turn has added, in the order of positions."""
        return [self._events[position] for position in sorted(self._events)]

    @property
    def next_messages(self) -> list[Message]:
        """The conversation as it stands."""
        return self._with(self.base_messages)

    @property
    def own_messages(self) -> list[Message]:
        """This turn's messages alone."""
        return self._with([])

    # --- inside

    def _keep(self, position: int, event: MessageEvent) -> None:
        self._events[position] = event
        self._only_appends = self._only_appends and isinstance(event, Append)

    def _with(self, base: list[Message]) -> list[Message]:
        if self._only_appends:
            return [*base, *(event.message for event in self.events if isinstance(event, Append))]
        return fold(base, self.events)


def read_event(event: Any, *, message_id: str, source: str, at: str) -> MessageEvent:
    """A message event as an extension gave it; what its message lacks is filled in. Raises MiddlewareError."""
    try:
        given = msgspec.convert(_filled_in(event, message_id, source, at), _KINDS) if isinstance(event, dict) else event
        # Once through bytes: what is stored must be readable by every later step.
        data = encode_value(given)
        check_depth(data)
        read: MessageEvent = msgspec.msgpack.decode(data, type=_KINDS)
        check_json(msgspec.to_builtins(read), "it")
    except DECODE_ERRORS as error:
        raise MiddlewareError(f"no message event: {describe_decode_error(error)}") from None
    except GoondanError as error:
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


def resumption(stored: Sequence[StoredEvent], operator: bool) -> Resume:
    """What the turn machine needs of the events that an earlier incarnation stored."""
    own = [(s.position, s.event.message) for s in stored if isinstance(s.event, Append) and s.origin is None]
    told = max((s.position for s in stored if s.origin is not None and s.origin.endswith(ANSWER_SUFFIX)), default=-1)
    behind = bool(own) and told > own[-1][0]
    return Resume(own, operator, max((s.position + 1 for s in stored), default=0), behind)

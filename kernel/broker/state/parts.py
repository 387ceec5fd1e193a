"""The hooks that a part of the broker may have, and how long what it takes and answers may be. Pure.

A part is an object that answers some frames and keeps some state. The core (router.py) makes the parts of features from
what the loader gives it, and calls the hooks that they have. A part has a hook if its class defines it: what is absent
is not called. The order of parts is the order in which their hooks are called.

Lists for operators and agents are cut so that they fit in one frame (`fitting`), whatever names and ids they contain:
anybody can choose ids and keys. A frame that is too long would end the connection of the asker, and nobody could see
the list any more.

Source: docs/design/features.md section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, Final, Literal, NamedTuple, ParamSpec, TypeVar

from msgspec import Struct

from goondan.kernel.broker.state.entities import Actor, Call, Connection, Event, Handler
from goondan.kernel.broker.state.workdirs import Workdir
from goondan.schemas.bundle.effective_config import LiveChanges
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.wire.codec import encode_value
from goondan.schemas.wire.frames import Frame, Hello

#: Bytes of the entries of one answer. The rest of a frame of 1 MiB is enough for everything else in it.
LIST_BYTES: Final = 768 << 10

T = TypeVar("T")
K = TypeVar("K")
P = ParamSpec("P")
R = TypeVar("R")


def fitting(entries: Iterable[T], room: int = LIST_BYTES) -> list[T]:
    """The first entries, as many as fit into `room` bytes."""
    found: list[T] = []
    for entry in entries:
        room -= len(encode_value(entry))
        if room < 0:
            break
        found.append(entry)
    return found


#: Bytes of a payload that has names and numbers only, and of one with a list of names or texts of 10,000 characters.
SHORT_BYTES: Final = 4 << 10
LISTS_BYTES: Final = 64 << 10
#: Bytes of one character at most.
UTF8_BYTES: Final = 4


class Take(NamedTuple):
    """A frame that a part takes."""

    #: Who may send it: a class of sockets (entities.py), or the name of a supervised process on the control socket.
    peers: Sequence[int | str]
    #: The type of the frame.
    frame_type: str
    #: Answers it.
    handler: Handler
    #: The longest payload (bytes) for what opens it; None for what passes payloads on unopened. Everybody shares the
    #: time of the broker's loop, and to open a payload takes time: a MiB that was made to be slow takes 0.4 s. So a
    #: longer payload is refused before a byte of it is read.
    most_bytes: int | None = None
    #: Whether a confined agent may send it: one that may change nothing outside, since its answers are from a file that
    #: anybody can have written.
    #: - `yes`: it acts on nothing outside.
    #: - `inside`: only if the agent that the frame names is confined, too.
    #: - `own state`: as `inside`, and only in a state directory of its own.
    #: - `no`: never.
    confined: Literal["yes", "inside", "own state", "no"] = "yes"


class Op(NamedTuple):
    """A question of clients (`admin`) that a part answers."""

    #: The `op` of the question.
    name: str
    #: Its arguments: the asking connection, the frame, its payload, the time.
    handler: Callable[[Connection, Frame, dict[str, Any], float], None]
    #: True when every client may ask it; else only operators may.
    for_all: bool = False
    #: The longest payload that it needs (bytes).
    most_bytes: int = LISTS_BYTES


class Waiting(NamedTuple):
    """Somebody waits, for `gdn ps --why`."""

    #: What is waited for: a word of PROTOCOL.md.
    kind: str
    #: The event whose turn waits.
    event: Event
    #: Since when (seconds on the broker's clock).
    since: float
    #: What else is told of it. `text`: what it waits for, in words, where the word does not say it. `live`: the live
    #: events of the turn tell of it as well.
    more: Mapping[str, Any]


class Record(NamedTuple):
    """A kind of record in the journal."""

    #: What it looks like. The name of the feature is in its tag, and its first field is the event that it concerns
    #: (records.py).
    struct: type[Struct]
    #: Takes over a record of an earlier broker: its subject, and itself. Events that are accepted before it are there.
    restore: Callable[[str, Any], None]


class Part:
    """The hooks of a part. Times are seconds on the broker's clock."""

    #: Frames that it takes.
    takes: Sequence[Take] = ()
    #: Questions that it answers.
    ops: Sequence[Op] = ()
    #: Messages of the supervisor that it hears, by their types (schemas/wire/control.py); those of its feature's half
    #: there (ForFeature) by the name of the feature.
    hears: Mapping[type[Struct] | str, Callable[[Any, float], None]] = {}

    #: Its records in the journal.
    records: Sequence[Record] = ()

    def applies(self) -> bool:
        """Whether anything of the plan or the journal is for it. If not, `Hooks` has none of its hooks."""
        return True

    def resumed(self, now: float) -> None:
        """The whole journal was read: every record was restored. The last part is called first: what a part stands on
        stands behind it.
        """

    def revise(self, plan: KernelPlan) -> None:
        """The plan is this one from now on. The constructor sees to the first plan itself."""

    def welcome(self, peer: Connection) -> Mapping[str, Any]:
        """Fields of the `welcome` that an agent gets."""
        return {}

    def here(self, peer: Connection, hello: Hello, now: float) -> None:
        """A peer was welcomed, perhaps again."""

    def gone(self, peer: Connection, now: float) -> None:
        """The transport has no such peer any more."""

    def tick(self, now: float) -> None:
        """A few times a second: look at what is due."""

    def waiting(self, now: float) -> Iterable[Waiting]:
        """Who waits for what this part has."""
        return ()


class OfEvents:
    """The hooks of a part in the life of events."""

    def accepts(self, event: Event, actor: Actor) -> None:
        """A new event that is about to be staged. Raises GoondanError to refuse it."""

    def kept(self, event: Event) -> None:
        """The journal has a new event."""

    def follows(self, answer: Event, request: Event) -> None:
        """A new event that has the answer to a request whose sender does not wait."""

    def leased(self, event: Event, frame: Frame | None) -> None:
        """A process holds the event. `frame` will hand it over, and a part can say something in its header: another
        process may have held the event before. None: the process has it already, from an earlier broker.
        """

    def handed(self, event: Event) -> None:
        """The process has been sent the event, about whose calls a person was asked: what it is sent now, it takes as
        about the event.
        """

    def left(self, event: Event, *, ended: bool) -> None:
        """No process holds the event any more. `ended`: it is over, or was never accepted."""

    def held(self, event: Event, since: float | None) -> None:
        """A person is asked about one more call of this event, since then. None: about one fewer, from now on."""


class OfCalls:
    """The hooks of a part in the life of tool calls. They are called for each call, so they look at little."""

    def admits(self, connection: Connection, event: Event, frame: Frame, place: Workdir, now: float) -> bool:
        """Whether a `tool.call` goes on, new or again. If not, the part answers it, now or later. Raises GoondanError
        to refuse it.
        """
        return True

    def opens(self, call: Call, frame: Frame, now: float) -> None:
        """A call that is about to be opened. Raises GoondanError to refuse it."""

    def stored(self, event: Event, call_ids: Sequence[str]) -> None:
        """The agent has stored the results of these calls."""

    def over(self, event: Event, call_id: str) -> None:
        """A call that asks its agent is over, or any call is cancelled, of an event about whose calls a person was
        asked.
        """

    def keeps(self, event: Event, call_id: str) -> bool:
        """Whether a call that has ended must not be forgotten, because it must never run again. Asked of events as for
        `over`.
        """
        return False


class OfInstances:
    """The hooks of a part that changes for single instances what the plan says of their agents. One part at most has
    `changes`.
    """

    def changes(self, agent: str, key: str) -> LiveChanges | None:
        """What is changed of the specification of an instance; None: nothing. The part sends later changes itself."""
        return None

    def allows(self, agent: str, key: str) -> frozenset[str]:
        """The tools that an instance may call beside those of its agent."""
        return frozenset()

    def forget(self, agent: str, key: str) -> None:
        """The deletion of an instance is decided: forget what is kept of it."""


class OfHosts:
    """The hooks of a part in the life of tool hosts, for what it has asked them, and for what runs there."""

    def host_lost(self, host: Connection, now: float) -> None:
        """A tool host is gone, with all that ran there."""

    def host_ended(self, address: str, launch: int, now: float) -> None:
        """The supervisor saw a tool host end. Its connection may be unknown here."""

    def no_host(self, reason: str) -> None:
        """No tool host can be started."""

    def answered(self, host: Connection, frame: Frame, now: float) -> bool:
        """Whether this `reply` or `error` of a tool host answers a question of this part, which takes it then."""
        return False


def hooks_of(
    parts: Iterable[object], interface: type[K], hook: Callable[Concatenate[K, P], R]
) -> tuple[Callable[P, R], ...]:
    """The methods of those parts that have this hook of an interface: their class defines it anew."""
    name = hook.__name__
    mine = [part for part in parts if isinstance(part, interface)]
    return tuple(getattr(part, name) for part in mine if getattr(type(part), name) is not hook)


class Hooks:
    """The hooks of the parts that apply, in lists that stay the same objects."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._lists: list[tuple[list[Any], type[Any], Callable[..., Any]]] = []

    def of(self, interface: type[K], hook: Callable[Concatenate[K, P], R]) -> Sequence[Callable[P, R]]:
        """See hooks_of. The list is empty until the first `choose`."""
        found: list[Callable[P, R]] = []
        self._lists.append((found, interface, hook))
        return found

    def choose(self) -> None:
        """The plan is another one, or the journal was read: ask which parts apply."""
        parts = [part for part in self._parts if part.applies()]
        for found, interface, hook in self._lists:
            found[:] = hooks_of(parts, interface, hook)

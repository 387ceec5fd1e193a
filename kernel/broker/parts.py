"""The interface between the broker's core and its parts: the hooks that a part may have, and what the core gives it.

A part is an object that answers some frames and keeps some state. The core (router.py) makes the parts of features from
what the loader gives it, and calls the hooks that they have. A part has a hook if its class defines it: what is absent
is not called. The order of parts is the order in which their hooks are called.

Source: docs/design/features.md section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

from msgspec import Struct

from goondan.kernel.broker.bus import Bus
from goondan.kernel.broker.entities import Connection, Event, Handler
from goondan.schemas.frames import Frame, Hello
from goondan.schemas.launch import KernelPlan

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
    #: What else is told of it.
    more: Mapping[str, Any]


class Record(NamedTuple):
    """A kind of record in the journal."""

    #: What it looks like. The name of the feature is in its tag, and its first field is the event that it concerns
    #: (journal/records.py).
    struct: type[Struct]
    #: Takes over a record of an earlier broker: its subject, and itself. Events that are accepted before it are there.
    restore: Callable[[str, Any], None]


class Part:
    """The hooks of a part. Times are seconds on the broker's clock."""

    #: Frames that it takes.
    takes: Sequence[Take] = ()
    #: Questions that it answers.
    ops: Sequence[Op] = ()
    #: Words of the supervisor that it hears, by their types (schemas/control.py).
    hears: Mapping[type[Struct], Callable[[Any, float], None]] = {}

    #: Its records in the journal.
    records: Sequence[Record] = ()

    def resumed(self, now: float) -> None:
        """The whole journal was read: every record was restored."""

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


class Core(Protocol):
    """What the core gives a part."""

    @property
    def bus(self) -> Bus:
        """The state that all parts share."""

    def accepted(self, event: Event, kept: bool) -> None:
        """Act on a new event that a part has staged: the journal has it, or no room for it."""


#: Makes a part of a feature: `part` of its `broker.py`.
MakePart = Callable[[Core], Part]

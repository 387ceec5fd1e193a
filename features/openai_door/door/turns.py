"""The turns of requests: found their conversation, asked one after the other, and listened to until their end.

A request holds the lock of its instance from the moment at which its conversation is decided until its turn is over, so
what comes meanwhile is decided by what that turn has said. The broker would keep their order as well; but the second
one's history would not be known yet.

A turn whose client leaves is cancelled, as OpenAI's is, unless it was asked for in the background.

Source: docs/design/delivery.md section 2; rules/conversations.py.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from hashlib import sha256
from typing import Any, Final, Protocol
from weakref import WeakValueDictionary

from msgspec import Struct

from goondan.features.openai_door.door.known import Begun, Known
from goondan.features.openai_door.door.rules import conversations
from goondan.features.openai_door.door.rules.conversations import Place, Step
from goondan.features.openai_door.door.rules.faults import Fault, fault_of, refused
from goondan.features.openai_door.door.rules.pieces import Piece, Pieces
from goondan.features.openai_door.door.rules.requests import Asked, Attached
from goondan.features.serve.api import Caller, Swarm
from goondan.features.serve.api.progress import Position
from goondan.kernel.cli.one_message import Message
from goondan.kernel.cli.session import OpenFile
from goondan.schemas.bundle.address import MAX_INSTANCE_KEY, is_instance_key
from goondan.schemas.wire import blobs
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import Answer, FilePart
from goondan.schemas.wire.runtime_events import RuntimeEvent

#: What the keys of new instances begin with.
KEY: Final = "chat-"


class Shape(Protocol):
    """What a stream is written as."""

    def first(self) -> bytes:
        """What it begins with."""

    def piece(self, piece: Piece) -> bytes:
        """A piece of the answer."""


class Route(Struct, frozen=True):
    """Where a request goes, as the table says now."""

    #: The instance; "": a new one.
    instance: str
    #: What the agent is told there.
    step: Step
    #: The digest of all that the request says. None: it follows a response, and says only what is new.
    asked: bytes | None = None
    #: The digest of how its conversation begins.
    root: bytes | None = None


class Underway:
    """One turn. `ended` is called once, with the answer or with why there is none, before anybody is told; it returns
    the end of the stream.
    """

    def __init__(self, route: Route, event_id: str, shape: Shape | None) -> None:
        self.route = route
        self.event_id = event_id
        self._shape = shape
        self._head = b"" if shape is None else shape.first()
        self._pieces = Pieces()
        self._waiting: list[Piece] = []
        self._tail: bytes | None = None
        self._news = asyncio.Event()
        #: The answer of a completed turn.
        self.answer: Answer | None = None
        #: Why there is none.
        self.fault: Fault | None = None
        #: Set when there is something to tell, and when the turn is over.
        self.heard = asyncio.Event()
        self.over = asyncio.Event()

    @property
    def said(self) -> str:
        """All text that was heard."""
        return self._pieces.said

    def hear(self, kind: str, data: Any) -> None:
        """An event of the turn's stream."""
        if isinstance(data, RuntimeEvent):
            pieces = self._pieces.heard(kind, data.step, data.text or "", data.at, again=data.again)
        else:
            pieces = self._pieces.heard(kind, data.get("step", 0), data.get("text", ""), data.get("at", 0))
        self._add(pieces)

    def end(self, ended: Answer | Fault, last: Callable[[Underway], bytes]) -> None:
        """The turn is over. `last` makes the end of its stream."""
        if isinstance(ended, Answer):
            self.answer = ended
            self._add(self._pieces.ended(ended))
        else:
            self.fault = ended
        self._tail = self._written() + last(self)
        for event in (self.over, self.heard, self._news):
            event.set()

    async def stream(self, alive_s: float) -> AsyncIterator[bytes | None]:
        """What is to be sent, piece by piece. None: nothing has come for so many seconds."""
        yield self._head
        while self._tail is None:
            try:
                async with asyncio.timeout(alive_s):
                    await self._news.wait()
            except TimeoutError:
                yield None
            self._news.clear()
            if written := self._written():  # nothing, once there is a tail
                yield written
        yield self._tail

    def _add(self, pieces: Sequence[Piece]) -> None:
        if self._shape is None:
            return
        for piece in pieces:
            last = self._waiting[-1] if self._waiting else None
            if last is not None and last.kind == piece.kind and not piece.begins:  # its reader is slow
                self._waiting[-1] = Piece(last.kind, last.text + piece.text, last.begins)
            else:
                self._waiting.append(piece)
        if pieces:
            self.heard.set()
            self._news.set()

    def _written(self) -> bytes:
        pieces, self._waiting = self._waiting, []
        return b"" if self._shape is None else b"".join([self._shape.piece(piece) for piece in pieces])


class Turns:
    """All turns of the door. `refuses`: a history that was edited is refused, else it goes on in a new instance."""

    def __init__(self, swarm: Swarm, known: Known, *, refuses: bool = False) -> None:
        self._swarm = swarm
        self._known = known
        self._refuses = refuses
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(
        self,
        caller: Caller,
        asked: Asked,
        instance: str | None,
        event_id: str,
        shape: Shape | None,
        last: Callable[[Underway], bytes],
        accepted: Callable[[Begun, Underway], None] = lambda begun, turn: None,
    ) -> Underway:
        """Begin the turn of a request, when those before it in its conversation are over. `instance`: the one that it
        names. `accepted` is called when the broker has the message.

        Raises GoondanError, RefusedError.
        """
        with ExitStack() as held:
            route = await self._settled(caller, asked, instance, held)
            turn = Underway(route, event_id, shape)
            begun = await self._sent(caller, asked, turn)
            accepted(begun, turn)
            self._spawn(self._listen(turn, begun.place, last, held.pop_all()))
        return turn

    def leave(self, turn: Underway) -> None:
        """Nobody waits for this turn any more: it is cancelled, if it is not over."""
        if not turn.over.is_set():
            self._spawn(self._cancel(turn.event_id))

    async def cancel(self, event_id: str) -> None:
        """Cancel a turn, and wait until it has ended. Raises GoondanError."""
        await self._swarm.cancel(event_id)

    async def answer(self, event_id: str, place: tuple[str, str]) -> Answer | None:
        """How a turn has ended that another door had begun. None: it goes on. Raises GoondanError."""
        turn = await self._swarm.turn(event_id, place)
        return turn.answered.result() if turn.answered.done() else None

    # --- which conversation

    async def _settled(self, caller: Caller, asked: Asked, instance: str | None, held: ExitStack) -> Route:
        """The route of a request, when it is its turn. The lock of its instance is held by `held` then."""
        route = self._route(caller, asked, instance)
        while True:
            key = route.instance or KEY + os.urandom(8).hex()
            lock = self._locks.setdefault((asked.agent, key), asyncio.Lock())
            await lock.acquire()
            with ExitStack() as this:
                this.callback(lock.release)
                again = self._route(caller, asked, instance) if route.instance else route
                if again.instance == route.instance:
                    held.push(this.pop_all())
                    return Route(key, again.step, again.asked, again.root)
                route = again

    def _route(self, caller: Caller, asked: Asked, instance: str | None) -> Route:
        """Where a request goes. Raises RefusedError, GoondanError."""
        said = asked.said
        named = None if instance is None else self._known.named(caller.name, asked.agent, instance)
        if asked.previous is not None:
            return self._after(caller, asked, asked.previous)
        digests = conversations.chain(conversations.beginning(caller.name, asked.agent), said)
        root, whole = conversations.root(digests, said), digests[-1]
        for count in conversations.candidates(said):
            for place in self._found(caller, asked, digests[count], instance):
                step = conversations.went_on(place, said, count)
                if step is not None:
                    return Route(place.instance, step, whole, root)
        known = conversations.history(said)
        for place in self._found(caller, asked, digests[known - 1], instance) if known else []:
            if conversations.has_part(place, said):
                return Route(place.instance, conversations.goes_on(place, said[known:]), whole, root)
        if not known or (named is None and instance is not None):
            return Route(instance or "", conversations.begun(said, named), whole, root)
        if self._refuses and self._known.is_root(root):
            raise _edited("messages")
        return Route("", conversations.begun(said), whole, root)

    def _found(self, caller: Caller, asked: Asked, digest: bytes, instance: str | None) -> list[Place]:
        """The conversations whose tip this is, the named one first."""
        found = self._known.find(caller.name, asked.agent, digest)
        return sorted(found, key=lambda place: place.instance != instance)

    def _after(self, caller: Caller, asked: Asked, name: str) -> Route:
        """Where a request goes that follows a response."""
        kept = self._known.response(caller.name, name)
        if kept is None:
            message = f"Previous response with id '{name[:64]}' not found."
            raise refused(message, "previous_response_id", "previous_response_not_found")
        place, same = self._known.numbered(kept.number), kept.response["model"] == asked.agent
        if same and place is not None and place.turns == kept.turns:
            return Route(place.instance, conversations.begun(asked.said, place))
        if self._refuses and same:
            raise _edited("previous_response_id")
        earlier = self._known.up_to(caller.name, kept)
        if earlier is None:
            message = f"The conversation of '{name[:64]}' has gone on, and what was said before is not kept any more."
            raise refused(message, "previous_response_id", "previous_response_not_found")
        return Route("", conversations.begun(asked.said, earlier=earlier))

    # --- one turn

    async def _sent(self, caller: Caller, asked: Asked, turn: Underway) -> Begun:
        """Send the message, and note where its conversation is then. Raises GoondanError."""
        route = turn.route
        files = await self._laid_down(route.step.files)
        message = Message(asked.agent, route.instance, route.step.text, event_id=turn.event_id, files=files)
        told = conversations.instructions_of(asked.said)
        begun = self._known.begin(
            caller.name, asked.agent, route.instance, told=told, root=route.root, asked=route.asked
        )
        try:
            await self._swarm.begin(message)
        except GoondanError:
            self._known.take_back(begun)
            raise
        except asyncio.CancelledError:
            self._spawn(self._cancel(turn.event_id))
            raise
        return begun

    async def _listen(self, turn: Underway, place: Place, last: Callable[[Underway], bytes], held: ExitStack) -> None:
        with held:
            try:
                ended = await self._heard(turn)
            except GoondanError as error:
                ended = fault_of(error.info, begun=True)
            with suppress(GoondanError):  # then the next message begins a new instance
                self._note_end(turn, place, ended)
            turn.end(ended, last)

    async def _heard(self, turn: Underway) -> Answer | Fault:
        async for news in self._swarm.follow(turn.event_id, Position()):
            if news.kind != "answer":
                turn.hear(news.kind, news.data)
                continue
            answer: Answer = news.data
            if answer.status == "completed":
                return answer
            assert answer.error is not None
            return fault_of(answer.error, begun=True)
        raise AssertionError("a stream ends with an answer")

    def _note_end(self, turn: Underway, place: Place, ended: Answer | Fault) -> None:
        asked = turn.route.asked
        if isinstance(ended, Fault):
            self._known.end(place, [], answered=False, part=turn.said)
        elif asked is None:
            self._known.end(place, [], answered=True)
        else:
            texts = {ended.response or "", turn.said}
            tips = [conversations.after(asked, "assistant", text) for text in texts]
            self._known.end(place, tips, answered=True)

    async def _laid_down(self, files: Sequence[Attached]) -> list[FilePart]:
        """Lay the files of a message down. Raises GoondanError."""
        with ExitStack() as closing:
            opened = []
            for file in files:
                descriptor = os.memfd_create("attached", os.MFD_CLOEXEC)
                closing.callback(os.close, descriptor)
                view = memoryview(file.data)
                while view:
                    view = view[os.write(descriptor, view) :]
                media_type = blobs.media_type_of(file.data) or ""
                opened.append(OpenFile(descriptor, len(file.data), media_type, file.name or ""))
            return await self._swarm.lay_down(opened) if opened else []

    async def _cancel(self, event_id: str) -> None:
        with suppress(GoondanError):  # it is over, or the kernel is gone
            await self._swarm.cancel(event_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def instance_of_user(caller: str, user: str) -> str:
    """The instance that a `user` names. Those of different tokens never meet: the name of a token has no `@`."""
    key = f"{user}@{caller}"
    if len(key) <= MAX_INSTANCE_KEY and is_instance_key(key):
        return key
    return f"{sha256(user.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}@{caller}"


def _edited(param: str) -> Exception:
    message = (
        "This conversation was edited, or goes on from an earlier place. The owner of this swarm has it refused: begin "
        "a new one, or send it as it is."
    )
    return refused(message, param, "conversation_edited", 409)

"""The turns of requests: they find their conversation, are asked one after the other, and are listened to to their end.

A request holds the lock of its instance from the moment at which its conversation is decided until its turn is over, so
what comes meanwhile is decided by what that turn has said. The broker would keep their order as well; but the second
one's history would not be known yet.

A turn whose client leaves is cancelled, as OpenAI's is, unless it was asked for in the background.

Source: docs/design/delivery.md section 2; rules/conversations.py.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import ExitStack, aclosing, suppress
from hashlib import sha256
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from msgspec import Struct

from goondan.features.openai_door.door.known import Known
from goondan.features.openai_door.door.rules import answers, conversations
from goondan.features.openai_door.door.rules.conversations import Place
from goondan.features.openai_door.door.rules.faults import Fault, fault_of, refused
from goondan.features.openai_door.door.rules.pieces import Pieces
from goondan.features.openai_door.door.rules.requests import Asked, Said
from goondan.features.serve.api import Caller, Swarm
from goondan.features.serve.api.swarm import IDLE, Turn
from goondan.kernel.cli.one_message import Message
from goondan.kernel.traces.rules.progress import Position
from goondan.schemas.bundle.address import is_instance_key
from goondan.schemas.wire.blobs import MAX_REQUEST_BYTES
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import Answer

#: After how long without a piece a comment is sent (seconds). Proxies end connections after thirty.
ALIVE_S: Final = 15.0
#: So many bytes of a request are read at once: in a millisecond or two.
AT_ONCE: Final = 128 << 10
#: What a stream is written as.
Shape = answers.Completion | answers.Events
_T = TypeVar("_T")


class Route(Struct, frozen=True):
    """Where a request goes, as the table says now."""

    #: The instance; "": a new one.
    instance: str
    #: What the agent is told there.
    new: Sequence[Said]
    #: The digest of all that the request says. None: it follows a response, and says only what is new.
    asked: bytes | None = None
    #: The digest of how its conversation begins.
    root: bytes | None = None


class Underway:
    """A turn that has begun. `over` is called at its end, before anybody is told."""

    def __init__(self, turns: Turns, route: Route, turn: Turn, place: Place, held: ExitStack) -> None:
        self._turns = turns
        self._held = held
        self._turn = turn
        self._pieces = Pieces()
        self._news = turn.read(turns.swarm.state_dir, Position(), ALIVE_S)
        self.route = route
        self.event_id = turn.event_id
        self.place = place
        self.over: Callable[[Answer | Fault], None] = lambda ended: None
        #: How it has ended.
        self.ended: Answer | Fault | None = None

    async def end(self) -> Answer | Fault:
        """How the turn ends."""
        try:
            told = told_by(await asyncio.shield(self._turn.answered))
        except GoondanError as error:
            told = fault_of(error.info, begun=True)
        return self._end(told)

    def _end(self, told: Answer | Fault) -> Answer | Fault:
        if self.ended is None:
            self.ended = told
            with self._held, suppress(GoondanError):  # then the next message begins a new instance
                self.over(told)
                self._turns.note(self, self._pieces.said)
        return self.ended

    def leave(self, *, cancel: bool) -> None:
        """Nobody listens any more. `cancel`: then nobody wants it to go on."""
        if self.ended is None:
            self._turns.spawn(self.end())
            if cancel:
                self._turns.spawn(self._turns.cancel(self.event_id))

    async def stream(self, shape: Shape) -> AsyncIterator[bytes]:
        """The stream of the turn."""
        yield shape.first()
        told: Answer | Fault = Fault(500, "The stream of the turn has ended without its answer.", "E_INTERNAL")
        try:
            async with aclosing(self._news) as reading:
                async for news in reading:
                    if news is IDLE:
                        yield answers.ALIVE
                    elif news.kind == "answer":
                        told = told_by(news.data)
                        break
                    elif pieces := self._pieces.heard(news):
                        yield b"".join(map(shape.piece, pieces))
        except GoondanError as error:
            told = fault_of(error.info, begun=True)
        rest = b"".join(map(shape.piece, self._pieces.ended(told))) if isinstance(told, Answer) else b""
        self._end(told)
        yield rest + (shape.last(told) if isinstance(told, Answer) else shape.failed(told))


async def beside(size: int, work: Callable[..., _T], *given: Any) -> _T:
    """What some work on so many bytes gives. Much of it is done in a thread, and others are served meanwhile."""
    return work(*given) if size <= AT_ONCE else await asyncio.to_thread(work, *given)


def told_by(answer: Answer) -> Answer | Fault:
    """How a turn has ended that has this answer."""
    return answer if answer.error is None else fault_of(answer.error, begun=True)


class Turns:
    """All turns of the door. `refuses`: a history that was edited is refused, else it goes on in a new instance."""

    def __init__(self, swarm: Swarm, known: Known, *, refuses: bool = False) -> None:
        self.swarm = swarm
        self._known = known
        self._refuses = refuses
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def begin(self, caller: Caller, asked: Asked, instance: str | None, event_id: str) -> Underway:
        """Begin the turn of a request, when those before it in its conversation are over. `instance`: the one that it
        names. Raises GoondanError, RefusedError.
        """
        with ExitStack() as held:
            route = await self._settled(caller, asked, instance, held)
            files = await self.swarm.lay_down([(file.data, file.name) for file in conversations.files_of(route.new)])
            text = conversations.worded(route.new)
            if len(text) > MAX_REQUEST_BYTES:  # the broker says so as well, after more work
                raise refused(f"What is new has {len(text)} characters, limit {MAX_REQUEST_BYTES}.", status=413)
            message = Message(asked.agent, route.instance, text, event_id=event_id, files=files)
            told = conversations.instructions_of(asked.said)
            try:
                turn = await self.swarm.begin(message)
                place = self._known.begin(caller.name, asked.agent, route.instance, told, route.root, route.asked)
            except BaseException:
                self.spawn(self.cancel(event_id))
                raise
            return Underway(self, route, turn, place, held.pop_all())

    def note(self, turn: Underway, said: str) -> None:
        """A turn has ended of whose answer its client has heard `said`. Raises GoondanError."""
        asked, ended = turn.route.asked, turn.ended
        if isinstance(ended, Answer):
            texts = {ended.response or "", said or ended.response or ""} if asked is not None else set()
            tips = [conversations.after(asked or b"", Said("assistant", text)) for text in texts]
            self._known.end(turn.place, tips, answered=True)
        else:
            self._known.end(turn.place, [], answered=False, part=said)

    async def cancel(self, event_id: str) -> None:
        """Cancel a turn, and wait until it has ended, if it has not."""
        with suppress(GoondanError):
            await self.swarm.cancel(event_id)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do something beside, to its end."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- which conversation

    async def _settled(self, caller: Caller, asked: Asked, instance: str | None, held: ExitStack) -> Route:
        """The route of a request, when it is its turn. The lock of its instance is held by `held` then."""
        start = conversations.beginning(caller.name, asked.agent)
        digests = await beside(asked.size, conversations.chain, start, asked.said)
        while True:
            route = self._route(caller, asked, instance, digests)
            key = route.instance or f"chat-{os.urandom(8).hex()}"
            lock = self._locks.setdefault((asked.agent, key), asyncio.Lock())
            await lock.acquire()
            with ExitStack() as this:
                this.callback(lock.release)
                again = self._route(caller, asked, instance, digests) if route.instance else route
                if again.instance == route.instance:
                    held.push(this.pop_all())
                    return Route(key, again.new, again.asked, again.root)

    def _route(self, caller: Caller, asked: Asked, instance: str | None, digests: Sequence[bytes]) -> Route:
        """Where a request goes whose messages have these digests. Raises RefusedError, GoondanError."""
        if previous := asked.given.get("previous_response_id"):
            return self._after(caller, asked, previous)
        said, named = asked.said, None if instance is None else self._known.named(caller.name, asked.agent, instance)
        root, whole, known = conversations.root(digests, said), digests[-1], conversations.history(said)

        def found(digest: bytes) -> Iterable[Place]:
            places = self._known.find(caller.name, asked.agent, digest)
            return sorted(places, key=lambda place: place.instance != instance)

        for count in conversations.candidates(said):
            for place in found(digests[count]):
                if new := conversations.new_in(place, said, count):
                    return Route(place.instance, new, whole, root)
        for place in found(digests[known - 1]) if known else ():
            if conversations.has_part(place, said):
                return Route(place.instance, said[known:], whole, root)
        if not known or (named is None and instance is not None):
            return Route(instance or "", conversations.without_told(named, said), whole, root)
        if self._refuses and self._known.is_root(root):
            raise _edited("messages")
        return Route("", said, whole, root)

    def _after(self, caller: Caller, asked: Asked, name: str) -> Route:
        """Where a request goes that follows a response."""
        kept = self._known.response(caller.name, name)
        place = None if kept is None else self._known.numbered(kept.number)
        same = kept is not None and kept.response["model"] == asked.agent
        if kept is not None and place is not None and same and place.turns == kept.turns:
            return Route(place.instance, conversations.without_told(place, asked.said))
        if self._refuses and same:
            raise _edited("previous_response_id")
        earlier = None if kept is None else self._known.up_to(caller.name, kept)
        if earlier is None:
            message = f"Previous response with id '{name[:64]}' not found, or one before it is kept no more."
            raise refused(message, "previous_response_id", "previous_response_not_found")
        return Route("", [*earlier, *asked.said])


def instance_of_user(caller: str, user: str) -> str:
    """The instance that a `user` names. Those of different tokens never meet: the name of a token has no `@`."""
    key = f"{user}@{caller}"
    return key if is_instance_key(key) else f"{sha256(user.encode()).hexdigest()[:32]}@{caller}"


def _edited(param: str) -> Exception:
    message = "This conversation was edited, or goes on from an earlier place, and this swarm's owner has that refused."
    return refused(message, param, "conversation_edited", 409)

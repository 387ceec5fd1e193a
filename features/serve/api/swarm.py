"""The kernel behind the door: found when it is needed, and found again when it was stopped, restarted or replaced.

A message is sent under an event id, and whoever asks under the same id asks for the same turn: here, where it is one
Turn, and in the broker, which takes it for a repeat and gives the answer again. So a request outlives the kernel that
it was sent to, and a stream outlives the door.

A message that waits costs no credit of the link: the broker has accepted it then. So as many may wait as the broker
takes.

Source: docs/design/delivery.md section 2; docs/design/wire.md section 5.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Final, Self, TypeVar

from msgspec import Struct

from goondan.features.serve.api.gate import Way
from goondan.features.serve.api.rules.callers import Caller
from goondan.kernel.cli.attach import Kernel, hold
from goondan.kernel.cli.joined import Joined
from goondan.kernel.cli.observing import Missed, Seen
from goondan.kernel.cli.one_message import Message, event_frame
from goondan.kernel.cli.onlookers import LOOK_S, Onlookers
from goondan.kernel.cli.operator_question import NO_SUCH_QUESTION
from goondan.kernel.cli.session import GONE, WELCOME_S, Session, check_together, opened_data
from goondan.kernel.cli.state import BundleTarget
from goondan.kernel.traces import stored_turns
from goondan.kernel.traces.rules.progress import News, Position, Progress, Reader
from goondan.schemas.bundle.address import is_resource_name
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import Answer, FilePart, Frame
from goondan.schemas.wire.runtime_events import RuntimeEvent

_T = TypeVar("_T")

#: How long a message that was sent waits for a kernel that comes back (seconds): a stop and a start take a few.
RETURN_S: Final = 30.0
#: How long the broker's answer to a message whose time is over is waited for (seconds): it says what became of it.
LATE_S: Final = 5.0
#: How often a turn that was not begun here is looked for in its file, beside at its end (seconds).
POLL_S: Final = 2.0
#: How long a turn that is over is kept for readers that come back (seconds), and how many are.
LINGER_S: Final = 30.0
MAX_LINGERING: Final = 256
#: How long a list of agents is good (seconds).
AGENTS_S: Final = 5.0
#: Turns that run, or are read, at once.
MAX_TURNS: Final = 8192
#: News without a position that are kept for readers. One that is slower misses some.
MAX_NEWS: Final = 64
#: Text of one turn that is kept for readers (characters). Steps that all of them have got go then.
MAX_KEPT: Final = 1 << 20
#: The codes with which a kernel that is gone, or goes, ends a request that may be made again.
LOST: Final = (*GONE, "E_LINK_CLOSED", "E_TOKEN_INVALID")


#: Nothing has come for some time.
IDLE: Final = News("idle", None)


class Turn:
    """One message on its way: who waits for its answer, and who reads its stream."""

    def __init__(self, event_id: str, agent: str, instance: str, message: Message | None = None) -> None:
        self.event_id = event_id
        self.agent = agent
        self.instance = instance
        #: The message; None: it was not sent here.
        self.message = message
        #: Done when the broker has the message, with its trace.
        self.accepted: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        #: Done when the turn is over, with its answer.
        self.answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.progress = Progress()
        self.readers: list[Reader] = []
        self._news: deque[News] = deque(maxlen=MAX_NEWS)
        self._told = 0
        self._changed = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    def hear(self, event: RuntimeEvent) -> None:
        """A live event of the turn."""
        news = self.progress.hear(event)
        if news is not None:
            self._news.append(news)
            self._told += 1
        self._bound(event.step)
        self.change()

    def change(self) -> None:
        """Wake all readers."""
        self._changed.set()
        self._changed = asyncio.Event()

    def accept(self, frame: Frame) -> None:
        """The broker has the message."""
        if not self.accepted.done():
            self.accepted.set_result(frame.trace_id)

    def settle(self, answer: Answer | GoondanError) -> None:
        """The turn is over, or nothing more can be learned of it."""
        if isinstance(answer, GoondanError):
            for waiting in (self.accepted, self.answered):
                if not waiting.done():
                    waiting.set_exception(answer)
                    waiting.exception()  # perhaps nobody waits
        else:
            if not self.accepted.done():
                self.accepted.set_result(answer.trace_id)
            self.answered.set_result(answer)
            self.progress.end(answer, answer.response, answer.steps)
        self.change()

    async def read(self, state_dir: str, after: Position, idle_s: float | None = None) -> AsyncGenerator[News, None]:
        """What comes behind a position, to the answer; and IDLE whenever nothing has come for `idle_s` seconds. Raises
        GoondanError when nothing more can be learned.
        """
        reader, clock = Reader(after), asyncio.get_running_loop().time
        seen = self._told if after.step else 0
        self.readers.append(reader)
        try:
            told_at = clock()
            while True:
                changed = self._changed
                for news in self.progress.read(reader):
                    yield news
                    told_at = clock()
                    if news.kind == "answer":
                        return
                missed, seen = self._told - seen, self._told
                for news in list(self._news)[-missed:] if missed else ():
                    yield news
                    told_at = clock()
                if self.progress.wants_file:
                    self._read_file(state_dir)
                elif self._reading is None and self.answered.done() and (failed := self.answered.exception()):
                    raise failed
                self._bound(reader.position.step)
                try:
                    # What is heard may tell a reader nothing: where a piece was lost, its step waits for the file.
                    async with asyncio.timeout_at(None if idle_s is None else told_at + idle_s):
                        await changed.wait()
                except TimeoutError:
                    yield IDLE
                    told_at = clock()
        finally:
            self.readers.remove(reader)

    def _bound(self, step: int) -> None:
        """Keep no more text than may be kept: steps that all readers have got go, or, without a reader, those before
        `step`.
        """
        if self.progress.characters > MAX_KEPT:
            self.progress.drop_before(min((one.position.step for one in self.readers), default=step))

    def _read_file(self, state_dir: str) -> None:
        """Have the file read, unless it is being read."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._fill(state_dir))

    async def _fill(self, state_dir: str) -> None:
        with suppress(GoondanError):  # it cannot be read now; at the end readers are told what is missing
            await self.take_file(state_dir)
        self._reading = None
        self.change()

    async def take_file(self, state_dir: str) -> Answer | None:
        """Take over what the conversation file has. Returns the answer in it. Raises GoondanError E_STATE."""
        self.progress.begin_file()
        found = None
        try:
            found = await asyncio.to_thread(stored_turns.read_turn, state_dir, self.agent, self.instance, self.event_id)
        finally:
            self.progress.fill(found)
            self.change()
        return None if found is None else found.answer


class AgentRow(Struct, frozen=True):
    """An agent of the bundle."""

    #: Its name.
    agent: str
    #: Whether it gets the messages that name no agent.
    entry: bool


def _agents(place: BundleTarget) -> list[AgentRow]:
    from goondan.kernel.bundle.loader import Asking, open_bundle  # few ask for it

    asking = Asking(everything=True)
    plan = open_bundle(
        place.bundle, state_dir=place.state_dir, handlers=False, policy=place.policy, asking=asking, runs=False
    ).plan
    names = sorted(filter(is_resource_name, plan.agents), key=lambda name: (name != plan.entry_agent, name))
    return [AgentRow(name, name == plan.entry_agent) for name in names]


def _lay_down(session: Session, files: Sequence[tuple[bytes, str]]) -> list[FilePart]:
    with ExitStack() as closing:
        opened = [closing.enter_context(opened_data(data, name)) for data, name in files]
        check_together(opened)
        return session.lay_down(opened)


class Swarm:
    """The kernel of one bundle, for all requests of the door. Use it with `async with`; nothing is looked for then."""

    def __init__(self, place: BundleTarget) -> None:
        self.place = place
        #: The state of the bundle's workspace.
        self.state_dir = place.state_dir
        #: Who else knows a caller by the digest of a token: doors add theirs.
        self.callers: list[Callable[[bytes], Caller | None]] = []
        #: All ways of the door.
        self.ways: Sequence[Way] = ()
        self._joined = Joined(self._find)
        self._turns: dict[str, Turn] = {}
        #: Those who hear what happens in it.
        self.onlookers = Onlookers(self.session)
        # Turns that were not begun here, by their events, and what is set at their ends.
        self._watched: dict[str, tuple[Turn, asyncio.Event]] = {}
        self._agents: tuple[float, list[AgentRow]] | None = None
        self._ended: dict[str, None] = {}  # the turns that are over, the oldest first
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await self._joined.leave()

    # --- messages; each has its event id

    def ask(self, message: Message, timeout_s: float | None = None, *, new: bool = False) -> Awaitable[Answer]:
        """Send a message and wait for its answer, also over a restart of the kernel. The turn goes on when the waiting
        is cancelled. `new`: its event id was made for it, so nobody else can wait for the same here.

        Raises GoondanError: the broker's refusal, E_AGENT_TIMEOUT, E_KERNEL_NOT_RUNNING, E_KERNEL_STOPPED,
        E_KERNEL_LOST, E_OVERLOADED.
        """
        return self._ask(message, timeout_s) if new else asyncio.shield(self._begin(message, timeout_s).answered)

    async def begin(self, message: Message, timeout_s: float | None = None) -> Turn:
        """Send a message whose stream will be read; its turn, when the broker has accepted it. Raises the errors of
        `ask`.
        """
        turn = self._begin(message, timeout_s)
        await asyncio.shield(turn.accepted)
        return turn

    async def tell(self, message: Message) -> str | None:
        """Send a message and wait until it is accepted. Returns its trace, None where the broker no longer knows it.
        Raises the errors of `ask`.
        """
        if (turn := self._known(message)) is not None:
            return await asyncio.shield(turn.accepted)
        return await self._again(lambda session: session.tell(message, WELCOME_S))

    async def turn(self, event_id: str, place: tuple[str, str] | None = None) -> Turn:
        """The turn of a message that was sent, perhaps by another door. Raises GoondanError E_EVENT_NOT_FOUND."""
        if (turn := self._turns.get(event_id)) is not None:
            return turn
        found = await asyncio.to_thread(stored_turns.instance_of, self.state_dir, event_id)
        if found is None and place is not None and await self._waits(event_id, place):
            found = place
        if found is None:
            raise fail("E_EVENT_NOT_FOUND", f"no message {event_id[:100]!r} waits, is worked on or was answered")
        return self._turns.get(event_id) or self._start(Turn(event_id, *found), self._watch)

    async def cancel(self, event_id: str) -> str:
        """Cancel a message and wait until it has ended. Returns how it ended. Raises GoondanError E_EVENT_NOT_FOUND."""
        return await (await self.session()).cancel(event_id)

    async def admin(self, request: dict[str, Any]) -> dict[str, Any]:
        """Ask the broker itself. Raises GoondanError."""
        return await (await self.session()).admin(request)

    async def generation(self, agent: str) -> int:
        """From when on conversations of an agent count; 0 when no kernel runs, or nothing lets one begin anew. Raises
        GoondanError.
        """
        try:
            return int((await self.admin({"op": "generation", "agent": agent}))["generation"])
        except GoondanError as error:
            if error.info.code in ("E_KERNEL_NOT_RUNNING", NO_SUCH_QUESTION):
                return 0
            raise

    async def lay_down(self, files: Sequence[tuple[bytes, str]]) -> list[FilePart]:
        """Copy the files of a message, each its content and its name, to where its event names them.

        Raises GoondanError: E_FILE_INVALID, and the errors of Session.lay_down.
        """
        return await asyncio.to_thread(_lay_down, await self.session(), files) if files else []

    async def agents(self) -> list[AgentRow]:
        """The agents of the bundle, the entry agent first. Raises GoondanError when the bundle cannot be read."""
        now = asyncio.get_running_loop().time()
        if self._agents is None or self._agents[0] < now - AGENTS_S:
            self._agents = now, await asyncio.to_thread(_agents, self.place)
        return self._agents[1]

    async def session(self) -> Session:
        """The open session with the kernel. Raises GoondanError when none runs."""
        return await self._joined.session()

    async def entry_agent(self) -> str | None:
        """The agent that gets messages which name none. Raises GoondanError E_KERNEL_NOT_RUNNING."""
        await self.session()
        return None if self._joined.kernel is None else self._joined.kernel.entry_agent

    # --- turns

    def _known(self, message: Message) -> Turn | None:
        """The turn of a message that was sent here before. Raises GoondanError E_FRAME_INVALID, as the broker does."""
        turn = self._turns.get(message.event_id or "")
        if turn is not None and turn.message is not None:
            digest, known = (event_frame(one, turn.event_id, None).digest for one in (message, turn.message))
            if (message.agent, message.instance, digest) != (turn.agent, turn.instance, known):
                raise fail("E_FRAME_INVALID", f"{ID_IN_USE} another instance or another content")
        return turn

    def _begin(self, message: Message, timeout_s: float | None) -> Turn:
        if (turn := self._known(message)) is not None:
            return turn
        turn = Turn(message.event_id or "", message.agent, message.instance, message)
        return self._start(turn, lambda turn: self._ask(message, timeout_s, turn))

    def _start(self, turn: Turn, work: Callable[[Turn], Awaitable[Answer]]) -> Turn:
        if len(self._turns) - len(self._ended) >= MAX_TURNS:
            raise fail("E_OVERLOADED", f"{MAX_TURNS} messages are under way through this door, and no more may")
        self._turns[turn.event_id] = turn
        task = asyncio.ensure_future(self._run_turn(turn, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return turn

    async def _run_turn(self, turn: Turn, work: Callable[[Turn], Awaitable[Answer]]) -> None:
        try:
            turn.settle(await work(turn))
        except Exception as error:
            known = error if isinstance(error, GoondanError) else fail("E_INTERNAL", "it could not be followed")
            del self._turns[turn.event_id]  # who asks again is answered anew
            turn.settle(known)
            if known is not error:
                raise
            return
        if not turn.readers:
            del self._turns[turn.event_id]
            return
        self._ended[turn.event_id] = None
        while len(self._ended) > MAX_LINGERING:
            self._forget(next(iter(self._ended)))
        asyncio.get_running_loop().call_later(LINGER_S, self._forget, turn.event_id)

    def _forget(self, event_id: str) -> None:
        if event_id in self._ended:
            del self._ended[event_id], self._turns[event_id]

    def _ask(self, message: Message, timeout_s: float | None, turn: Turn | None = None) -> Awaitable[Answer]:
        hear, accept = (turn.hear, turn.accept) if turn else (None, None)
        ask = partial(Session.ask, message=message, listener=hear, on_accepted=accept, timeout_s=timeout_s)
        return self._again(ask, None if timeout_s is None else partial(ask, timeout_s=LATE_S))

    async def _watch(self, turn: Turn) -> Answer:
        """The answer of a message that another door, or another program, has sent. Its turn is observed; the answer is
        read when it has ended.
        """
        if (answer := await turn.take_file(self.state_dir)) is not None:
            return answer
        turn.accepted.set_result(None)
        ended = asyncio.Event()
        self._watched[turn.event_id] = turn, ended
        try:
            await self.onlookers.add(self._hear)  # without a kernel the turn is looked at now and then
            while True:
                waits = True
                if (answer := await turn.take_file(self.state_dir)) is None:
                    waits = await self._waits(turn.event_id, (turn.agent, turn.instance))
                if not waits:  # it may have ended just now
                    answer = await turn.take_file(self.state_dir)
                if answer is not None:
                    return answer
                if not waits:
                    raise fail("E_ANSWER_GONE", f"the message {turn.event_id[:100]!r} has ended, and no answer is kept")
                with suppress(TimeoutError):  # then it is time to look
                    async with asyncio.timeout(POLL_S):
                        await ended.wait()
                ended.clear()
        finally:
            del self._watched[turn.event_id]
            if not self._watched:
                self.onlookers.remove(self._hear)

    def _hear(self, heard: Seen | Missed) -> None:
        """What is heard of the turns that were not begun here. One onlooker is for all of them: there may be many."""
        if isinstance(heard, Missed):
            for turn, _ in self._watched.values():
                turn.progress.wants_file = True
                turn.change()
        elif heard.event is not None and (found := self._watched.get(heard.frame.event_id or "")) is not None:
            turn, ended = found
            if heard.event.kind == "event.ended":
                ended.set()
            elif heard.event.kind != "event.accepted":
                turn.hear(heard.event)

    async def _waits(self, event_id: str, place: tuple[str, str]) -> bool:
        """Whether a message waits for an instance, or is worked on."""
        asked = {"op": "events", "agent": place[0], "instanceKey": place[1]}
        listed = await self._again(lambda session: session.admin(dict(asked)))
        return bool(listed["more"]) or any(one["eventId"] == event_id for one in listed["events"])

    # --- the link

    async def _again(
        self, work: Callable[[Session], Awaitable[_T]], late: Callable[[Session], Awaitable[_T]] | None = None
    ) -> _T:
        """Do something that may be done again, until a kernel has lived long enough for it; and `late` when its time is
        over. Raises GoondanError when no kernel came back in time; at once when none was there.
        """
        loop = asyncio.get_running_loop()
        until = 0.0
        while True:
            try:
                session = self._joined.at_hand() or await self._joined.session()
            except GoondanError as error:
                if error.info.code not in (*LOST, "E_KERNEL_NOT_RUNNING") or loop.time() >= until:
                    raise
            else:
                try:
                    return await work(session)
                except GoondanError as error:
                    if error.info.code == "E_AGENT_TIMEOUT" and late is not None:
                        work, late = late, None
                        continue
                    if error.info.code not in LOST:
                        raise
                until = loop.time() + RETURN_S
            await asyncio.sleep(LOOK_S)

    def _find(self) -> Kernel:
        if (kernel := hold(self.place)) is None:
            raise fail("E_KERNEL_NOT_RUNNING", "no kernel runs the bundle of this door")
        return kernel


#: How the broker begins to say that an event id was used for something else (kernel/broker/routing/intake.py).
ID_IN_USE: Final = "the event id is in use for another sender,"

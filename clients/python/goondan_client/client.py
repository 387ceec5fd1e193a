"""What a program does with a running kernel, with asyncio (`Client`) and without (`BlockingClient`).

Source: clients/README.md has the names; PROTOCOL.md and PROTOCOL-OPERATORS.md the rules.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Literal, Self, TypedDict, TypeVar, Unpack

import msgspec

from goondan_client.errors import GoondanError
from goondan_client.files import Place, lay_down, write_blob
from goondan_client.frames import (
    AgentEvent,
    Answer,
    Approval,
    Frame,
    Instance,
    LiveEvent,
    ReplyTo,
    ToolResult,
    Usage,
    checked,
    opened,
    to_raw,
)
from goondan_client.link import Link, goes_by_file

#: How long a question is waited for unless the caller says otherwise (seconds).
DEADLINE_S: Final = 600.0
#: Live events that wait to be read. They are news: more of them are dropped.
MAX_NEWS: Final = 4096
#: How long a question to the broker itself is waited for (seconds).
ADMIN_S: Final = 30.0

T = TypeVar("T")


class Options(TypedDict, total=False):
    """What may be said about a message."""

    #: The conversation with the agent: a name; `default` without a word.
    instance: str
    #: Pictures and PDFs: paths, or contents.
    files: Sequence[str | os.PathLike[str] | bytes]
    #: How long it may take (seconds). None: as long as it takes. 600 without a word; of `send` None.
    deadline: float | None
    #: The event's id, 1 to 256 letters, digits, `_`, `-`, `.` and `:`. The same question with the same id is asked
    #: once, also after this program was started anew. Random without a word.
    event_id: str
    #: Where the turn works: an absolute path.
    workdir: str
    #: The trace that it belongs to: 32 hexadecimal digits.
    trace_id: str


class Client:
    """A connection to a running kernel, for one event loop. `connect` makes it.

    Methods raise GoondanError: what the kernel refuses, a failed answer, E_AGENT_TIMEOUT at the end of a deadline,
    E_LINK_CLOSED after `close`. A restart of the kernel is waited for, and what is unanswered is sent again: it is
    worked on once. Who cancels the task that asks, cancels the turn.
    """

    def __init__(self, place: Place) -> None:
        self._link = Link(place)
        self._run = os.urandom(8).hex()
        self._count = 0
        self._usage = Usage()

    async def open(self, timeout: float) -> Self:
        """Connect. Raises GoondanError: E_KERNEL_NOT_RUNNING, E_BROKER_UNTRUSTED, E_TOKEN_INVALID, E_VERSION."""
        await self._link.open(timeout)
        return self

    async def close(self) -> None:
        """Leave. What was accepted goes on."""
        await self._link.close()

    # --- agents

    async def ask(
        self, agent: str, text: str, *, schema: type[Any] | None = None, **options: Unpack[Options]
    ) -> Answer:
        """Ask an agent and wait for its answer. `schema`: the type of `Answer.object`, or E_OUTPUT_INVALID."""
        frame, deadline = await self._event(agent, "user.message", text, options)
        return self._checked(self._answer(await self._answered(frame, deadline)), schema)

    async def stream(
        self, agent: str, text: str, *, schema: type[Any] | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[LiveEvent | Answer, None]:
        """Ask, and hear of the turn while it runs. The last item is the answer. Any other may be lost."""
        frame, deadline = await self._event(agent, "user.message", text, options)
        frame.live = True
        news: deque[LiveEvent] = deque()
        rung = asyncio.Event()

        def listener(said: Frame) -> None:
            if len(news) < MAX_NEWS:
                event = opened(said.payload, LiveEvent)
                checked(event.wait)
                news.append(event)
                rung.set()

        asking = asyncio.ensure_future(self._answered(frame, deadline, listener))
        asking.add_done_callback(lambda _: rung.set())
        try:
            while not asking.done() or news:
                if not news:
                    await rung.wait()
                rung.clear()
                while news:
                    yield news.popleft()
            yield self._checked(self._answer(asking.result()), schema)
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait((asking,))

    async def send(self, agent: str, text: str, **options: Unpack[Options]) -> str:
        """Ask without waiting for the answer. Returns the event's id when the kernel has accepted it."""
        frame, deadline = await self._event(agent, "user.message", text, {"deadline": None, **options}, answer=False)
        await self._answered(frame, deadline)
        return frame.event_id or ""

    async def call(
        self,
        tool: str,
        args: dict[str, Any],
        *,
        agent: str = "_operator",
        instance: str = "default",
        deadline: float | None = DEADLINE_S,
    ) -> ToolResult:
        """Call a tool: one of the bundle, or with `agent` one of that agent's catalog, by its rules. A tool's error is
        raised.
        """
        options: Options = {"instance": instance, "deadline": deadline}
        frame, left = await self._event(agent, "operator.call", {"tool": tool, "args": args}, options)
        result = opened(self._answer(await self._answered(frame, left)).output, ToolResult)
        checked([result.output, result.receipt])
        if result.status == "error":
            raise _raised(result.error, "E_TOOL", f"{tool} failed without a word")
        return result

    async def cancel(self, agent: str | None = None, *, instance: str = "default", event_id: str | None = None) -> str:
        """End an event, or what an instance works on. Returns how it ended when it has: `cancelled`, or `done`,
        `failed`, `expired`, `dead` where it was over before. Raises GoondanError E_EVENT_NOT_FOUND.
        """
        if event_id is None:
            listed = await self._admin({"op": "events", "agent": agent, "instanceKey": instance})
            if not listed.get("events"):
                raise GoondanError("E_EVENT_NOT_FOUND", f"{agent}/{instance} works on nothing")
            event_id = str(listed["events"][0]["eventId"])
        return str((await self._admin({"op": "cancel", "eventId": event_id}, None)).get("state"))

    # --- the kernel

    async def approvals(self) -> list[Approval]:
        """What waits for a person, the oldest first."""
        return _list((await self._admin({"op": "approve.list"})).get("items"), Approval)

    async def decide(
        self, id: str, decision: Literal["yes", "no", "answer"], *, reason: str | None = None, answer: Any = None
    ) -> str:
        """Decide about an item by its id or code; `answer` is a question's. Returns its state."""
        asked = {"op": "approve.answer", "id": id, "decision": decision, "reason": reason}
        told = await self._admin({**asked, "answer": answer} if decision == "answer" else asked)
        return str(told.get("state"))

    async def instances(self) -> list[Instance]:
        """The instances of agents that run."""
        peers = (await self._admin({"op": "peers"})).get("peers") or ()
        return _list([peer for peer in peers if peer.get("role") == "agent"], Instance)

    def usage(self) -> Usage:
        """What the turns have used whose answers this client was given. `gdn usage` has all of the bundle."""
        return msgspec.structs.replace(self._usage)

    # --- inside

    async def _event(
        self, agent: str, kind: str, said: Any, options: Options, answer: bool = True
    ) -> tuple[Frame, float | None]:
        welcome = self._link.welcome
        instance = options.get("instance", "default")
        given = options.get("event_id")
        if given is None:
            self._count += 1
        event_id = given or f"{self._run}-{self._count}"
        deadline = options.get("deadline", DEADLINE_S)
        event = AgentEvent(id=event_id, type=kind, created_at=datetime.now(UTC).isoformat(), input=said)
        frame = Frame(type="event", to=agent, instance_key=instance, event_id=event_id, payload=to_raw(event))
        if answer:
            frame.reply_to = ReplyTo("client", event_id)
        if options.keys() & {"workdir", "trace_id"}:
            frame.workdir, frame.trace_id = options.get("workdir"), options.get("trace_id")
        durable = welcome.durability == "power"
        if files := options.get("files"):
            frame.files = await self._link.in_thread(lay_down, welcome.blobs, files, durable)
        if given is not None:  # the payload has the time; what is meant is the same at any time
            same = [kind, said, [part.blob.digest for part in frame.files or ()]]
            frame.digest = hashlib.sha256(memoryview(to_raw(same))).hexdigest()
        payload = memoryview(frame.payload)
        if goes_by_file(payload, welcome):
            frame.blob = await self._link.in_thread(write_blob, welcome.blobs, payload, durable)
            frame.payload = msgspec.Raw(b"\xc0")
        return frame, deadline

    async def _answered(
        self, frame: Frame, deadline: float | None, listener: Callable[[Frame], None] | None = None
    ) -> Frame:
        entry, waiter = self._link.submit(frame, deadline, listener)
        try:
            return await waiter
        except asyncio.CancelledError:
            if self._link.forget(entry) and frame.type == "event":
                self._give_up(frame)
            raise

    def _give_up(self, frame: Frame) -> None:
        """Ask for the end of an event that nobody waits for any more. Nobody waits for that, either."""
        wish = Frame(type="admin", payload=to_raw({"op": "cancel", "eventId": frame.event_id}))
        _, ended = self._link.submit(wish, None)
        ended.add_done_callback(lambda one: one.cancelled() or one.exception())

    def _answer(self, frame: Frame) -> Answer:
        answer = opened(frame.payload, AgentEvent).answer
        if answer is None:
            raise GoondanError("E_AGENT_FAILED", "the agent's answer is empty")
        if answer.usage is not None:
            self._add(answer.usage)
        if answer.status == "failed":
            raise _raised(answer.error, "E_AGENT_FAILED", "the agent failed without a word")
        if answer.object is not None:
            checked(answer.object)
        answer.event_id = (frame.event_id or "").removesuffix(":answer")
        return answer

    def _checked(self, answer: Answer, schema: type[Any] | None) -> Answer:
        if schema is not None:
            try:
                answer.object = msgspec.convert(answer.object, schema)
            except msgspec.ValidationError as error:
                hint = "Give the agent a `spec.output.schema` that says the same."
                raise GoondanError("E_OUTPUT_INVALID", f"the answer's object is another: {error}", hint) from None
        return answer

    def _add(self, used: Usage) -> None:
        total = self._usage
        for name in (
            "input_tokens",
            "output_tokens",
            "cached_tokens",
            "cache_write_tokens",
            "reasoning_tokens",
            "model_calls",
        ):
            setattr(total, name, getattr(total, name) + getattr(used, name))
        if used.cost is not None:
            total.cost, total.currency = (total.cost or 0.0) + used.cost, used.currency

    async def _admin(self, request: dict[str, Any], deadline: float | None = ADMIN_S) -> dict[str, Any]:
        frame = await self._answered(Frame(type="admin", payload=to_raw(request)), deadline)
        return opened(frame.payload, dict)


def _raised(error: Any, code: str, message: str) -> GoondanError:
    return GoondanError(code, message) if error is None else error.as_exception(code)


def _list(rows: Any, kind: type[T]) -> list[T]:
    try:
        return msgspec.convert(rows or [], list[kind])  # type: ignore[valid-type]
    except msgspec.ValidationError as error:
        raise GoondanError("E_FRAME_INVALID", f"the kernel's answer is no list of {kind.__name__}: {error}") from None


class BlockingClient:
    """The same for programs without asyncio, and for any number of threads. Each method waits for its result."""

    def __init__(self, place: Place) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = Client(place)
        self._thread = threading.Thread(target=self._loop.run_forever, name="goondan", daemon=True)
        self._thread.start()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._thread.is_alive():
            work.close()
            raise GoondanError("E_LINK_CLOSED", "the connection to the kernel is closed", "Connect again.")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupt: the turn is cancelled
            raise

    def open(self, timeout: float) -> Self:
        """Connect: see Client.open."""
        try:
            self._do(self._client.open(timeout))
        except BaseException:
            self._stop()
            raise
        return self

    def close(self) -> None:
        """Leave. A second call does nothing."""
        if self._thread.is_alive():
            self._do(self._client.close())
            self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def ask(self, agent: str, text: str, *, schema: type[Any] | None = None, **options: Unpack[Options]) -> Answer:
        """See Client.ask."""
        return self._do(self._client.ask(agent, text, schema=schema, **options))

    def stream(
        self, agent: str, text: str, *, schema: type[Any] | None = None, **options: Unpack[Options]
    ) -> Generator[LiveEvent | Answer, None, None]:
        """See Client.stream."""
        items = self._client.stream(agent, text, schema=schema, **options)

        async def following() -> LiveEvent | Answer | None:
            return await anext(items, None)

        try:
            while (item := self._do(following())) is not None:
                yield item
        finally:
            self._do(_closed(items))

    def send(self, agent: str, text: str, **options: Unpack[Options]) -> str:
        """See Client.send."""
        return self._do(self._client.send(agent, text, **options))

    def call(
        self,
        tool: str,
        args: dict[str, Any],
        *,
        agent: str = "_operator",
        instance: str = "default",
        deadline: float | None = DEADLINE_S,
    ) -> ToolResult:
        """See Client.call."""
        return self._do(self._client.call(tool, args, agent=agent, instance=instance, deadline=deadline))

    def cancel(self, agent: str | None = None, *, instance: str = "default", event_id: str | None = None) -> str:
        """See Client.cancel."""
        return self._do(self._client.cancel(agent, instance=instance, event_id=event_id))

    def approvals(self) -> list[Approval]:
        """See Client.approvals."""
        return self._do(self._client.approvals())

    def decide(
        self, id: str, decision: Literal["yes", "no", "answer"], *, reason: str | None = None, answer: Any = None
    ) -> str:
        """See Client.decide."""
        return self._do(self._client.decide(id, decision, reason=reason, answer=answer))

    def instances(self) -> list[Instance]:
        """See Client.instances."""
        return self._do(self._client.instances())

    def usage(self) -> Usage:
        """See Client.usage."""
        return self._client.usage()


async def _closed(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()


class Connecting:
    """A connection that is about to be made: `async with` gives a Client, `with` a BlockingClient."""

    def __init__(self, place: Place, timeout: float) -> None:
        self._place = place
        self._timeout = timeout
        self._made: Client | None = None
        self._blocking: BlockingClient | None = None

    async def __aenter__(self) -> Client:
        self._made = await Client(self._place).open(self._timeout)
        return self._made

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._made is not None:
            await self._made.close()

    def __enter__(self) -> BlockingClient:
        self._blocking = BlockingClient(self._place).open(self._timeout)
        return self._blocking

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._blocking is not None:
            self._blocking.close()


def connect(
    bundle: str | os.PathLike[str] | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    timeout: float = 10.0,
) -> Connecting:
    """The kernel that runs: in `run_dir`, else that of `bundle`, else in GOONDAN_RUN_DIR, else that of the bundle in
    the folder that the program stands in. `timeout`: how long its welcome may take (seconds).

    Use it with `async with` or with `with`, which raise GoondanError: E_KERNEL_NOT_RUNNING, E_BROKER_UNTRUSTED,
    E_TOKEN_INVALID, E_VERSION.
    """
    return Connecting(Place(bundle, run_dir), timeout)

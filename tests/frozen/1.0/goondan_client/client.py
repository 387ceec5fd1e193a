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
from concurrent.futures import CancelledError
from contextlib import suppress
from datetime import UTC, datetime
from functools import update_wrapper
from typing import Any, Concatenate, Final, Literal, ParamSpec, Self, TypedDict, TypeVar, Unpack

import msgspec
from msgspec import Raw

from goondan_client.errors import GoondanError
from goondan_client.files import Place, lay_down, write_blob
from goondan_client.frames import AgentEvent, Answer, Frame, LiveEvent, ToolResult, Usage, checked, opened, packed
from goondan_client.link import Link
from goondan_client.machine import Entry

#: How long a question is waited for unless the caller says otherwise (seconds).
DEADLINE_S: Final = 600.0
#: Live events that wait to be read. They are news: more of them are dropped.
MAX_NEWS: Final = 4096
#: How long a question to the broker itself is waited for (seconds).
ADMIN_S: Final = 30.0

T = TypeVar("T")
P = ParamSpec("P")
#: The type that an answer's object must have. None: any will do.
Schema = type[Any] | None


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
    #: The working directory of its tools: an absolute path. The instance's own without a word.
    workdir: str
    #: The trace that it belongs to: 32 hexadecimal digits. A new one without a word.
    trace_id: str


class Client:
    """A connection to a running kernel, for one event loop: what `async with connect()` gives.

    Methods raise GoondanError: what the kernel refuses, a failed answer, E_AGENT_TIMEOUT at the end of a deadline,
    E_LINK_CLOSED after the end. A restart of the kernel is waited for, and what is unanswered is sent again: it is
    worked on once. Who cancels the task that asks, cancels the turn.
    """

    def __init__(self, place: Place, timeout: float) -> None:
        self._link = Link(place)
        self._timeout = timeout
        self._run, self._count = os.urandom(8).hex(), 0
        self._usage = Usage()
        self._blocking: BlockingClient | None = None

    async def __aenter__(self) -> Self:
        await self._link.open(self._timeout)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._link.close()

    def __enter__(self) -> BlockingClient:
        self._blocking = BlockingClient(self)
        return self._blocking

    def __exit__(self, *error: object) -> None:
        if self._blocking is not None:
            self._blocking.close()

    # --- agents

    async def ask(self, agent: str, text: str, *, schema: Schema = None, **options: Unpack[Options]) -> Answer:
        """Ask an agent and wait for its answer. `schema`: the type of `Answer.object`, or E_OUTPUT_INVALID."""
        return self._answer(await self._asked(agent, "user.message", text, options), schema)

    async def stream(
        self, agent: str, text: str, *, schema: Schema = None, **options: Unpack[Options]
    ) -> AsyncGenerator[LiveEvent | Answer, None]:
        """Ask, and hear of the turn while it runs. The last item is the answer. Any other may be lost."""
        news: deque[LiveEvent] = deque(maxlen=MAX_NEWS)
        rung = asyncio.Event()

        def listener(said: Frame) -> None:
            news.append(opened(said.payload, LiveEvent))
            rung.set()

        frame = await self._event(agent, "user.message", text, options)
        frame["live"] = True
        entry, waiter = self._link.submit(frame, options.get("deadline", DEADLINE_S), listener)
        waiter.add_done_callback(lambda _: rung.set())
        try:
            while not waiter.done() or news:
                await rung.wait()
                rung.clear()
                while news:
                    yield news.popleft()
            yield self._answer(waiter.result(), schema)
        finally:
            self._give_up(entry)

    async def send(self, agent: str, text: str, **options: Unpack[Options]) -> str:
        """Ask without waiting for the answer. Returns the event's id when the kernel has accepted it."""
        options = {"deadline": None, **options}
        return (await self._asked(agent, "user.message", text, options, answer=False)).event_id or ""

    async def call(
        self, tool: str, args: dict[str, Any], *, agent: str = "_operator", **options: Unpack[Options]
    ) -> ToolResult:
        """Call a tool: one of the bundle, or with `agent` one of that agent's catalog, by its rules. A tool's error is
        raised.
        """
        answered = await self._asked(agent, "operator.call", {"tool": tool, "args": args}, options)
        result = opened(self._answer(answered, None).output, ToolResult)
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

    async def approvals(self) -> list[dict[str, Any]]:
        """What waits for a person, the oldest first: each with `id`, `code`, `kind`, `agent`, `instanceKey`,
        `eventId`, `tool`, `args`, and the other fields of the schemas' ApprovalItem.
        """
        return list((await self._admin({"op": "approve.list"})).get("items") or ())

    async def decide(
        self, id: str, decision: Literal["yes", "no", "answer"], *, reason: str | None = None, answer: Any = None
    ) -> str:
        """Decide about an item by its id or code; `answer` is a question's. Returns its state."""
        asked = {"op": "approve.answer", "id": id, "decision": decision, "reason": reason}
        told = await self._admin({**asked, "answer": answer} if decision == "answer" else asked)
        return str(told.get("state"))

    async def instances(self) -> list[dict[str, Any]]:
        """The instances of agents that run: each with `agent`, `instanceKey`, `pid`, `startedMs` (CLOCK_BOOTTIME)."""
        peers = (await self._admin({"op": "peers"})).get("peers") or ()
        return [{"agent": peer.pop("name"), **peer} for peer in peers if peer.pop("role") == "agent"]

    def usage(self) -> Usage:
        """What the turns have used whose answers this client was given; money of the first currency only. `gdn usage`
        has all of the bundle.
        """
        return msgspec.structs.replace(self._usage)

    # --- inside

    async def _asked(self, agent: str, kind: str, said: Any, options: Options, answer: bool = True) -> Frame:
        """Send an event, and give the frame that answers it."""
        frame = await self._event(agent, kind, said, options, answer)
        return await self._answered(frame, options.get("deadline", DEADLINE_S))

    async def _event(self, agent: str, kind: str, said: Any, options: Options, answer: bool = True) -> dict[str, Any]:
        """The frame of an event, its files and its large payload laid down."""
        self._count += 1
        given, welcome = options.get("event_id"), self._link.welcome
        event_id = given or f"{self._run}-{self._count}"
        payload = packed({"id": event_id, "type": kind, "createdAt": datetime.now(UTC).isoformat(), "input": said})
        frame: dict[str, Any] = {"type": "event", "to": agent, "eventId": event_id, "payload": Raw(payload)}
        frame["instanceKey"] = options.get("instance", "default")
        more = {"workdir": options.get("workdir"), "traceId": options.get("trace_id")}
        frame.update({name: option for name, option in more.items() if option is not None})
        if answer:
            frame["replyTo"] = {"target": "client", "correlationId": event_id}
        durable = welcome.durability == "power"
        if files := options.get("files"):
            frame["files"] = await self._link.in_thread(lay_down, welcome.blobs, files, durable)
        if given is not None:  # the payload has the time; what is meant is the same at any time
            same = packed([kind, said, [part["blob"].digest for part in frame.get("files", ())]])
            frame["digest"] = hashlib.sha256(same).hexdigest()
        if welcome.by_file(len(payload)):
            del frame["payload"]
            frame["blob"] = await self._link.in_thread(write_blob, welcome.blobs, payload, durable)
        return frame

    async def _answered(self, frame: dict[str, Any], deadline: float | None) -> Frame:
        entry, waiter = self._link.submit(frame, deadline)
        try:
            return await waiter
        finally:
            self._give_up(entry)  # what is answered is not open any more

    def _give_up(self, entry: Entry) -> None:
        """Nobody waits for it any more. An event that may have gone out is cancelled; nobody waits for that, either."""
        if entry.waiter.done() and not entry.waiter.cancelled():
            entry.waiter.exception()  # seen: whoever left a stream does not ask for it
        if self._link.machine.give_up(entry) and entry.frame["type"] == "event":
            wish = {"type": "admin", "payload": {"op": "cancel", "eventId": entry.frame["eventId"]}}
            self._link.submit(wish, None)[1].add_done_callback(lambda one: one.cancelled() or one.exception())

    def _answer(self, frame: Frame, schema: Schema) -> Answer:
        answer = opened(frame.payload, AgentEvent).answer
        if answer is None:
            raise GoondanError("E_AGENT_FAILED", "the agent's answer is empty")
        if (used := answer.usage) is not None:
            if (total := self._usage).cost is None:
                total.currency = used.currency
            for name in Usage.__struct_fields__[:-1]:
                more = getattr(used, name)
                if more is not None and (name != "cost" or used.currency == total.currency):
                    setattr(total, name, (getattr(total, name) or 0) + more)
        if answer.status == "failed":
            raise _raised(answer.error, "E_AGENT_FAILED", "the agent failed without a word")
        if answer.object is not None:
            checked(answer.object)
        if schema is not None:
            try:
                answer.object = msgspec.convert(answer.object, schema)
            except msgspec.ValidationError as error:
                hint = "Give the agent a `spec.output.schema` that says the same."
                raise GoondanError("E_OUTPUT_INVALID", f"the answer's object is another: {error}", hint) from None
        answer.event_id = (frame.event_id or "").removesuffix(":answer")
        return answer

    async def _admin(self, request: dict[str, Any], deadline: float | None = ADMIN_S) -> dict[str, Any]:
        frame = await self._answered({"type": "admin", "payload": Raw(packed(request))}, deadline)
        return opened(frame.payload, dict)


def _raised(error: Any, code: str, message: str) -> GoondanError:
    return GoondanError(code, message) if error is None else error.as_exception(code)


def _blocking(
    method: Callable[Concatenate[Client, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingClient, P], T]:
    """The same method of a BlockingClient."""

    def waiting(self: BlockingClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.wait_for(method(self.client, *args, **kwargs))

    update_wrapper(waiting, method)
    return waiting


class BlockingClient:
    """The same without asyncio, for any number of threads: what `with connect()` gives. Each method waits for its
    result. An interrupt cancels the turn.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self._lock, self._closed = threading.Lock(), False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="goondan", daemon=True)
        self._thread.start()
        try:
            self.wait_for(client.__aenter__())
        except BaseException:
            self._stop()
            raise

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine in the client's loop."""
        closed = GoondanError("E_LINK_CLOSED", "the connection to the kernel is closed", "Connect again.")
        with self._lock:  # what comes before `close` is ended by it
            if self._closed:
                work.close()
                raise closed
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise closed from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Leave. What was accepted goes on. A second call does nothing."""
        with self._lock:
            again, self._closed = self._closed, True
        if not again:
            try:
                asyncio.run_coroutine_threadsafe(self._leave(), self._loop).result()
            finally:
                self._stop()

    async def _leave(self) -> None:
        """Close, and end what other threads wait for: a loop that has stopped ends nothing."""
        await self.client.__aexit__()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    ask = _blocking(Client.ask)
    send = _blocking(Client.send)
    call = _blocking(Client.call)
    cancel = _blocking(Client.cancel)
    approvals = _blocking(Client.approvals)
    decide = _blocking(Client.decide)
    instances = _blocking(Client.instances)

    def stream(
        self, agent: str, text: str, *, schema: Schema = None, **options: Unpack[Options]
    ) -> Generator[LiveEvent | Answer, None, None]:
        """See Client.stream."""
        items = self.client.stream(agent, text, schema=schema, **options)

        async def following() -> LiveEvent | Answer | None:
            return await anext(items, None)

        async def ended() -> None:
            await items.aclose()

        try:
            while (item := self.wait_for(following())) is not None:
                yield item
        finally:
            with suppress(GoondanError):  # closed: there is nothing left to cancel
                self.wait_for(ended())

    def usage(self) -> Usage:
        """See Client.usage."""
        return self.client.usage()


def connect(
    bundle: str | os.PathLike[str] | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    timeout: float = 10.0,
) -> Client:
    """The kernel that runs: in `run_dir`, else that of `bundle`, else in GOONDAN_RUN_DIR, else that of the bundle in
    the folder that the program stands in. `timeout`: how long its welcome may take (seconds).

    Use it once, with `async with` or with `with`. They raise GoondanError: E_KERNEL_NOT_RUNNING, E_BROKER_UNTRUSTED,
    E_TOKEN_INVALID, E_VERSION.
    """
    return Client(Place(bundle, run_dir), timeout)

"""One agent process: a link, the events that come over it one after another, and the ways to leave.

How it leaves.
- It was idle for long enough: it sends `bye`, and the broker alone decides.
- `shutdown` or SIGTERM: the running turn goes on to its next step boundary, or until the granted time is over, if there
  is a limit. Then the process releases everything unfinished, its extensions clean up, and it sends `shutdown_ack` and
  exits 0.
- The broker refused the link: the process exits 1.

Source: docs/design/processes.md section 6; requirement IPC-07.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from typing import Any, Final

from goondan.agentproc.calls.asks import unsent_answer
from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.machine.questions import describe_late
from goondan.agentproc.start.log import KnownSecrets, configure_log
from goondan.agentproc.turn.instance import Instance
from goondan.agentproc.turn.runner import TurnRunner
from goondan.schemas.bundle import address, launch
from goondan.schemas.system.startup import report_failure, report_ready
from goondan.schemas.transport import TRANSPORTS, Transport
from goondan.schemas.transport.link import Link
from goondan.schemas.wire import codec, errors
from goondan.schemas.wire.frames import OPERATOR_AGENT, ORCHESTRATOR, ErrorPayload, Frame, Lease, Shutdown, Welcome

#: How long after SIGTERM everything must be released (seconds). The supervisor kills agents 3 s into a stop: by then
#: the broker must have its events back, instead of learning from a death that they are free.
TERM_GRACE_S: Final = 2.5
#: The part of the grace that is kept for the frames that release events (seconds); at most half of the grace.
RELEASE_S: Final = 1.0
#: How soon an idle process that has no broker looks again (seconds).
RECHECK_S: Final = 1.0
#: How many messages of the operator agent are kept. No model reads its history.
OPERATOR_MESSAGES: Final = 1000
#: How long queued frames may take to leave when the process ends (seconds).
LINGER_S: Final = 0.5

log = logging.getLogger("agentproc")


class AgentApp:
    """One agent process. `run` is its whole life. `broker_uid` is the user of the broker, None for our own user. The
    log hides `secrets`. `transport` is that of the link.
    """

    def __init__(
        self,
        endpoint: str,
        broker_uid: int | None = None,
        transport: str | Callable[..., Transport] = TRANSPORTS[0],
    ) -> None:
        self.secrets = KnownSecrets()
        self._inbox: deque[Frame] = deque()
        self._wake = asyncio.Event()
        self._runner: TurnRunner | None = None
        self._early: list[Frame] = []  # what came with the welcome, for the runner
        self._working: asyncio.Task[None] | None = None
        self._context: Context | None = None  # as the extensions have left it; None: no event may be worked on
        self._bye: asyncio.Future[Frame] | None = None
        self._shutdown: Frame | None = None
        self._leaving = False
        self._leave_at: float | None = None  # while leaving: when everything must be released; None: no limit
        self._cut_at: float | None = None  # before that: when a step that still runs is cut off
        self.link = Link(
            endpoint,
            "",
            on_frame=self._on_frame,
            on_welcome=self._on_welcome,
            on_unsent=self._on_unsent,
            on_late=lambda frame: log.warning("%s", describe_late(frame)),
            broker_uid=broker_uid,
            held=self._held,
            transport=transport,
        )

    async def run(self, token: str, ready: Callable[[], None] | None = None) -> int:
        """Serve until it is time to leave, also because of a signal, and return the exit status. `ready` is called when
        the broker has welcomed us.

        Raises GoondanError when there is no welcome.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._terminate)
        loop.add_signal_handler(signal.SIGINT, self._terminate)
        return await self.live(token, ready)

    async def live(self, token: str, ready: Callable[[], None] | None = None) -> int:
        """The same in a process whose signals are somebody else's."""
        welcome = await self.link.start(token=token)
        spec = codec.from_raw(welcome.spec, launch.AgentSpec, checked=True)  # with the welcome
        runner = self._runner = self.make_runner(spec, welcome)
        for frame in self._early:
            self._on_frame(frame)
        await runner.load_extensions()
        if ready is not None:
            ready()
        self.link.closed.add_done_callback(self._nudge)
        try:
            return await self._serve(runner, spec.idle_s)
        finally:
            self._context = None
            await runner.instance.extensions.close()  # they may use the bus for it
            if (asked := self._shutdown) is not None:
                name, to = runner.instance.spec.name, asked.from_ or ORCHESTRATOR
                self.link.send(Frame("shutdown_ack", from_=name, to=to, in_reply_to=asked.id))
                await asyncio.sleep(0)  # it is out before the files are closed, which may wait for the disk
            await runner.close()
            await self.link.close(LINGER_S)

    # --- life

    async def _serve(self, runner: TurnRunner, idle_s: float) -> int:
        loop = asyncio.get_running_loop()
        idle_since, self._context = loop.time(), copy_context()
        while True:
            if self.link.closed.done():
                log.error("the link is over: %s", self.link.closed.exception() or "closed")
                runner.abandon()
                return 1
            if self._leaving:
                return await self._leave(runner)
            if self._working is not None and self._working.done():
                self._working.result()
                self._working = None
                idle_since = loop.time()
            self._work(runner)
            if self._bye is not None and self._bye.done():
                refused = self._bye.cancelled() or self._bye.exception() is not None
                self._bye, idle_since = None, loop.time()
                if not refused and self._working is None:
                    return 0
            await self._pause_until_news(runner, idle_since + idle_s - loop.time())

    def _work(self, runner: TurnRunner) -> None:
        """Begin with the next event, if none is worked on."""
        if self._context is not None and self._working is None and self._inbox and not self._leaving:
            work = runner.run(self._inbox.popleft())
            self._working = runner.instance.loop.create_task(work, context=self._context.copy())
            self._working.add_done_callback(self._nudge)

    async def _pause_until_news(self, runner: TurnRunner, idle_left: float) -> None:
        """Wait until anything happens. When there was nothing to do for long enough, ask whether we may leave."""
        timeout: float | None = None
        if self._working is None and self._bye is None:
            if idle_left <= 0 and self.link.ready:
                runner.instance.acks.flush()  # afterwards the broker does not hear us
                self._bye = self.link.post(Frame("bye"))
                self._bye.add_done_callback(self._nudge)
            else:
                timeout = max(idle_left, RECHECK_S)
        with suppress(TimeoutError):
            # Not wait_for: in Python 3.11 it forgets to be cancelled when the news comes that very moment.
            async with asyncio.timeout(timeout):
                await self._wake.wait()
        self._wake.clear()

    def _nudge(self, _: object = None) -> None:
        self._wake.set()

    async def _leave(self, runner: TurnRunner) -> int:
        """Reach a step boundary in time, or not. Then release what is unfinished."""
        loop = asyncio.get_running_loop()
        held = runner.leases()
        runner.pause()
        unfinished: list[Lease] = []
        if self._working is not None:
            await self._until_released(self._working)
            if self.link.closed.done():
                runner.abandon()
                return 1
            if not self._working.done():
                runner.abandon()
                await asyncio.wait([self._working], timeout=RELEASE_S)
                unfinished += held
        runner.instance.acks.flush()  # while the broker knows the calls, and hears us
        unfinished += [Lease(f.event_id or "", f.epoch or 0, runner.instance.instance_key) for f in self._inbox]
        releases = [
            self.link.post(Frame("ack", stage="release", event_id=lease.event_id, epoch=lease.epoch))
            for lease in unfinished
        ]
        if releases:
            left = RELEASE_S if self._leave_at is None else self._leave_at - loop.time()
            await asyncio.wait(releases, timeout=min(RELEASE_S, max(0.05, left)))
            for release in releases:
                if release.done() and not release.cancelled():
                    release.exception()  # a refused release says that somebody else has the event already
        return 0

    async def _until_released(self, working: asyncio.Task[None]) -> None:
        """Wait until the running turn comes to its step boundary, as long as that may take. The time can become
        shorter.
        """
        loop = asyncio.get_running_loop()
        while not working.done() and not self.link.closed.done():
            patience = None if self._cut_at is None else self._cut_at - loop.time()
            if patience is not None and patience <= 0:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):  # not wait_for, see _pause_until_news
                    await self._wake.wait()
            self._wake.clear()

    # --- what comes in

    def _on_frame(self, frame: Frame) -> None:
        try:
            if frame.type == "event":
                self._on_event(frame)
            elif frame.type == "shutdown":
                grace_ms = codec.from_raw(frame.payload, Shutdown).grace_period_ms
                self._shutdown = frame
                self._begin_leaving(None if grace_ms is None else grace_ms / 1000)
            elif frame.type == "error":
                log.warning("the broker says: %s", errors.GoondanError(codec.from_raw(frame.payload, ErrorPayload)))
            elif frame.type == "listen" and (waiting := self._waiting(frame)) is not None:
                waiting.live = frame.live
            elif self._runner is None:
                self._early.append(frame)
            else:
                self._runner.take(frame)
        except errors.GoondanError as error:
            log.warning("a %s frame was ignored: %s", frame.type, error)

    def _on_welcome(self, welcome: Welcome) -> None:
        if self._runner is not None:
            self._runner.features.welcomed(welcome)
            self._runner.instance.caller.welcomed()
            self._runner.instance.config.take(welcome.config, welcome.spec)

    def _on_unsent(self, frame: Frame, error: errors.GoondanError) -> None:
        """The payload of a large frame could not be written."""
        if frame.type == "tool.answer":
            self.link.send(unsent_answer(frame, error))

    def _on_event(self, frame: Frame) -> None:
        if frame.in_reply_to is not None and not frame.asynchronous:
            return  # an answer that nobody here waits for
        if frame.asynchronous and frame.epoch is None:
            if self._runner is not None:
                self._runner.answered(frame)
            return
        if frame.event_id is None or frame.epoch is None:
            log.warning("an event without id or epoch was ignored")
            return
        if self._waiting(frame) is not None:
            return
        runner = self._runner
        if runner is not None:
            if runner.holds(frame):
                return  # the broker was restarted and knows it from our hello
            if any(lease.event_id == frame.event_id for lease in runner.leases()):
                runner.abandon()  # handed over again under a later epoch: go on from what is stored
        self._inbox.append(frame)
        if runner is not None:
            self._work(runner)

    def _waiting(self, frame: Frame) -> Frame | None:
        """The delivery that this frame is about, if it waits for its turn."""
        return next((one for one in self._inbox if (one.event_id, one.epoch) == (frame.event_id, frame.epoch)), None)

    def _terminate(self) -> None:
        self._begin_leaving(TERM_GRACE_S)

    def _begin_leaving(self, grace_s: float | None) -> None:
        self._leaving = True
        if grace_s is not None:
            leave_at = asyncio.get_running_loop().time() + grace_s
            if self._leave_at is None or leave_at < self._leave_at:
                self._leave_at, self._cut_at = leave_at, leave_at - min(RELEASE_S, grace_s / 2)
        if self._runner is not None:
            self._runner.pause()
        self._wake.set()

    def _held(self) -> dict[str, Any]:
        """What a hello says that this process holds: fields of schemas.wire.frames.Hello."""
        if (runner := self._runner) is None:
            return {}
        key = runner.instance.instance_key
        waiting = [Lease(frame.event_id or "", frame.epoch or 0, key, frame.root_event) for frame in self._inbox]
        leases, calls = runner.leases() + waiting, runner.instance.caller.open_call_ids
        return {"leases": leases, "calls": calls, **runner.features.held()}

    def make_runner(self, spec: launch.AgentSpec, welcome: Welcome) -> TurnRunner:
        """What runs the turns of the instance that the broker has named."""
        instance_key = welcome.instance_key or "default"
        store = ConversationStore(
            address.instance_dir(spec.state_dir, spec.name, instance_key),
            durability=spec.durability,
            kept_messages=OPERATOR_MESSAGES if spec.name == OPERATOR_AGENT else None,
            max_bytes=spec.conversation_mb << 20,
            large_notes=spec.traces == "whole",
            generation=0 if spec.name == OPERATOR_AGENT else welcome.generation,
        )
        instance = Instance(spec, instance_key, self.link, store, secrets=self.secrets)
        instance.config.take(welcome.config)
        runner = TurnRunner(instance)
        runner.features.welcomed(welcome)
        return runner


async def connected(channel: socket.socket, endpoint: str, broker_uid: int | None) -> AgentApp:
    """An agent process that the broker has asked for hello, or that has got its request on `channel` before that."""
    loop = asyncio.get_running_loop()
    agent, news = AgentApp(endpoint, broker_uid), asyncio.Event()
    loop.add_reader(channel, news.set)
    with suppress(errors.GoondanError):  # the start tells it
        agent.link.connect(news.set)
        await news.wait()
    loop.remove_reader(channel)
    channel.setblocking(True)  # which it is not in a loop
    return agent


def new_loop() -> asyncio.AbstractEventLoop:
    """The event loop of an agent process. While it runs, it is the current one."""
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def main(
    loop: asyncio.AbstractEventLoop,
    endpoint: str,
    token: str,
    *,
    name: str,
    ready_fd: int | None = None,
    broker_uid: int | None = None,
    ahead: AgentApp | None = None,
) -> int:
    """Run one agent process to its end, and return the exit status. `name` stands in every line of its log.
    `broker_uid` is the user of the broker, None for our own user. `ahead` is connected to this broker already.

    `ready_fd` gets a newline when the broker has welcomed us, or the reason why it never will.
    """
    waiting = ready_fd

    def ready() -> None:
        nonlocal waiting
        waiting = None
        report_ready(ready_fd)

    try:
        agent = ahead or AgentApp(endpoint, broker_uid)
        configure_log(name, agent.secrets)
        return loop.run_until_complete(agent.run(token, ready))
    except errors.GoondanError as error:
        log.error("%s", error)
        report_failure(waiting, error.info)
        return 1

"""The events of one agent instance, each to its turn and its one answer.

Rules.
- One turn at a time (turn_run.py).
- The answer is stored under the event's key before it is sent; a finished event is answered from there again.
- Whatever goes wrong with the file, the model or our own code ends that turn with one error; the process serves on.

Source: docs/design/turns.md section 2; docs/design/delivery.md section 2.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

from msgspec import structs

from agentproc.acks import AckLink, ResultAcks
from agentproc.answers import answer_payload, done_frame, failed, input_text, internal_error, turn_id
from agentproc.blocked_loop import LoopWatch, blocked_error
from agentproc.calls import CallLink, ToolCaller
from agentproc.catalog import Catalog
from agentproc.completions import Ended, read_answer, read_completion
from agentproc.extensions.bundle_changes import BundleChanges
from agentproc.extensions.dynamic_tools import DynamicTools
from agentproc.extensions.events import EventBus
from agentproc.extensions.loaded import Extensions, InstancePaths
from agentproc.extensions.oauth import AccessTokens
from agentproc.extensions.patience import Watch
from agentproc.extensions.pipeline import Pipeline
from agentproc.extensions.point_stages import PointStages
from agentproc.extensions.workspaces import Workspaces
from agentproc.known_secrets import KnownSecrets
from agentproc.live_config import InForce, LiveConfig
from agentproc.providers.base import Provider, redactor_of
from agentproc.providers.choose import make_provider
from agentproc.store import ConversationStore
from agentproc.swarm import DELEGATION_RESULT, AskingLink
from agentproc.told_event import told_event
from agentproc.turn import Begin, BeginCall, End, Pause
from agentproc.turn_run import TurnRun
from schemas.address import instance_dir, instance_workdir
from schemas.codec import check_json, from_raw
from schemas.errors import GoondanError, fail
from schemas.frames import (
    OPERATOR_AGENT,
    OPERATOR_CALL,
    TOOL_COMPLETED,
    AgentEvent,
    ErrorPayload,
    Frame,
    Lease,
    OperatorCall,
)
from schemas.launch import AgentSpec
from schemas.redaction import Redactor
from schemas.times import rfc3339
from schemas.trace_index import IndexLine, add

#: Why a link does not send a large payload.
UNSENT: Final = ("E_FRAME_TOO_LARGE", "E_DISK_FULL", "E_STATE", "E_BLOB_UNAVAILABLE")

log = logging.getLogger("agentproc")


class TurnLink(CallLink, AckLink, AskingLink, Protocol):
    """What is needed of a link (schemas.link.Link)."""


def now_rfc3339() -> str:
    """The time, RFC 3339 in UTC with milliseconds."""
    return rfc3339(time.time())


class TurnRunner:
    """Runs the turns of one agent instance, one after another."""

    def __init__(
        self,
        spec: AgentSpec,
        instance_key: str,
        link: TurnLink,
        store: ConversationStore,
        *,
        provider: Provider | None = None,
        clock: Callable[[], str] = now_rfc3339,
        secrets: KnownSecrets | None = None,
    ) -> None:
        """`secrets` are those that the process's log hides."""
        loop = asyncio.get_running_loop()
        self.instance_key = instance_key
        self.link = link
        self.store = store
        self.loop = loop
        self.clock = clock
        self.pipeline = Pipeline()
        self.tools = DynamicTools()
        self.catalog = Catalog.of(spec, self.tools)
        self.events = EventBus()
        files = instance_dir(spec.state_dir, spec.name, instance_key)
        self.place = InstancePaths(spec.name, instance_key, files, spec.state_dir)
        self.secrets = secrets or KnownSecrets()
        self.tokens = AccessTokens(link, self.events, self.secrets)
        self.live_config = LiveConfig(spec, instance_key, link, self.secrets.redact)
        self.watch = Watch()
        self.loop_watch = LoopWatch(files)
        self._blocked = self.loop_watch.take() if spec.extensions else None
        self.workspaces = Workspaces(self.pipeline, self.events, self.watch)
        changes = BundleChanges(link, self.workspaces.mounted)
        self.extensions = Extensions(
            self.pipeline,
            self.tools,
            self.events,
            self.place,
            self.live_config,
            self.tokens,
            bundle_changes=changes,
        )
        self.caller = ToolCaller(link, loop)
        self.acks = ResultAcks(link, loop)
        self._provider = provider
        self._redactor: Redactor | None = None
        self._run: TurnRun | None = None
        self._lease: Lease | None = None
        self._pausing = False
        self._cancelled: tuple[str, int] | None = None  # the delivery that is to end, if it is not over
        self._broken: GoondanError | None = None  # why the agent cannot work at all
        self._loaded = self.live_config.current  # what the extensions were loaded for

    @property
    def spec(self) -> AgentSpec:
        """What the bundle says of the agent. It becomes another one between two steps at any time (live_config.py), but
        not in its model.
        """
        return self.live_config.current.spec

    def points(self, in_force: InForce) -> PointStages:
        """The points of one turn, which begins with this configuration."""
        return PointStages(self.pipeline, self.tools, self.extensions, in_force, self.watch)

    def redact(self, text: str) -> str:
        """A text without what is secret of the agent's model, and without the tokens that its extensions got."""
        if self._redactor is None:
            self._redactor = redactor_of(self.spec.model)
        return self.secrets.redact(self._redactor(text))

    def index_turn(self, at: str, trace_id: str, turn_id: str, event_id: str) -> None:
        """Note where the turn of a trace is found. A turn goes on without."""
        try:
            add(self.spec.state_dir, IndexLine(at, trace_id, turn_id, event_id, self.spec.name, self.instance_key))
        except (OSError, UnicodeEncodeError) as error:
            log.warning("the index of traces could not be written: %s", error)

    @property
    def provider(self) -> Provider:
        """The model, made when it is first needed."""
        if self._provider is None:
            self._provider = make_provider(self.spec.model)
        return self._provider

    async def load_extensions(self) -> None:
        """Load the agent's extensions. What goes wrong is answered to every event from then on."""
        try:
            await self.extensions.start()
            self._broken = None
        except GoondanError as error:
            self._broken = error
        self._loaded = self.live_config.current

    def leases(self) -> list[Lease]:
        """What this process holds: asked by the link at every hello."""
        return [self._lease] if self._lease is not None else []

    def holds(self, frame: Frame) -> bool:
        """Whether this very delivery is being worked on."""
        lease = self._lease
        return lease is not None and (lease.event_id, lease.epoch) == (frame.event_id, frame.epoch)

    def pause(self) -> None:
        """Give the running turn back at its next step boundary, and every later one at once."""
        self._pausing = True
        if self._run is not None:
            self._run.push(Pause())

    def abandon(self) -> None:
        """Leave the running turn as it is, without a word about it."""
        if self._run is not None:
            self._run.abandon()

    def cancel(self, frame: Frame) -> None:
        """`tool.cancel` of a whole event: end its turn, whether it runs already or is just about to."""
        self._cancelled = (frame.event_id or "", frame.epoch or 0)
        if self._run is not None and self.holds(frame):
            self._run.cancel()

    def decided(self, frame: Frame) -> None:
        """`approval.news`: a person has decided about calls of the running turn."""
        if self._run is not None and self.holds(frame):
            self._run.decided(frame.calls or [])

    def set_clock(self, frame: Frame) -> None:
        """`clock` of the running turn: its time stands still, or goes on."""
        if self._run is not None and self.holds(frame):
            self._run.set_clock(frame)

    def progress(self, frame: Frame) -> None:
        """What a tool host says of a call that runs. Raises GoondanError E_FRAME_INVALID."""
        if self._run is not None:
            self._run.progress(frame)

    async def run(self, frame: Frame) -> None:
        """Work on one delivered event until it is answered, given back or abandoned. Raises only cancellation."""
        event_id, epoch = frame.event_id or "", frame.epoch or 0
        self._lease = Lease(event_id, epoch, self.instance_key, frame.root_event)
        try:
            answer = await self._answer(frame, event_id, epoch)
            if answer is not None:
                await self._post(answer, frame.trace_id)
        finally:
            self._lease = None

    def completed(self, frame: Frame) -> None:
        """A `tool.completed` frame: for the turn that runs. Raises GoondanError E_FRAME_INVALID, E_FORBIDDEN."""
        if self._run is not None:
            self._run.completed(read_completion(frame, from_raw(frame.payload, AgentEvent)))

    def answered(self, frame: Frame) -> None:
        """An answer that nobody waits for: for the turn that runs. Raises GoondanError E_FRAME_INVALID."""
        if self._run is not None and frame.blob is None:
            self._run.answered(read_answer(frame))

    def notice(self, ended: Ended) -> None:
        """Tell extensions of the answer to what was asked without waiting (EVENTS-11)."""
        if ended.answer is not None:
            self.events.emit(DELEGATION_RESULT, ended.answer, emitter="the kernel")

    async def close(self) -> None:
        """Let the extensions clean up, stop timers, give back the file and the model's connections."""
        await self.extensions.close()
        self.watch.close()
        self.loop_watch.close()
        self.acks.close()
        self.caller.abandon()
        self.store.close()
        if self._provider is not None:
            await self._provider.close()

    # --- inside

    async def _answer(self, frame: Frame, event_id: str, epoch: int) -> Frame | None:
        """The frame that ends the event for us, or None when the event is no longer ours."""
        turn = turn_id(self.spec.name, self.instance_key, event_id)
        try:
            seen = self.store.adopt(epoch)
            if seen > epoch:
                log.warning("event %s came under epoch %d; the conversation file holds %d", event_id, epoch, seen)
                return Frame("ack", stage="release", event_id=event_id, epoch=epoch, seen_epoch=seen)
            row = self.store.find_turn(event_id)
            if row is not None and row.answer is not None:  # its payload may be gone: nobody needs it any more
                return done_frame(event_id, epoch, row.status, row.answer)
            first = self._first_input(frame)
            if isinstance(first, Begin) and first.source.type == "tool" and self.store.has_message(event_id):
                # The turn that ran when the work ended has told the model already.
                told = End(status="completed", steps=0, response="", finish_reason="stop")
                return done_frame(event_id, epoch, "completed", answer_payload(told, turn, event_id, self.clock()))
            if self._pausing:
                return Frame("ack", stage="release", event_id=event_id, epoch=epoch)
            if self._broken is not None and self._loaded is not self.live_config.current:
                await self.load_extensions()  # a patch may have broken it, and its revert may mend it
            if self._broken is not None:
                raise self._broken
            blocked, self._blocked = self._blocked, None
            if blocked is not None and blocked.event_id != event_id:
                blocked = None
            if self.spec.extensions:
                self.loop_watch.begin(event_id)
            workdir = frame.workdir or instance_workdir(self.spec.state_dir, self.spec.name, self.instance_key)
            if blocked is None:
                await self.workspaces.enter(workdir)
            run = self._run = TurnRun(self, frame, first, row)
            turn = run.turn.turn_id
            if blocked is not None:
                raise GoondanError(blocked_error(blocked, self.spec.extensions))
            if self._cancelled == (event_id, epoch):
                run.cancel()
            return await run.go()
        except GoondanError as error:
            if error.info.code == "E_LEASE_LOST":
                log.warning("event %s: %s", event_id, error.info.message)
                return None
            log.error("event %s: %s", event_id, error)
            info = structs.replace(error.info, message=self.secrets.redact(error.info.message))
            ended = None if self._run is None else self._run.fail(info)
        except Exception as error:
            log.exception("event %s", event_id)
            self.store.close()
            info = internal_error(type(error).__name__)
            ended = None if self._run is None else self._run.fail(info)
        finally:
            self.loop_watch.end()
            if self._run is not None:
                self._run.release()
                self._run = None
        if ended is not None:
            return ended
        payload = answer_payload(failed(info), turn, event_id, self.clock(), frame.trace_id)
        return done_frame(event_id, epoch, "failed", payload)

    def _first_input(self, frame: Frame) -> Begin | BeginCall:
        """What the event asks for. Raises GoondanError E_FRAME_INVALID, E_FORBIDDEN, E_USAGE, or why its large payload
        cannot be had.
        """
        if frame.blob is not None:
            raise GoondanError(from_raw(frame.payload, ErrorPayload))
        if frame.asynchronous:
            ended = read_answer(frame)
            self.notice(ended)
            return Begin(ended.text, ended.source, ended.metadata)
        event = told_event(frame)
        for name, part in (("input", event.input), ("auth", event.auth), ("metadata", event.metadata)):
            check_json(part, name)
        is_operator = self.spec.name == OPERATOR_AGENT
        if event.type == TOOL_COMPLETED:
            ended = read_completion(frame, event)
            return Begin(ended.text, ended.source)
        if event.type != OPERATOR_CALL:
            if is_operator:
                raise fail("E_USAGE", f"the operator agent takes {OPERATOR_CALL} events, not {event.type}")
            return Begin(input_text(event.input))
        if not is_operator:
            raise fail("E_FORBIDDEN", f"{OPERATOR_CALL} events go to the operator agent only")
        asked = event.input
        if not isinstance(asked, dict) or not isinstance(asked.get("tool"), str):
            raise fail("E_FRAME_INVALID", f"the input of {OPERATOR_CALL} is {{tool, args}}")
        call = OperatorCall(asked["tool"], asked.get("args", {}))
        return BeginCall(call.tool, call.args)

    async def _post(self, frame: Frame, trace_id: str | None) -> None:
        """Send what ends the event, until the broker has it. An answer that cannot be sent, by its size or because the
        disk is full, becomes a failed one that says so.
        """
        try:
            await self.link.post(frame)
        except GoondanError as error:
            log.warning("event %s, %s: %s", frame.event_id, frame.stage, error)
            if error.info.code not in UNSENT or frame.stage in ("release", "park"):
                return
            event_id = frame.event_id or ""
            turn = turn_id(self.spec.name, self.instance_key, event_id)
            payload = answer_payload(failed(error.info), turn, event_id, self.clock(), trace_id)
            with suppress(GoondanError):  # as above: nobody may be there any more
                await self.link.post(done_frame(event_id, frame.epoch, "failed", payload))

"""The events of one agent instance, each to its turn and its one answer.

Rules.
- One turn at a time (run.py).
- The answer is stored under the event's key before it is sent; a finished event is answered from there again.
- A failure of the file, the model or our own code ends that turn with one error. The process goes on serving.

Source: docs/design/turns.md section 2; docs/design/delivery.md section 2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from msgspec import structs

from goondan.agentproc.conversation.store import TurnRow
from goondan.agentproc.machine import answers, questions
from goondan.agentproc.machine.turn import Begin, BeginCall, BeginList, End, First, Pause
from goondan.agentproc.start.blocked_loop import blocked_error
from goondan.agentproc.turn.instance import Instance
from goondan.agentproc.turn.parts import AgentFeature, Features, TakeFrame, kinds
from goondan.agentproc.turn.run import TurnRun, operators_work
from goondan.schemas.bundle.address import MAX_TOOL_NAME, blobs_dir
from goondan.schemas.wire import codec, frames
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.worker import servers

#: The reasons why a link does not send a large payload.
UNSENT: Final = ("E_FRAME_TOO_LARGE", "E_DISK_FULL", "E_STATE", "E_BLOB_UNAVAILABLE")

#: The stages with which an event goes back to its queue.
GIVEN_BACK: Final = ("release", "park")

log = logging.getLogger("agentproc")


class TurnRunner:
    """Runs the turns of one agent instance, one after another. `features` are those that it has; None: all."""

    def __init__(self, instance: Instance, features: Sequence[type[AgentFeature]] | None = None) -> None:
        self.instance = instance
        #: The features of the process.
        self.features = Features(instance, kinds() if features is None else features)
        instance.extensions.brought = self.features.api
        self._blocked = instance.loop_watch.take() if instance.spec.extensions else None
        self._run: TurnRun | None = None
        self._event: frames.Frame | None = None  # the delivery that is worked on
        self._leaving_it = False  # the leased event is given back, and the broker has not said so yet
        self._pausing = False
        self._swept = False
        self._cancelled: tuple[str, int] | None = None  # the delivery that is to end, if it is not over
        self._broken: GoondanError | None = None  # why the agent cannot work at all
        self._loaded = instance.config.current  # what the extensions were loaded for
        #: The functions that take the broker's frames for the working instance, by the type of the frame. Each raises
        #: GoondanError for a frame that cannot be read.
        self.takes: Mapping[str, TakeFrame] = {
            "tool.progress": self.progress,
            "tool.cancel": self.cancel,
            "tool.completed": self.completed,
            "tool.ask": self.asked,
            servers.NEWS: instance.servers.news,
            "config.changed": lambda frame: instance.config.take(frame.payload),
            "clock": self.set_clock,
            "listen": self.listen,
            **self.features.takes,
        }

    async def load_extensions(self) -> None:
        """Load the agent's extensions. When that fails, every later event is answered with the error. So it is when the
        specification has a part that no feature claims; then nothing is loaded.
        """
        try:
            self.features.refuse_unclaimed(self.instance.config.current.spec)
            await self.instance.extensions.start()
            self._broken = None
        except GoondanError as error:
            self._broken = error
        self._loaded = self.instance.config.current

    def leases(self) -> list[frames.Lease]:
        """The leases that this process holds. The link asks for them at every hello."""
        event, key = self._event, self.instance.instance_key
        return [] if event is None else [frames.Lease(event.event_id or "", event.epoch or 0, key, event.root_event)]

    def holds(self, frame: frames.Frame) -> bool:
        """Whether this very delivery is being worked on. One that is given back is not: the broker may hand it over
        again, in the same epoch, before its word about the return is read here.
        """
        event = self._event
        if event is None or self._leaving_it:
            return False
        return (event.event_id, event.epoch) == (frame.event_id, frame.epoch)

    def pause(self) -> None:
        """Give the running turn back at its next step boundary, and every later one at once."""
        self._pausing = True
        if self._run is not None:
            self._run.push(Pause())

    def abandon(self) -> None:
        """Leave the running turn as it is, without telling anybody."""
        if self._run is not None:
            self._run.abandon()

    def cancel(self, frame: frames.Frame) -> None:
        """Handle `tool.cancel` for a whole event: end its turn, whether it runs already or is about to begin."""
        self._cancelled = (frame.event_id or "", frame.epoch or 0)
        if self._run is not None and self.holds(frame):
            self._run.cancel()

    def asked(self, frame: frames.Frame) -> None:
        """`tool.ask`: a call of the running turn asks something. Raises GoondanError E_FRAME_INVALID."""
        if self._run is not None and self.holds(frame):
            self._run.calls.asks.take(frame)

    def take(self, frame: frames.Frame) -> None:
        """Handle a frame of any other type for the working instance: the parts of the running turn may take it. Raises
        GoondanError for one that cannot be read.
        """
        take = self.takes.get(frame.type)
        if take is not None:
            take(frame)
        elif self._run is not None and self.holds(frame):
            self._run.parts.take(frame)

    def set_clock(self, frame: frames.Frame) -> None:
        """`clock` of the running turn: its time stands still, or goes on."""
        if self._run is not None and self.holds(frame):
            self._run.set_clock(frame)

    def listen(self, frame: frames.Frame) -> None:
        """`listen`: somebody wants to hear of the turn, or nobody does any more. The turn may be about to begin."""
        if self._event is not None and self.holds(frame):
            self._event.live = frame.live
            if self._run is not None:
                self._run.listen(frame.live)

    def progress(self, frame: frames.Frame) -> None:
        """Handle a tool host's progress of a running call. Raises GoondanError E_FRAME_INVALID."""
        if self._run is not None:
            self._run.live.progress(frame)

    def run(self, frame: frames.Frame) -> Coroutine[Any, Any, None]:
        """Work on one delivered event, which is held from this moment on, until it is answered, given back or
        abandoned. Raises only cancellation.
        """
        self._event = frame
        return self._work_on(frame, frame.event_id or "", frame.epoch or 0)

    async def _work_on(self, frame: frames.Frame, event_id: str, epoch: int) -> None:
        try:
            answer = await self._answer(frame, event_id, epoch)
            if answer is not None:
                self._leaving_it = answer.stage in GIVEN_BACK
                if self._leaving_it:
                    self.instance.acks.flush()  # while the broker knows the calls
                await self._post(answer, frame.trace_id)
        finally:
            self._event, self._leaving_it = None, False

    def completed(self, frame: frames.Frame) -> None:
        """Give a `tool.completed` frame to the running turn. Raises GoondanError E_FRAME_INVALID, E_FORBIDDEN."""
        if self._run is not None:
            self._run.completed(questions.read_completion(frame, codec.from_raw(frame.payload, frames.AgentEvent)))

    def answered(self, frame: frames.Frame) -> None:
        """Give an answer to a question that was asked without waiting to the running turn. Raises GoondanError
        E_FRAME_INVALID.
        """
        if self._run is not None and frame.blob is None:
            self._run.answered(questions.read_answer(frame))

    async def close(self) -> None:
        """Close the instance."""
        await self.instance.close()
        self.features.close()

    # --- inside

    async def _answer(self, frame: frames.Frame, event_id: str, epoch: int) -> frames.Frame | None:
        """The frame that ends the event for us, or None when the event is no longer ours."""
        try:
            found = self._look_at(frame, event_id, epoch)
            return found if isinstance(found, frames.Frame) else await self._work(frame, *found)
        except GoondanError as error:
            if error.info.code == "E_LEASE_LOST":
                log.warning("event %s: %s", event_id, error.info.message)
                return None
            log.error("event %s: %s", event_id, error)
            return self._fail(
                frame, structs.replace(error.info, message=self.instance.secrets.redact(error.info.message))
            )
        except Exception as error:
            log.exception("event %s", event_id)
            self.instance.store.close()
            return self._fail(frame, answers.internal_error(type(error).__name__))
        finally:
            self.instance.loop_watch.end()
            if self._run is not None:
                self._run.release()
                self._run = None

    def _look_at(self, frame: frames.Frame, event_id: str, epoch: int) -> frames.Frame | tuple[First, TurnRow | None]:
        """The first input of the event and the stored row of its turn; or the frame that ends an event which needs no
        turn.

        Raises GoondanError.
        """
        seen = self.instance.store.adopt(epoch)
        if seen > epoch:
            log.warning("event %s came under epoch %d; the conversation file holds %d", event_id, epoch, seen)
            return frames.Frame("ack", stage="release", event_id=event_id, epoch=epoch, seen_epoch=seen)
        self._sweep_files()
        row = self.instance.store.find_turn(event_id)
        if row is not None and row.answer is not None:  # its payload may be gone: nobody needs it any more
            return answers.done_frame(event_id, epoch, row.status, row.answer)
        first = self._first_input(frame)
        if callable(first):
            return frames.Frame("ack", stage="release", event_id=event_id, epoch=epoch) if self._pausing else first()
        if isinstance(first, Begin) and first.source.type == "tool" and self._needs_no_model(first, event_id):
            return self._end(event_id, epoch, End(status="completed", steps=0, response="", finish_reason="stop"))
        if self._pausing:
            return frames.Frame("ack", stage="release", event_id=event_id, epoch=epoch)
        return first, row

    def _needs_no_model(self, ended: Begin, event_id: str) -> bool:
        """Whether the turn that ran when the work ended has told the model already, or an operator began the work, who
        asks for its result when it suits them.
        """
        return self.instance.store.has_message(event_id) or ended.work_of in operators_work(self.instance.store)

    async def _work(self, frame: frames.Frame, first: First, row: TurnRow | None) -> frames.Frame | None:
        """Run the turn of an event. Returns the frame that ends the event, None when the event is no longer ours.
        Raises GoondanError when the turn cannot begin.
        """
        event_id = frame.event_id or ""
        if self._broken is not None and self._loaded is not self.instance.config.current:
            await self.load_extensions()  # one configuration may have broken it, and the next may mend it
        if self._broken is not None:
            raise self._broken
        blocked, self._blocked = self._blocked, None
        if blocked is not None and blocked.event_id != event_id:
            blocked = None
        if self.instance.spec.extensions:
            self.instance.loop_watch.begin(event_id)
        if blocked is None:
            await self.instance.workspaces.enter(self.instance.workdir_of(frame))
        run = self._run = TurnRun(self.instance, frame, first, row, self.features)
        if blocked is not None:
            raise GoondanError(blocked_error(blocked, self.instance.spec.extensions))
        if self._cancelled == (event_id, frame.epoch or 0):
            run.cancel()
        return await run.go()

    def _fail(self, frame: frames.Frame, info: frames.ErrorPayload) -> frames.Frame:
        """End an event with this error. The error is stored with its turn, if it has a turn and the file can be
        written.
        """
        ended = None if self._run is None else self._run.fail(info)
        return ended or self._end(frame.event_id or "", frame.epoch or 0, answers.failed(info), frame.trace_id)

    def _end(self, event_id: str, epoch: int | None, end: End, trace_id: str | None = None) -> frames.Frame:
        """The frame that ends an event so. Nothing of it is stored."""
        instance, run = self.instance, self._run
        name = answers.turn_id(instance.spec.name, instance.instance_key, event_id) if run is None else run.turn_id
        payload = answers.answer_payload(end, name, event_id, instance.clock(), trace_id)
        return answers.done_frame(event_id, epoch, end.status, payload)

    def _first_input(self, frame: frames.Frame) -> First | Callable[[], frames.Frame]:
        """The first input for the turn machine; or what answers the event, if it needs no turn.

        Raises GoondanError E_FRAME_INVALID, E_FORBIDDEN, E_USAGE, or the reason why its large payload is not available.
        """
        if frame.blob is not None:
            raise GoondanError(codec.from_raw(frame.payload, frames.ErrorPayload))
        if frame.asynchronous:
            ended = questions.read_answer(frame)
            self.instance.notice(ended)
            return Begin(ended.text, ended.source, ended.metadata)
        event = answers.told_event(frame)
        is_operator = self.instance.spec.name == frames.OPERATOR_AGENT
        if event.type == frames.TOOL_COMPLETED:
            ended = questions.read_completion(frame, event)
            return Begin(ended.text, ended.source, work_of=ended.turn_id)
        if event.type not in frames.OPERATOR_TYPES:
            if is_operator:
                raise fail("E_USAGE", f"the operator agent takes {frames.OPERATOR_CALL} events, not {event.type}")
            return Begin(answers.input_text(event.input), files=self._files_of(frame))
        if frame.source != frames.OPERATOR:
            raise fail("E_FORBIDDEN", f"only an operator sends {event.type} events")
        if event.type == frames.OPERATOR_TOOLS:
            return BeginList()
        if event.type != frames.OPERATOR_CALL:
            answer = self.features.events.get(event.type)
            if answer is None:
                raise fail("E_FEATURE_MISSING", f"nothing here answers {event.type} events")
            return partial(answer, frame, event)
        asked = event.input
        if not isinstance(asked, dict) or not isinstance(asked.get("tool"), str):
            raise fail("E_FRAME_INVALID", f"the input of {frames.OPERATOR_CALL} is {{tool, args}}")
        call = frames.OperatorCall(asked["tool"], asked.get("args", {}))
        # A model reads the history of any other agent: each turn of it begins with somebody's words.
        told = None if is_operator else f"(An operator calls {call.tool[:MAX_TOOL_NAME]}.)"
        return BeginCall(call.tool, call.args, told)

    def _sweep_files(self) -> None:
        """Once in each process, delete the files to which the conversation no longer refers."""
        swept, self._swept = self._swept, True
        if not swept and self.instance.files.place is not None:
            self.instance.files.sweep(self.instance.store.file_names())

    def _files_of(self, frame: frames.Frame) -> list[frames.FilePart]:
        """The files of a message, which are the instance's own from now on. Raises GoondanError."""
        if not frame.files:
            return []
        if frame.source != frames.OPERATOR:
            raise fail("E_FORBIDDEN", "only the events of an operator have files")
        return self.instance.files.take(blobs_dir(self.instance.spec.state_dir), frame.files)

    async def _post(self, frame: frames.Frame, trace_id: str | None) -> None:
        """Send the frame that ends the event, until the broker has it. An answer that cannot be sent, because of its
        size or a full disk, becomes a failed one that gives the reason.
        """
        try:
            await self.instance.link.post(frame)
        except GoondanError as error:
            log.warning("event %s, %s: %s", frame.event_id, frame.stage, error)
            if error.info.code not in UNSENT or frame.stage in GIVEN_BACK:
                return
            ended = self._end(frame.event_id or "", frame.epoch, answers.failed(error.info), trace_id)
            with suppress(GoondanError):  # as above: nobody may be there any more
                await self.instance.link.post(ended)

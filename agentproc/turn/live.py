"""The live news of a running turn for its asker and for observers: pieces of text, steps, tool calls.

Rules.
- Best effort. A frame that the link does not take is lost. This module never waits, keeps no copy, and fails no turn.
- Text goes out at once when none was sent just before, otherwise in batches: a model's 50,000 tokens are some hundred
  frames.
- Every piece gives its position in the text of its step, so that a reader notices a loss. The model's reasoning goes
  the same way, as news of another kind with positions of its own.
- Names, ids and codes only. Arguments and results may hold secrets, and stay in the conversation. Only an operator, who
  can read the conversation anyway, gets a short line of each call's arguments.
- Text that holds a secret is not sent, and nothing behind it in its step: the answer comes without it at the end.
- Nothing is sent for an event of which nobody wants to hear, except what a turn waits for: the broker keeps that for
  `gdn ps --why`. It is told when the wait has lasted two seconds, so a turn that goes on tells nothing.
- Who begins to listen in mid-turn is told that the turn and its step run. Then comes all text of a request that is
  out, so that positions are right, and no secret is cut in two.

Source: docs/design/wire.md section 8; PROTOCOL.md "Live events".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from msgspec import Struct, structs

from goondan.agentproc.calls.caller import AgentLink
from goondan.agentproc.machine.messages import ToolData
from goondan.agentproc.machine.turn import Action, AskModel, End, RunTool, Store
from goondan.agentproc.providers.base import TextDelta
from goondan.agentproc.turn.notes import Ending
from goondan.schemas.wire.codec import from_raw, replace_surrogates, to_raw
from goondan.schemas.wire.frames import OPERATOR, Frame
from goondan.schemas.wire.runtime_events import RuntimeEvent, RuntimeEventKind, ToolProgress, Wait
from goondan.schemas.wire.spans import call_span, step_span, turn_span

#: How often text is sent while it flows (seconds). The eye cannot see shorter steps.
BATCH_S: Final = 0.03
#: Characters in one frame: at most 12 KiB as UTF-8, which the broker takes (kernel/broker/routing/clients.py).
MAX_PIECE: Final = 3000
#: Frames in one batch. With BATCH_S that is 800,000 characters a second, which is below the limit of the broker.
MAX_BATCH: Final = 8
#: How many characters may wait to be sent. When a step makes more in too short a time, its further text is not sent.
MAX_WAITING: Final = 1 << 18
#: How often text and reasoning may take turns in what waits. No model that people use comes near, and each turn is a
#: frame.
MAX_RUNS: Final = 64
#: How much of the text that was sent is looked through with the next batch (characters): a secret may come in parts.
TAIL: Final = 1024
#: The longest name or id of a tool in a frame (characters).
MAX_NAME: Final = 200
#: The longest progress message of a handler (characters).
MAX_MESSAGE: Final = 1000


_Kind = Literal["text", "reasoning"]


class _Run(Struct):
    """Pieces of one kind that wait to be sent."""

    #: Of what.
    kind: _Kind
    #: Its pieces.
    pieces: list[str] = []


class LiveFeed:
    """The news of the turn `turn_id`, for the event in `frame`. `again`: an earlier incarnation began the turn.
    `redact` removes secrets from a text. It is called with the pieces of text of the provider.
    """

    def __init__(
        self,
        link: AgentLink,
        loop: asyncio.AbstractEventLoop,
        frame: Frame,
        turn_id: str,
        *,
        again: bool,
        redact: Callable[[str], str] = str,
    ) -> None:
        self._redact = redact
        self._link = link
        self._loop = loop
        self._turn_id = turn_id
        self._parent_span = frame.parent_span_id
        self._event_id = frame.event_id
        self._epoch = frame.epoch
        #: Whether anybody listens: 0, or how often somebody has begun to.
        self.wanted = self._times = int(frame.live)
        self._closed = False
        self._wait: RuntimeEventKind | None = None  # the kind of the wait that was told and is not over
        self._for_operator = frame.source == OPERATOR
        self._resumed = again
        self._begun = False
        self._step = 0
        self._at: dict[_Kind, int] = {}
        self._tails: dict[_Kind, str] = {}
        self._again = False
        self._waiting: list[_Run] = []
        self._size = 0
        self._muted = False
        self._sent_at = loop.time() - BATCH_S
        self._timer: asyncio.TimerHandle | None = None

    def tell(self, actions: Sequence[Action], endings: Sequence[Ending] = ()) -> None:
        """Send news about the next actions of the turn. All earlier text is sent first. `endings` are the ends of the
        turn or of a step that come with these actions.
        """
        if not self.wanted:
            return
        self._send_text(everything=True)
        if not self._begun:
            self._begin()
        for action in actions:
            if isinstance(action, Store) and isinstance(action.message.data, ToolData):
                for part in action.message.data.content:
                    failed = part.result.status == "error"
                    code = part.result.error.code if part.result.error is not None else None
                    self._tell_tool("tool.failed" if failed else "tool.completed", part, code)
        for ending in endings:
            told = RuntimeEvent(kind=ending.kind, step=ending.step, error=ending.error)
            self._send(told, ending.span_id, ending.parent_span_id)
        for action in actions:
            if isinstance(action, AskModel):
                self._begin_step(action.step)
            elif isinstance(action, RunTool):
                self._tell_tool("tool.called", action.part)
            elif isinstance(action, End):
                self.close()

    def listen(self, wanted: bool, step: int) -> None:
        """Somebody listens from now on, or nobody does any more. `step` is the step that runs; 0: none does."""
        if self._closed or bool(self.wanted) == wanted:
            return
        if not wanted:
            self.wanted = 0
            self._stop()
            return
        self.wanted = self._times = self._times + 1
        self._begin()
        if step:
            self._begin_step(step)

    def progress(self, frame: Frame) -> None:
        """`tool.progress` of a call of this turn. Raises GoondanError E_FRAME_INVALID."""
        if not self.wanted or not frame.call_id:
            return
        said = from_raw(frame.payload, ToolProgress)
        message = None if said.message is None else _short(said.message, MAX_MESSAGE)
        call = _short(frame.call_id.rpartition("/")[2], MAX_NAME)
        event = RuntimeEvent(
            kind="tool.progress", step=self._step, tool_call_id=call, done=said.done, total=said.total, message=message
        )
        self._send(event)

    def waits(self, tool_call_id: str) -> None:
        """A call of this turn waits for a person."""
        if self.wanted:
            call = _short(tool_call_id, MAX_NAME)
            self._send(RuntimeEvent(kind="tool.waits", step=self._step, tool_call_id=call))

    def begin_wait(self, wait: RuntimeEvent) -> None:
        """The turn waits. The broker is told as well; the asker, if it listens."""
        if not self._closed:
            message = None if wait.message is None else _short(wait.message, MAX_MESSAGE)
            self._wait = wait.kind
            self._send(structs.replace(wait, step=wait.step or self._step, message=message), stage="waits")

    def end_wait(self, kind: RuntimeEventKind) -> None:
        """What was told by `begin_wait` with this kind is over."""
        if self._wait == kind and not self._closed:
            self._send(RuntimeEvent(kind="waits.over", step=self._step), stage="over")
            self._wait = None

    def hangs(self, extension: str, point: str, hangs_s: float | None) -> None:
        """A layer of an extension hangs, for `hangs_s` seconds now; None: it does not any more."""
        if hangs_s is None:
            self.end_wait("extension.waits")
            return
        name, place, waited_ms = _short(extension, MAX_NAME), _short(point, MAX_NAME), round(hangs_s * 1000)
        wait = Wait(waited_ms=waited_ms, extension=name, point=place)
        self.begin_wait(RuntimeEvent(kind="extension.waits", wait=wait))

    def in_line(self, before: int, held_ms: int) -> None:
        """The step's request waits before a model server, as the broker says: `before` others go out before it, and
        nobody for `held_ms` (milliseconds).
        """
        if self.wanted:
            wait = Wait(before=before, wait_ms=held_ms)
            self._send(RuntimeEvent(kind="model.waits", step=self._step, wait=wait))

    def close(self) -> None:
        """Stop the timer, and drop everything that waits."""
        self.wanted, self._closed = 0, True
        self._stop()

    # --- inside

    def _begin(self) -> None:
        self._begun = True
        started = RuntimeEvent(kind="turn.started", again=self._resumed)
        self._send(started, turn_span(self._turn_id), self._parent_span)

    def _begin_step(self, step: int) -> None:
        self._step = step
        self._restart(again=False)
        started = RuntimeEvent(kind="step.started", step=step)
        self._send(started, step_span(self._turn_id, step), turn_span(self._turn_id))

    def _stop(self) -> None:
        self._mute()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def __call__(self, delta: TextDelta) -> None:
        """Take a piece of text."""
        if delta.again:
            self._restart(again=True)
        if not self.wanted or self._muted:
            return
        kind: _Kind = "reasoning" if delta.reasoning else "text"
        if not self._waiting or self._waiting[-1].kind != kind:
            self._waiting.append(_Run(kind))
        self._waiting[-1].pieces.append(delta.text)
        self._size += len(delta.text)
        if self._size > MAX_WAITING or len(self._waiting) > MAX_RUNS:
            self._mute()
        elif self._timer is None:
            since = self._loop.time() - self._sent_at
            if since >= BATCH_S:
                self._send_text()
            else:
                self._timer = self._loop.call_later(BATCH_S - since, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._send_text()

    def _restart(self, *, again: bool) -> None:
        """The step's text begins, or begins again."""
        self._mute()
        self._at.clear()
        self._tails.clear()
        self._muted = False
        self._again = again

    def _mute(self) -> None:
        """Send no more of the step's text."""
        self._muted = True
        self._waiting.clear()
        self._size = 0

    def _send_text(self, *, everything: bool = False) -> None:
        """Send a batch of the waiting text; the rest follows later."""
        if not self._waiting:
            return
        room = MAX_WAITING if everything else MAX_BATCH
        while self._waiting and room > 0:
            run = self._waiting.pop(0)
            text = replace_surrogates("".join(run.pieces))
            seen = self._tails.get(run.kind, "") + text
            if self._redact(seen) != seen:
                self._mute()
                return
            self._tails[run.kind] = seen[-TAIL:]
            end = MAX_PIECE * room
            for start in range(0, min(end, len(text)), MAX_PIECE):
                self._send_piece(run.kind, text[start : start + MAX_PIECE])
                room -= 1
            if end < len(text):
                self._waiting.insert(0, _Run(run.kind, [text[end:]]))
        self._size = sum(len(piece) for run in self._waiting for piece in run.pieces)
        self._sent_at = self._loop.time()
        if self._waiting and self._timer is None:
            self._timer = self._loop.call_later(BATCH_S, self._on_timer)

    def _send_piece(self, kind: _Kind, piece: str) -> None:
        at = self._at.get(kind, 0)
        self._send(RuntimeEvent(kind=kind, step=self._step, text=piece, at=at, again=self._again))
        self._at[kind] = at + len(piece)
        self._again = False

    def _tell_tool(self, kind: Any, part: Any, code: str | None = None) -> None:
        name, call = _short(part.tool_name, MAX_NAME), _short(part.tool_call_id, MAX_NAME)
        line = None
        if kind == "tool.called" and self._for_operator:
            from goondan.schemas.text.visible import argument_line

            line = replace_surrogates(argument_line(part.args)) or None
        event = RuntimeEvent(kind=kind, step=self._step, tool_name=name, tool_call_id=call, code=code, arguments=line)
        self._send(event, call_span(f"{self._turn_id}/{part.tool_call_id}"), step_span(self._turn_id, self._step))

    def _send(
        self,
        event: RuntimeEvent,
        span_id: str | None = None,
        parent_span_id: str | None = None,
        *,
        stage: str | None = None,
    ) -> None:
        frame = Frame("runtime.event", event_id=self._event_id, epoch=self._epoch, stage=stage, payload=to_raw(event))
        frame.span_id, frame.parent_span_id = span_id, parent_span_id
        self._link.send(frame)


def _short(text: str, limit: int) -> str:
    cleaned: str = replace_surrogates(text[:limit])
    return cleaned

"""What an agent instance records or replays: the one place that its turns, model calls and tool calls tell.

An instance has none unless its kernel records, or its calls are answered from a recording.

Source: docs/design/turns.md section 12.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from msgspec import to_builtins

from goondan.agentproc.conversation import error_result
from goondan.agentproc.providers.base import ModelAnswer, ModelRequest
from goondan.agentproc.recordings.forms import Places, recorded_answer, recorded_fault, recorded_result, request_of
from goondan.agentproc.recordings.recorder import Recorder
from goondan.agentproc.recordings.replayed import Replayed
from goondan.agentproc.store import ConversationStore
from goondan.agentproc.turn import Begin, End, First
from goondan.schemas.approval_rules import decide
from goondan.schemas.bundle.address import SEPARATOR, instance_dir
from goondan.schemas.bundle.launch import AgentSpec
from goondan.schemas.mcp import McpListing
from goondan.schemas.models.model_windows import known_window
from goondan.schemas.recorded_texts import STATE, WORKDIR, comparable
from goondan.schemas.recordings import (
    NOTHING,
    RecordedCall,
    RecordedFile,
    RecordedListing,
    RecordedStep,
    RecordedTurn,
    parts_of,
)
from goondan.schemas.text.secret_values import in_texts
from goondan.schemas.wire.errors import GoondanError, tool_error
from goondan.schemas.wire.frames import FilePart, Frame, ToolResult

#: The id of the one message of a question that is asked outside of the conversation (agentproc/aside.py).
ASIDE: Final = "aside"
#: Who gives an agent a message from outside. Work of tools ends in a replay only because the message is sent again.
_OUTSIDE: Final = frozenset(("client", "connector", "tool"))
#: Errors of calls that nobody made: those that a person forbade.
_NOT_MADE: Final = frozenset(("E_APPROVAL_DENIED", "E_APPROVAL_MISMATCH"))
#: Bundled tools that ask other agents.
_ASKING: Final = frozenset(("agents", "handoff"))


class Tape:
    """The recording of one agent instance. `redact` takes secrets out of a text."""

    def __init__(
        self, spec: AgentSpec, instance_key: str, store: ConversationStore, redact: Callable[[str], str]
    ) -> None:
        folder = instance_dir(spec.state_dir, spec.name, instance_key)
        self._agent = spec.name
        self._instance = instance_key
        self._folder = folder
        self._files: list[FilePart] = []
        self._state_dir = spec.state_dir
        self._store = store
        self._recorder = Recorder(folder, spec.record, redact) if spec.record else None
        #: What answers in place of the model and the tools; None while a run is recorded.
        self.replayed = None if spec.replay is None else Replayed(spec.replay, spec.name, instance_key, folder)
        #: How many tokens the model's context holds, as its server says; None: it was not asked, or does not say.
        self.listed_window: int | None = None
        self._approvals = [] if spec.replay is None else spec.replay.approvals
        self._turn = 0
        self._asked = ""
        self._outside = False
        self._places: Places = ()
        self._before = NOTHING
        self._requests: dict[tuple[int, int, bool], int] = {}
        self._listings: dict[str, int] = {}

    # --- turns

    def begin(self, frame: Frame, first: First, workdir: str) -> None:
        """A turn that a model answers begins, or goes on, whose row is stored. Raises GoondanError E_REPLAY_DIFFERS,
        E_CONFIG_INVALID_VALUE.
        """
        self._turn = 0
        if not isinstance(first, Begin):
            return
        self._turn = self._store.turn_number(frame.event_id or "")
        self._asked, self._files = first.text, first.files
        self._outside = frame.source is not None and frame.source.kind in _OUTSIDE
        self._places = ((workdir, WORKDIR), (self._state_dir, STATE))
        self._requests.clear()
        if self._recorder is not None:
            self._recorder.places = self._places
            self._write_turn(None)
        if self.replayed is not None:
            self.replayed.begin(self._turn, first.text, self._places)

    def ended(self, end: End) -> None:
        """The turn has ended."""
        if self._recorder is not None and self._turn:
            self._write_turn(end)

    def _write_turn(self, end: End | None) -> None:
        if self._recorder is None:
            return
        error = None if end is None else end.error
        self._recorder.write(
            RecordedTurn(
                agent=self._agent,
                instance=self._instance,
                turn=self._turn,
                input=self._asked if self._outside else comparable(self._asked),
                files=[self._file(file) for file in self._files] if end is None and self._outside else [],
                outside=int(self._outside),
                status=None if end is None else end.status,
                response=None if end is None else end.response,
                error=None if error is None else error.code,
            )
        )

    def _file(self, file: FilePart) -> RecordedFile:
        """A file of the conversation with its bytes; without them when it cannot be read."""
        data = b""
        with suppress(OSError):
            data = Path(self._folder, "files", file.blob.file).read_bytes()
        return RecordedFile(file.media_type, data, file.name)

    # --- the model

    def answered(self, request: ModelRequest, answer: ModelAnswer, *, own: bool, in_place: bool) -> None:
        """A model has answered. `own`: the request had the messages of its turn only. `in_place`: another one gave no
        answer. In a replay at another model or
        prompt this raises GoondanError E_REPLAY_DIFFERS.
        """
        self._write_step(request, own, in_place, answer=answer)
        if self.replayed is not None and not is_aside(request):
            self.replayed.compare(request, answer)

    def failed(self, request: ModelRequest, error: GoondanError, *, own: bool, in_place: bool) -> None:
        """A model has not answered."""
        if error.info.code == "E_LEASE_LOST":
            return  # another incarnation asks
        self._write_step(request, own, in_place, error=error)

    def _write_step(
        self,
        request: ModelRequest,
        own: bool,
        in_place: bool,
        *,
        answer: ModelAnswer | None = None,
        error: GoondanError | None = None,
    ) -> None:
        if self._recorder is None or not self._turn:
            return
        aside = is_aside(request)
        place = (self._turn, request.step, aside)
        self._requests[place] = n = self._requests.get(place, 0) + 1
        whole = request_of(request, self._places, shorten=False)
        shared, entries, tools = parts_of(whole, NOTHING if aside else self._before)
        if not aside:
            self._before = whole
        self._recorder.write(
            RecordedStep(
                agent=self._agent,
                instance=self._instance,
                turn=self._turn,
                step=request.step,
                aside=aside,
                n=n,
                own=own,
                in_place=in_place,
                shared=shared,
                entries=entries,
                tools=tools,
                answer=None if answer is None else recorded_answer(answer),
                window=request.model.context_tokens or self.listed_window or known_window(request.model.model),
                fault=None if error is None else recorded_fault(error),
            )
        )

    # --- tools and servers

    def runs(self, tool: str, args: Any) -> bool:
        """Whether a call of a tool in the agent's process is made in a replay as well. Agents are asked, because they
        repeat the run, too; they get no folder that the recording names. What a person decided about is not made, and
        nothing that an operator asks for.
        """
        resource = tool.partition(SEPARATOR)[0]
        if resource == "self-restart" or (self.replayed is not None and not self._turn):
            return False
        if tool == "agents__spawn" and isinstance(args, dict) and args.get("cwd") is not None:
            return False
        return resource in _ASKING or decide(self._approvals, tool, args).action == "allow"

    def result(self, step: int, tool: str, args: Any, *, runs: bool) -> ToolResult | None:
        """The recorded result of a call. None: the call is to be made, because the run is not replayed, or the tool
        `runs` in a replay as well.
        """
        if self.replayed is None:
            return None
        if not self._turn:
            message = f"agent {self._agent} is answered from a recorded run, which has no call of an operator"
            return error_result(tool_error("E_REPLAY_DIFFERS", message, name="ReplayError"))
        found = self.replayed.result(step, tool, args)
        if not runs:
            return found if found is not None else self.replayed.no_such_call(step, tool, args)
        return found if found is not None and found.error is not None and found.error.code in _NOT_MADE else None

    def called(self, step: int, call_id: str, tool: str, args: Any, result: ToolResult, *, runs: bool) -> None:
        """A call has its result. `runs`: as for `result`."""
        if self._recorder is not None and self._turn:
            told = recorded_result(result)
            self._recorder.write(
                RecordedCall(
                    agent=self._agent,
                    instance=self._instance,
                    turn=self._turn,
                    step=step,
                    id=call_id,
                    tool=tool,
                    args=args,
                    result=in_texts(told, comparable) if runs else told,
                )
            )

    def listing(self, server: str) -> McpListing | None:
        """What an MCP server offered when the run was recorded. None: it is to be asked. Raises GoondanError
        E_REPLAY_DIFFERS.
        """
        return None if self.replayed is None else self.replayed.listing(server)

    def listed(self, server: str, listing: McpListing) -> None:
        """An MCP server has said what it offers."""
        if self._recorder is not None:
            self._listings[server] = n = self._listings.get(server, 0) + 1
            listed = to_builtins(listing)
            self._recorder.write(
                RecordedListing(agent=self._agent, instance=self._instance, server=server, n=n, listing=listed)
            )

    def close(self) -> None:
        """Close the file that is written."""
        if self._recorder is not None:
            self._recorder.close()


def is_aside(request: ModelRequest) -> bool:
    """Whether a question is asked outside of the conversation."""
    return len(request.messages) == 1 and request.messages[0].id == ASIDE

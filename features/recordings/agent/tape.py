"""What an agent instance records or replays: its turns, the answers of its models, the results of its calls, listings.

Each incarnation of a recorded instance appends to one file beside the conversation, which `gdn record` collects and
deletes. Texts have no secret that the agent knows, and names in place of this machine's folders. The rest is the
collector's work (command.py).

Source: docs/design/turns.md section 12.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import to_builtins

from goondan.agentproc.conversation.file import create_file
from goondan.agentproc.machine.messages import error_result
from goondan.agentproc.machine.turn import Begin, End
from goondan.agentproc.providers.base import ModelAnswer, ModelRequest
from goondan.agentproc.turn.instance import Instance
from goondan.agentproc.turn.parts import Ask, Call, Done, OnNews, Start, TurnCore, TurnPart
from goondan.features.approvals.wire import decide, policies_of
from goondan.features.recordings import PROVIDER, wire
from goondan.features.recordings.agent.replayed import (
    Places,
    Replayed,
    ReplayProvider,
    is_aside,
    recorded_answer,
    recorded_fault,
    recorded_result,
    request_of,
)
from goondan.features.recordings.wire.texts import STATE, WORKDIR, comparable, without_places
from goondan.schemas.bundle import address, launch
from goondan.schemas.models.server_answers import known_window
from goondan.schemas.text.redaction import in_texts
from goondan.schemas.wire.errors import GoondanError, fail, tool_error
from goondan.schemas.wire.frames import FilePart, ToolResult
from goondan.schemas.worker.servers import ServerListing

#: Room for the line that says that nothing more is written (bytes).
_ROOM_FOR_END: Final = 1024
#: Who gives an agent a message from outside. Work of tools ends in a replay only because the message is sent again.
_OUTSIDE: Final = frozenset(("client", "connector", "tool"))
#: Errors of calls that nobody made: those that a person forbade.
_NOT_MADE: Final = frozenset(("E_APPROVAL_DENIED", "E_APPROVAL_MISMATCH"))
#: Bundled tools that ask other agents.
_ASKING: Final = frozenset(("agents", "handoff"))

log = logging.getLogger("agentproc")


class Recorder:
    """The file of the run `run` in the instance's `folder`. `redact` takes secrets out of a text. Nothing is raised: a
    turn does not fail because its record cannot be written.
    """

    def __init__(self, folder: str, run: str, redact: Callable[[str], str]) -> None:
        self._path = os.path.join(folder, wire.noted_file(run))
        self._redact = redact
        self._fd: int | None = None
        self._room = wire.MAX_FILE_BYTES
        self._stopped = False
        #: Folders of this machine, each with the name that is written in its place.
        self.places: Places = ()

    def write(self, part: wire.Part) -> None:
        """Append a part of the recording."""
        if self._stopped:
            return
        places = self.places
        files = part.files if isinstance(part, wire.RecordedTurn) else []
        told = msgspec.structs.replace(part, files=[]) if files else part
        plain = in_texts(to_builtins(told), lambda text: without_places(self._redact(text), places))
        clean = msgspec.convert(plain, type(part))
        line = wire.encode_noted(
            wire.Noted(time.time_ns(), msgspec.structs.replace(clean, files=files) if files else clean)
        )
        if len(line) > wire.MAX_LINE_BYTES or len(line) > self._room - _ROOM_FOR_END:
            most, most_line = wire.MAX_FILE_BYTES >> 20, wire.MAX_LINE_BYTES >> 20
            why = f"it would be larger than {most} MiB, or a line longer than {most_line} MiB"
            line = self._last(why)
        try:
            self._append(line)
        except OSError as error:
            self._last(str(error))

    def _last(self, why: str) -> bytes:
        """The line after which nothing is written any more."""
        log.error("the run is recorded no further: %s", why)
        self._stopped = True
        return wire.encode_noted(wire.Noted(time.time_ns(), wire.Stopped(why)))

    def _append(self, line: bytes) -> None:
        if self._fd is None:
            create_file(Path(self._path))
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            self._room -= os.fstat(self._fd).st_size
        os.write(self._fd, line)
        self._room -= len(line)

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Tape:
    """The recording of one agent instance, and the recorded run that answers it. `part` says what there is of both."""

    def __init__(self, part: wire.RecordingsPart, instance: Instance) -> None:
        spec, folder = instance.spec, instance.place.instance_dir
        self.agent = spec.name
        self.instance_key = instance.instance_key
        self.folder = folder
        #: Writes the run; None: it is not recorded.
        self.recorder = Recorder(folder, part.record, instance.redact) if part.record else None
        #: What answers in place of the model and the tools; None while a run is recorded.
        self.replayed = None if part.replay is None else Replayed(part.replay, self.agent, self.instance_key, folder)
        #: Which calls a person decided about in the recorded run.
        self.policies = policies_of(spec.parts)
        #: The last request of the conversation that was written.
        self.before = wire.NOTHING
        self._listings: Counter[str] = Counter()

    def provider(self, _: launch.ModelSpec) -> ReplayProvider:
        """The provider that answers from the recording. Raises GoondanError E_CONFIG_INVALID_VALUE if there is none."""
        if self.replayed is None:
            raise fail("E_CONFIG_INVALID_VALUE", f"provider {PROVIDER} needs a recording")
        return ReplayProvider(self.replayed)

    @property
    def answers_alone(self) -> bool:
        """Whether no MCP server is asked."""
        return self.replayed is not None

    async def listing(self, server: str, ask: Callable[[], Awaitable[ServerListing]]) -> ServerListing:
        """What an MCP server offers, or offered when the run was recorded. Raises GoondanError E_REPLAY_DIFFERS, and as
        `ask`.
        """
        if self.replayed is not None:
            return self.replayed.listing(server)
        listing = await ask()
        if self.recorder is not None:
            self._listings[server] += 1
            self.recorder.write(
                wire.RecordedListing(
                    agent=self.agent,
                    instance=self.instance_key,
                    server=server,
                    n=self._listings[server],
                    listing=to_builtins(listing),
                )
            )
        return listing

    def close(self) -> None:
        """Close the file that is written."""
        if self.recorder is not None:
            self.recorder.close()


class TapedTurn(TurnPart):
    """The recording of a turn, which begins or goes on. A turn that no model answers has none, and has its calls not
    made in a replay. Raises GoondanError E_REPLAY_DIFFERS, E_CONFIG_INVALID_VALUE.
    """

    def __init__(self, tape: Tape, turn: TurnCore) -> None:
        self._tape = tape
        self._core = turn
        self._turn = 0  # its number in the instance; 0: it has no recording
        self._asked = ""
        self._files: list[FilePart] = []
        self._outside = False
        self._places: Places = ((turn.workdir, WORKDIR), (turn.spec.state_dir, STATE))
        self._requests: Counter[tuple[int, bool]] = Counter()
        first = turn.first
        if not isinstance(first, Begin):
            return
        self._turn = turn.instance.store.turn_number(turn.event.event_id or "")
        self._asked, self._files = first.text, first.files
        self._outside = turn.event.source is not None and turn.event.source.kind in _OUTSIDE
        if tape.recorder is not None:
            tape.recorder.places = self._places
            self._write_turn(None)
        if tape.replayed is not None:
            tape.replayed.begin(self._turn, first.text, self._places)

    def storing(self, end: End | None) -> None:
        """The turn ends."""
        if end is not None and self._turn:
            self._write_turn(end)

    def _write_turn(self, end: End | None) -> None:
        tape = self._tape
        if tape.recorder is None:
            return
        error = None if end is None else end.error
        tape.recorder.write(
            wire.RecordedTurn(
                agent=tape.agent,
                instance=tape.instance_key,
                turn=self._turn,
                input=self._asked if self._outside else comparable(self._asked),
                files=[self._file(file) for file in self._files] if end is None and self._outside else [],
                outside=int(self._outside),
                status=None if end is None else end.status,
                response=None if end is None else end.response,
                error=None if error is None else error.code,
            )
        )

    def _file(self, file: FilePart) -> wire.RecordedFile:
        """A file of the conversation with its bytes; without them when it cannot be read."""
        data = b""
        with suppress(OSError):
            data = Path(self._tape.folder, "files", file.blob.file).read_bytes()
        return wire.RecordedFile(file.media_type, data, file.name)

    # --- the model

    async def model(self, request: ModelRequest, on_news: OnNews, ask: Ask) -> ModelAnswer:
        """Write down what comes of a request. In a replay at another model or prompt the answer has to be the recorded
        one, else this raises GoondanError E_REPLAY_DIFFERS.
        """
        if request.model.provider == PROVIDER:
            return await ask(request, on_news)
        in_place = any(request.model is model for model in self._core.instance.spec.fallback)
        try:
            answer = await ask(request, on_news)
        except GoondanError as error:
            if error.info.code != "E_LEASE_LOST":  # else another incarnation asks
                self._write_step(request, in_place, error=error)
            raise
        self._write_step(request, in_place, answer=answer)
        if self._tape.replayed is not None and not is_aside(request):
            self._tape.replayed.compare(request, answer)
        return answer

    def _write_step(
        self,
        request: ModelRequest,
        in_place: bool,
        *,
        answer: ModelAnswer | None = None,
        error: GoondanError | None = None,
    ) -> None:
        tape, instance = self._tape, self._core.instance
        if tape.recorder is None or not self._turn:
            return
        aside = is_aside(request)
        provider = instance.provider_in_place(request.model) if in_place else instance.provider
        self._requests[request.step, aside] += 1
        whole = request_of(request, self._places, shorten=False)
        shared, entries, tools = wire.parts_of(whole, wire.NOTHING if aside else tape.before)
        if not aside:
            tape.before = whole
        listed = instance.context.listed
        tape.recorder.write(
            wire.RecordedStep(
                agent=tape.agent,
                instance=tape.instance_key,
                turn=self._turn,
                step=request.step,
                aside=aside,
                n=self._requests[request.step, aside],
                own=not provider.needs_history,
                in_place=in_place,
                shared=shared,
                entries=entries,
                tools=tools,
                answer=None if answer is None else recorded_answer(answer),
                window=request.model.context_tokens or listed or known_window(request.model.model),
                fault=None if error is None else recorded_fault(error),
            )
        )

    # --- tools

    def call(self, call: Call, done: Done, start: Start) -> None:
        """Make a call and write down its result, or answer it from the recording."""
        replayed = self._tape.replayed
        if replayed is None and call.action.within is not None:
            start(call, done)  # the result of its script is written
            return
        runs = self._has_handler_here(call.tool) and self.runs(call.tool, call.args)
        if replayed is not None and (recorded := self._recorded(replayed, call, runs)) is not None:
            done(recorded)
            return

        def ended(result: ToolResult) -> None:
            self._write_call(call, result, runs)
            done(result)

        start(call, ended)

    def _has_handler_here(self, tool: str) -> bool:
        """Whether calls of this tool can run here in a replay as well. What extensions of a bundle do is unknown, so a
        tool of theirs says so itself.
        """
        instance = self._core.instance
        local = instance.tools.get(tool)
        return tool in instance.catalog.run_here if local is None else local.in_replay

    def runs(self, tool: str, args: Any) -> bool:
        """Whether a call of a tool in the agent's process is made in a replay as well. Agents are asked, because they
        repeat the run, too; they get no folder that the recording names. What a person decided about is not made, and
        nothing that an operator asks for.
        """
        resource = tool.partition(address.SEPARATOR)[0]
        if resource == "self-restart" or (self._tape.replayed is not None and not self._turn):
            return False
        if tool == "agents__spawn" and isinstance(args, dict) and args.get("cwd") is not None:
            return False
        return resource in _ASKING or decide(self._tape.policies, tool, args).action == "allow"

    def _recorded(self, replayed: Replayed, call: Call, runs: bool) -> ToolResult | None:
        """The recorded result of a call. None: the call is to be made, because the tool `runs` in a replay as well."""
        if not self._turn:
            message = f"agent {self._tape.agent} is answered from a recorded run, which has no call of an operator"
            return error_result(tool_error("E_REPLAY_DIFFERS", message, name="ReplayError"))
        found = replayed.result(call.step, call.tool, call.args)
        if not runs:
            return found if found is not None else replayed.no_such_call(call.step, call.tool, call.args)
        return found if found is not None and found.error is not None and found.error.code in _NOT_MADE else None

    def _write_call(self, call: Call, result: ToolResult, runs: bool) -> None:
        tape = self._tape
        if tape.recorder is not None and self._turn:
            told = recorded_result(result)
            tape.recorder.write(
                wire.RecordedCall(
                    agent=tape.agent,
                    instance=tape.instance_key,
                    turn=self._turn,
                    step=call.step,
                    id=call.id,
                    tool=call.tool,
                    args=call.args,
                    result=in_texts(told, comparable) if runs else told,
                )
            )

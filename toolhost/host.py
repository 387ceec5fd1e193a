"""The tool host's decisions about calls, put into effect: frames in, calls placed and timed, results out.

It holds no socket of the bus: results leave through `send`, calls arrive through `on_frame`. So it runs the same with a
link, in a test, and in front of a fake. calls/call_registry.py decides about callIds, serving/sessions.py about jails,
and serving/answers.py about results.

Rules.
- Every call ends in exactly one result. One that reaches its deadline is answered then.
- A cancelled call is answered at once.

Source: docs/design/delivery.md section 6.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from goondan.schemas.bundle.address import MAX_PATH_BYTES, is_path
from goondan.schemas.bundle.launch import DEFAULT_ERROR_LIMIT, ServerSpec, ToolHostSpec, ToolSpec
from goondan.schemas.transport.link import boottime_us
from goondan.schemas.wire.blobs import MAX_ARGS_BYTES, too_large
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload, fail
from goondan.schemas.wire.frames import ErrorPayload, Frame, InstanceEnd, InstanceEnded, ToolCallPayload, ToolError
from goondan.schemas.worker import grantable, servers, tool_host_reports
from goondan.schemas.worker.servers import CONNECT_S, NamedServer
from goondan.toolhost.calls import asks, call_inputs
from goondan.toolhost.calls.call_registry import Call, Listing, StoredResult, listing_for
from goondan.toolhost.calls.results import Promise, error_result, refusal
from goondan.toolhost.jails import server_jail, write_exposures
from goondan.toolhost.lookup.folders import FolderCopies, folder_of_call
from goondan.toolhost.policy.subject import CallFolder
from goondan.toolhost.privileges.powers import Powers
from goondan.toolhost.serving import sessions, starting
from goondan.toolhost.serving.answers import Announce, Answers, Asking, Speaker, is_polling

#: Seconds between two looks at idle jails, orphans and kept results.
TICK_S: Final = 1.0
#: How long an answer to `mcp.attach` or `mcp.list` may take (seconds): the start of a server and of the template, and a
#: little more, so that what kept them is what is told.
LISTING_S: Final = CONNECT_S + server_jail.FORK_S + 5.0
#: Calls and handles that an answer names when an instance cannot be deleted: a person reads the first of them.
MAX_NAMED: Final = 16


class Host:
    """Serves calls of the tools in a ToolHostSpec. Use from the loop's thread only."""

    def __init__(
        self,
        spec: ToolHostSpec,
        powers: Powers,
        *,
        send: Callable[[Frame], bool],
        on_log: Callable[[tool_host_reports.LogLine], None] = lambda line: None,
        on_worker: Callable[[tool_host_reports.WorkerNews], None] = lambda event: None,
        announce: Announce = lambda event, told: None,
        remember: Callable[[list[Promise]], None] = lambda promises: None,
        unmade: Callable[[], None] = lambda: None,
        environment: Mapping[str, str] | None = None,
        speaker: Speaker | None = None,
        exposures: write_exposures.WriteExposures | None = None,
        copies: FolderCopies | None = None,
        server_asks: Mapping[str, asks.MakeServerAsk] | None = None,
    ) -> None:
        """Calls wait until `sessions.open`.

        `announce`, `remember` and `unmade`: see serving/answers.py. `speaker`: how handlers ask agents, if they can.
        `exposures`: None keeps no record of them. `copies`: None keeps those of folders in a temporary place.
        `server_asks`: what workers of servers may ask of features (`ASKS` of their `host.py`).
        """
        self._loop = asyncio.get_running_loop()
        self._messages = call_inputs.MessageCache()
        self.asking = Asking(self._loop, speaker, on_log, {} if server_asks is None else server_asks)
        self.answers = Answers(self._loop, send, self.asking, announce, remember, unmade)
        granted = os.environ if environment is None else environment
        self.sessions = sessions.Sessions(
            self._loop,
            self.answers,
            self.asking,
            starting.JailStarter(self._loop, spec, powers, granted, exposures),
            spec.max_jails,
            send=send,
            on_log=on_log,
            on_worker=on_worker,
        )
        self._calls = self.answers.calls
        self._tools: dict[str, ToolSpec] = {}
        self._generations: dict[str, str] = {}
        self._generation = 0
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._deadline_at = float("inf")
        self._ticker: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._finding: set[asyncio.Task[None]] = set()
        self._powers = powers
        self._copies = FolderCopies() if copies is None else copies
        self._send = send
        self._closing = False
        self.configure(spec)

    # --- life

    def configure(self, spec: ToolHostSpec) -> None:
        """Serve the tools of `spec` from now on; jails of tools that changed finish what they run."""
        before = self._tools
        self.spec = spec
        self._generation += 1
        self._tools = {tool.name: tool for tool in spec.tools}
        for name, tool in self._tools.items():
            if before.get(name) != tool:
                self._generations[name] = str(self._generation)
        self._exports = call_inputs.Exports(spec, self._generations)
        self.sessions.configure(spec, {name for name, tool in before.items() if self._tools.get(name) != tool})

    @property
    def wants_forks(self) -> bool:
        """Whether there is a tool whose calls would be forked, if that can be done (Sessions.fork_calls)."""
        sandboxes = [sandbox for tool in self.spec.tools for sandbox in (tool.sandbox, *tool.narrowed.values())]
        return any(sandbox.isolation == "call" for sandbox in sandboxes)

    async def close(self) -> None:
        """Kill every jail and wait until all their processes are gone, some seconds at most. Answers no call."""
        self._closing = True
        for timer in (self._deadline_timer, self._ticker):
            if timer is not None:
                timer.cancel()
        await self.sessions.close()
        await self._powers.offload.looked_up(self._copies.close)

    def unsent(self, frame: Frame, error: GoondanError) -> None:
        """A result's large payload could not be written: the call ends with that error."""
        if frame.type == "tool.result":
            payload = error_result(refusal(error.info), DEFAULT_ERROR_LIMIT)
            self.answers.send_result(frame.call_id or "", frame.to, frame.instance_key, payload)

    # --- from the bus

    def on_frame(self, frame: Frame) -> None:
        """Handle a frame from the broker. Never raises; what cannot be served is answered or dropped."""
        kind = frame.type
        if kind == "tool.call":
            if self._closing:
                return  # the next incarnation of this host answers, or the broker
            try:
                self._tool_call(frame)
            except GoondanError as error:
                self._refuse(frame, refusal(error.info))
            except Exception as error:  # a bug of ours costs this call, and no other
                self._refuse(frame, refusal(self._bug(error, f"the call {str(frame.call_id)[:200]!r}")))
        elif kind == "tool.cancel":
            if frame.call_id is not None:
                call = self._calls.get(frame.call_id)
                owner = (frame.from_, frame.instance_key)
                if isinstance(call, Call) and (frame.from_ is None or owner == call.owner):
                    self.sessions.cancel(call)
        elif kind == "instance.end":
            ending = self._loop.create_task(self._end_instance(frame))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
        elif kind == "clock":
            self._set_clock(frame)
        elif kind in (servers.ATTACH, servers.LIST, servers.DETACH):
            self._server_frame(frame)
        elif kind == "ack" and frame.stage == "result":
            self._calls.acknowledge(frame.calls or ([frame.call_id] if frame.call_id else []))

    def _server_frame(self, frame: Frame) -> None:
        """An agent attaches to a server, asks what it offers, or leaves it."""
        try:
            prefix = from_raw(frame.payload, NamedServer).server
            owner = (frame.from_ or "", frame.instance_key or "")
            if frame.type == servers.DETACH:
                self.sessions.detach(owner, prefix)
                return
            if self._closing:
                return
            found = self._exports.server(prefix, owner[0])
            if found is None:
                raise GoondanError(error_payload("E_TOOL_NOT_FOUND", f"there is no MCP server {prefix[:100]!r} here"))
            _check_workdir(frame)
            allowed_s = LISTING_S if frame.deadline_ms is None else min(LISTING_S, frame.deadline_ms / 1000)
            call = listing_for(frame, *found, self._loop.time(), allowed_s)
        except GoondanError as error:
            answer = Frame("error", to=frame.from_, instance_key=frame.instance_key, in_reply_to=frame.id)
            answer.payload = to_raw(error.info)
            self._send(answer)
            return
        if self._ticker is None:
            self._ticker = self._loop.call_later(TICK_S, self._tick)
        self._loop.call_later(allowed_s, self._listing_due, call)
        self.sessions.place(call)

    def _listing_due(self, call: Listing) -> None:
        if call.state != "done" and not self._closing:
            self.sessions.run_out(call)

    def _set_clock(self, frame: Frame) -> None:
        """An agent that a call has asked waits for a person, or goes on. The call's time stands still or goes on with
        it.
        """
        call = self._calls.get(frame.call_id or "")
        if not isinstance(call, Call):
            return
        now = self._loop.time()
        if frame.stage == "held":
            self._calls.hold(call, now)
        else:
            self._calls.go_on(call, now)
        self._set_deadline_timer()

    async def _end_instance(self, frame: Frame) -> None:
        """An instance is deleted. Answer when nothing of it runs here any more, or name what still does."""
        owner = (frame.to or "", frame.instance_key or "")
        calls, handles = self._calls.open_of(owner), [work.promise.handle for work in self.answers.pending.of(owner)]
        if not from_raw(frame.payload, InstanceEnd).force and (calls or handles):
            work = [*(call.id for call in calls), *handles][:MAX_NAMED]
            self._send(Frame("reply", in_reply_to=frame.id, payload=to_raw(InstanceEnded(work))))
            return
        for call in calls:
            self.sessions.cancel(call)
        self.answers.forget(owner)
        await self.sessions.end_all_of(owner)
        self._send(Frame("reply", in_reply_to=frame.id, payload=to_raw(InstanceEnded())))

    def _tool_call(self, frame: Frame) -> None:
        call_id, agent, instance_key = frame.call_id, frame.from_, frame.instance_key
        if not call_id or agent is None or instance_key is None:
            raise GoondanError(error_payload("E_FRAME_INVALID", "a tool.call needs callId, from and instanceKey"))
        known = self._calls.get(call_id)
        if known is not None:
            self._repeat(known, (agent, instance_key))
            return
        if frame.attach:
            message = "the call was started before, and this tool host does not know it"
            raise GoondanError(error_payload("E_TOOL_OUTCOME_UNKNOWN", message))
        _check_workdir(frame)
        entry = self._exports.find(frame.tool, frame.from_)
        if entry is None:
            raise GoondanError(error_payload("E_TOOL_NOT_FOUND", f"there is no tool {str(frame.tool)[:100]!r} here"))
        if frame.blob is not None:  # its arguments cannot be had; the link says why
            raise GoondanError(from_raw(frame.payload, ErrorPayload))
        payload = from_raw(frame.payload, ToolCallPayload)
        size = len(memoryview(payload.args))
        if size > MAX_ARGS_BYTES:
            raise too_large(size, MAX_ARGS_BYTES)
        args = call_inputs.arguments(entry, str(frame.tool), payload.args)
        if isinstance(args, ToolError):
            self._refuse(frame, args)
            return
        tool, blind, milliseconds = entry.tool, entry.is_blind, entry.longest_ms
        if frame.deadline_ms is not None:
            milliseconds = min(milliseconds, max(0, frame.deadline_ms))
        now = self._loop.time()
        call = Call(
            id=call_id,
            agent=agent,
            instance_key=instance_key,
            tool=tool,
            export=entry.export,
            args=args,
            turn_id=payload.turn_id,
            tool_call_id=payload.tool_call_id,
            message_id=payload.message_id,
            message=self._message((agent, instance_key), payload),
            workdir=None if blind else frame.workdir,
            workdir_base=None if blind else frame.workdir_base,
            folder_name=payload.folder,
            deadline=now + milliseconds / 1000,
            allowed_ms=int(milliseconds),
            generation=entry.generation,
            root_event=frame.root_event,
            trace_id=frame.trace_id,
            came_us=boottime_us(),
            within=frame.within,
            question=frame.in_reply_to,
        )
        if tool.server is not None:
            _bound_silence(call, tool.server, now)
        self._calls.open(call)
        if self._ticker is None:
            self._ticker = self._loop.call_later(TICK_S, self._tick)
        if call.deadline is not None and call.deadline < self._deadline_at:
            self._set_deadline_timer()
        self._place(call)

    def _place(self, call: Call) -> None:
        """Run a call that was accepted."""
        if is_polling(call.tool):
            self.answers.poll(call)
        elif call.folder_name is not None or call.agent in call.tool.folders:
            finding = self._loop.create_task(self._place_in_folder(call))
            self._finding.add(finding)
            finding.add_done_callback(self._finding.discard)
        else:
            self.sessions.place(call)

    async def _place_in_folder(self, call: Call) -> None:
        """Run a call that names a folder, if its caller may name it."""
        try:
            found = await self._powers.offload.looked_up(lambda: self._folder_of(call))
        except (GoondanError, OSError) as error:
            if call.state != "done" and not self._closing:
                self.answers.fail(call, refusal(starting.why_not(error)))
            return
        if call.state == "done" or self._closing:  # cancelled, or out of time
            return
        call.folder = found
        call.tool = msgspec.structs.replace(call.tool, sandbox=found.sandbox)
        self.sessions.place(call)

    def _folder_of(self, call: Call) -> CallFolder:
        """Look for the folder that a call names. Raises GoondanError, OSError."""
        if call.folder_name is None:
            raise fail("E_FRAME_INVALID", f"a call of the tool {call.tool.name} names no folder")
        writable = [place for tool in self.spec.tools for place in tool.sandbox.filesystem.write]
        place = call.workdir, call.workdir_base
        return folder_of_call(call.folder_name, call.tool, call.agent, *place, writable, self._copies)

    def _message(self, owner: tuple[str, str], payload: ToolCallPayload) -> bytes | None:
        """The message that made the call: from its frame, or from that of an earlier call."""
        if payload.message_id is None:
            return None
        name = (*owner, payload.message_id)
        if payload.message is None or memoryview(payload.message).nbytes > MAX_ARGS_BYTES:
            return self._messages.get(name)
        message = bytes(payload.message)
        self._messages.put(name, message)
        return message

    def _bug(self, error: Exception, where: str) -> ErrorPayload:
        """The answer for an exception that nobody expected. The log has the details."""
        context = {"message": f"{where} failed", "exception": error}
        self._loop.call_exception_handler(context)
        return error_payload("E_INTERNAL", f"{where} failed: {type(error).__name__}")

    def _repeat(self, known: Call | StoredResult, owner: tuple[str, str]) -> None:
        """A callId that is known: attach to the open call, or send the kept result again."""
        if known.owner != owner:
            raise GoondanError(error_payload("E_FORBIDDEN", "the callId is in use"))
        if isinstance(known, StoredResult):
            self.answers.send_stored(known)

    def _refuse(self, frame: Frame, error: ToolError) -> None:
        """Answer a call that was not accepted."""
        entry = self._exports.find(frame.tool, frame.from_)
        limit = DEFAULT_ERROR_LIMIT if entry is None else entry.tool.error_message_limit
        payload = error_result(error, limit)
        self.answers.send_result(frame.call_id or "", frame.from_, frame.instance_key, payload)

    # --- now and then

    def _set_deadline_timer(self) -> None:
        when = self._calls.next_deadline()
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None
        self._deadline_at = float("inf") if when is None else when
        if when is not None and not self._closing:
            self._deadline_timer = self._loop.call_at(when, self._deadlines)

    def _deadlines(self) -> None:
        self._deadline_timer = None
        # libuv's clock has milliseconds; what is due within the next one is due.
        for call in self._calls.due(self._loop.time() + 0.001):
            self.sessions.run_out(call)
        self._set_deadline_timer()

    def _tick(self) -> None:
        self.sessions.tick()
        for call, waits in self._calls.waits():
            told = Frame("tool.progress", call_id=call.id, to=call.agent, instance_key=call.instance_key)
            told.stage = "waits" if waits else "over"
            self._send(told)
        self._calls.expire(self._loop.time())
        more = self.sessions.jail_count or not self._calls.empty or not self.answers.pending.empty
        self._ticker = self._loop.call_later(TICK_S, self._tick) if more else None


def _bound_silence(call: Call, server: ServerSpec, now: float) -> None:
    """A call of a server is given up as well when nothing is heard of it for some time."""
    if server.idle_s * 1000 < call.allowed_ms:
        call.idle_s, call.total = server.idle_s, call.deadline
        call.deadline = now + server.idle_s


def _check_workdir(frame: Frame) -> None:
    """Raise GoondanError E_FRAME_INVALID for a bad working directory, or a bad base of one."""
    path, base = frame.workdir, frame.workdir_base
    if (path is not None and not is_path(path)) or (base is not None and not is_path(base)):
        message = f"a workdir is an absolute path of at most {MAX_PATH_BYTES} bytes, none of them zero"
        raise GoondanError(error_payload("E_FRAME_INVALID", message))
    if base is not None and not (path is not None and grantable.within(os.path.normpath(path), os.path.normpath(base))):
        raise GoondanError(error_payload("E_FRAME_INVALID", "the workdir lies outside of its base"))

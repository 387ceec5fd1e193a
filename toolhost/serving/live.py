"""One session whose jail is there: what the jail is told, and what its logs, results and receipts say.

machine.py decides what happens to the session. This module performs the actions that concern one jail alone.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping
from typing import Final

from msgspec import Raw
from msgspec.structs import replace

from goondan.schemas.bundle.launch import ServerSpec, ToolSpec
from goondan.schemas.text import redaction, times
from goondan.schemas.transport.link import boottime_us
from goondan.schemas.wire.errors import tool_error
from goondan.schemas.wire.frames import ToolError
from goondan.schemas.worker import hosts, servers
from goondan.schemas.worker.tool_host_reports import LogLine, WorkerNews
from goondan.schemas.worker.worker_frames import SERVER_LEFT, WORKER_PROTOCOL, Cancel, Exit, Init, Message, WorkerError
from goondan.schemas.worker.worker_frames import Call as WorkerCall
from goondan.toolhost.calls import call_inputs, call_registry, machine, untrusted
from goondan.toolhost.calls.results import JailReceipts, shown, without_network
from goondan.toolhost.calls.session import JailSession
from goondan.toolhost.jails.jail import CallSandbox, CallSandboxes, Jail
from goondan.toolhost.jails.network import JailNetwork
from goondan.toolhost.jails.server_jail import RemoteServer, ServerJail
from goondan.toolhost.jails.worker import CLOSED, Granted, Worker, WorkerOwner
from goondan.toolhost.lookup.hiding import Hiding
from goondan.toolhost.policy.limits import lacks_memory, lacks_processes, limit_error, with_limit
from goondan.toolhost.traffic.messages import Denied, Failed
from goondan.toolhost.watch.procfs import signal_all

#: How many looks in turn may find orphans in a jail before it is ended.
ORPHAN_LOOKS: Final = 3
#: The variable in which the tool finds the folder that its calls name.
FOLDER_VARIABLE: Final = "CALL_FOLDER"


#: What helps when a runtime cannot start within `memoryMb`.
_MEMORY_AHEAD: Final = (
    "Write 1024 or more: where no control group counts memory, a runtime must get all that it takes ahead, and Node 22 "
    "takes least."
)


class LiveSession:
    """A session with its jail."""

    def __init__(
        self,
        session: JailSession,
        jail: Jail | RemoteServer,
        tool: ToolSpec,
        hiding: Hiding,
    ) -> None:
        self.session = session
        self.jail = jail
        #: The tool, or the server, that it was started for.
        self.tool = tool
        #: Of a server: why its worker could not connect, as the worker says.
        self.unloaded: str | None = None
        #: How many calls it got.
        self.calls_made = 0
        #: The folders that its tool must not see.
        self.hiding = hiding
        #: What it may take in its workdir; None where the workdir has no file system of its own.
        #: The folders that belong to somebody and that its jail can write to.
        self.named = jail.plan.request.named
        self.receipts = JailReceipts(jail.plan)
        #: The sandboxes of its calls; None for a jail that runs calls in its worker.
        self.sandboxes: CallSandboxes | None = None
        #: What is known of its connections; None when it has no network.
        self.network: JailNetwork | None = None
        #: The messages that its worker has.
        self.messages = call_inputs.SentMessages()
        #: Set when its jail's last process has ended.
        self.gone = asyncio.Event()
        #: How many looks in turn have found orphans.
        self.orphans = 0
        #: Runs when what it waits for is over.
        self.timer: asyncio.TimerHandle | None = None

    def stop_timer(self) -> None:
        """Stop waiting."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    # --- what its workers are told

    def load(
        self,
        environment: Mapping[str, str],
        owner: WorkerOwner,
        loop: asyncio.AbstractEventLoop,
        *,
        folder: str | None = None,
        handshake: bool = False,
    ) -> None:
        """Tell the worker what to load, with the granted part of `environment`. It waits for its network, if any.

        A shared jail is for everybody, so it gets nothing of the environment. `folder` is the one that its calls name.
        `handshake`: the server is asked by the handshake first.
        """
        tool, jail, server, plan = self.tool, self.jail, self.tool.server, self.jail.plan
        init = Init(
            protocol=WORKER_PROTOCOL,
            tool=tool.name,
            entry="",
            env={},
            output_limit=untrusted.output_limit(tool.sandbox.limits.output_mb),
            permissions=list(self.session.permissions),
        )
        if self.network is None and plan.layout is not None:
            self.network = JailNetwork(hosts.read_network(tool.sandbox.network), plan.layout)
        if server is not None:
            self._connect(server, init, handshake=handshake)
            return
        assert isinstance(jail, Jail)
        names = tool.sandbox.env if tool.sandbox.isolation != "shared" else []
        granted = {name: environment[name] for name in names if name in environment}
        secrets: list[str] = []
        if granted:
            from goondan.schemas.text.secret_values import granted_secrets  # its patterns take 2 ms, and most need none

            secrets = granted_secrets(granted)
        if plan.layout is not None:
            granted = {**plan.layout.environment, **granted}
        if folder is not None:
            granted[FOLDER_VARIABLE] = folder
        request = plan.request
        init = replace(init, entry=request.entry, env=granted, import_paths=request.import_paths, jailed=True)
        init = replace(init, offline=self.network is None)
        if plan.calls is None:
            jail.send(init)
        else:
            self.session.forks = True
            self.sandboxes = CallSandboxes(jail, owner, loop, init)
            jail.usage.sandboxes = self.sandboxes.processes
        if secrets:
            hidden = Granted(secrets)
            jail.grant(hidden)
            if self.sandboxes is not None:
                self.sandboxes.granted = hidden
            if self.network is not None:
                self.network.redact = hidden.redact
        if self.network is not None:
            (self.sandboxes or jail).hold()  # until its sockets are there

    def _connect(self, server: ServerSpec, init: Init, *, handshake: bool) -> None:
        """Tell an MCP worker which server it speaks with. The server waits for its network, if it has one."""
        from goondan.schemas.text.secret_values import secret_parts

        kept = [*server.env.values(), *server.headers.values(), *server.login_secrets]
        if secrets := secret_parts(kept):
            # Everything of the server comes in at three places: its worker, what it prints, the hosts that it names.
            redact = redaction.Redactor(*secrets)
            self.jail.hide(redact)
            if self.network is not None:
                self.network.redact = redact
        told = servers.ServerInit(
            transport=server.transport,
            endpoint=server.endpoint,
            headers=server.headers,
            tools=server.tools,
            resources=server.resources,
            prompts=server.prompts,
            grants=server.grants,
            root=self.jail.plan.workdir if "roots" in server.grants and server.scope == "agent" else None,
            longest_export=servers.longest_export(self.tool.name),
            idle_ms=int(server.idle_s * 1000),
            login=server.login,
            handshake=handshake,
            secrets=secrets,
        )
        self.jail.send(replace(init, server=told))
        if self.network is not None:
            self.jail.hold()
        else:
            self.jail.release()

    def send_call(self, call: call_registry.Call, now: float) -> None:
        """Hand a call to its worker, with the message that made it. Raises OSError when the call gets no sandbox."""
        worker: Worker = self.jail
        sent = self.messages
        self.calls_made += 1
        if worker.live and len(self.session.calls) == 1:
            worker.forget()  # it is nothing of this call's, and may be another caller's
        if self.sandboxes is not None:
            worker, sent = self.sandboxes.enter(call.worker_call_id), call_inputs.SentMessages()
        message_id = None
        if call.message_id is not None:
            message_id, is_new = sent.name((call.agent, call.instance_key, call.message_id), call.message)
            if is_new:
                worker.send(Message(message_id or "", Raw(call.message or b"\xc0")))
        frame = WorkerCall(
            call_id=call.worker_call_id,
            export=call.export.name,
            input=call.args,
            agent_name=call.agent,
            instance_key=call.instance_key,
            turn_id=call.turn_id,
            tool_call_id=call.tool_call_id,
            workdir=self.jail.plan.workdir,
            message_id=message_id,
            deadline_ms=None if call.deadline is None else max(0, int(((call.total or call.deadline) - now) * 1000)),
            background=call.export.background,
        )
        worker.send(frame)

    def perform(self, action: machine.JailAction) -> None:
        """Perform an action on the jail, or on the worker of one call."""
        if isinstance(action, machine.Kill):
            self.jail.kill(action.reason)
            self.receipts.ended(action.reason)
        elif isinstance(action, machine.Leave):
            self._leave()
        elif isinstance(action, machine.Terminate):
            if isinstance(self.jail, ServerJail | RemoteServer):
                self.jail.terminate()
        else:
            name = action.call.worker_call_id
            sandbox = None if self.sandboxes is None else self.sandboxes.by_name.get(name)
            worker = self.jail if self.sandboxes is None else sandbox
            match action:
                case machine.AskToStop() if worker is not None:
                    worker.send(Cancel(name))
                case machine.LeaveCall() if sandbox is not None:
                    sandbox.leave()
                case machine.EndCall() if sandbox is not None:
                    sandbox.kill(action.reason)

    def _leave(self) -> None:
        if isinstance(self.jail, ServerJail | RemoteServer):
            self.jail.leaving = True
        self.jail.send(Exit())

    def own_call(self, worker: Worker) -> call_registry.Call | None:
        """The call that this worker was made for; None for the worker of a jail."""
        return self.session.own.get(worker.name or "") if isinstance(worker, CallSandbox) else None

    def sweep(self) -> bool:
        """Kill what calls have left behind in an idle jail. False: it comes back, so the jail must end.

        The worker sweeps after its calls, but a hostile worker may not. So this looks from outside while nothing runs.
        """
        session = self.session
        if session.clean or session.background or session.state != "serving":
            return True
        orphans = self.jail.orphans()
        if not orphans:
            session.clean, self.orphans = True, 0
            return True
        self.orphans += 1
        if self.orphans > ORPHAN_LOOKS:
            return False
        signal_all(self.jail.orphans, signal.SIGKILL)
        return True

    # --- results and receipts

    def ending(self, cause: str, worker: Worker) -> ToolError:
        """Why a running call has failed when its worker ended; the worker is the jail's or the call's own."""
        usage = self.jail.usage
        # Linux may have ended a single call before anybody looked at its jail.
        met = usage.limit_met() if isinstance(worker, CallSandbox) else usage.met
        if met is not None:
            return limit_error(met, usage.limits)
        if isinstance(worker, CallSandbox) and worker.unmade is not None:
            if usage.refused():
                return limit_error("processes", usage.limits)
            return unavailable(f"the call could not be separated from others: {worker.unmade}")
        words = worker.last_words
        if self.jail.was_replaced:
            hint = "Call again; see which program replaces it."
            return tool_error("E_SANDBOX_DENIED", words.removeprefix("boot: "), name="SandboxDenied", suggestion=hint)
        if not worker.live and words.startswith(("bwrap: ", "launcher: ", "boot: ")):
            return unavailable(f"the jail could not be made: {words}")
        if self.tool.server is not None:
            return self._server_ended(cause, worker)
        if self.tool.javascript is not None and lacks_memory(
            words, began=worker.live, counted=usage.keeper.counts_memory
        ):
            error = limit_error("memoryMb", usage.limits)
            advice = error.suggestion if worker.live else _MEMORY_AHEAD
            return replace(error, message=f"{error.message} ({words})", suggestion=advice)
        while_ = "during the call" if worker.live else "while the tool was being loaded"
        said = f"; it said last: {words}" if words else ""
        return tool_error("E_TOOL_CRASHED", f"the tool's process {cause} {while_}{said}", name="ToolCrashed")

    def _server_ended(self, cause: str, worker: Worker) -> ToolError:
        words = worker.last_words
        said = f"; it said last: {words}" if words else ""
        if worker.live:
            return tool_error(servers.GONE, f"the MCP server {self.tool.name} {cause}{said}", name=servers.ERROR_NAME)
        if self.unloaded is not None and (cause == CLOSED or SERVER_LEFT not in self.unloaded):
            message = f"the MCP server {self.tool.name}: {self.unloaded}{said}"
        else:
            message = f"the MCP server {self.tool.name} {cause} before it had said what it offers{said}"
        return tool_error(servers.NOT_CONNECTED, message, name=servers.ERROR_NAME)

    def explained(self, error: WorkerError) -> WorkerError:
        """A handler's error together with the wall or the limit that it met, as far as that is known at once."""
        if self.tool.server is not None and error.message.startswith(_THE_SERVER):
            message = f"the MCP server {self.tool.name}{error.message.removeprefix(_THE_SERVER)}"
            error = replace(error, message=message)
        if self.network is None:
            error = without_network(error)
        usage = self.jail.usage
        refused = lacks_processes(error) and usage.refused()
        return with_limit(error, usage.limits, refused=refused, counted=usage.keeper.counts_processes)

    def receipt(self, call: call_registry.Call, now: float, cause: str | None = None, handler_ms: float = 0.0) -> Raw:
        """The receipt of a call that this jail has, or had until now.

        `cause`: why the call's processes end before it had a result; for a call without its own processes, the jail's.
        `handler_ms`: how long the worker says that it had the call (milliseconds).
        """
        receipts, call_s = self.receipts, now - call.started
        if receipts.is_due(now, call_s):
            receipts.look(now, self.jail.used())
        network = self.network
        denied: list[str] = []
        if network is not None:
            refused = network.denied_since(call.denied_before)
            denied = list(dict.fromkeys(shown(event.host, event.port) for event in refused))
            reached = [shown(host, port) for host, port in network.reached]
            receipts.network(reached, list(dict.fromkeys(shown(event.host, event.port) for event in network.denied)))
        if cause is not None and not self.session.forks:
            receipts.ended(cause)
            cause = None
        return receipts.receipt(call.came_us, call.began_us, boottime_us(), handler_ms, cause, denied)

    # --- logs and events

    def log_line(self, level: str, message: str, call: call_registry.Call | None = None) -> LogLine:
        """A log line of this jail, with its owner: the owner of the call, or the one instance that the jail is for."""
        line = LogLine(time=time.time(), level=level, message=message, tool=self.jail.name)
        if call is not None:
            line.agent, line.instance_key, line.call_id = call.agent, call.instance_key, call.id
        elif (instance := self.session.instance) is not None:
            line.agent, line.instance_key = instance
        return line

    def network_line(self, event: Denied | Failed) -> LogLine:
        """A log line: the egress proxy refused this jail something, or could not reach something for it."""
        what = "was denied" if isinstance(event, Denied) else "could not be reached"
        return self.log_line("warn", f"{shown(event.host, event.port)} {what}: {event.reason}")

    def started(self) -> WorkerNews | None:
        """News of a worker that has said `ready`; None when its process is not known."""
        jail, session = self.jail, self.session
        if jail.worker_pid is None or session.server:  # a server has reports of its own
            return None
        first = None if len(session.key) == 2 else next(iter(session.calls.values()), None)  # a shared one is nobody's
        return WorkerNews(
            op="start",
            pid=jail.worker_pid,
            tool=jail.name,
            agent=None if first is None else first.agent,
            instance_key=None if first is None else first.instance_key,
            since=times.rfc3339(time.time()),
        )

    def ended(self, cause: str) -> WorkerNews | None:
        """News of a worker that is gone; None when its process was never known."""
        pid = self.jail.worker_pid
        if pid is None or self.session.server:
            return None
        return WorkerNews(op="exit", pid=pid, tool=self.jail.name, cause=cause)


#: How a worker begins what it says of its server, whose name it does not know.
_THE_SERVER: Final = "the server"


def unavailable(message: str) -> ToolError:
    """The error of calls whose walls could not be put up."""
    return tool_error("E_SANDBOX_UNAVAILABLE", message, name="SandboxUnavailable")


def load_error(tool: ToolSpec, why: str) -> ToolError:
    """The error of calls whose worker could not load its tool, or could not connect to its server."""
    if tool.server is not None:
        return tool_error(servers.NOT_CONNECTED, f"the MCP server {tool.name}: {why}", name=servers.ERROR_NAME)
    return tool_error("E_CONFIG_ENTRY", f"the tool {tool.name} could not be loaded: {why}", name="ToolLoadError")


def protocol_error(violation: untrusted.Violation, worker: Worker) -> ToolError:
    """The error of calls whose worker broke the protocol."""
    what_then = "its processes were ended" if isinstance(worker, CallSandbox) else "its jail was ended"
    name = "OutputTooLarge" if violation.code == "E_TOOL_LIMIT" else "ToolProtocolError"
    return tool_error(violation.code, f"{violation}; {what_then}", name=name)

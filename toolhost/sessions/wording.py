"""What the host says of a jail's calls: frames to its worker and to the bus, lines for the log, errors."""

from __future__ import annotations

import os
import time

from schemas.codec import to_raw
from schemas.errors import tool_error
from schemas.frames import Frame, ToolError, ToolProgress
from schemas.launch import ToolSpec
from schemas.worker_frames import WORKER_PROTOCOL, Init, LoadFailed, Log, Progress
from schemas.worker_frames import Call as WorkerCall
from toolhost.calls.call_registry import Call
from toolhost.calls.denials import shown
from toolhost.egress.messages import Denied, Failed
from toolhost.news import LogLine
from toolhost.sessions.live import LiveSession
from toolhost.untrusted import Violation


def progress_frame(call: Call, progress: Progress) -> Frame:
    """What a handler says of its work, for the bus."""
    message = None if progress.message is None else progress.message[:1000]
    told = ToolProgress(progress.done, progress.total, message)
    return Frame("tool.progress", call_id=call.id, to=call.agent, instance_key=call.instance_key, payload=to_raw(told))


def log_line(live: LiveSession, call: Call | None, log: Log) -> LogLine:
    """What a handler, or its module, has logged."""
    line = LogLine(time=time.time(), level=log.level, message=log.message[:16384], tool=live.jail.name)
    return _of(line, call, live)


def printed_lines(live: LiveSession, text: str, call: Call | None = None) -> list[LogLine]:
    """What was written to a jail's standard output or error, past its worker."""
    now, tool = time.time(), live.jail.name
    lines = [line for line in text.splitlines() if line.strip()]
    return [_of(LogLine(time=now, level="info", message=line[:8192], tool=tool), call, live) for line in lines]


def _of(line: LogLine, call: Call | None, live: LiveSession) -> LogLine:
    """The line with whose it is: the call's, or that of the one instance that the jail is for."""
    if call is not None:
        line.agent, line.instance_key, line.call_id = call.agent, call.instance_key, call.id
    elif (whose := live.session.instance) is not None:
        line.agent, line.instance_key = whose
    return line


def network_line(live: LiveSession, news: Denied | Failed) -> LogLine:
    """What the egress proxy has refused a jail, or could not get for it."""
    what = "was denied" if isinstance(news, Denied) else "could not be reached"
    message = f"{shown(news.host, news.port)} {what}: {news.reason}"
    return _of(LogLine(time=time.time(), level="warn", message=message, tool=live.jail.name), None, live)


def protocol_error(violation: Violation, what_then: str) -> ToolError:
    """The error of calls whose worker broke the protocol."""
    name = "OutputTooLarge" if violation.code == "E_TOOL_LIMIT" else "ToolProtocolError"
    return tool_error(violation.code, f"{violation}; {what_then}", name=name)


def load_error(tool: str, frame: LoadFailed) -> ToolError:
    """The error of calls of a tool that cannot be loaded."""
    message = f"the tool {tool} could not be loaded: {frame.message[:4096]}"
    return tool_error("E_CONFIG_ENTRY", message, name="ToolLoadError")


def worker_init(live: LiveSession, tool: ToolSpec, env: dict[str, str], output_limit: int) -> Init:
    """The first frame to a jail: what to load. `env` is what was granted."""
    return Init(
        protocol=WORKER_PROTOCOL,
        tool=tool.name,
        entry=os.path.realpath(tool.entry),
        env=env,
        import_paths=live.jail.plan.request.import_paths,
        output_limit=output_limit,
        jailed=True,
        offline=live.network is None,
        permissions=list(live.session.permissions),
    )


def worker_call(live: LiveSession, call: Call, message_id: str | None, now: float) -> WorkerCall:
    """The frame that hands a call to its jail."""
    return WorkerCall(
        call_id=call.worker_call_id,
        export=call.export.name,
        input=call.args,
        agent_name=call.agent,
        instance_key=call.instance_key,
        turn_id=call.turn_id,
        tool_call_id=call.tool_call_id,
        workdir=live.jail.plan.workdir,
        message_id=message_id,
        deadline_ms=None if call.deadline is None else max(0, int((call.deadline - now) * 1000)),
        background=call.export.background,
    )

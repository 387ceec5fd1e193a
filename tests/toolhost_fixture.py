"""A tool host without a bus: real policy, real jails, results handed to whoever made the call."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from goondan.schemas.bundle.launch import ExportSpec, SandboxSpec, ToolHostSpec, ToolSpec
from goondan.schemas.wire.blobs import INLINE_FRAME_BYTES
from goondan.schemas.wire.codec import encode, encode_value
from goondan.schemas.wire.frames import Frame, ToolCallPayload
from goondan.schemas.worker.receipts import Receipt
from goondan.schemas.worker.tool_host_reports import LogLine, WorkerNews
from goondan.toolhost.calls.session import JailSession
from goondan.toolhost.host import Host
from goondan.toolhost.jails.write_exposures import WriteExposures
from goondan.toolhost.lookup.this_host import find_bwrap, host_facts
from goondan.toolhost.policy.subject import HostFacts
from goondan.toolhost.privileges.powers import Ordinary
from goondan.toolhost.serving.answers import Speaker
from goondan.toolhost.serving.live import LiveSession

#: What tests can have done on this machine, as root, too: they do everything themselves.
POWERS = Ordinary()


@lru_cache(maxsize=1)
def bwrap() -> str:
    """Found once: it is asked for its version each time."""
    return find_bwrap()[0]


def make_tool(
    folder: Path,
    source: str | bytes,
    *exports: str | ExportSpec,
    name: str = "t",
    file: str = "handler.py",
    mode: int = 0o755,
    sandbox: SandboxSpec | None = None,
    error_message_limit: int = 1000,
) -> ToolSpec:
    """A tool with that source in a file of that name and mode; exports are named, or given whole."""
    root = folder / f"tool-{name}"
    root.mkdir(parents=True, exist_ok=True)
    entry = root / file
    entry.write_bytes(source.encode() if isinstance(source, str) else source)
    entry.chmod(mode)
    return ToolSpec(
        name=name,
        entry=str(entry),
        root=str(root),
        exports=[ExportSpec(name=e) if isinstance(e, str) else e for e in exports],
        sandbox=sandbox or SandboxSpec(),
        error_message_limit=error_message_limit,
    )


def small_outputs(tool: ToolSpec) -> ToolSpec:
    """The tool with outputs of 1 MiB at most, so that a limit is met without work."""
    return replace(tool, sandbox=replace(tool.sandbox, limits=replace(tool.sandbox.limits, output_mb=1)))


def error_of(result: dict[str, Any]) -> dict[str, Any]:
    """The error of a failed call, which says where help is and what to do."""
    assert result["status"] == "error", result
    error: dict[str, Any] = result["error"]
    assert error["helpUrl"].startswith("https://")
    assert error["suggestion"]
    return error


def code_of(result: dict[str, Any]) -> str:
    """The code of a failed call."""
    return str(error_of(result)["code"])


async def until(condition: Callable[[], object], within_s: float = 30.0) -> None:
    """Wait for something that has no event of its own."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


class Bench:
    """A host, and callers of it. Use inside `bench(...)`."""

    def __init__(
        self,
        spec: ToolHostSpec,
        *,
        hidden: list[str] | None = None,
        environment: dict[str, str] | None = None,
        grouped: bool = True,
        speaker: Speaker | None = None,
        exposures: WriteExposures | None = None,
    ):
        self.loop = asyncio.get_running_loop()
        self.logs: list[LogLine] = []
        self.workers: list[WorkerNews] = []
        self.progress: list[tuple[str, Any]] = []
        self.results: list[tuple[str, dict[str, Any]]] = []
        self.news: list[Frame] = []
        self.answers: dict[str, asyncio.Future[Frame]] = {}  # to what was asked, by the ids of the questions
        self.receipts: dict[str, Any] = {}  # by callId; results are kept without them
        self._waiters: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._count = itertools.count(1)
        self.host = Host(
            spec,
            POWERS,
            send=self._receive,
            on_log=self.logs.append,
            on_worker=self.workers.append,
            environment=environment or {},
            speaker=speaker,
            exposures=exposures,
        )
        self.facts = msgspec.structs.replace(host_facts(bwrap(), hidden or [], POWERS), nests=True)
        if not grouped:
            self.facts = msgspec.structs.replace(self.facts, groups=None)

    def _receive(self, frame: Frame) -> bool:
        if len(memoryview(frame.payload)) <= INLINE_FRAME_BYTES:  # the link sends what is larger by reference
            encode(frame)
        if frame.type == "tool.progress":
            self.progress.append((frame.call_id or "", msgspec.msgpack.decode(frame.payload)))
            return True
        if frame.type == "mcp.news":
            self.news.append(frame)
            return True
        if frame.type in ("reply", "error"):
            self.answers.pop(frame.in_reply_to or "").set_result(frame)
            return True
        assert frame.type == "tool.result"
        result = msgspec.msgpack.decode(frame.payload)
        if "receipt" in result:
            receipt = self.receipts[frame.call_id or ""] = result.pop("receipt")
            msgspec.convert(receipt, Receipt)
        self.results.append((frame.call_id or "", result))
        waiter = self._waiters.pop(frame.call_id or "", None)
        if waiter is not None and not waiter.done():
            waiter.set_result(result)
        return True

    def start(
        self,
        tool: str,
        args: Any = None,
        *,
        workdir: Path | str | None = None,
        workdir_base: Path | str | None = None,
        agent: str = "coder",
        instance_key: str = "k1",
        deadline_ms: int | None = 20_000,
        call_id: str | None = None,
        message_id: str | None = None,
        message: Any = None,
        folder: Path | str | None = None,
    ) -> tuple[str, asyncio.Future[dict[str, Any]]]:
        """Make a call; its callId and its result to come."""
        number = next(self._count)
        call_id = call_id or f"turn-1/call-{number}"
        waiter = self._waiters[call_id] = self.loop.create_future()
        payload = ToolCallPayload(
            args=Raw(encode_value({} if args is None else args)),
            turn_id="turn-1",
            tool_call_id=call_id.rpartition("/")[2],
            message_id=message_id,
            message=None if message is None else Raw(encode_value(message)),
            folder=None if folder is None else str(folder),
        )
        self.host.on_frame(
            Frame(
                "tool.call",
                call_id=call_id,
                from_=agent,
                instance_key=instance_key,
                tool=tool,
                workdir=None if workdir is None else str(workdir),
                workdir_base=None if workdir_base is None else str(workdir_base),
                deadline_ms=deadline_ms,
                payload=Raw(encode_value(payload)),
            )
        )
        return call_id, waiter

    async def call(self, tool: str, args: Any = None, *, within_s: float = 25.0, **options: Any) -> dict[str, Any]:
        """Make a call and wait for its result."""
        _, waiter = self.start(tool, args, **options)
        return await asyncio.wait_for(waiter, within_s)

    def live_of(self, session: JailSession) -> LiveSession:
        """The live session of a session whose jail is there."""
        return self.host.sessions._live[session.number]

    def cancel(self, call_id: str) -> None:
        """Say that the caller gave up."""
        self.host.on_frame(Frame("tool.cancel", call_id=call_id))

    def acknowledge(self, *call_ids: str) -> None:
        """Say that results were stored."""
        self.host.on_frame(Frame("ack", stage="result", calls=list(call_ids)))


@asynccontextmanager
async def bench(
    *tools: ToolSpec,
    state_dir: Path | str = "/nonexistent/state",
    max_jails: int = 16,
    jail_idle_s: float = 60.0,
    protected: list[str] | None = None,
    hidden: list[str] | None = None,
    environment: dict[str, str] | None = None,
    grouped: bool = True,
    exposures: WriteExposures | None = None,
    facts: Callable[[HostFacts], HostFacts] = lambda facts: facts,
    speaker: Speaker | None = None,
) -> AsyncIterator[Bench]:
    """A host that serves these tools; at the end all of its jails are gone.

    `grouped`: with control groups. `facts` changes what is known of this machine.
    """
    spec = ToolHostSpec(
        tools=list(tools),
        state_dir=str(state_dir),
        revision="1",
        max_jails=max_jails,
        jail_idle_s=jail_idle_s,
        protected=protected or [],
    )
    made = Bench(spec, hidden=hidden, environment=environment, grouped=grouped, exposures=exposures, speaker=speaker)
    made.facts = facts(made.facts)
    made.host.sessions.open(made.facts)
    try:
        yield made
    finally:
        await made.host.close()
        assert made.host.sessions.jail_count == 0

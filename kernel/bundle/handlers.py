"""Checks that every export has a handler: has each module loaded in a jail, and judges the document by the report.

The kernel imports neither a tool's code nor the tool host. It starts `goondan.toolhost.inspection` once for all tools,
which loads each module in a jail. The answer is checked like all data from outside. The report of a jail is kept in the
workspace's state. The next check uses it if the files are the same.

The loader imports this before everything else, and starts that program while the rest is imported: so what only the
judging needs is imported there.

Source: docs/design/bundle.md section 5; toolhost/inspection.py has the other half; requirements HANDLER-03, HANDLER-04,
VALIDATE-02.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from goondan.kernel import paths, spawn
from goondan.kernel.bundle.files import read_file, tree_digest
from goondan.kernel.bundle.rules.lookup import Unreadable
from goondan.kernel.bundle.rules.problems import Path, Report, did_you_mean, shown
from goondan.kernel.start import INSPECTION
from goondan.schemas.bundle import address, launch
from goondan.schemas.worker.inspection import InspectionAnswer, InspectionRequest, ModuleReport

if TYPE_CHECKING:
    from goondan.kernel.bundle.rules.checked import CheckedTool


#: How long one module may take to load (seconds): the import of a large library from a cold disk.
LOAD_TIMEOUT_S: Final = 5.0
#: How long the whole inspection may take (seconds). Modules are loaded side by side, and a machine may be busy.
INSPECTION_TIMEOUT_S: Final = 30.0
#: The longest answer of the program (bytes): it has only names of exports and short messages.
MAX_ANSWER: Final = 4 << 20
#: What is known about handlers, in the workspace's state.
CACHE_FILE: Final = "cache/handlers.json"


class Start(Protocol):
    """Starts a program of ours; see goondan.kernel.ahead.Ahead.start."""

    def __call__(
        self, module: str, arguments: Sequence[str], *, env: Mapping[str, str], output_fd: int, pass_fds: Sequence[int]
    ) -> int: ...


def execute(module: str, arguments: Sequence[str], **given: Any) -> int:
    """A Start by exec."""
    return spawn.start_program(spawn.command(module, arguments), **given)


class _Program:
    """The program, and our end of the socket on which it is asked. Raises OSError."""

    def __init__(self, start: Start) -> None:
        self._channel, theirs = socket.socketpair()
        # It talks to jails, so its environment has only values that a module gets.
        env, given = spawn.environment(os.environ), [theirs.fileno()]
        try:
            with theirs, open(os.devnull, "wb") as null:
                self.pid = start(INSPECTION, [*map(str, given)], env=env, output_fd=null.fileno(), pass_fds=given)
        except OSError:
            self._channel.close()
            raise
        self.ended = False

    def answer(self, request: bytes) -> bytes:
        """Its answer; empty when it failed. Raises OSError when there is none in time."""
        data, channel, until = b"", self._channel, time.monotonic() + INSPECTION_TIMEOUT_S
        channel.settimeout(INSPECTION_TIMEOUT_S)
        channel.sendall(request)
        channel.shutdown(socket.SHUT_WR)
        while len(data) <= MAX_ANSWER and (chunk := channel.recv(MAX_ANSWER)):
            data += chunk
            channel.settimeout(max(0.0, until - time.monotonic()))
        return data if self._wait() == 0 and len(data) <= MAX_ANSWER else b""

    def kill(self) -> None:
        """End it."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._wait()

    def _wait(self) -> int | None:
        self.ended = True
        self._channel.close()
        with suppress(ChildProcessError):
            return os.waitpid(self.pid, 0)[1]
        return None


class Inspector:
    """The inspecting program. Started early it loads its own modules while documents are being checked.

    A context manager: the program is gone when it ends. `state_dir` None: nothing is remembered.
    """

    def __init__(self, state_dir: str | None, start: Start | None = None) -> None:
        """`start` starts the program; None: by exec."""
        self.state_dir = state_dir
        self.cache = os.path.join(state_dir, CACHE_FILE) if state_dir is not None else None
        self._start = start or execute
        self._process: _Program | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and not self._process.ended:
            self._process.kill()

    def start_early(self) -> None:
        """Start now, unless the reports are probably known already. Never raises."""
        if self.cache is None or not os.path.exists(self.cache):
            with suppress(OSError):  # ask() tries again, and the caller says when nothing was checked
                self._process = _Program(self._start)

    def ask(
        self, tools: Sequence[launch.ToolSpec], documents: Sequence[str], values: Mapping[str, str]
    ) -> list[ModuleReport]:
        """Inspect the modules of `tools`. `documents` are the bundle's files, which no module sees.

        `values` are variables of the environment. A module gets those that its sandbox.env names.

        Call it once. The result is empty when there is no answer. Never raises.
        """
        request = InspectionRequest(
            tools=[*tools],
            state_dir=self.state_dir or paths.state_root(),
            protected=[*documents],
            timeout_s=LOAD_TIMEOUT_S,
            values={**values},
        )
        try:
            process = self._process = self._process or _Program(self._start)
            data = process.answer(msgspec.json.encode(request))
            asked = {tool.name for tool in tools}
            answer = msgspec.json.decode(data, type=InspectionAnswer)
            return [finding for finding in answer.tools if finding.name in asked]
        except (OSError, msgspec.DecodeError):
            return []  # nothing was checked, and the caller says so


#: The most names in a suggestion.
_LISTED: Final = 8
#: The longest message of a module (characters).
_MAX_MESSAGE: Final = 300


class Check(Struct, frozen=True):
    """How modules are inspected."""

    #: The inspection.
    inspector: Inspector
    #: The bundle's files. No module sees them.
    documents: Sequence[str]
    #: Takes values of the environment out of what modules print and raise.
    redact: Callable[[str], str]
    #: The person's environment.
    env: Mapping[str, str]
    #: The user has agreed to what the bundle asks for. A module of a bundle that was not reviewed gets no variable and
    #: reads only its own folder. A packaged tool gets what the operator has accepted, or nothing.
    reviewed: bool = True


def check_handlers(tools: Iterable[CheckedTool], check: Check, report: Report) -> None:
    """Report exports without a handler, and modules that cannot be loaded. The bundled package is not checked."""
    subjects = [tool for tool in tools if tool.entry and tool.root and not tool.bundled]
    if not subjects:
        return
    findings = inspect(subjects, check)
    for tool in subjects:
        finding = findings.get(tool.name)
        if finding is None:
            message = "the handlers were not checked: the inspection did not answer"
            report.warn("W_CONFIG_UNCHECKED", message, tool.document.place("spec", "entry"), _NO_ANSWER)
        else:
            judge(tool, finding, check, report)


_UNREVIEWED: Final = "Look at the bundle, then trust it with `gdn trust`: its modules are loaded as they would run."
_NO_ANSWER: Final = "See whether `python -m goondan.toolhost.inspection` starts on this machine."


def judge(tool: CheckedTool, finding: ModuleReport, check: Check, report: Report) -> None:
    """Report the problems of a Tool's document that follow from a finding."""
    from goondan.kernel.bundle.rules.plan import tool_spec

    entry_at: Path = ("spec", "entry")
    place, entry = tool.document.place(*entry_at), tool.document.text(*entry_at)
    if finding.error is not None:
        message, suggestion = _one_line(check.redact(finding.error.message)), None
        if spec_for(tool, check) != tool_spec(tool):  # it might be well with what it asks for
            text = f"the module {entry} was loaded without what the bundle asks for, and failed: {message}"
            report.warn("W_CONFIG_UNCHECKED", text, place, _UNREVIEWED)
            return
        if finding.error.reason == "runtime":  # of this machine, and of no other
            text = f"no call of {tool.document.resource} can run on this machine: {message}"
            report.warn("W_CONFIG_UNCHECKED", text, place, finding.error.suggestion)
            return
        if finding.error.reason == "sandbox":  # no fault of the module, which was not loaded
            at = tool.document.place("spec", "sandbox")
            if any(p.resource == at.resource and p.path.startswith("spec.sandbox.") for p in report.errors):
                return  # which says it better
            report.error("E_SANDBOX_DENIED", f"no jail of this tool can be made: {message}", at)
            return
        if finding.error.reason == "handlers":
            suggestion = "Give the module `handlers`, a dict (in JavaScript an object) from export names to functions."
        report.error("E_CONFIG_ENTRY", f"the entry {entry} cannot be used: {message}", place, suggestion)
        return
    if finding.method == "source":
        message = f"the module {entry} was read, not loaded: there is no jail on this machine"
        report.warn("W_CONFIG_UNCHECKED", message, place)
    if finding.exports is None:
        return
    for index, export in enumerate(tool.body.exports):
        if not export.name or export.name in finding.exports:
            continue
        text = tool.document.text("spec", "exports", index, "name")
        hint = did_you_mean(export.name, finding.exports)
        if address.build_tool_name(tool.name, export.name) in finding.exports:
            hint = "The keys of `handlers` are the export names alone, without the tool's name."
        listed = ", ".join(shown(name) for name in finding.exports[:_LISTED]) or "none"
        where = tool.document.place("spec", "exports", index, "name")
        message = f"`handlers` of {entry} has no function {text}"
        report.error("E_CONFIG_ENTRY", message, where, hint or f"The module has: {listed}.")


def spec_for(tool: CheckedTool, check: Check) -> launch.ToolSpec:
    """The tool with the grants for the inspection of its module."""
    from goondan.kernel.bundle.rules.plan import tool_spec

    spec = tool_spec(tool)
    if check.reviewed or tool.bundled or tool.package:
        return spec
    return replace(spec, sandbox=launch.SandboxSpec(), narrowed={})


def inspect(tools: Sequence[CheckedTool], check: Check) -> dict[str, ModuleReport]:
    """The report on each tool, from the cache or from the inspection, by the tool's name. Never raises."""
    from goondan.kernel.bundle.rules.plan import tool_spec

    inspector = check.inspector
    specs = {tool.name: spec_for(tool, check) for tool in tools}
    keys = {tool.name: _key(tool) if specs[tool.name] == tool_spec(tool) else None for tool in tools}
    remembered = _recall(inspector.cache)
    findings: dict[str, ModuleReport] = {}
    for name, key in keys.items():
        known = remembered.get(key) if key is not None else None
        if known is not None:
            findings[name] = known
    missing = [tool for tool in tools if tool.name not in findings]
    if missing:
        asked = [specs[tool.name] for tool in missing]
        granted = {name: check.env[name] for spec in asked for name in spec.sandbox.env if name in check.env}
        for finding in inspector.ask(asked, check.documents, granted):
            findings[finding.name] = finding
        # Timeouts and crashes may be chance, and after a reading of the source a jail may be possible later. So neither
        # is kept.
        settled = {
            key: findings[name]
            for name, key in keys.items()
            if key is not None and name in findings and _is_settled(findings[name])
        }
        _remember(inspector.cache, settled)
    return findings


def _is_settled(finding: ModuleReport) -> bool:
    return finding.method == "jail" and (finding.error is None or finding.error.reason in ("import", "handlers"))


def _key(tool: CheckedTool) -> str | None:
    """A digest of the content that a finding depends on. None when it depends on more than the tool's own files."""
    sandbox = tool.body.sandbox
    if launch.entry_kind(tool.entry) == "executable":
        return None  # what runs it is of the system
    if sandbox.python.venv is not None or sandbox.env or sandbox.filesystem.read or sandbox.filesystem.write:
        return None
    # A bundled tool imports what lies beside its folder (docs/design/tools.md).
    digest, whole = tree_digest(os.path.dirname(tool.root) if tool.bundled else tool.root)
    runtime = sys.version if tool.javascript is None else str(tool.javascript)
    parts = f"{runtime}\0{tool.name}\0{tool.entry}\0{tool.root}\0{digest}"
    return hashlib.sha256(parts.encode("utf-8", "surrogateescape")).hexdigest() if whole else None


def _recall(path: str | None) -> dict[str, ModuleReport]:
    if path is None:
        return {}
    try:
        return msgspec.json.decode(read_file(path, MAX_ANSWER), type=dict[str, ModuleReport])
    except (Unreadable, msgspec.DecodeError):
        return {}


def _remember(path: str | None, settled: dict[str, ModuleReport]) -> None:
    """Keep what was found out. A state directory that cannot be written to only makes the next check slower."""
    if path is None or not settled:
        return
    from goondan.schemas.system.directories import DirectoryRefused, open_directory, replace_in

    folder = os.path.dirname(path)
    with (
        suppress(OSError, DirectoryRefused),
        open_directory(folder, make=True, private_from=paths.root_of(folder)) as kept,
    ):
        replace_in(kept.fd, os.path.basename(path), msgspec.json.encode(settled))


def _one_line(text: str) -> str:
    """A message of a module without line breaks and control characters, because its text is from outside."""
    return "".join(c if c.isprintable() else " " for c in text)[:_MAX_MESSAGE]

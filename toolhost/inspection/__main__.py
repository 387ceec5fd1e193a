"""`python -m toolhost.inspection`: what the modules of tools export, without running them outside of a jail.

`gdn validate` and the start of a kernel ask this program: neither may import a tool's code. One JSON document comes in
on stdin, one goes out on stdout:

    {"tools": [ToolSpec, …], "stateDir": PATH, "protected": [PATH, …], "timeoutS": 5, "values": {}}
    {"tools": [{"name", "method": "jail" | "source", "exports": […] | null, "error": {"reason", "message"} | null}]}

In a jail the module is loaded by the very worker that would serve it, with what it was granted to read, without a
workdir and without network. Without a jail its syntax tree is read: then `exports` is null when the handlers cannot
be told from the source. Both are bounded in time.

Source: docs/design/bundle.md section 5; requirements HANDLER-03, HANDLER-04, VALIDATE-02.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Final

import msgspec

from schemas.errors import GoondanError
from schemas.launch import Filesystem, SandboxSpec, ToolHostSpec, ToolSpec
from schemas.tool_host_reports import InspectionAnswer, InspectionRequest, ModuleReport
from schemas.worker_frames import LoadFailed, Ready, WorkerFrame
from toolhost.drop_privileges import drop_privileges
from toolhost.inspection.source import NO_HANDLERS, read_source, refuse
from toolhost.jails.jail import Jail
from toolhost.jails.visit import Visit
from toolhost.policy.hiding import hidden_folders, with_hidden
from toolhost.policy.subject import HostFacts
from toolhost.privileges.powers import Powers

#: Jails at once: more would only wait for each other's processors.
MAX_JAILS: Final = 8
#: How the complaints of what makes a jail begin; then there is none on this machine, whatever the module is like.
_NO_JAIL: Final = ("bwrap: ", "launcher: ", "boot: ")
#: Where in our own code a worker was when a module failed; of no use to the module's author.
_OURS: Final = re.compile(r" at (?:<frozen |/run/goondan/)")


async def inspect(request: InspectionRequest, powers: Powers, facts: HostFacts | GoondanError) -> list[ModuleReport]:
    """Look at every tool, several at once."""
    if isinstance(facts, GoondanError) or not facts.bwrap:
        return [read_source(tool) for tool in request.tools]
    spec = ToolHostSpec(tools=request.tools, state_dir=request.state_dir, revision="", protected=request.protected)
    host = with_hidden(facts, hidden_folders(spec, "", facts.home, powers.operator))
    turns = asyncio.Semaphore(MAX_JAILS)

    async def one(tool: ToolSpec) -> ModuleReport:
        async with turns:
            return await load_in_jail(tool, spec, host, powers, request) or read_source(tool)

    return list(await asyncio.gather(*(one(tool) for tool in request.tools)))


class _Visit(Visit[Ready | LoadFailed]):
    def __init__(self, granted: dict[str, str]) -> None:
        super().__init__()
        self._granted = granted

    def ask(self, jail: Jail, tool: ToolSpec) -> None:
        jail.send(self.init(jail, tool, self._granted))

    def hear(self, jail: Jail, frame: WorkerFrame) -> None:
        if isinstance(frame, Ready | LoadFailed):
            self.tell(frame)

    def describe_end(self, jail: Jail, cause: str) -> str:
        return f"{cause}{': ' if jail.last_words else ''}{jail.last_words}"


async def load_in_jail(
    tool: ToolSpec, spec: ToolHostSpec, host: HostFacts, powers: Powers, request: InspectionRequest
) -> ModuleReport | None:
    """What a worker says after loading the module. None when no jail can be had on this machine."""
    granted = {name: request.values[name] for name in tool.sandbox.env if name in request.values}
    try:
        jail, told = await _Visit(granted).answer(_narrowed(tool), spec, host, powers, request.timeout_s)
    except GoondanError as error:
        if error.info.code == "E_SANDBOX_UNAVAILABLE":
            return None
        return refuse(tool, "sandbox", error.info.message, "jail")
    except TimeoutError:
        return refuse(tool, "timeout", f"the module was not loaded within {request.timeout_s:g} s", "jail")
    if isinstance(told, Ready):
        return ModuleReport(name=tool.name, method="jail", exports=told.exports)
    if isinstance(told, LoadFailed):
        if told.message.startswith("NoHandlers:"):
            return refuse(tool, "handlers", NO_HANDLERS, "jail")
        return refuse(tool, "import", _OURS.split(told.message)[0], "jail")
    if jail.last_words.startswith(_NO_JAIL):
        return None
    return refuse(tool, "crash", f"the process that loads the module {told}", "jail")


def _narrowed(tool: ToolSpec) -> ToolSpec:
    """The tool with what loading needs: what it may read, its variables and its environment of packages."""
    asked = tool.sandbox
    readable = Filesystem(read=[*asked.filesystem.read, *asked.filesystem.write])
    sandbox = SandboxSpec(isolation="shared", filesystem=readable, python=asked.python, limits=asked.limits)
    return msgspec.structs.replace(tool, sandbox=sandbox, narrowed={})


def main() -> int:
    """Read the request from stdin, write the findings to stdout. 2: it is none; 1: root stays root."""
    try:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=InspectionRequest)
    except msgspec.DecodeError as error:
        print(f"toolhost.inspection: {error}", file=sys.stderr)
        return 2
    try:
        powers, facts = drop_privileges()
        powers.settle(False)
    except OSError as error:
        print(f"toolhost.inspection: cannot give up root's powers: {error.strerror or error}", file=sys.stderr)
        return 1
    answer = InspectionAnswer(asyncio.run(inspect(request, powers, facts)))
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

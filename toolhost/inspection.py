"""`python -m goondan.toolhost.inspection`: reports what the modules of tools export, without running them outside of a
jail.

`gdn validate` and the start of a kernel start this program, because they must not import a tool's code. It reads one
JSON document from stdin, or a socket, and writes one to stdout, or that socket:

    {"tools": [ToolSpec, …], "stateDir": PATH, "protected": [PATH, …], "timeoutS": 5, "values": {}}
    {"tools": [{"name", "method": "jail" | "source", "exports": […] | null, "error": {"reason", "message"} | null}]}

In a jail, the same worker program loads the module that would serve it. The jail has the granted files to read, but no
workdir and no network. Without a jail, the syntax tree of the module is read, which is not run. Then `exports` is null
when the source does not show the handlers. Both are bounded in time.

Source: docs/design/bundle.md section 5; requirements HANDLER-03, HANDLER-04, VALIDATE-02.
"""

from __future__ import annotations

import ast
import asyncio
import os
import re
import socket
import sys
from typing import IO, Final, Literal

import msgspec

from goondan.schemas.bundle.launch import Filesystem, SandboxSpec, ToolHostSpec, ToolSpec, entry_kind
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.worker.inspection import InspectionAnswer, InspectionRequest, ModuleReport, Reason, Refusal
from goondan.schemas.worker.worker_frames import LoadFailed, Ready, WorkerFrame
from goondan.toolhost.drop_privileges import drop_privileges
from goondan.toolhost.jails.jail import Jail, Visit
from goondan.toolhost.lookup.hiding import hidden_folders, with_hidden
from goondan.toolhost.policy import launch_plan, subject
from goondan.toolhost.privileges.powers import Powers

# --- the source of a module -------------------------------------------------------------------------------------------

#: The largest module (bytes). People write modules of handlers, so they are not large.
MAX_SOURCE_BYTES: Final = 4 << 20
#: The longest message with text of a module (characters).
MAX_MESSAGE: Final = 500
_NO_HANDLERS: Final = "the module has no `handlers`, a dict from export names to functions"
_NO_MAPPING: Final = "`handlers` is no mapping"


def refuse(tool: ToolSpec, reason: Reason, message: str, method: Literal["jail", "source"] = "source") -> ModuleReport:
    """The report of a module that cannot serve."""
    return ModuleReport(name=tool.name, method=method, error=Refusal(reason, message[:MAX_MESSAGE]))


def read_source(tool: ToolSpec) -> ModuleReport:
    """Read the `handlers` of a module from its syntax tree. The module is not run.

    Nobody reads JavaScript here, and a program has none.
    """
    if launch_plan.is_javascript(tool):
        lacks = Refusal("runtime", tool.lack, tool.lack_fix or None) if tool.javascript is None else None
        return ModuleReport(name=tool.name, method="source", error=lacks)
    if entry_kind(tool.entry) == "executable":
        return ModuleReport(name=tool.name, method="source")
    try:
        with open(tool.entry, "rb") as source:
            data = source.read(MAX_SOURCE_BYTES + 1)
    except OSError as error:
        return refuse(tool, "import", error.strerror or type(error).__name__)
    if len(data) > MAX_SOURCE_BYTES:
        return refuse(tool, "import", f"the module is larger than {MAX_SOURCE_BYTES} bytes")
    try:
        tree = ast.parse(data)
    except SyntaxError as error:
        return refuse(tool, "import", f"SyntaxError: {error.msg} (line {error.lineno})")
    except (ValueError, RecursionError, MemoryError) as error:
        return refuse(tool, "import", f"{type(error).__name__}: {error}")
    return _read_tree(tool, tree)


def _read_tree(tool: ToolSpec, tree: ast.Module) -> ModuleReport:
    """Follow the assignments to `handlers` at the module's top level. If anything else uses the name, the handlers are
    unclear.
    """
    names: list[str] | None = None
    bound = unclear = False
    for statement in tree.body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                if name == "handlers":
                    return refuse(tool, "handlers", _NO_MAPPING)
                unclear = unclear or _mentions(statement)  # a decorator may add handlers
            case ast.ImportFrom(names=aliases) | ast.Import(names=aliases):
                if any((alias.asname or alias.name) in ("handlers", "*") for alias in aliases):
                    bound = unclear = True
            case (
                ast.Assign(targets=targets, value=ast.expr() as value)
                | ast.AnnAssign(target=targets, value=ast.expr() as value)
            ) if _is_handlers(targets):
                bound = True
                names, fault = _keys(value)
                if fault is not None:
                    return refuse(tool, "handlers", fault)
                unclear = unclear or names is None
            case ast.Assign(
                targets=[ast.Subscript(value=ast.Name(id="handlers"), slice=ast.Constant(value=str(key)))]
            ) if names is not None:
                names.append(key)
            case _ if _mentions(statement):
                bound = unclear = True  # a loop, a condition, a call
    if not bound:
        return refuse(tool, "handlers", _NO_HANDLERS)
    return ModuleReport(name=tool.name, method="source", exports=None if unclear else names)


def _mentions(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "handlers" for node in ast.walk(statement))


def _is_handlers(targets: list[ast.expr] | ast.expr) -> bool:
    named = targets if isinstance(targets, list) else [targets]
    return any(isinstance(target, ast.Name) and target.id == "handlers" for target in named)


def _keys(value: ast.expr) -> tuple[list[str] | None, str | None]:
    """The keys of a literal mapping (None when it is none), and its fault."""
    if isinstance(value, ast.Constant | ast.List | ast.Tuple | ast.Set | ast.Lambda | ast.JoinedStr):
        return None, _NO_MAPPING
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "dict" and not value.args:
        keywords = [keyword.arg for keyword in value.keywords]
        return ([str(name) for name in keywords], None) if None not in keywords else (None, None)
    if not isinstance(value, ast.Dict):
        return None, None
    names: list[str] = []
    for key, item in zip(value.keys, value.values, strict=True):
        if not isinstance(key, ast.Constant):
            return None, None
        if not isinstance(key.value, str):
            return None, "a key of `handlers` is no string"
        if isinstance(item, ast.Constant | ast.Dict | ast.List | ast.Tuple | ast.Set | ast.JoinedStr):
            return None, f"handlers[{key.value!r}] is not callable"
        names.append(key.value)
    return names, None


# --- modules in jails -------------------------------------------------------------------------------------------------

#: The most jails at once. More would only wait for processors.
MAX_JAILS: Final = 8
#: The beginnings of messages of programs that make jails. With such a message no jail can be made on this machine,
#: whatever the module is.
_NO_JAIL: Final = ("bwrap: ", "launcher: ", "boot: ")
#: A line of a traceback in our own code. The author of the module has no use for it.
_OURS: Final = re.compile(rf" at (?:<frozen |{subject.JAIL_CODE})")


async def inspect(
    request: InspectionRequest, powers: Powers, facts: subject.HostFacts | GoondanError
) -> list[ModuleReport]:
    """Inspect all tools, several at once."""
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
    tool: ToolSpec, spec: ToolHostSpec, host: subject.HostFacts, powers: Powers, request: InspectionRequest
) -> ModuleReport | None:
    """The report of a worker that has loaded the module. None when no jail can be made on this machine."""
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
        exports = None if entry_kind(tool.entry) == "executable" else told.exports
        return ModuleReport(name=tool.name, method="jail", exports=exports)
    if isinstance(told, LoadFailed):
        if told.message.startswith("NoHandlers: "):
            return refuse(tool, "handlers", told.message.removeprefix("NoHandlers: "), "jail")
        return refuse(tool, "import", _OURS.split(told.message)[0], "jail")
    if jail.last_words.startswith(_NO_JAIL):
        return None
    return refuse(tool, "crash", f"the process that loads the module {told}", "jail")


def _narrowed(tool: ToolSpec) -> ToolSpec:
    """The tool with only the grants that loading needs: files to read, variables, and its environment of packages."""
    asked = tool.sandbox
    readable = Filesystem(read=[*asked.filesystem.read, *asked.filesystem.write])
    sandbox = SandboxSpec(isolation="shared", filesystem=readable, python=asked.python, limits=asked.limits)
    return msgspec.structs.replace(tool, sandbox=sandbox, narrowed={})


def main() -> int:
    """Read the request from stdin, and write the findings to stdout. An argument is the descriptor of a socket for
    both. Returns 0, 2 for an invalid request, or 1 when root could not be given up.
    """
    source: IO[bytes] = sys.stdin.buffer
    answers: IO[bytes] = sys.stdout.buffer
    for descriptor in sys.argv[1:]:
        os.set_inheritable(int(descriptor), False)  # no jail is to have it
        with socket.socket(fileno=int(descriptor)) as channel:
            source, answers = channel.makefile("rb"), channel.makefile("wb")
    try:
        request = msgspec.json.decode(source.read(), type=InspectionRequest)
    except msgspec.DecodeError as error:
        print(f"goondan.toolhost.inspection: {error}", file=sys.stderr)
        return 2
    try:
        powers, facts = drop_privileges()
        powers.settle(False)
    except OSError as error:
        print(f"goondan.toolhost.inspection: cannot give up root's powers: {error.strerror or error}", file=sys.stderr)
        return 1
    answer = InspectionAnswer(asyncio.run(inspect(request, powers, facts)))
    answers.write(msgspec.json.encode(answer) + b"\n")
    answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

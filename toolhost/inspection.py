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

import ast
import asyncio
import re
import sys
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from schemas.errors import GoondanError
from schemas.launch import Filesystem, SandboxSpec, ToolHostSpec, ToolSpec
from schemas.worker_frames import WORKER_PROTOCOL, Init, LoadFailed, Ready, WorkerFrame
from toolhost.drop_privileges import drop_privileges
from toolhost.jails.jail import Jail
from toolhost.policy.facts import find_bwrap, home, host_facts, look_up
from toolhost.policy.hiding import hidden_folders
from toolhost.policy.plan import plan
from toolhost.policy.subject import HostFacts
from toolhost.privileges.powers import Powers
from toolhost.untrusted import Violation

#: A module of handlers is written by people.
MAX_SOURCE_BYTES: Final = 4 << 20
#: One message of a module's own making (characters).
MAX_MESSAGE: Final = 500
#: Jails at once: more would only wait for each other's processors.
MAX_JAILS: Final = 8
#: A worker that only loads a module sends next to nothing (bytes).
OUTPUT_LIMIT: Final = 1 << 20
#: How the complaints of what makes a jail begin; then there is none on this machine, whatever the module is like.
_NO_JAIL: Final = ("bwrap: ", "launcher: ", "boot: ")
#: Where in our own code a worker was when a module failed; of no use to the module's author.
_OURS: Final = re.compile(r" at (?:<frozen |/run/goondan/)")
NO_HANDLERS: Final = "the module has no `handlers`, a dict from export names to functions"

#: `sandbox`: what the tool asks for cannot be given to any jail, so the module was not loaded.
Reason = Literal["import", "handlers", "timeout", "crash", "sandbox"]


class Request(Struct, frozen=True, rename="camel", kw_only=True):
    """What comes in. `timeout_s` bounds each tool, `protected` are the bundle's documents.

    `values` are the values of variables; a module gets those that its tool's sandbox.env names.
    """

    tools: list[ToolSpec]
    state_dir: str
    protected: list[str] = []
    timeout_s: float = 5.0
    values: dict[str, str] = {}


class Refusal(Struct, frozen=True):
    """Why a module cannot serve."""

    reason: Reason
    message: str


class Finding(Struct, frozen=True, rename="camel", kw_only=True):
    """What was found. `exports` is None when it could not be told, or with an error."""

    name: str
    method: Literal["jail", "source"]
    exports: list[str] | None = None
    error: Refusal | None = None


async def inspect(request: Request, powers: Powers) -> list[Finding]:
    """Look at every tool, several at once."""
    host = _host(request, powers)
    if host is None:
        return [read_source(tool) for tool in request.tools]
    spec = ToolHostSpec(tools=request.tools, state_dir=request.state_dir, revision="", protected=request.protected)
    turns = asyncio.Semaphore(MAX_JAILS)

    async def one(tool: ToolSpec) -> Finding:
        async with turns:
            return await load_in_jail(tool, spec, host, powers, request) or read_source(tool)

    return list(await asyncio.gather(*(one(tool) for tool in request.tools)))


def _host(request: Request, powers: Powers) -> HostFacts | None:
    spec = ToolHostSpec(tools=[], state_dir=request.state_dir, revision="")
    try:
        return host_facts(find_bwrap(), hidden_folders(spec, "", home(), powers.operator), powers)
    except GoondanError:
        return None


# --- in a jail ------------------------------------------------------------------------------------------------------


class _Visit:
    """Waits for the one thing that a worker has to say, and for its end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.told: asyncio.Future[WorkerFrame | str] = loop.create_future()
        self.over: asyncio.Future[str] = loop.create_future()

    def jail_found(self, jail: Jail, pid: int) -> None:
        """A module is looked at without network (jail.Owner)."""

    def jail_frames(self, jail: Jail, frames: list[WorkerFrame]) -> None:
        for frame in frames:
            if isinstance(frame, Ready | LoadFailed):
                self._tell(frame)

    def jail_broken(self, jail: Jail, violation: Violation) -> None:
        self._tell(str(violation))

    def jail_printed(self, jail: Jail, text: str) -> None:
        pass  # what a module prints while it is loaded is nobody's business here

    def jail_gone(self, jail: Jail, cause: str) -> None:
        self._tell(f"{cause}{': ' if jail.last_words else ''}{jail.last_words}")
        self.over.set_result(cause)

    def _tell(self, what: WorkerFrame | str) -> None:
        if not self.told.done():
            self.told.set_result(what)


async def load_in_jail(
    tool: ToolSpec, spec: ToolHostSpec, host: HostFacts, powers: Powers, request: Request
) -> Finding | None:
    """What a worker says after loading the module. None when no jail can be had on this machine."""
    timeout_s, values = request.timeout_s, request.values
    loop = asyncio.get_running_loop()
    visit = _Visit(loop)
    try:
        jail = await Jail.start(
            lambda: plan(look_up(_narrowed(tool), None, spec, host, powers), host),
            visit,
            powers,
            output_limit=OUTPUT_LIMIT,
            name=tool.name,
        )
    except GoondanError as error:
        if error.info.code == "E_SANDBOX_UNAVAILABLE":
            return None
        return _refuse(tool, "sandbox", error.info.message, "jail")
    granted = {name: values[name] for name in tool.sandbox.env if name in values}
    jail.send(Init(WORKER_PROTOCOL, tool.name, tool.entry, granted, import_paths=jail.plan.import_paths, jailed=True))
    try:
        async with asyncio.timeout(timeout_s):
            told = await visit.told
    except TimeoutError:
        return _refuse(tool, "timeout", f"the module was not loaded within {timeout_s:g} s", "jail")
    finally:
        jail.kill("the inspection is over")
        await visit.over
    if isinstance(told, Ready):
        return Finding(name=tool.name, method="jail", exports=told.exports)
    if isinstance(told, LoadFailed):
        if told.message.startswith("NoHandlers:"):
            return _refuse(tool, "handlers", NO_HANDLERS, "jail")
        return _refuse(tool, "import", _OURS.split(told.message)[0], "jail")
    if isinstance(told, str) and jail.last_words.startswith(_NO_JAIL):
        return None
    return _refuse(tool, "crash", f"the process that loads the module {told}", "jail")


def _narrowed(tool: ToolSpec) -> ToolSpec:
    """The tool with what loading needs: what it may read, its variables and its environment of packages."""
    asked = tool.sandbox
    readable = Filesystem(read=[*asked.filesystem.read, *asked.filesystem.write])
    sandbox = SandboxSpec(isolation="shared", filesystem=readable, python=asked.python, limits=asked.limits)
    return ToolSpec(name=tool.name, entry=tool.entry, root=tool.root, exports=tool.exports, sandbox=sandbox)


# --- from the source ------------------------------------------------------------------------------------------------


def read_source(tool: ToolSpec) -> Finding:
    """What the syntax tree of a module says about its `handlers`; the module is not run."""
    try:
        with open(tool.entry, "rb") as source:
            data = source.read(MAX_SOURCE_BYTES + 1)
    except OSError as error:
        return _refuse(tool, "import", error.strerror or type(error).__name__)
    if len(data) > MAX_SOURCE_BYTES:
        return _refuse(tool, "import", f"the module is larger than {MAX_SOURCE_BYTES} bytes")
    try:
        tree = ast.parse(data)
    except SyntaxError as error:
        return _refuse(tool, "import", f"SyntaxError: {error.msg} (line {error.lineno})")
    except (ValueError, RecursionError, MemoryError) as error:
        return _refuse(tool, "import", f"{type(error).__name__}: {error}")
    return _read_tree(tool, tree)


def _read_tree(tool: ToolSpec, tree: ast.Module) -> Finding:
    """Follow the assignments to `handlers` at the module's top level; whatever else touches it leaves them unclear."""
    names: list[str] | None = None
    bound = unclear = False
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if statement.name == "handlers":
                return _refuse(tool, "handlers", "`handlers` is no mapping")
            unclear = unclear or _mentions(statement)  # a decorator may fill it
            continue
        if isinstance(statement, ast.ImportFrom | ast.Import):
            if any((alias.asname or alias.name) in ("handlers", "*") for alias in statement.names):
                bound = unclear = True
            continue
        value, item = _assigned(statement), _item_assigned(statement)
        if value is not None:
            bound = True
            names, fault = _keys(value)
            if fault is not None:
                return _refuse(tool, "handlers", fault)
            unclear = unclear or names is None
        elif item is not None and names is not None:
            names.append(item)
        elif _mentions(statement):
            bound = unclear = True  # a loop, a condition, a call
    if not bound:
        return _refuse(tool, "handlers", NO_HANDLERS)
    return Finding(name=tool.name, method="source", exports=None if unclear else names)


def _mentions(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "handlers" for node in ast.walk(statement))


def _assigned(statement: ast.stmt) -> ast.expr | None:
    """The value when the statement is `handlers = …`."""
    if isinstance(statement, ast.Assign):
        named = any(isinstance(target, ast.Name) and target.id == "handlers" for target in statement.targets)
        return statement.value if named else None
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.value if statement.target.id == "handlers" else None
    return None


def _item_assigned(statement: ast.stmt) -> str | None:
    """The key when the statement is `handlers["key"] = …`."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target = statement.targets[0]
    if not isinstance(target, ast.Subscript) or not isinstance(target.slice, ast.Constant):
        return None
    named = isinstance(target.value, ast.Name) and target.value.id == "handlers"
    return target.slice.value if named and isinstance(target.slice.value, str) else None


def _keys(value: ast.expr) -> tuple[list[str] | None, str | None]:
    """The keys of a literal mapping (None when it is none), and what is wrong with it."""
    if isinstance(value, ast.Constant | ast.List | ast.Tuple | ast.Set | ast.Lambda | ast.JoinedStr):
        return None, "`handlers` is no mapping"
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


def _refuse(tool: ToolSpec, reason: Reason, message: str, method: Literal["jail", "source"] = "source") -> Finding:
    return Finding(name=tool.name, method=method, error=Refusal(reason, message[:MAX_MESSAGE]))


def main() -> int:
    """Read the request from stdin, write the findings to stdout. 2: it is none; 1: root stays root."""
    try:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    except msgspec.DecodeError as error:
        print(f"toolhost.inspection: {error}", file=sys.stderr)
        return 2
    try:
        powers = drop_privileges()
        powers.settle(False)
    except OSError as error:
        print(f"toolhost.inspection: cannot give up root's powers: {error.strerror or error}", file=sys.stderr)
        return 1
    answer: dict[str, Any] = {"tools": asyncio.run(inspect(request, powers))}
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

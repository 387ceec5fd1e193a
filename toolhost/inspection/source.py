"""Reads the handlers of a module from its syntax tree. The module is not run.

Source: docs/design/bundle.md section 5.
"""

from __future__ import annotations

import ast
from typing import Final, Literal

from goondan.schemas.bundle.launch import ToolSpec, entry_kind
from goondan.schemas.worker.tool_host_reports import ModuleReport, Reason, Refusal
from goondan.toolhost.policy.launch_plan import is_javascript

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
    if is_javascript(tool):
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

"""Scripts in Python: what they see, and how they run.

A script runs in this very process, which was made for its call and ends with it.
"""

from __future__ import annotations

import sys

from goondan_tool import ToolError

from code_scripts.calls import Calls, Pending, Printed, ToolCallError, output_of, value_of

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

#: How the script is called in a traceback.
NAME = "<script>"
#: ast.PyCF_ALLOW_TOP_LEVEL_AWAIT and inspect.CO_COROUTINE, without importing either module.
_TOP_LEVEL_AWAIT = 0x2000
_COROUTINE = 0x80
#: Lines of a traceback that are told. A recursion has a thousand.
MAX_PLACES = 12


class Prepared:
    """A call that was not made yet, for `tools.parallel`."""

    __slots__ = ("args", "name")

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        self.name = name
        self.args = args

    def __repr__(self) -> str:
        return f"tools[{self.name!r}].later({self.args!r})"


class Tool:
    """One tool, as a function: its arguments by name, or one dict of them."""

    __slots__ = ("_calls", "_name")

    def __init__(self, calls: Calls, name: str) -> None:
        self._calls = calls
        self._name = name

    def __call__(self, args: dict[str, Any] | None = None, /, **named: Any) -> Any:
        """Call it and return its output; where an event loop runs, return something to await.

        Work that goes on after the call is a Pending. Raises ToolCallError.
        """
        return self._calls.ask("tool", {"name": self._name, "args": _args(args, named)}, output_of)

    def later(self, args: dict[str, Any] | None = None, /, **named: Any) -> Prepared:
        """The same call, for `tools.parallel`."""
        return Prepared(self._name, _args(args, named))

    def __repr__(self) -> str:
        return f"tools[{self._name!r}]"


class Tools:
    """The tools of the agent: `tools.NAME(...)`, or `tools["NAME"](...)` for a name that is no identifier."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Tool:
        if name.startswith("_"):
            raise AttributeError(name)
        return Tool(self._calls, name)

    def __getitem__(self, name: str) -> Tool:
        return Tool(self._calls, str(name))

    def search(self, query: str, limit: int = 10) -> Any:
        """Tools that fit these words, the best first: a list of {name, description, parameters}."""
        return self._calls.ask("tools", {"query": str(query), "limit": int(limit)}, _found)

    def describe(self, *names: str) -> Any:
        """The same of the tools with these names."""
        return self._calls.ask("tools", {"names": [str(name) for name in names]}, _found)

    def parallel(self, *prepared: Prepared, errors: bool = False) -> list[Any]:
        """Make several calls (`tools.NAME.later(...)`) at once; their outputs in the same order.

        The first that failed is raised when all are done, or, with `errors`, stands in its place in the list.
        """
        if not all(isinstance(one, Prepared) for one in prepared):
            raise TypeError("tools.parallel takes calls such as tools.NAME.later(...)")
        values: list[Any] = []
        for frame in self._calls.ask_all([("tool", {"name": one.name, "args": one.args}) for one in prepared]):
            try:
                values.append(value_of(frame, output_of))
            except ToolCallError as error:
                values.append(error)
        failed = next((value for value in values if isinstance(value, ToolCallError)), None)
        if failed is not None and not errors:
            raise failed
        return values

    def map(self, tool: Tool, arguments: Any, errors: bool = False) -> list[Any]:
        """Call one tool with each of these dicts at once; see `parallel`."""
        return self.parallel(*(tool.later(args) for args in arguments), errors=errors)


def run(source: str, calls: Calls, printed: Printed) -> None:
    """Run a script. Raises ToolError E_SCRIPT_FAILED when it does not compile, raises something, or exits with another
    status than 0.
    """
    outputs = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = printed
    try:
        names = {"__name__": "__main__", "tools": Tools(calls), "ToolCallError": ToolCallError, "Pending": Pending}
        code = compile(source, NAME, "exec", flags=_TOP_LEVEL_AWAIT, dont_inherit=True)
        if code.co_flags & _COROUTINE:
            import asyncio

            asyncio.run(_awaited(code, names))
        else:
            exec(code, names)  # noqa: S102 - this is what the jail is for
    except SystemExit as left:
        if left.code not in (None, 0):
            raise failed(f"the script called sys.exit({left.code!r})", printed) from None
    except BaseException as error:
        raise failed(_told(error, source), printed) from None
    finally:
        sys.stdout, sys.stderr = outputs


async def _awaited(code: Any, names: dict[str, Any]) -> None:
    await eval(code, names)  # noqa: S307 - this is what the jail is for


def failed(message: str, printed: Printed) -> ToolError:
    """The error of a script that failed, with the end of what it had printed."""
    tail = printed.tail()
    said = f"\nIt had printed:\n{tail}" if tail else ""
    return ToolError(message + said, code="E_SCRIPT_FAILED", suggestion="Mend the script; mind what it has done.")


def _told(error: BaseException, source: str) -> str:
    """What was raised, and at which lines of the script."""
    lines = source.splitlines()
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} (line {error.lineno})"
    code = getattr(error, "code", None)
    what = f"{type(error).__name__}{f' [{code}]' if isinstance(code, str) else ''}: {error}"
    suggestion = getattr(error, "suggestion", None)
    if isinstance(suggestion, str) and suggestion:
        what += f" ({suggestion})"
    return "\n".join([*_places(error.__traceback__, lines), what])


def _places(at: TracebackType | None, lines: list[str]) -> list[str]:
    places = []
    while at is not None:
        if at.tb_frame.f_code.co_filename == NAME:
            line = lines[at.tb_lineno - 1].strip() if 0 < at.tb_lineno <= len(lines) else ""
            places.append(f"line {at.tb_lineno}, in {at.tb_frame.f_code.co_name}: {line}")
        at = at.tb_next
    return places if len(places) <= MAX_PLACES else [*places[: MAX_PLACES // 2], "…", *places[-MAX_PLACES // 2 :]]


def _args(args: Any, named: dict[str, Any]) -> dict[str, Any]:
    if args is None:
        return named
    if not isinstance(args, dict):
        raise TypeError("a tool takes its arguments by name, or as one dict")
    return {**args, **named}


def _found(value: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = value["tools"]
    return found

"""Which tools a step may call: the registry (all that can run), the catalog of one step, and the check of one call; who
refused a call, and the line that would allow it; and which tools fit a question, by their words.

Rules.
- A step's catalog is made for each step and does not change while the step runs. So the calls that are enforced are
  those that the model was shown.
- Order of the checks, as recorded: catalog, arguments, registry. A refused call causes no frame.
- `allow_registry` (off by default) contains patterns of tool names that may be called without being in the catalog.

Source: requirements CATALOG-01 to CATALOG-07, CALL-01 to CALL-07; recorded parity `executor/*`;
docs/design/traces.md section 5.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from operator import is_
from typing import Any, Final, Protocol

from msgspec import Struct

from goondan.schemas.bundle.address import MAX_TOOL_NAME, SEPARATOR, shown_tool_name
from goondan.schemas.bundle.arguments import ArgumentChecker, compile_arguments, invalid_arguments
from goondan.schemas.bundle.effective_config import reachable_tools, tool_of
from goondan.schemas.bundle.launch import DEFAULT_ERROR_LIMIT, AgentSpec, CatalogItem
from goondan.schemas.traces.turn_notes import RefusedDetail, Refuser
from goondan.schemas.wire.errors import CODES, NEAR_NAME, GoondanError, fail, row_of, tool_error
from goondan.schemas.wire.frames import ToolError

log = logging.getLogger("agentproc")


class Allowed(Struct, frozen=True):
    """A call that may be made: its catalog item, and the arguments to send (aliases renamed)."""

    #: The catalog item.
    item: CatalogItem
    #: The arguments to send.
    args: dict[str, Any]


class StepCatalog:
    """The tools of one step, in the order in which the model sees them. No list of it is ever changed: a step that
    begins with the same tools shares them.
    """

    __slots__ = ("_catalog", "_items", "items", "shown")

    def __init__(self, catalog: Catalog, items: Iterable[CatalogItem], same: StepCatalog | None = None) -> None:
        """`same`: a catalog of these items."""
        self._catalog = catalog
        self._items: dict[str, CatalogItem] = {item.name: item for item in items} if same is None else same._items
        self.items: list[CatalogItem] = list(self._items.values()) if same is None else same.items
        shown = [item for item in self.items if not item.deferred] if same is None else same.shown
        #: The tools that the model sees. The others may still be called.
        self.shown: list[CatalogItem] = shown

    def __contains__(self, name: str) -> bool:
        return name in self._items

    def is_outside(self, name: str) -> bool:
        """Whether a policy allows a call of this name past the catalog, straight to the registry (CALL-03)."""
        return name not in self._items and self._catalog.allowed_outside(name) is not None

    def parameters(self, name: str) -> dict[str, Any] | None:
        """The schema of a tool's arguments; None when the tool has none or is not in the catalog."""
        item = self._items.get(name)
        return None if item is None else item.parameters

    def error_limit(self, name: str) -> int:
        """The longest error message of this tool (characters; ERROR-04)."""
        item = self._items.get(name) or self._catalog.allowed_outside(name)
        return DEFAULT_ERROR_LIMIT if item is None else item.error_message_limit

    def check(self, name: str, args: Any) -> Allowed | ToolError:
        """Check a call. The error is complete, but its message is not yet cut to a limit."""
        item = self._items.get(name) or self._catalog.allowed_outside(name)
        if item is None:
            return not_in_catalog(name, self._items)
        try:
            checked, issues = self._catalog.checker(item).apply(args)
        except GoondanError as error:
            return tool_error(error.info.code, error.info.message, name="ToolSchemaError")
        if issues:
            return invalid_arguments(name, issues, item.parameters)
        if not self._catalog.can_run(name):
            return tool_error("E_TOOL_NOT_FOUND", f"Tool '{name}' is not registered.", name="ToolNotFoundError")
        return Allowed(item, checked)


class DynamicItems(Protocol):
    """The tools that extensions have registered (goondan.agentproc.extensions.dynamic_tools.DynamicTools)."""

    @property
    def exposed(self) -> list[CatalogItem]: ...

    def find(self, name: str) -> CatalogItem | None: ...

    def canonical(self, name: str) -> str: ...

    def reserve(self, taken: Mapping[str, CatalogItem]) -> None: ...


class Catalog:
    """The registry of one agent, and the catalog that its steps begin with: the agent's own tools, then the dynamic
    ones.

    A tool without a registry item is shown by its name only; a call of it is E_TOOL_NOT_FOUND. `_named` are the dynamic
    tools that `spec.tools` names. `_reach` are the tools that the broker lets through.
    """

    def __init__(self, spec: AgentSpec, dynamic: DynamicItems | None = None) -> None:
        self._dynamic = dynamic
        self.agent = spec.name
        self._checkers: dict[str, tuple[CatalogItem, ArgumentChecker]] = {}
        self._followed: AgentSpec | None = None
        self._begun_with: list[CatalogItem] = []  # the items of the last step
        self._last: StepCatalog | None = None
        self.follow(spec)

    def follow(self, spec: AgentSpec) -> None:
        """Steps that begin from now on use this specification. Nothing happens if it is the one in use."""
        if spec is self._followed:
            return
        self._followed = spec
        self.registry = registry = {item.name: item for item in spec.registry}
        #: The tools whose handlers are bundled ones in this process (agentproc/calls/handlers.py).
        self.run_here = frozenset([item.name for item in spec.registry if item.in_agent])
        self._declared = self._initial = [registry.get(name) or CatalogItem(name=name) for name in spec.catalog]
        self._patterns = spec.allow_registry
        self._declared_dynamic = self._named = spec.dynamic
        self._declared_reach = self._reach = reachable_tools(spec)
        #: Whether the agent's extensions may add tools at all.
        self.widened = not all(extension.bundled for extension in spec.extensions)
        if self._dynamic is not None:
            self._dynamic.reserve(registry)

    def begin_with(self, tools: Sequence[str] | None) -> None:
        """From now on steps begin with every export of these Tools, and with dynamic tools by their own names. None:
        steps begin with the tools that the agent declares.
        """
        if tools is None:
            self._initial, self._named, self._reach = self._declared, self._declared_dynamic, self._declared_reach
            return
        by_tool: dict[str, list[CatalogItem]] = {}
        for item in self.registry.values():
            if item.source.type == "config":  # a tool that an extension brings is shown by that extension
                by_tool.setdefault(tool_of(item), []).append(item)
        self._initial = [item for tool in tools for item in by_tool.get(tool, ())]
        self._named = [shown_tool_name(tool) for tool in tools if tool not in by_tool]
        self._reach = self._declared_reach.union(item.name for item in self._initial)

    def for_step(self) -> StepCatalog:
        """The catalog of a new step (CATALOG-03, CATALOG-09)."""
        items, dynamic = self._initial, self.dynamic
        if dynamic:
            items = [*items, *dynamic]
        known = self._begun_with
        if items is not known and (len(items) != len(known) or not all(map(is_, items, known))):
            self._begun_with, self._last = items, None
        self._last = made = StepCatalog(self, items, self._last)
        return made

    @property
    def dynamic(self) -> list[CatalogItem]:
        """The extensions' tools that a step begins with: those that `spec.tools` names, then those that are exposed by
        themselves (DYNAMIC-08, DYNAMIC-09).
        """
        if self._dynamic is None or not ((exposed := self._dynamic.exposed) or self._named):
            return []
        named = [item for name in self._named if (item := self._dynamic.find(name)) is not None]
        return [*named, *(item for item in exposed if item.name not in self._named)]

    def registered(self, name: str) -> CatalogItem | None:
        """The item of a tool that an extension has registered."""
        return None if self._dynamic is None else self._dynamic.find(name)

    def canonical(self, name: str) -> str:
        """The name of a dynamic tool that has several; any other name is given back."""
        return name if self._dynamic is None else self._dynamic.canonical(name)

    def may_come(self, name: str) -> bool:
        """Whether `spec.tools` names a tool of this name, which an extension registers now or later."""
        return name in self._named

    def reaches(self, name: str) -> bool:
        """Whether some step could call this name: the broker allows it, or an extension has registered it."""
        return name in self._reach or (self._dynamic is not None and self._dynamic.find(name) is not None)

    def of_items(self, items: Iterable[CatalogItem]) -> StepCatalog:
        """The catalog that a step's middleware has made (CATALOG-05)."""
        return StepCatalog(self, items)

    def can_run(self, name: str) -> bool:
        """Whether there is a handler behind the name."""
        return name in self.registry or (self._dynamic is not None and self._dynamic.find(name) is not None)

    def allowed_outside(self, name: str) -> CatalogItem | None:
        """The item of a tool outside of the step's catalog that a policy lets through (CALL-03), or None."""
        if any(fnmatchcase(name, pattern) for pattern in self._patterns):
            found = self.registry.get(name)
            return found if found is not None or self._dynamic is None else self._dynamic.find(name)
        return None

    def checker(self, item: CatalogItem) -> ArgumentChecker:
        """The compiled schema of an item. It is kept from step to step. Raises GoondanError E_CONFIG_SCHEMA."""
        known = self._checkers.get(item.name)
        if known is not None and known[0] is item:
            return known[1]
        checker = compile_arguments(item.parameters, item.aliases)
        checker.compile()
        for place in checker.unchecked:
            log.warning("tool %s: the pattern at %s is not checked: it needs look-around", item.name, place)
        self._checkers[item.name] = (item, checker)
        return checker


def not_in_catalog(name: str, known: Iterable[str]) -> ToolError:
    """The refusal of CALL-05 and CALL-06. It names the nearest of the `known` names."""
    from difflib import get_close_matches

    message = f"Tool '{name}' is not available in the current Tool Catalog."
    near = get_close_matches(name[:MAX_TOOL_NAME], list(known), 1)
    hint = f"{NEAR_NAME} '{near[0]}'?" if near else None
    return tool_error("E_TOOL_NOT_IN_CATALOG", message, name="ToolNotInCatalogError", suggestion=hint)


# --- calls that were refused ------------------------------------------------------------------------------------------


#: The code of an extension's refusal.
REFUSED: Final = "E_EXTENSION_DENIED"
#: Stands in its message, behind the extension.
_SAYS: Final = " refused it: "
#: The code of a refusal -> who refuses with it.
REFUSERS: Final[dict[str, Refuser]] = {
    "E_TOOL_NOT_IN_CATALOG": "catalog",
    "E_SANDBOX_DENIED": "grant",
    "E_FORBIDDEN": "grant",
    REFUSED: "extension",
}


def refused_by(extension: str, reason: str) -> GoondanError:
    """The error with which an extension refuses what goes on."""
    return fail(REFUSED, f"Extension/{extension}{_SAYS}{reason}")


def refusal(spec: AgentSpec, tool: str, code: str, message: str, suggestion: str | None) -> RefusedDetail | None:
    """The refusal that an error of this code tells of, for the agent of `spec`; None: it is none. `tool` is "" for a
    turn or a step.
    """
    by = REFUSERS.get(code) or row_of(code).refuser
    allow = suggestion or CODES.get(code, "")
    if by == "catalog":
        allow = _in_catalog(spec, tool)
    elif by == "extension":
        allow = f"the config or the code of {message.partition(_SAYS)[0]}, which decides"
    return RefusedDetail(by, code, message, allow, tool) if by else None


def unreachable(tool: str, hosts: Sequence[str]) -> RefusedDetail:
    """The refusal of connections of a call: it has the grants of its Tool. `hosts`: as "host:port"."""
    shown = ", ".join(hosts)
    allow = f"Tool/{tool.partition(SEPARATOR)[0]}: spec.sandbox.network: {{allow: [{shown}]}}"
    return RefusedDetail("grant", "E_SANDBOX_DENIED", f"not reachable from this sandbox: {shown}", allow, tool)


def _in_catalog(spec: AgentSpec, tool: str) -> str:
    if tool in spec.catalog:
        return f"an extension of Agent/{spec.name} has taken it out of this step, and can leave it in"
    found = next((item for item in spec.registry if item.name == tool), None)
    if found is None:
        return "nothing: there is no such tool (gdn tool list)"
    return f"Agent/{spec.name}: spec.tools: [Tool/{tool_of(found)}]"


# --- which tools fit a question ---------------------------------------------------------------------------------------


_WORDS: Final = re.compile(r"[^\W_]+")
#: The score of a word of the query that is in a tool's name; below, in its description or in the names of its
#: parameters.
_IN_NAME: Final = 3
_IN_TEXT: Final = 1
#: How many letters two forms of a word have in common; also the length of a short word that begins the other one.
_SAME_STEM: Final = 4
_SHORT_STEM: Final = 3


def best(tools: list[CatalogItem], query: str, limit: int) -> list[CatalogItem]:
    """The tools that fit a query, the best first. A tool that fits no word is left out."""
    words = set(_words(query))
    scored = [(sum(_worth(word, item) for word in words), item) for item in tools]
    fitting = [(score, item) for score, item in scored if score]
    fitting.sort(key=lambda pair: (-pair[0], pair[1].name))
    return [item for _, item in fitting[:limit]]


def _worth(word: str, item: CatalogItem) -> int:
    properties = (item.parameters or {}).get("properties")
    text = " ".join([item.description or "", *(properties if isinstance(properties, dict) else ())])
    return _IN_NAME * _has(word, item.name) + _IN_TEXT * _has(word, text)


def _has(word: str, text: str) -> int:
    """1 when a word of the text is this word or another form of it, otherwise 0."""
    return any(_alike(word, known) for known in _words(text))


def _alike(one: str, other: str) -> bool:
    """True for `files` and `file`, `writing` and `write`; false for `form` and `forecast`."""
    if one == other:
        return True
    least = min(len(one), len(other))
    common = next((n for n in range(least) if one[n] != other[n]), least)
    return common >= max(_SAME_STEM, least - 1) or (common == least >= _SHORT_STEM)


def _words(text: str) -> list[str]:
    split = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", text)  # readFile is two words
    return [word.lower() for word in _WORDS.findall(split)]

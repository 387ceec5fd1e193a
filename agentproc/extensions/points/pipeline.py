"""Which handlers extensions have registered, at which points, and in which order. Pure; engine.py runs them.

There are two spellings. `mutate` and `wrap` put handlers at points (v0.9). `register` puts middleware of a kind around
a turn, a step or a tool call: a wrap around everything of that kind, whose next() is in its context.

Rules.
- Three kinds: `turn`, `step`, `toolCall`. The first registered middleware is outermost. A lower priority comes further
  out; equal priorities keep the order of registration. The order is the same on every run.
- Both spellings have one order. Middleware of `register` and the mutators of `turn.pre`, `step.pre` and `toolCall.pre`
  are layers of one onion, in the order above. The other points lie inside of it, in the order of POINTS, each with its
  handlers in the order above. So every `.post` runs before the code behind a next(), and sees the result of the core.

Source: requirements CALL-09, COMPAT-03, PIPELINE-01, PIPELINE-03, PIPELINE-05 to PIPELINE-09, PIPELINE-25.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, get_args

from msgspec import Struct

from goondan.schemas.wire.errors import fail

Kind = Literal["turn", "step", "toolCall"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


class Point(Struct, frozen=True):
    """One point."""

    #: Whether its handlers are mutators or wraps.
    form: Literal["mutate", "wrap"]
    #: The kind of middleware that it belongs to.
    kind: Literal["turn", "step", "toolCall", "workspace"]
    #: The fields of its context that a handler may replace with other objects. All other fields must come back
    #: unchanged.
    changes: tuple[str, ...] = ()
    #: The field that its handlers must not leave empty; "": there is none, and a wrap need not call next().
    keeps: str = ""


_SHOWN: Final = ("blocks", "tool_catalog")

#: Every point, in the order in which a turn reaches them (PIPELINE-07, PIPELINE-25).
POINTS: Final[Mapping[str, Point]] = {
    "turn.pre": Point("mutate", "turn"),
    "step.pre": Point("mutate", "step", _SHOWN),
    "step.config": Point("mutate", "step", ("effective_config",)),
    "step.tools": Point("mutate", "step", _SHOWN),
    "step.blocks": Point("mutate", "step", _SHOWN),
    "step.llmCall": Point("wrap", "step", (*_SHOWN, "llm_result"), "llm_result"),
    "step.llmError": Point("wrap", "step", (*_SHOWN, "llm_result")),
    "toolCall.pre": Point("mutate", "toolCall"),
    "toolCall.exec": Point("wrap", "toolCall", ("tool_result",), "tool_result"),
    "toolCall.post": Point("mutate", "toolCall", ("tool_result",), "tool_result"),
    "step.post": Point("mutate", "step"),
    "turn.post": Point("mutate", "turn"),
    "workspace.repoAvailable": Point("mutate", "workspace", ("metadata",)),
    "workspace.worktreeMounted": Point("mutate", "workspace", ("metadata",)),
}

#: Points whose mutators stand in the onion of their kind.
_BEFORE: Final = frozenset(("turn.pre", "step.pre", "toolCall.pre"))

#: Takes a context (a wrap also takes next). Returns a result, or an awaitable of one.
Middleware = Callable[..., Any]


class MiddlewareError(Exception):
    """Middleware broke a rule. Becomes an error with the code E_MIDDLEWARE."""


class Layer(Struct, frozen=True):
    """One registered handler."""

    #: The name of the Extension that registered it.
    extension: str
    #: The function.
    handler: Middleware
    #: A lower priority is further out.
    priority: int = 0
    #: The point that it is for; None: it is middleware of a kind.
    point: str | None = None
    #: That kind; "" for a point.
    kind: str = ""

    @property
    def of(self) -> Point | None:
        """The point that it is for; None: it is middleware of a kind."""
        return None if self.point is None else POINTS[self.point]


class Pipeline:
    """The middleware of one agent.

    The lists that a turn reads are made at each registration, as tuples that do not change. So a running chain keeps
    the layers that it began with.
    """

    def __init__(self) -> None:
        self._layers: dict[str, tuple[Layer, ...]] = {}
        self._wrapped: frozenset[str] = frozenset()
        #: Whether any handler is registered in the older spelling.
        self.uses_points = False

    def register(self, kind: str, handler: Middleware, *, extension: str, priority: Any = 0) -> None:
        """Add middleware. Raises GoondanError E_USAGE for an unknown kind, a handler that cannot be called or a
        priority that is no integer.
        """
        if kind not in KINDS:
            raise fail("E_USAGE", f"no middleware kind {str(kind)[:80]!r}; there are: {', '.join(KINDS)}")
        self._add(kind, Layer(extension, handler, priority, kind=kind), f"{kind} middleware")

    def add_to_point(self, form: str, name: str, handler: Middleware, *, extension: str, priority: Any = 0) -> None:
        """Add a mutator or a wrap (`form`) to a point. Raises GoondanError E_USAGE, as `register` does."""
        given: Any = name  # an extension may give anything
        point = POINTS.get(given) if isinstance(given, str) else None
        if point is None or point.form != form:
            known = [known for known, found in POINTS.items() if found.form == form]
            other = "" if point is None else f"; {name} is for api.pipelines.{point.form}"
            message = f"no point {str(name)[:80]!r} for {form}{other}"
            raise fail("E_USAGE", message, suggestion=f"Use one of {', '.join(known)}.")
        place = point.kind if name in _BEFORE else name
        self._add(place, Layer(extension, handler, priority, name), f"{name} handler")

    def unregister(self, extension: str) -> None:
        """Remove every handler that an extension has registered."""
        for place, layers in self._layers.items():
            self._layers[place] = tuple(layer for layer in layers if layer.extension != extension)
        self._note_kinds()

    def at(self, place: str) -> Sequence[Layer]:
        """The layers of a kind, with the mutators that stand among them, or the handlers of another point: the
        outermost first.
        """
        return self._layers.get(place, ())

    @property
    def empty(self) -> bool:
        """Whether there is no middleware at all."""
        return not self._wrapped

    def has(self, kind: Kind) -> bool:
        """Whether any handler runs around a turn, a step or a tool call.

        A handler at a point of tool calls also sees the step, so the step counts as well.
        """
        return kind in self._wrapped

    def _add(self, place: str, layer: Layer, what: str) -> None:
        if not callable(layer.handler):
            raise fail("E_USAGE", f"the {what} of extension {layer.extension} is no function")
        priority: Any = layer.priority
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise fail("E_USAGE", f"the priority of a {what} is an integer, not {type(priority).__name__}")
        layers = self._layers.get(place, ())
        self._layers[place] = tuple(sorted((*layers, layer), key=lambda layer: layer.priority))  # stable
        self._note_kinds()

    def _note_kinds(self) -> None:
        """After a change, find out which kinds have handlers."""
        layers = [layer for found in self._layers.values() for layer in found]
        kinds = {layer.kind or POINTS[layer.point or ""].kind for layer in layers}
        if any(layer.point is not None and POINTS[layer.point].kind == "toolCall" for layer in layers):
            kinds.add("step")
        self._wrapped, self.uses_points = frozenset(kinds), any(layer.point is not None for layer in layers)

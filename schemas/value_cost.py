"""The cost of checking one value against one schema: first by its size alone, then by walking both. Pure.

A schema may be cheap for usual values and expensive for large ones: `uniqueItems` over a million items, a pattern over
a megabyte. So a value is measured before it is checked. For nearly all values the number of their bytes is enough.

Finding the places of faults costs far more than the verdict. Each fault is an object with a copy of the value. A
recursive schema visits a value again for every path that leads to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from msgspec import Struct

from goondan.schemas.schema_cost import Graph, Price

#: The highest cost of one check (units of schema_cost; this is half a second).
MAX_CHECK_UNITS: Final = 50_000_000
#: The most values that are copied to word the faults of one value: about 6 µs each, so a third of a second.
MAX_WORDING: Final = 60_000
#: The most lists and objects that are counted in a value with too many bytes: a third of a second.
MAX_CONTAINERS: Final = 100_000
#: The most values that are walked together with the schema: a quarter of a second.
MAX_WALKED: Final = 50_000
#: The most steps of one walk, each a subschema at a value: a quarter of a second.
_MAX_STEPS: Final = 250_000


class Extent(Struct, frozen=True):
    """The size of a value."""

    #: How many values it contains, names of members included.
    values: int
    #: How many of these are objects.
    objects: int
    #: How many characters its strings have.
    chars: int
    #: How many levels it has.
    depth: int


def extent(value: Any) -> Extent | None:
    """Measure a value. None for a value with more than MAX_CONTAINERS lists and objects."""
    values, objects, chars, depth = 1, 0, len(value) if isinstance(value, str) else 0, 1
    todo: list[tuple[Any, int]] = [(value, 1)]
    containers = 0
    while todo:
        found, level = todo.pop()
        containers += 1
        if containers > MAX_CONTAINERS:
            return None
        if isinstance(found, dict):
            objects += 1
            values += 2 * len(found)
            chars += sum(len(name) for name in found if isinstance(name, str))
            inner: Iterable[Any] = found.values()
        elif isinstance(found, list):
            values += len(found)
            inner = found
        else:
            continue
        depth = max(depth, level + bool(found))
        for item in inner:
            if isinstance(item, str):
                chars += len(item)
            elif isinstance(item, dict | list):
                todo.append((item, level + 1))
    return Extent(values, objects, chars, depth)


def is_affordable(graph: Graph, value: Any, size: int) -> bool:
    """Whether the verdict on `value` stays within MAX_CHECK_UNITS. `size` is its size as msgpack (bytes)."""
    price = graph.whole
    if size * (price.units + price.members + price.chars) <= MAX_CHECK_UNITS and not price.unique:
        return True
    seen = extent(value)
    if seen is None:
        return False
    unique = seen.depth * price.unique
    cost = seen.values * (price.units + unique) + seen.objects * price.members + seen.chars * price.chars
    if cost <= MAX_CHECK_UNITS:
        return True
    if seen.values > MAX_WALKED:
        return False
    return _Walk(graph, copies=False, limit=MAX_CHECK_UNITS).of(value)


def can_be_worded(graph: Graph, value: Any) -> bool:
    """Whether every fault of `value` can be found and worded within MAX_WORDING."""
    seen = extent(value)
    if seen is None or seen.values + seen.chars // 100 > MAX_WORDING:
        return False
    return _Walk(graph, copies=True, limit=MAX_WORDING).of(value)


class _Walk:
    """Goes through a value and adds up the costs of the subschemas that are applied to its parts.

    `copies`: faults are counted instead, each with the part that it copies, and every path counts for itself.
    """

    def __init__(self, graph: Graph, *, copies: bool, limit: int) -> None:
        self._graph = graph
        self._copies = copies
        self._limit = limit
        self._cost = 0.0
        self._steps = 0
        self._applied: dict[int, dict[int, int]] = {}
        self._sizes: dict[int, tuple[int, int]] = {}  # id of a list or object -> values and characters in it

    def of(self, value: Any) -> bool:
        """Whether the whole check stays within the limit."""
        if self._copies or self._graph.whole.unique:
            self._measure(value)
        todo: list[tuple[Any, dict[int, int]]] = [(value, {0: 1})]
        while todo:
            found, entries = todo.pop()
            nodes = self._together(entries)
            self._add(found, nodes)
            if self._cost > self._limit or self._steps > _MAX_STEPS:
                return False
            if isinstance(found, dict):
                self._members(found, nodes, todo)
            elif isinstance(found, list):
                self._items(found, nodes, todo)
        return True

    def _together(self, entries: dict[int, int]) -> dict[int, int]:
        """All subschemas that are applied to one value, and how often each."""
        if len(entries) == 1:
            ((number, times),) = entries.items()
            if times == 1:
                return self._in_place(number)
        nodes: dict[int, int] = {}
        for number, times in entries.items():
            for inner, copies in self._in_place(number).items():
                nodes[inner] = nodes.get(inner, 0) + times * copies
        return nodes

    def _in_place(self, number: int) -> dict[int, int]:
        """A subschema and the subschemas that it applies in place, with their multiplicities."""
        known = self._applied.get(number)
        if known is None:
            stack = [number]
            while stack:  # innermost first
                top = stack[-1]
                node = self._graph.nodes[top]
                missing = [n for n in node.in_place if n not in self._applied]
                if missing:
                    stack += missing
                    continue
                stack.pop()
                if top in self._applied:
                    continue
                found = {top: 1}
                for inner in node.in_place:
                    for deeper, copies in self._applied[inner].items():
                        found[deeper] = found.get(deeper, 0) + node.times * copies
                    self._steps += len(self._applied[inner])
                self._applied[top] = found
            known = self._applied[number]
        return known

    def _add(self, value: Any, nodes: dict[int, int]) -> None:
        self._steps += len(nodes)
        values, chars = self._sizes.get(id(value), (1, len(value) if isinstance(value, str) else 0))
        if self._copies:
            self._cost += sum(nodes.values()) * (values + chars // 100)
            return
        for number, times in nodes.items():
            self._cost += times * _cost(self._graph.nodes[number].own, values, chars, value)

    def _members(self, value: dict[str, Any], nodes: dict[int, int], todo: list[tuple[Any, dict[int, int]]]) -> None:
        graph = self._graph
        concerned = [(n, graph.nodes[n], times) for n, times in nodes.items() if graph.nodes[n].members()]
        if not concerned:
            return
        for name, inner in value.items():
            entries: dict[int, int] = {}
            names: dict[int, int] = {}
            for number, node, times in concerned:
                self._steps += 1
                own = node.properties.get(name)
                for matching, child in node.patterns:
                    self._cost += 0 if self._copies else times * _cost(matching, 1, len(name), name)
                    self._apply(entries, number, child, times)
                if own is not None:
                    self._apply(entries, number, own, times)
                elif node.additional is not None:
                    self._apply(entries, number, node.additional, times)
                if node.unevaluated_properties is not None:
                    self._apply(entries, number, node.unevaluated_properties, times)
                if node.names is not None:
                    self._apply(names, number, node.names, times)
            if entries:
                todo.append((inner, entries))
            if names:
                todo.append((name, names))

    def _items(self, value: list[Any], nodes: dict[int, int], todo: list[tuple[Any, dict[int, int]]]) -> None:
        graph = self._graph
        concerned = [(n, graph.nodes[n], times) for n, times in nodes.items() if graph.nodes[n].members()]
        if not concerned:
            return
        rest: dict[int, int] = {}
        for number, node, times in concerned:
            for child in node.of_any_item():
                self._apply(rest, number, child, times)
        longest = max(len(node.prefix) for _, node, _ in concerned)
        for index, item in enumerate(value):
            entries = rest
            if index < longest:
                entries = dict(rest)
                for number, node, times in concerned:
                    if index < len(node.prefix):
                        self._apply(entries, number, node.prefix[index], times)
            if entries:
                todo.append((item, entries))

    def _apply(self, entries: dict[int, int], node: int, member: int, times: int) -> None:
        """Apply a subschema. Through a reference that leads back the validator visits a value once, except for
        faults.
        """
        once = not self._copies and self._graph.leads_back(node, member)
        entries[member] = entries.get(member, 0) + (1 if once else times)

    def _measure(self, value: Any) -> None:
        """Count the values and characters in each list and object."""
        order: list[Any] = []
        todo = [value]
        while todo:
            found = todo.pop()
            if isinstance(found, dict | list):
                order.append(found)
                todo += found.values() if isinstance(found, dict) else found
        for found in reversed(order):
            values, chars = 1, 0
            if isinstance(found, dict):
                values += len(found)
                chars += sum(map(len, found))
            for inner in found.values() if isinstance(found, dict) else found:
                more = self._sizes.get(id(inner)) or (1, len(inner) if isinstance(inner, str) else 0)
                values, chars = values + more[0], chars + more[1]
            self._sizes[id(found)] = values, chars


def _cost(price: Price, values: int, chars: int, value: Any) -> float:
    """The cost of one subschema by itself for one value with `values` and `chars` in it."""
    cost = float(price.units)
    if isinstance(value, str):
        cost += price.chars * chars
    elif isinstance(value, list):
        cost += price.unique * values
    elif isinstance(value, dict):
        cost += price.members
    return cost

"""The cost of checking a value against a JSON Schema, computed before the check. Pure, and linear in the schema.

A schema of a few lines can make the validator visit one value a billion times: two references to a schema that has two
references, and so on. The checks of all agents share a tool host. So the worst case is computed from the graph of the
schema, and not tried. A node of the graph is one subschema. It applies other subschemas to the same value ("in place":
`allOf`, `anyOf`, `$ref`, …) or to members of the value (`properties`, `items`, …).

- The visits of one value multiply along paths. The cost of a node is the sum of its own cost, the cost of all
  subschemas that it applies in place, and the cost of the most expensive member.
- A schema may be recursive. Through a reference that leads back, the validator visits each value once. So such an edge
  ends a path here, and its target begins a path of its own.
- Nothing is fetched and nothing is compiled. A reference that cannot be followed is an error.

The unit is what the validator takes for the simplest keyword of one value: 10 ns on a machine of 2023.

Source: the JSON Schema specification, drafts 4 to 2020-12; measured with jsonschema-rs 0.60.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin

from msgspec import Struct

#: The highest cost of one value (units; this is 5 ms). Schemas that people write cost tens of units, generated ones
#: with large unions thousands.
MAX_UNITS: Final = 500_000
#: The most subschemas of one schema. Reading one takes 20 to 100 µs. The largest published schemas have some thousand.
MAX_SUBSCHEMAS: Final = 20_000
#: The longest chain of subschemas that lead to one another, references included. With about a thousand the validator
#: uses up its stack, which ends the process. Literally nested subschemas may have 128 levels.
MAX_LEVELS: Final = 250
#: The most steps of the backtracking engine for one string. Only patterns with look-around or back references use it,
#: and they need about as many steps as the string has characters. Beyond the limit the validator refuses the string.
BACKTRACK_LIMIT: Final = 10_000
#: The cost of these steps (units).
BACKTRACK_UNITS: Final = 24_000
#: The cost of one state of a pattern for one character, when every state may be active at once (units).
STATE_UNITS: Final = 1.2
#: The cost of `uniqueItems` for one value at any depth of the array, and of comparing with a constant (units).
UNIQUE_UNITS: Final = 50
CONST_UNITS: Final = 30
#: The cost of a reference to a meta-schema, which the validator has built in (units).
META_UNITS: Final = 2000
#: The largest number of the calculation. Larger results are cut to it.
_MUCH: Final = 10**12

_IN_PLACE_LISTS: Final = ("allOf", "anyOf", "oneOf")
_IN_PLACE: Final = ("not", "if", "then", "else")
_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
#: The keywords that apply other subschemas.
_APPLICATORS: Final = frozenset(
    (
        *_IN_PLACE_LISTS, *_IN_PLACE, *_REFERENCES, "dependentSchemas", "dependencies", "properties",
        "patternProperties", "additionalProperties", "propertyNames", "unevaluatedProperties", "prefixItems", "items",
        "additionalItems", "contains", "unevaluatedItems",
    )
)  # fmt: skip
#: The keywords whose own verdict depends on the verdicts of the subschemas.
_FORKS: Final = frozenset(
    (
        "anyOf", "oneOf", "not", "if", "contains", "dependentSchemas", "dependencies", "propertyNames",
        "unevaluatedProperties", "unevaluatedItems",
    )
)  # fmt: skip
_META: Final = re.compile(r"https?://json-schema\.org/")


class TooCostly(ValueError):
    """The worst case of a schema is beyond a limit. Or (`lost`) the schema has a reference that cannot be followed
    here; the validator may know its target. `path` leads to the place.
    """

    def __init__(self, message: str, path: tuple[str | int, ...], *, lost: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.lost = lost


class Price(Struct, frozen=True):
    """The highest cost of checking one value (units)."""

    #: The part that does not depend on the size.
    units: int = 0
    #: The addition for each member of an object.
    members: int = 0
    #: The addition for each character of a string.
    chars: int = 0
    #: The addition for each value below it and each level.
    unique: int = 0

    def plus(self, other: Price, times: int = 1) -> Price:
        """The sum with so many times `other`."""
        return Price(
            min(_MUCH, self.units + times * other.units),
            min(_MUCH, self.members + times * other.members),
            min(_MUCH, self.chars + times * other.chars),
            min(_MUCH, self.unique + times * other.unique),
        )

    def or_more(self, other: Price) -> Price:
        """The larger number of each part."""
        return Price(
            max(self.units, other.units),
            max(self.members, other.members),
            max(self.chars, other.chars),
            max(self.unique, other.unique),
        )


_NOTHING: Final = Price()


class Node:
    """One subschema. Numbers are indexes of nodes. `times` says how often the subschemas in place are visited."""

    __slots__ = (
        "additional", "contains", "in_place", "items", "names", "own", "path", "patterns", "prefix", "properties",
        "times", "unevaluated_items", "unevaluated_properties",
    )  # fmt: skip

    def __init__(self, path: tuple[str | int, ...]) -> None:
        self.path = path
        self.own = Price(1)
        self.times = 1
        self.in_place: list[int] = []
        self.properties: dict[str, int] = {}
        # The price of matching one name (chars: for each letter), and the node that applies to the member.
        self.patterns: list[tuple[Price, int]] = []
        self.additional: int | None = None
        self.names: int | None = None
        self.unevaluated_properties: int | None = None
        self.prefix: list[int] = []
        self.items: int | None = None
        self.contains: int | None = None
        self.unevaluated_items: int | None = None

    def of_any_member(self) -> list[int]:
        """The nodes that apply to every member of an object, whatever its name."""
        found = [child for _, child in self.patterns]
        return [*found, *(n for n in (self.additional, self.unevaluated_properties, self.names) if n is not None)]

    def of_any_item(self) -> list[int]:
        """The nodes that apply to every item without a rule for its place."""
        return [n for n in (self.items, self.contains, self.unevaluated_items) if n is not None]

    def members(self) -> list[int]:
        """All nodes that apply to members and items."""
        return [*self.properties.values(), *self.of_any_member(), *self.prefix, *self.of_any_item()]


class Graph:
    """The nodes of a schema. The first is the root. `whole` is the highest price of any one value.

    Raises TooCostly, and RecursionError for a schema that the validator does not take either.
    """

    def __init__(self, schema: Any) -> None:
        self.nodes: list[Node] = []
        self.forks = False  # whether a fault may combine others, as when none of several schemas fits
        self._numbers: dict[int, int] = {}
        self._todo: list[tuple[int, Any]] = []
        self._documents: list[_Document] = []  # one, for a schema that has references
        self._schema = schema
        self._number(schema, ())
        while self._todo:
            number, found = self._todo.pop()
            if isinstance(found, dict):
                self._read(self.nodes[number], found)
        none: list[int | None] = [None] * len(self.nodes)
        loops = _components([node.in_place for node in self.nodes]) if self._documents else none
        for index, node in enumerate(self.nodes):  # the validator ignores a reference in place to itself
            loop = loops[index]
            node.in_place = [n for n in node.in_place if n != index and (loop is None or loops[n] != loop)]
        edges = [[*node.in_place, *node.members()] for node in self.nodes]
        self._loops = _components(edges) if self._documents else none
        self.levels = [1] * len(self.nodes)
        self.prices = self._priced()
        self.whole = self._whole()

    def leads_back(self, node: int, member: int) -> bool:
        """Whether the subschema `member`, which `node` applies to a member of its value, leads back to `node`."""
        return node == member or (self._loops[node] is not None and self._loops[node] == self._loops[member])

    def check(self) -> None:
        """Raise TooCostly for a schema beyond MAX_LEVELS or MAX_UNITS. For MAX_UNITS the place is the innermost one."""
        deepest = max(range(len(self.levels)), key=self.levels.__getitem__)
        if self.levels[deepest] > MAX_LEVELS:
            message = f"{self.levels[deepest]:,} subschemas lead to one another, limit {MAX_LEVELS}"
            raise TooCostly(message, self.nodes[deepest].path)
        worst = self.whole.units + self.whole.members
        if worst <= MAX_UNITS:
            return
        costs = [price.units + price.members for price in self.prices]
        beyond = [index for index, cost in enumerate(costs) if cost > MAX_UNITS]
        inner = min(beyond, key=costs.__getitem__, default=0)
        raise TooCostly(
            f"checking one value may take {_spelt(worst)} steps, limit {MAX_UNITS:,}: what combines schemas "
            "(allOf, anyOf, oneOf, references) multiplies here",
            self.nodes[inner].path,
        )

    # --- reading

    def _number(self, schema: Any, path: tuple[str | int, ...]) -> int:
        known = self._numbers.get(id(schema)) if isinstance(schema, dict) else None
        if known is not None:
            return known
        number = len(self.nodes)
        if number == MAX_SUBSCHEMAS:
            raise TooCostly(f"the schema has more than {MAX_SUBSCHEMAS:,} subschemas", path)
        self.nodes.append(Node(path))
        if isinstance(schema, dict):
            self._numbers[id(schema)] = number
        self._todo.append((number, schema))
        return number

    def _read(self, node: Node, schema: dict[str, Any]) -> None:
        at = node.path
        node.own = _own_price(schema)
        if _APPLICATORS.isdisjoint(schema):
            return
        self.forks = self.forks or not _FORKS.isdisjoint(schema)
        for keyword in _IN_PLACE_LISTS:
            node.in_place += [self._number(s, (*at, keyword, i)) for i, s in enumerate(_list(schema.get(keyword)))]
        node.in_place += [self._number(schema[keyword], (*at, keyword)) for keyword in _IN_PLACE if keyword in schema]
        for keyword in ("dependentSchemas", "dependencies"):
            inner = _dict(schema.get(keyword))
            node.in_place += [
                self._number(s, (*at, keyword, k)) for k, s in inner.items() if isinstance(s, dict | bool)
            ]
        for keyword in _REFERENCES:
            if isinstance(schema.get(keyword), str):
                node.in_place += self._targets(node, schema, keyword)
        node.properties = {
            str(k): self._number(s, (*at, "properties", k)) for k, s in _dict(schema.get("properties")).items()
        }
        node.patterns = [
            (pattern_price(str(k)), self._number(s, (*at, "patternProperties", k)))
            for k, s in _dict(schema.get("patternProperties")).items()
        ]
        items = schema.get("items")
        places = items if isinstance(items, list) else _list(schema.get("prefixItems"))
        keyword = "items" if isinstance(items, list) else "prefixItems"
        node.prefix = [self._number(s, (*at, keyword, i)) for i, s in enumerate(places)]
        node.items = self._one(schema, at, "additionalItems" if isinstance(items, list) else "items")
        node.additional = self._one(schema, at, "additionalProperties")
        node.names = self._one(schema, at, "propertyNames")
        node.contains = self._one(schema, at, "contains")
        node.unevaluated_properties = self._one(schema, at, "unevaluatedProperties")
        node.unevaluated_items = self._one(schema, at, "unevaluatedItems")
        if node.unevaluated_properties is not None or node.unevaluated_items is not None:
            node.times = 2  # once for the verdict, once to find out what was evaluated

    def _one(self, schema: dict[str, Any], at: tuple[str | int, ...], keyword: str) -> int | None:
        inner = schema.get(keyword)
        return self._number(inner, (*at, keyword)) if isinstance(inner, dict | bool) else None

    def _targets(self, node: Node, schema: dict[str, Any], keyword: str) -> list[int]:
        reference = schema[keyword]
        if _META.match(reference):
            node.own = node.own.plus(Price(META_UNITS))
            return []
        if not self._documents:
            self._documents.append(_Document(self._schema))
        (document,) = self._documents
        found = document.follow(reference, id(schema))
        if keyword != "$ref":
            found = [*found, *document.dynamic(reference)]
        if not found:
            raise TooCostly("a reference leads to nothing that can be found", (*node.path, keyword), lost=True)
        unique = {id(target): (target, path) for target, path in found}
        return [self._number(target, path) for target, path in unique.values()]

    # --- pricing

    def _priced(self) -> list[Price]:
        """The price of each node, the innermost first, without recursion."""
        prices: list[Price | None] = [None] * len(self.nodes)
        for start in range(len(self.nodes)):
            stack = [start]
            while stack:
                index = stack[-1]
                if prices[index] is not None:
                    stack.pop()
                    continue
                node = self.nodes[index]
                needed = [*node.in_place, *(n for n in node.members() if not self.leads_back(index, n))]
                open_ones = [n for n in needed if prices[n] is None]
                if open_ones:
                    stack += open_ones
                    continue
                stack.pop()
                self.levels[index] = 1 + max((self.levels[n] for n in needed), default=0)
                prices[index] = self._price(index, node, prices)
        return [price or Price() for price in prices]

    def _price(self, index: int, node: Node, prices: list[Price | None]) -> Price:
        def of(numbers: list[int]) -> Price:
            total = Price()
            for number in numbers:
                if not self.leads_back(index, number):
                    total = total.plus(prices[number] or _NOTHING)
            return total

        price = node.own
        for inner in node.in_place:
            price = price.plus(prices[inner] or _NOTHING, node.times)
        any_member = of(node.of_any_member())
        for matching, _ in node.patterns:
            any_member = any_member.plus(matching)
        member, item = any_member, of(node.of_any_item())
        any_item = item
        for number in node.properties.values():
            member = member.or_more(any_member.plus(of([number])))
        for number in node.prefix:
            item = item.or_more(any_item.plus(of([number])))
        return price.plus(member.or_more(item))

    def _whole(self) -> Price:
        """The price of the root, and of all nodes that recursions lead back to. Each is visited once for each such
        edge.
        """
        whole = self.prices[0]
        for index, node in enumerate(self.nodes):
            for member in node.members():
                if self.leads_back(index, member):
                    whole = whole.plus(self.prices[member])
        return whole


# --- keywords ---------------------------------------------------------------------------------------------------------


def _own_price(schema: dict[str, Any]) -> Price:
    """The cost of the keywords of one subschema alone, for one value."""
    units = 1 + len(schema)
    members = len(_list(schema.get("required"))) + len(_dict(schema.get("properties")))
    members += sum(1 + len(_list(names)) for names in _dict(schema.get("dependentRequired")).values())
    for value in ([schema["const"]] if "const" in schema else []) + _list(schema.get("enum")):
        units += _size_of(value) * CONST_UNITS if isinstance(value, dict | list) else 1
    units += CONST_UNITS if "const" in schema else 0
    chars = 1 if "maxLength" in schema or "minLength" in schema else 0
    chars += 4 if "format" in schema else 0
    price = Price(units, members, chars, UNIQUE_UNITS if schema.get("uniqueItems") is True else 0)
    pattern = schema.get("pattern")
    return price.plus(pattern_price(pattern)) if isinstance(pattern, str) else price


def _size_of(value: Any) -> int:
    """The number of values in a constant."""
    size, todo = 0, [value]
    while todo:
        found = todo.pop()
        size += 1
        todo += found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return size


#: The parts of patterns that only the backtracking engine matches: look-around, back references, atomic and possessive
#: parts.
_FANCY: Final = re.compile(r"\(\?<?[=!]|\(\?>|\\[1-9k]|[*+?}]\+|\\[GK]")
_COUNTED: Final = re.compile(r"\{(\d+)(,(\d*))?\}")
#: The number of copies that stands for a part without an upper bound.
_MANY: Final = 2


def pattern_price(pattern: str) -> Price:
    """The cost of matching one string against a pattern: `chars` for each of its characters."""
    units = BACKTRACK_UNITS if _FANCY.search(pattern) else 0
    return Price(units, chars=max(1, int(_states(pattern) * STATE_UNITS)))


def _states(pattern: str) -> int:
    """The number of states of the pattern that may be active at once: all states behind a part of variable length.

    After a fixed beginning, the copies of one counted part are active one after another.
    """
    vague = not pattern.startswith("^") or "|" in pattern
    stack: list[int] = []  # for each open group: the states so far in the group around it
    total, last, at = 0, 0, 0
    while at < len(pattern):
        letter = pattern[at]
        counted = _COUNTED.match(pattern, at) if letter == "{" else None
        if counted is not None:
            low, high = int(counted[1][:9]), int((counted[3] or "0")[:9])
            copies = max(low + (_MANY if counted[2] is not None and not counted[3] else 0), high, 1)
            total = min(_MUCH, total + last * ((copies if vague or last > 1 else _MANY) - 1))
            vague = vague or counted[2] is not None
            last, at = 0, counted.end()
            continue
        if letter in "*+?" and at:
            vague = vague or letter != "?"
            at += 1
            continue
        if letter == "(":
            stack.append(total)
            total, last, at = 0, 0, at + 1
            continue
        if letter == ")" and stack:
            last = total + 1
            total, at = min(_MUCH, stack.pop() + last), at + 1
            continue
        at = _after_atom(pattern, at)
        total, last = total + 1, 1
    while stack:
        total += stack.pop()
    return max(1, total)


def _after_atom(pattern: str, at: int) -> int:
    """The end of the letter, escape or class that begins at `at`."""
    if pattern[at] == "\\":
        return at + 2
    if pattern[at] != "[":
        return at + 1
    at += 1
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at + 1


# --- references -------------------------------------------------------------------------------------------------------


class _Document:
    """Finds the targets of references: by pointer, by anchor, by the `$id` of a part."""

    def __init__(self, schema: Any) -> None:
        self._resources: dict[str, tuple[Any, tuple[str | int, ...]]] = {"": (schema, ())}
        self._anchors: dict[str, list[tuple[Any, tuple[str | int, ...]]]] = {}
        self._dynamic: dict[str, list[tuple[Any, tuple[str | int, ...]]]] = {}
        self._bases: dict[int, str] = {}
        for found, base, path in self._walk(schema):
            self._bases[id(found)] = base
            for keyword in ("$anchor", "$dynamicAnchor"):
                name = found.get(keyword)
                if isinstance(name, str):
                    self._anchors.setdefault(f"{base}#{name}", []).append((found, path))
                    if keyword == "$dynamicAnchor":
                        self._dynamic.setdefault(name, []).append((found, path))
            if found.get("$recursiveAnchor") is True:
                self._dynamic.setdefault("", []).append((found, path))

    def follow(self, reference: str, at: int) -> list[tuple[Any, tuple[str | int, ...]]]:
        """The targets of a reference in the object with the id() `at`, each with its place."""
        document, fragment = urldefrag(urljoin(self._bases.get(at, ""), reference) if reference else "")
        if reference.startswith("#"):
            document = self._bases.get(at, "")
            fragment = reference[1:]
        if fragment and not fragment.startswith("/"):
            return self._anchors.get(f"{document}#{unquote(fragment)}", [])
        resource = self._resources.get(document)
        if resource is None:
            return []
        found, path = resource
        for step in fragment.split("/")[1:]:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and step in found:
                found, path = found[step], (*path, step)
            elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
                found, path = found[int(step)], (*path, int(step))
            else:
                return []
        return [(found, path)]

    def dynamic(self, reference: str) -> list[tuple[Any, tuple[str | int, ...]]]:
        """All parts that a dynamic reference with this name may mean."""
        return self._dynamic.get(unquote(reference.partition("#")[2]), [])

    def _walk(self, schema: Any) -> Iterator[tuple[dict[str, Any], str, tuple[str | int, ...]]]:
        """Every object of the document with its base URI. Parts with an `$id` are recorded."""
        todo: list[tuple[Any, str, tuple[str | int, ...]]] = [(schema, "", ())]
        seen: set[int] = set()
        while todo:
            found, base, path = todo.pop()
            if isinstance(found, list):
                todo += [(item, base, (*path, index)) for index, item in enumerate(found)]
            if not isinstance(found, dict) or id(found) in seen:
                continue
            seen.add(id(found))
            name = found.get("$id", found.get("id"))
            if isinstance(name, str):
                if name.startswith("#"):  # an anchor of earlier drafts
                    self._anchors.setdefault(f"{base}{name}", []).append((found, path))
                else:
                    base = urldefrag(urljoin(base, name))[0]
                    self._resources.setdefault(base, (found, path))
            yield found, base, path
            todo += [(inner, base, (*path, key)) for key, inner in found.items()]


# --- graphs -----------------------------------------------------------------------------------------------------------


def _components(edges: list[list[int]]) -> list[int | None]:
    """For each node the number of its strongly connected component. None for a node that is in no cycle."""
    search = _Tarjan(edges)
    for start in range(len(edges)):
        if search.order[start] < 0:
            search.visit(start)
    return search.found


class _Tarjan:
    """Tarjan's search for strongly connected components, without recursion: a graph may be deeper than the stack."""

    def __init__(self, edges: list[list[int]]) -> None:
        self._edges = edges
        #: When each node was met first (-1: not yet), and the earliest node of the stack that it leads back to.
        self.order = [-1] * len(edges)
        self._low = [0] * len(edges)
        #: The component of each node that is in a cycle.
        self.found: list[int | None] = [None] * len(edges)
        self._stack: list[int] = []
        self._on_stack = [False] * len(edges)
        self._met = self._components = 0

    def visit(self, start: int) -> None:
        """Visit every node that `start` leads to and that was not met yet."""
        edges, order, low = self._edges, self.order, self._low
        work: list[tuple[int, int]] = [(start, 0)]
        while work:
            node, edge = work.pop()
            if edge == 0:
                self._meet(node)
            if edge < len(edges[node]):
                work.append((node, edge + 1))
                target = edges[node][edge]
                if order[target] < 0:
                    work.append((target, 0))
                elif self._on_stack[target]:
                    low[node] = min(low[node], order[target])
                continue
            if low[node] == order[node]:
                self._close(node)
            if work:
                around = work[-1][0]
                low[around] = min(low[around], low[node])

    def _meet(self, node: int) -> None:
        self.order[node] = self._low[node] = self._met
        self._met += 1
        self._stack.append(node)
        self._on_stack[node] = True

    def _close(self, node: int) -> None:
        """Make `node` and all nodes above it on the stack one component. A single node is in no cycle of several
        nodes.
        """
        members: list[int] = []
        while not members or members[-1] != node:
            members.append(self._stack.pop())
            self._on_stack[members[-1]] = False
        if len(members) > 1:
            for member in members:
                self.found[member] = self._components
            self._components += 1


def _spelt(units: int) -> str:
    return f"{units:,}" if units < _MUCH else f"more than {_MUCH:,}"


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []

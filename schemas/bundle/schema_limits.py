"""What checking a value against a JSON Schema can cost: caps on the schema's form, and one product for the value. Pure.

A schema of a few lines can make the validator visit one value a billion times: two references to a schema that has two
references, and so on. The checks of all agents share a tool host, and the validator holds the interpreter's lock. So
the form of a schema is limited (its number of subschemas, how deep they lead to one another, how often they apply to
one value), and a value is checked only if its size times what one value costs is affordable.

The form is read in the way the validator compiles it: depth first, each subschema once. A reference to a subschema that
is still being read leads back. The validator keeps the verdict of its target for each list and object, so such a
reference costs a look-up, and its target is counted once more for each. Which reference leads back depends on the
order of reading, so that the worse of two orders counts.

Patterns run in linear time (schemas/bundle/arguments.py). So a pattern costs as much for each character as it has
states.

Source: the JSON Schema specification, drafts 4 to 2020-12; measured with jsonschema-rs 0.60. The unit is 10 ns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

#: The highest cost of one value (units; this is 5 ms). Schemas that people write cost tens of units, generated ones
#: with large unions thousands.
MAX_UNITS: Final = 500_000
#: The most subschemas of one schema. Reading one takes 20 to 100 µs. The largest published schemas have some thousand.
MAX_SUBSCHEMAS: Final = 20_000
#: The longest chain of subschemas that lead to one another, references included. With about a thousand the validator
#: uses up its stack, which ends the process.
MAX_LEVELS: Final = 250
#: The most references that lead back without going into the value. The validator tries every way through them.
MAX_LOOPS: Final = 3
#: The highest cost of one check (units; this is half a second).
MAX_CHECK_UNITS: Final = 50_000_000
#: The most values that are copied to word the faults of one value: about 6 µs each, so a third of a second.
MAX_WORDING: Final = 60_000
#: The most lists and objects that are counted in a value: a third of a second.
MAX_CONTAINERS: Final = 100_000

#: The cost of one state of a pattern for one character, when every state may be active at once (units).
_STATE_UNITS: Final = 1.2
#: The cost of `uniqueItems` for one value at any depth of the array, and of comparing with a constant (units).
_UNIQUE_UNITS: Final = 50
_CONST_UNITS: Final = 30
#: The cost of a reference to a meta-schema, which the validator has built in, and of a look-up of a verdict (units).
_META_UNITS: Final = 2000
_LOOKUP_UNITS: Final = 50

#: What a keyword applies its subschemas to: to the same value, to one member, to every member.
_SAME, _ONE, _EVERY = "same", "one", "every"
_APPLIES: Final = {
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "not", "if", "then", "else"), _SAME),
    **dict.fromkeys(("dependentSchemas", "dependencies"), _SAME),
    **dict.fromkeys(("properties", "prefixItems"), _ONE),
    **dict.fromkeys(("patternProperties", "additionalProperties", "propertyNames", "items", "additionalItems"), _EVERY),
    **dict.fromkeys(("contains", "unevaluatedProperties", "unevaluatedItems"), _EVERY),
}
#: The keywords whose value maps names to subschemas.
_MAPS: Final = frozenset(("properties", "patternProperties", "dependentSchemas", "dependencies"))
_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
#: The keywords whose own verdict depends on the verdicts of the subschemas.
_FORKS: Final = frozenset(
    (
        "anyOf", "oneOf", "not", "if", "contains", "dependentSchemas", "dependencies", "propertyNames",
        "unevaluatedProperties", "unevaluatedItems",
    )
)  # fmt: skip
_META: Final = re.compile(r"https?://json-schema\.org/")

Path = tuple[str | int, ...]


class TooCostly(ValueError):
    """A schema is beyond a limit. Or (`lost`) it has a reference that cannot be followed here; the validator may know
    its target. `path` leads to the place.
    """

    def __init__(self, message: str, path: Path, *, lost: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.lost = lost


class Price(NamedTuple):
    """What one value costs at most (units)."""

    #: How many subschemas are applied to it.
    visits: int = 0
    #: The part that does not depend on its size.
    units: int = 0
    #: The addition for each object.
    members: int = 0
    #: The addition for each character of a string.
    chars: int = 0
    #: The addition for each value below it and each level.
    unique: int = 0

    def plus(self, other: Price) -> Price:
        """The sum of each part."""
        return Price(*map(sum, zip(self, other, strict=True)))

    def or_more(self, other: Price) -> Price:
        """The larger number of each part."""
        return Price(*map(max, self, other))


class _Cost(NamedTuple):
    """What a subschema costs with all that it applies."""

    #: For the value that it is applied to.
    here: Price = Price()
    #: For the value further down that costs most.
    below: Price = Price()
    #: How many subschemas lead to one another from here.
    levels: int = 0
    #: How many references lead back on the way to any one value.
    returns: int = 0

    def whole(self) -> Price:
        """For the value that costs most."""
        return self.here.or_more(self.below)


class SchemaLimits:
    """What a schema costs. Raises TooCostly for one beyond a limit, and RecursionError for one nested too deep.

    `price` is for the value that costs most, `returns` for how often a recursion may multiply with each level, `forks`
    whether a fault may combine others, `patterns` every pattern with its place.
    """

    def __init__(self, schema: Any) -> None:
        first, second = _Reading(schema, reverse=False), _Reading(schema, reverse=True)
        self.price = first.price.or_more(second.price)
        self.returns = max(first.returns, second.returns)
        self.forks = first.forks
        self.patterns = first.patterns
        worst = self.price.units + self.price.members
        if worst > MAX_UNITS:
            dear = first if first.price.units + first.price.members == worst else second
            raise TooCostly(
                f"checking one value may take {_spelt(worst)} steps, limit {MAX_UNITS:,}: what combines schemas "
                "(allOf, anyOf, oneOf, references) multiplies here",
                dear.dearest,
            )

    def is_affordable(self, value: Any, size: int) -> bool:
        """Whether the verdict on `value` stays within MAX_CHECK_UNITS. `size` is its size as msgpack (bytes)."""
        price = self.price
        if not price.unique and size * (price.units + price.members + price.chars) <= MAX_CHECK_UNITS:
            return True
        extent = _extent(value)
        if extent is None:
            return False
        each = price.units + extent.depth * price.unique
        cost = extent.values * each + extent.objects * price.members + extent.chars * price.chars
        return cost <= MAX_CHECK_UNITS

    def can_be_worded(self, value: Any) -> bool:
        """Whether every fault of `value` can be found and worded within MAX_WORDING: the validator makes an object
        with a copy of the value for each fault, and for each way that a recursion leads to it.
        """
        extent = _extent(value)
        if extent is None:
            return False
        ways: int = max(1, self.returns) ** min(extent.depth, 64)
        return (extent.copied + extent.chars // 100) * self.price.visits * ways <= MAX_WORDING


class _Reading:
    """Reads a schema depth first, its keywords in the order in which they stand, or the other way round."""

    def __init__(self, schema: Any, *, reverse: bool) -> None:
        self.forks = False
        self.patterns: list[tuple[Path, str]] = []
        self.returns = 0
        #: Where the innermost subschema stands that costs more than MAX_UNITS.
        self.dearest: Path = ()
        self._reverse = reverse
        # By id. While a subschema is being read: how many levels below the whole value it is applied.
        self._costs: dict[int, _Cost | int] = {}
        self._targets: list[int] = []  # what references lead back to
        self._loops = 0
        self._document: _Document | None = None
        self._schema = schema
        self.price = self._read(schema, (), 1, 0).whole()
        for cost in map(self._costs.get, self._targets):
            assert isinstance(cost, _Cost)
            self.price = self.price.plus(cost.whole())

    def _read(self, schema: Any, path: Path, level: int, inside: int) -> _Cost:
        if not isinstance(schema, dict):
            return _Cost(Price(1, 1), levels=1)
        if level > MAX_LEVELS:
            raise TooCostly(f"more than {MAX_LEVELS} subschemas lead to one another", path)
        if len(self._costs) == MAX_SUBSCHEMAS:
            raise TooCostly(f"the schema has more than {MAX_SUBSCHEMAS:,} subschemas", path)
        self._costs[id(schema)] = inside
        self.forks = self.forks or not _FORKS.isdisjoint(schema)
        here, below, levels, returns = self._own(schema, path), Price(), 0, 0
        one, returns_of_one = Price(), 0
        # Once for the verdict, once to find out what was evaluated.
        times = 2 if "unevaluatedProperties" in schema or "unevaluatedItems" in schema else 1
        for applies, at, inner, referred in self._inner(schema, path):
            cost = self._inner_cost(inner, at, level + 1, inside + (applies is not _SAME), referred=referred)
            levels = max(levels, cost.levels)
            if level + levels > MAX_LEVELS:
                raise TooCostly(f"more than {MAX_LEVELS} subschemas lead to one another", at)
            if applies is _ONE:
                one, returns_of_one = one.or_more(cost.whole()), max(returns_of_one, cost.returns)
                continue
            returns += cost.returns
            for _ in range(times if applies is _SAME else 1):
                here = here.plus(cost.here) if applies is _SAME else here
                below = below.plus(cost.below if applies is _SAME else cost.whole())
        found = _Cost(here, below.plus(one), levels + 1, returns + returns_of_one)
        self._costs[id(schema)] = found
        self.returns = max(self.returns, found.returns)
        if not self.dearest and found.whole().units + found.whole().members > MAX_UNITS:
            self.dearest = path
        return found

    def _inner_cost(self, inner: Any, path: Path, level: int, inside: int, *, referred: bool) -> _Cost:
        known = self._costs.get(id(inner))
        if isinstance(known, _Cost):
            return known
        # One object may stand at several places of a schema in YAML. Only a reference leads back.
        if known is None or not referred:
            return self._read(inner, path, level, inside)
        self._targets.append(id(inner))
        self._loops += known == inside
        if self._loops > MAX_LOOPS:
            raise TooCostly(f"more than {MAX_LOOPS} references apply subschemas in a circle to the same value", path)
        return _Cost(Price(1, _LOOKUP_UNITS), levels=1, returns=1)

    def _inner(self, schema: dict[str, Any], path: Path) -> Iterator[tuple[str, Path, Any, bool]]:
        """What a subschema applies: to what, the place, the inner subschema, whether through a reference."""
        for keyword in reversed(schema) if self._reverse else schema:
            value = schema[keyword]
            if keyword in _REFERENCES and isinstance(value, str):
                yield from ((_SAME, at, target, True) for target, at in self._followed(schema, path, keyword))
                continue
            applies = _APPLIES.get(keyword)
            if applies is None:
                continue
            if isinstance(value, list):
                places = list(enumerate(value))
                applies = _ONE if keyword == "items" else applies
            elif keyword in _MAPS and isinstance(value, dict):
                places = [(name, inner) for name, inner in value.items() if isinstance(inner, dict | bool)]
            else:
                yield applies, (*path, keyword), value, False
                continue
            for name, inner in reversed(places) if self._reverse else places:
                yield applies, (*path, keyword, name), inner, False

    def _own(self, schema: dict[str, Any], path: Path) -> Price:
        """The cost of the keywords of one subschema alone."""
        properties, required = schema.get("properties"), schema.get("required")
        members = sum(len(names) for names in (properties, required) if isinstance(names, dict | list))
        dependent = schema.get("dependentRequired")
        for names in dependent.values() if isinstance(dependent, dict) else ():
            members += 1 + (len(names) if isinstance(names, list) else 0)
        options = schema.get("enum")
        constants = [*(options if isinstance(options, list) else ()), schema.get("const")]
        units = 1 + len(schema) + sum(_size_of(value) * _CONST_UNITS for value in constants)
        units += _META_UNITS * any(_META.match(str(schema.get(keyword, ""))) for keyword in _REFERENCES)
        chars = 4 * ("format" in schema) + ("maxLength" in schema or "minLength" in schema)
        price = Price(1, units, members, chars, _UNIQUE_UNITS if schema.get("uniqueItems") is True else 0)
        pattern, named = schema.get("pattern"), schema.get("patternProperties")
        if isinstance(pattern, str):
            self.patterns.append(((*path, "pattern"), pattern))
            price = price.plus(Price(chars=pattern_price(pattern)))
        for name in named if isinstance(named, dict) else ():
            self.patterns.append(((*path, "patternProperties", name), str(name)))
            price = price.plus(Price(members=1, chars=pattern_price(str(name))))
        return price

    def _followed(self, schema: dict[str, Any], path: Path, keyword: str) -> list[tuple[Any, Path]]:
        reference = schema[keyword]
        if _META.match(reference):
            return []
        if self._document is None:
            self._document = _Document(self._schema)
        found = self._document.follow(reference, id(schema))
        if keyword != "$ref":
            found = [*found, *self._document.dynamic(reference)]
        if not found:
            raise TooCostly("a reference leads to nothing that can be found", (*path, keyword), lost=True)
        # The validator ignores a reference to the subschema that it stands in.
        return list({id(target): (target, at) for target, at in found if target is not schema}.values())


def _size_of(value: Any) -> int:
    """The number of values in a constant. A scalar is compared at no cost."""
    if not isinstance(value, dict | list):
        return 0
    size = 0
    todo: list[Any] = [value]
    while todo:
        found = todo.pop()
        size += 1
        todo += found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return size


# --- patterns ---------------------------------------------------------------------------------------------------------

#: An escape, a class, a count, or any other single letter.
_TOKEN: Final = re.compile(r"\\.?|\[(?:\\.|[^\]\\])*\]?|\{\d+(?:,\d*)?\}|.", re.DOTALL)
#: The number of copies that stands for a part without an upper bound.
_MANY: Final = 2


def pattern_price(pattern: str) -> int:
    """The cost of matching a string against a pattern, for each of its characters (units): the number of states that
    may be active at once, which are all states behind a part of variable length.

    After a fixed beginning, the copies of one counted part are active one after another.
    """
    vague = not pattern.startswith("^") or "|" in pattern
    open_groups: list[int] = []  # for each: the states so far in the group around it
    total, last = 0, 0
    for letter in _TOKEN.findall(pattern):
        if letter[0] == "{" and len(letter) > 1:
            low, comma, high = letter[1:-1].partition(",")
            copies = max(int(low[:9]) + _MANY * bool(comma and not high), int(high[:9] or 0), 1)
            total += last * ((copies if vague or last > 1 else _MANY) - 1)
            vague, last = vague or bool(comma), 0
        elif letter in "*+?":
            vague = vague or letter != "?"
        elif letter == "(":
            open_groups.append(total)
            total, last = 0, 0
        elif letter == ")" and open_groups:
            last = total + 1
            total = open_groups.pop() + last
        else:
            total, last = total + 1, 1
    return max(1, int((total + sum(open_groups)) * _STATE_UNITS))


# --- references -------------------------------------------------------------------------------------------------------


class _Document:
    """Finds the targets of references: by pointer, by anchor, by the `$id` of a part."""

    def __init__(self, schema: Any) -> None:
        self._resources: dict[str, tuple[Any, Path]] = {"": (schema, ())}
        self._anchors: dict[str, list[tuple[Any, Path]]] = {}
        self._dynamic: dict[str, list[tuple[Any, Path]]] = {}
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

    def follow(self, reference: str, at: int) -> list[tuple[Any, Path]]:
        """The targets of a reference in the object with the id() `at`, each with its place."""
        document, fragment = urldefrag(urljoin(self._bases.get(at, ""), reference) if reference else "")
        if reference.startswith("#"):
            document, fragment = self._bases.get(at, ""), reference[1:]
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

    def dynamic(self, reference: str) -> list[tuple[Any, Path]]:
        """All parts that a dynamic reference with this name may mean."""
        return self._dynamic.get(unquote(reference.partition("#")[2]), [])

    def _walk(self, schema: Any) -> Iterator[tuple[dict[str, Any], str, Path]]:
        """Every object of the document with its base URI. Parts with an `$id` are recorded."""
        todo: list[tuple[Any, str, Path]] = [(schema, "", ())]
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


# --- values -----------------------------------------------------------------------------------------------------------


class _Extent(NamedTuple):
    """The size of a value."""

    #: How many values it contains, names of members included.
    values: int
    #: How many of these are objects.
    objects: int
    #: How many characters its strings have.
    chars: int
    #: How many levels it has.
    depth: int
    #: How many values there are when each is copied once.
    copied: int


def _extent(value: Any) -> _Extent | None:
    """Measure a value. None for a value with more than MAX_CONTAINERS lists and objects."""
    values, objects, chars, depth, copied = 1, 0, len(value) if isinstance(value, str) else 0, 1, 1
    todo: list[tuple[Any, int]] = [(value, 1)]
    containers = 0
    while todo:
        found, level = todo.pop()
        containers += 1
        if containers > MAX_CONTAINERS:
            return None
        objects += isinstance(found, dict)
        if isinstance(found, dict):
            chars += sum(len(name) for name in found if isinstance(name, str))
        inside = list(found.values() if isinstance(found, dict) else found if isinstance(found, list) else ())
        values += len(inside) * (2 if isinstance(found, dict) else 1)
        copied += len(inside) * (level + 1)
        depth = max(depth, level + bool(inside))
        for item in inside:
            if isinstance(item, str):
                chars += len(item)
            elif isinstance(item, dict | list):
                todo.append((item, level + 1))
    return _Extent(values, objects, chars, depth, copied)


def _spelt(units: int) -> str:
    return f"{units:,}" if units < 10**12 else f"more than {10**12:,}"

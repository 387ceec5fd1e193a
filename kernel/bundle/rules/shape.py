"""A document's nodes to the struct of its kind, with an error for every place that does not fit.

The struct is the only description of what is allowed. Building never stops at an error. A value that is missing or
wrong becomes an empty value of the right type ("", [], 0), so that later rules can check everything else. To them an
empty required value therefore means "already reported". A plan is only made from a bundle without errors.

`${NAME}` is replaced here, in string values only. Messages repeat what stands in the file, never what it became.

Source: docs/design/bundle.md section 3; requirements SCHEMA-01 to SCHEMA-10, VALIDATE-04.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as EnvMapping
from typing import Any, Final

import msgspec.inspect as types
from msgspec import Struct

from goondan.kernel.bundle.rules.positions import Mapping, Node, Scalar, Sequence, node_at
from goondan.kernel.bundle.rules.problems import Path, Position, Report, did_you_mean, shown

#: Characters that `${NAME}` may add to a bundle in all; an environment is no place for documents.
MAX_EXPANDED_CHARS: Final = 1 << 20
VARIABLE: Final = re.compile(r"\$?\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class Environment:
    """The variables that `${NAME}` may name. None: nothing is replaced (the bundled package's own manifests)."""

    def __init__(self, variables: EnvMapping[str, str] | None) -> None:
        self._variables = variables
        self._left = MAX_EXPANDED_CHARS

    def expand(self, text: str, keep: frozenset[str] = frozenset()) -> tuple[str, list[str], bool]:
        """`text` with every `${NAME}` replaced; the names that are not set; whether it became too long.

        `$${NAME}` stands for the text `${NAME}` itself. Values that are put in are not expanded again. The names in
        `keep` are no variables: what stands in their place is known later.
        """
        variables = self._variables
        if variables is None or "${" not in text:
            return text, [], False
        missing: list[str] = []

        def value(match: re.Match[str]) -> str:
            if match.group().startswith("$$"):
                return match.group()[1:]
            if match.group(1) in keep:
                return match.group()
            found = variables.get(match.group(1))
            if found is None:
                missing.append(match.group(1))
                return ""
            self._left -= len(found)
            return found if self._left >= 0 else ""

        expanded = VARIABLE.sub(value, text)
        return expanded, missing, self._left < 0


def kept_names(path: Path) -> frozenset[str]:
    """The names that `${NAME}` does not take from the environment at this place: WORKDIR in the command of an MCP
    server, which is another one for each instance.
    """
    return _WORKDIR if "config" in path and "transport" in path else frozenset()


_WORKDIR: Final = frozenset(("WORKDIR",))


class Document(Struct):
    """One document."""

    #: The file that it is in.
    file: str
    #: Its nodes.
    node: Mapping
    #: Its number in the file, from 0.
    index: int = 0
    #: Its identity, once kind and name are known.
    resource: str = ""
    #: It was read from a file of a bundle, so that `${NAME}` in it means the user's variables. A document that reaches
    #: a running swarm in another way is never expanded: its author must not be able to read the environment.
    from_file: bool = False

    def place(self, *path: str | int) -> Position:
        """Where `path` stands; the nearest place above it when it is not there."""
        _, (line, column) = node_at(self.node, path)
        return Position(self.file, line, column, path, self.resource)

    def key(self, *path: str | int) -> Position:
        """Where the last key of `path` stands, not its value."""
        node, _ = node_at(self.node, path[:-1])
        entry = node.entries.get(str(path[-1])) if isinstance(node, Mapping) else None
        if entry is None:
            return self.place(*path)
        return Position(self.file, entry.line, entry.column, path, self.resource)

    def text(self, *path: str | int) -> str:
        """The text in the file at `path`, shortened and in quotes; '' when it is no scalar."""
        node, _ = node_at(self.node, path)
        return shown(node.text) if isinstance(node, Scalar) else "''"

    def scalar(self, *path: str | int) -> str | None:
        """What stands in the file at `path`, as it is; None when it is no scalar. Not for messages: see `text`."""
        node, _ = node_at(self.node, path)
        return node.text if isinstance(node, Scalar) and self.has(*path) else None

    def written(self, *path: str | int) -> str:
        """What stands in the file at `path`, of an item of a list as well; "" when it is no scalar."""
        node, _ = node_at(self.node, path)
        return node.text if isinstance(node, Scalar) else ""

    def has(self, *path: str | int) -> bool:
        """Whether `path` is written in the document."""
        node, _ = node_at(self.node, path[:-1])
        return isinstance(node, Mapping) and str(path[-1]) in node.entries


class Builder:
    """Builds structs from one document."""

    def __init__(self, document: Document, environment: Environment, report: Report) -> None:
        self._document = document
        self._environment = environment if document.from_file else Environment(None)
        self._report = report

    def build(self, kind: type[Any]) -> Any:
        """An instance of `kind` from the whole document; what does not fit is reported and stood in for."""
        return self._value(self._document.node, _described(kind), ())

    # Each takes a node, what is wanted, and the path; each returns a value of the wanted type.

    def _value(self, node: Node, want: types.Type, path: Path) -> Any:
        if isinstance(want, types.Metadata):
            return self._value(node, want.type, path)
        if isinstance(want, types.UnionType):
            return self._union(node, want, path)
        if isinstance(want, types.StructType):
            if isinstance(node, Mapping):
                return self._struct(node, want, path)
        elif isinstance(want, types.DictType):
            if isinstance(node, Mapping):
                return {
                    key: self._value(entry.value, want.value_type, (*path, key)) for key, entry in node.entries.items()
                }
        elif isinstance(want, types.ListType):
            if isinstance(node, Sequence):
                return self._list(node, want, path)
        elif isinstance(want, types.AnyType):
            return self._any(node, path)
        elif isinstance(node, Scalar):
            return self._scalar(node, want, path)
        self._mismatch(node, want, path)
        return stand_in(want)

    def _struct(self, node: Mapping, want: types.StructType, path: Path) -> Any:
        fields = {field.encode_name: field for field in want.fields}
        values: dict[str, Any] = {}
        for key, entry in node.entries.items():
            field = fields.get(key)
            if field is None:
                self._unknown(key, list(fields), path)
            elif not field.required and isinstance(entry.value, Scalar) and entry.value.value is None:
                continue  # `tools:` with nothing behind it is as good as absent
            else:
                values[field.name] = self._value(entry.value, field.type, (*path, key))
        for name, field in fields.items():
            if field.required and field.name not in values:
                if name not in node.entries:
                    place = self._document.place(*path)
                    where = Position(place.file, place.line, place.column, (*path, name), place.resource)
                    self._report.error("E_CONFIG_MISSING_FIELD", f"the field {shown(name)} is missing", where)
                values[field.name] = stand_in(field.type)
        return want.cls(**values)

    def _unknown(self, key: str, known: list[str], path: Path) -> None:
        removed = REMOVED.get((self._document.resource.partition("/")[0], (*path, key)))
        hint = removed or did_you_mean(key, known)
        if hint is None and known:
            hint = "Known here: " + ", ".join(known) + "."
        place = self._document.key(*path, key)
        self._report.error("E_CONFIG_UNKNOWN_FIELD", f"unknown field {shown(key)}", place, hint)

    def _list(self, node: Sequence, want: types.ListType, path: Path) -> list[Any]:
        if want.min_length is not None and len(node.items) < want.min_length:
            self._invalid(path, f"at least {want.min_length} item is needed", "Add an item.")
        return [self._value(item, want.item_type, (*path, index)) for index, item in enumerate(node.items)]

    def _union(self, node: Node, want: types.UnionType, path: Path) -> Any:
        """The branch that fits the node's own type; the branches of our unions differ in that."""
        literals: list[str] = []
        for branch in want.types:
            inner = branch.type if isinstance(branch, types.Metadata) else branch
            if isinstance(inner, types.UnionType):
                if any(_fits(node, nested) for nested in inner.types):
                    return self._union(node, inner, path)
            elif _fits(node, inner):
                return self._value(node, branch, path)
            elif isinstance(inner, types.LiteralType):
                literals += [str(value) for value in inner.values]
        if literals and isinstance(node, Scalar) and isinstance(node.value, str):
            self._choice(node, literals, path)
        else:
            self._mismatch(node, want, path)
        return stand_in(want)

    def _any(self, node: Node, path: Path) -> Any:
        if isinstance(node, Scalar):
            return self._text(node, path) if isinstance(node.value, str) else node.value
        if isinstance(node, Sequence):
            return [self._any(item, (*path, index)) for index, item in enumerate(node.items)]
        return {key: self._any(entry.value, (*path, key)) for key, entry in node.entries.items()}

    def _scalar(self, node: Scalar, want: types.Type, path: Path) -> Any:
        value = node.value
        if isinstance(want, types.StrType) and isinstance(value, str):
            text = self._text(node, path)
            if want.min_length is not None and len(text) < want.min_length:
                self._invalid(path, "the text is empty", "Write a value.")
            elif want.pattern is not None and re.search(want.pattern, text) is None:
                self._invalid(path, f"the text has to fit {want.pattern}", "Correct it.")
            return text
        if isinstance(want, types.LiteralType) and isinstance(value, str):
            text = self._text(node, path)
            if text in want.values:
                return text
            self._choice(node, [str(v) for v in want.values], path)
            return stand_in(want)
        if isinstance(want, types.BoolType) and isinstance(value, bool):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            if isinstance(want, types.IntType) and float(value).is_integer():
                return self._in_range(node, int(value), want, path)
            if isinstance(want, types.FloatType):
                return self._in_range(node, float(value), want, path)
        if isinstance(want, types.NoneType) and value is None:
            return None
        self._mismatch(node, want, path)
        return stand_in(want)

    def _text(self, node: Scalar, path: Path) -> str:
        text, missing, too_long = self._environment.expand(node.text, kept_names(path))
        for name in missing:
            self._report.error(
                "E_CONFIG_MISSING_ENV",
                f"the environment variable {name} is not set",
                self._document.place(*path),
                f"Set {name}, or write $${{{name}}} if the text itself is meant.",
            )
        if too_long:
            message = f"environment variables add more than {MAX_EXPANDED_CHARS} characters to the bundle"
            self._report.error("E_CONFIG_INVALID_VALUE", message, self._document.place(*path))
        return text

    def _in_range(self, node: Scalar, value: Any, want: types.IntType | types.FloatType, path: Path) -> Any:
        too_small = (want.ge is not None and value < want.ge) or (want.gt is not None and value <= want.gt)
        too_large = (want.le is not None and value > want.le) or (want.lt is not None and value >= want.lt)
        if too_small or too_large:
            bounds = [f"{word} {bound}" for word, bound in _bounds(want) if bound is not None]
            self._invalid(path, f"{shown(node.text)} is out of range", f"Write a number {' and '.join(bounds)}.")
            return stand_in(want)
        return value

    def _choice(self, node: Scalar, values: list[str], path: Path) -> None:
        hint = did_you_mean(node.text, values) or "Write one of: " + ", ".join(values) + "."
        self._invalid(path, f"{shown(node.text)} is not one of {', '.join(values)}", hint)

    def _mismatch(self, node: Node, want: types.Type, path: Path) -> None:
        expected = " or ".join(_names(want))
        hint = None
        if "text" in _names(want) and isinstance(node, Scalar) and node.value is not None:
            hint = "Put the value in quotes."
        self._invalid(path, f"expected {expected}, got {name_of(node)}", hint)

    def _invalid(self, path: Path, message: str, hint: str | None) -> None:
        self._report.error("E_CONFIG_INVALID_VALUE", message, self._document.place(*path), hint)


_descriptions: dict[type[Any], types.Type] = {}


def _described(kind: type[Any]) -> types.Type:
    """The struct's description, made once: it takes milliseconds, and a bundle has many documents of one kind."""
    found = _descriptions.get(kind)
    if found is None:
        found = _descriptions[kind] = types.type_info(kind)
    return found


#: Fields of older versions that a person may still write, and what to do about them (SCHEMA-06, SCHEMA-07, COMPAT-02).
#: A policy has no kind.
REMOVED: Final[dict[tuple[str, Path], str]] = {
    ("", ("disk",)): "`disk` is gone: workdirs have no file systems of their own any more, and all are watched. Remove "
    "`disk`. If `workspace.ext4` lies beside a workdir, the files are in it: `mount -o loop workspace.ext4 /mnt`, and "
    "copy them into the workdir.",
    ("Tool", ("spec", "runtime")): "Remove it: handlers always run in the tool host.",
    ("Tool", ("spec", "auth")): "Remove it: an extension that needs OAuth asks for tokens itself.",
    ("Extension", ("spec", "runtime")): "Remove it: extensions always run in their agent's process.",
    ("Connector", ("spec", "runtime")): "Remove it: connectors always run in a process of their own.",
    ("Agent", ("spec", "prompts")): "Write prompt: {system: …} or prompt: {systemRef: …}.",
    ("Swarm", ("spec", "entrypoint")): "Write entryAgent: Agent/NAME.",
    ("Model", ("spec", "options")): "Write params: {…}.",
    ("Model", ("spec", "name")): "Write model: NAME.",
}


def stand_in(want: types.Type) -> Any:
    """An empty value of the wanted type."""
    if isinstance(want, types.Metadata):
        return stand_in(want.type)
    if isinstance(want, types.UnionType):
        return None if any(isinstance(t, types.NoneType) for t in want.types) else stand_in(want.types[0])
    if isinstance(want, types.StructType):
        return want.cls(**{f.name: stand_in(f.type) for f in want.fields if f.required})
    if isinstance(want, types.LiteralType):
        return want.values[0]
    if isinstance(want, types.ListType):
        return []
    if isinstance(want, types.DictType):
        return {}
    if isinstance(want, types.StrType):
        return ""
    if isinstance(want, types.BoolType):
        return False
    if isinstance(want, types.IntType):
        return 0
    return 0.0 if isinstance(want, types.FloatType) else None


def name_of(node: Node) -> str:
    """The type of a node, for a person."""
    if isinstance(node, Mapping):
        return "a mapping"
    if isinstance(node, Sequence):
        return "a list"
    if node.value is None:
        return "nothing"
    if isinstance(node.value, bool):
        return "true or false"
    return "text" if isinstance(node.value, str) else "a number"


def _fits(node: Node, want: types.Type) -> bool:
    inner = want.type if isinstance(want, types.Metadata) else want
    if isinstance(node, Mapping):
        return isinstance(inner, types.StructType | types.DictType | types.AnyType)
    if isinstance(node, Sequence):
        return isinstance(inner, types.ListType | types.AnyType)
    value = node.value
    if isinstance(inner, types.LiteralType):
        return value in inner.values
    if isinstance(value, bool) or value is None:
        return isinstance(inner, types.BoolType if value is not None else types.NoneType)
    if isinstance(value, str):
        return isinstance(inner, types.StrType)
    return isinstance(inner, types.FloatType) or (isinstance(inner, types.IntType) and float(value).is_integer())


def _names(want: types.Type) -> list[str]:
    if isinstance(want, types.Metadata):
        return _names(want.type)
    if isinstance(want, types.UnionType):
        names = [name for t in want.types if not isinstance(t, types.NoneType) for name in _names(t)]
        return list(dict.fromkeys(names))
    if isinstance(want, types.StructType | types.DictType):
        return ["a mapping"]
    if isinstance(want, types.ListType):
        return ["a list"]
    if isinstance(want, types.BoolType):
        return ["true or false"]
    if isinstance(want, types.IntType):
        return ["a whole number"]
    return ["a number"] if isinstance(want, types.FloatType) else ["text"]


def _bounds(want: types.IntType | types.FloatType) -> list[tuple[str, Any]]:
    return [("of at least", want.ge), ("above", want.gt), ("of at most", want.le), ("below", want.lt)]

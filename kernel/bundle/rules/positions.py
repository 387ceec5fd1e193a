"""Reads YAML text into nodes that know their positions.

The C parser gives events, and this module builds the tree from them. So nothing recurses, every limit is checked while
reading, and a file with several faults gets an error for each. Scalars follow the YAML 1.2 core schema: `yes`, `on`,
`12:30` and dates are strings. Only values of JSON are accepted: no merge keys, no custom tags, no keys that are not
strings, no infinities.

Source: docs/design/bundle.md section 2; docs/bundle.md is generated from the structs, not from here.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

import yaml
from msgspec import Struct

from goondan.kernel.bundle.rules.lookup import MAX_FILE_BYTES
from goondan.kernel.bundle.rules.problems import Path, shown
from goondan.schemas.wire.codec import MAX_DEPTH

#: The most values in a whole bundle. An alias counts as often as it is used, so an exploding alias reaches the limit.
MAX_NODES: Final = 100_000
#: The most characters of text in a whole bundle, counted in the same way.
MAX_CHARS: Final = 8 << 20
#: The most faults of one file. After them reading ends, because the rest is no YAML either.
MAX_FAULTS: Final = 50

Plain = str | int | float | bool | None


# The nodes of the bundled manifests are also kept as arrays, each with its tag first (prepared.py).


class Scalar(Struct, frozen=True, array_like=True, tag="s"):
    """One value."""

    #: Its value.
    value: Plain
    #: Its text in the file.
    text: str
    #: Its line, from 1.
    line: int
    #: Its column, from 1.
    column: int


class Sequence(Struct, frozen=True, array_like=True, tag="l"):
    """A list."""

    #: Its items.
    items: list[Node]
    #: The line where it begins, from 1.
    line: int
    #: The column where it begins, from 1.
    column: int


class MapEntry(Struct, frozen=True, array_like=True):
    """One key of a mapping, with its own position, and its value."""

    #: The key.
    key: str
    #: The line of the key, from 1.
    line: int
    #: The column of the key, from 1.
    column: int
    #: The value.
    value: Node


class Mapping(Struct, frozen=True, array_like=True, tag="m"):
    """An object. Keys are unique strings."""

    #: Key -> its entry, in the order of the file.
    entries: dict[str, MapEntry]
    #: The line where it begins, from 1.
    line: int
    #: The column where it begins, from 1.
    column: int

    def get(self, key: str) -> Node | None:
        """The value of `key`, None when it is absent."""
        entry = self.entries.get(key)
        return None if entry is None else entry.value


Node = Scalar | Sequence | Mapping


class Fault(Struct, frozen=True):
    """A fault of the text itself."""

    #: The code of the error.
    code: str
    #: What is wrong.
    message: str
    #: The line, from 1.
    line: int
    #: The column, from 1.
    column: int
    #: The place in the document.
    path: Path = ()
    #: What to do about it.
    suggestion: str | None = None


class Allowance:
    """The rest of MAX_NODES and MAX_CHARS that a bundle may still use. Its files share it."""

    def __init__(self, nodes: int = MAX_NODES, chars: int = MAX_CHARS) -> None:
        self.nodes = nodes
        self.chars = chars

    def spend(self, nodes: int, chars: int) -> bool:
        """Take from the allowance. False when it is used up."""
        self.nodes -= nodes
        self.chars -= chars
        return self.nodes >= 0 and self.chars >= 0


class Composed(Struct, frozen=True):
    """The documents of one file."""

    #: The documents.
    documents: list[Node]
    #: The faults of the text.
    faults: list[Fault]
    #: False: reading had to end before the end of the file.
    complete: bool


def compose(text: str, allowance: Allowance) -> Composed:
    """Read every document of `text`. Empty documents are left out. Never raises for anything in the text."""
    builder = _Builder(allowance)
    loader: Any = None
    complete = False
    try:
        loader = yaml.CSafeLoader(text)
        while builder.going and loader.check_event():
            builder.take(loader.get_event())
        complete = builder.going
    except yaml.MarkedYAMLError as error:
        builder.fault(*_syntax(error, text))
    except yaml.reader.ReaderError as error:
        line, column = place_of(text, error.position)
        builder.fault("E_CONFIG_SYNTAX", f"not YAML: {error.reason}", line, column)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError, UnicodeError) as error:
        builder.fault("E_CONFIG_SYNTAX", f"not YAML: {type(error).__name__}", 1, 1)
    finally:
        if loader is not None:
            loader.dispose()
    return Composed(builder.documents, builder.faults, complete)


_FORBIDDEN: Final = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def decode(data: bytes) -> str | Fault:
    """The bytes of a file as text, without a byte order mark. A fault if they are not UTF-8 text."""
    if len(data) > MAX_FILE_BYTES:
        message = f"the file is larger than {MAX_FILE_BYTES} bytes"
        return Fault("E_CONFIG_SYNTAX", message, 1, 1, suggestion="Split the bundle into several files of a directory.")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8")
        line, column = place_of(before, len(before))
        message = f"byte 0x{data[error.start]:02x} is not UTF-8"
        return Fault("E_CONFIG_SYNTAX", message, line, column, suggestion="Save the file as UTF-8.")
    text = text.removeprefix("\ufeff")
    bad = _FORBIDDEN.search(text)
    if bad is not None:
        line, column = place_of(text, bad.start())
        message = f"character U+{ord(bad.group()):04X} is not allowed in YAML"
        return Fault("E_CONFIG_SYNTAX", message, line, column, suggestion="Remove the character.")
    return text


def place_of(text: str, offset: int) -> tuple[int, int]:
    """The line and the column of a character offset, both from 1."""
    start = text.rfind("\n", 0, offset) + 1
    return text.count("\n", 0, offset) + 1, offset - start + 1


def node_at(root: Node, path: Path) -> tuple[Node, tuple[int, int]]:
    """The node at `path`, or the nearest existing node above it, and the position to show.

    When the value of a key is a mapping or a list, the position is that of the key, because the value begins a line
    later.
    """
    node, at = root, (root.line, root.column)
    for step in path:
        if isinstance(node, Mapping) and isinstance(step, str) and step in node.entries:
            entry = node.entries[step]
            node = entry.value
            at = (node.line, node.column) if isinstance(node, Scalar) and node.text else (entry.line, entry.column)
        elif isinstance(node, Sequence) and isinstance(step, int) and step < len(node.items):
            node = node.items[step]
            at = (node.line, node.column)
        else:
            break
    return node, at


# --- building -------------------------------------------------------------------------------------------------------


class _Open:
    """A list or mapping whose end has not been read."""

    __slots__ = ("anchor", "chars", "column", "items", "key", "line", "mapping", "nodes", "path", "skip")

    def __init__(self, mapping: bool, anchor: str | None, line: int, column: int, path: Path) -> None:
        self.mapping = mapping
        self.anchor = anchor
        self.line = line
        self.column = column
        self.path = path
        self.items: Any = {} if mapping else []
        self.key: Scalar | None = None  # a key whose value has not been read yet
        self.skip = False  # that key is invalid: read its value, then drop it
        self.nodes = 1
        self.chars = 0


class _Builder:
    def __init__(self, allowance: Allowance) -> None:
        self.documents: list[Node] = []
        self.faults: list[Fault] = []
        self.going = True
        self._allowance = allowance
        self._stack: list[_Open] = []
        # anchor -> (node, nodes below it, characters below it); None while it is being read
        self._anchors: dict[str, tuple[Node, int, int] | None] = {}

    def fault(
        self, code: str, message: str, line: int, column: int, suggestion: str | None = None, key: str | None = None
    ) -> None:
        path = self._path() if key is None else (*self._path(), key)
        self.faults.append(Fault(code, message, line, column, path, suggestion))
        if len(self.faults) >= MAX_FAULTS:
            self.going = False

    def take(self, event: Any) -> None:
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            self._start(event)
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            self._end()
        elif isinstance(event, yaml.AliasEvent):
            self._alias(event)
        elif isinstance(event, yaml.DocumentStartEvent):
            self._anchors = {}

    def _scalar(self, event: Any) -> None:
        line, column = _at(event)
        text: str = event.value
        value: Plain = text
        if event.tag is not None and event.tag != "!":
            value = self._tagged(event.tag, text, line, column)
        elif event.implicit[0]:
            value = resolve(text)
        if isinstance(value, float) and not math.isfinite(value):
            self.fault("E_CONFIG_INVALID_VALUE", f"{shown(text)} is not a finite number", line, column)
            value = 0
        self._spend(1, len(text), line, column)
        node = Scalar(value, text, line, column)
        if event.anchor is not None:
            self._anchors[event.anchor] = (node, 1, len(text))
        self._add(node, 1, len(text))

    def _tagged(self, tag: str, text: str, line: int, column: int) -> Plain:
        name = tag.removeprefix("tag:yaml.org,2002:")
        value = resolve(text)
        if name == "str":
            return text
        fits = (
            (name == "null" and value is None)
            or (name == "bool" and isinstance(value, bool))
            or (name == "int" and isinstance(value, int) and not isinstance(value, bool))
            or (name == "float" and isinstance(value, int | float) and not isinstance(value, bool))
        )
        if not fits:
            what = f"{shown(text)} is no {name}" if name in _CORE_TAGS else f"the tag {shown(tag)} is not supported"
            self.fault("E_CONFIG_SYNTAX", what, line, column, "Write a plain value without a tag.")
            return text
        return value

    def _start(self, event: Any) -> None:
        line, column = _at(event)
        mapping = isinstance(event, yaml.MappingStartEvent)
        if event.tag not in (None, "!", _MAP_TAG if mapping else _SEQ_TAG):
            message = f"the tag {shown(event.tag)} is not supported"
            self.fault("E_CONFIG_SYNTAX", message, line, column, "Write a plain value without a tag.")
        if len(self._stack) >= MAX_DEPTH:
            self.fault("E_CONFIG_SYNTAX", f"nested deeper than {MAX_DEPTH} levels", line, column, "Make it flatter.")
            self.going = False
            return
        self._spend(1, 0, line, column)
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        self._stack.append(_Open(mapping, event.anchor, line, column, self._path()))

    def _end(self) -> None:
        done = self._stack.pop()
        make = Mapping if done.mapping else Sequence
        node: Node = make(done.items, done.line, done.column)
        if done.anchor is not None:
            self._anchors[done.anchor] = (node, done.nodes, done.chars)
        self._add(node, done.nodes, done.chars)

    def _alias(self, event: Any) -> None:
        line, column = _at(event)
        name = shown(event.anchor)
        if event.anchor not in self._anchors:
            self.fault("E_CONFIG_SYNTAX", f"the alias {name} has no anchor before it", line, column)
            self._add(Scalar(None, "", line, column), 1, 0)
            return
        target = self._anchors[event.anchor]
        if target is None:
            self.fault("E_CONFIG_SYNTAX", f"the alias {name} stands inside its own anchor", line, column)
            self._add(Scalar(None, "", line, column), 1, 0)
            return
        node, nodes, chars = target
        self._spend(nodes, chars, line, column)
        self._add(node, nodes, chars)

    def _spend(self, nodes: int, chars: int, line: int, column: int) -> None:
        if self.going and not self._allowance.spend(nodes, chars):
            message = f"more than {MAX_NODES} values or {MAX_CHARS} characters in one bundle, aliases written out"
            self.fault("E_CONFIG_SYNTAX", message, line, column, "Make the bundle smaller, or use fewer aliases.")
            self.going = False

    def _add(self, node: Node, nodes: int, chars: int) -> None:
        if not self._stack:
            if not (isinstance(node, Scalar) and node.value is None):
                self.documents.append(node)
            return
        top = self._stack[-1]
        top.nodes += nodes
        top.chars += chars
        if not top.mapping:
            top.items.append(node)
        elif top.key is None and not top.skip:
            self._key(top, node)
        else:
            if not top.skip and top.key is not None:
                top.items[top.key.value] = MapEntry(str(top.key.value), top.key.line, top.key.column, node)
            top.key, top.skip = None, False

    def _key(self, top: _Open, node: Node) -> None:
        top.skip = True
        if not isinstance(node, Scalar) or not isinstance(node.value, str):
            what = shown(node.text) if isinstance(node, Scalar) else "a list or mapping"
            message = f"{what} is no string, and keys are strings"
            self.fault("E_CONFIG_SYNTAX", message, node.line, node.column, "Put the key in quotes.")
        elif node.value == "<<":
            message = "merge keys (<<) are not supported"
            self.fault("E_CONFIG_SYNTAX", message, node.line, node.column, "Write the fields out.")
        elif (
            len(self._stack) == 1
            and node.value in ("apiVersion", "kind")
            and top.items.keys() & {"metadata", "spec"}
            and node.value in top.items
        ):
            message = "another document begins here, in the middle of the one before"
            hint = f"Put a line `---` before line {node.line}."
            self.fault("E_CONFIG_SYNTAX", message, node.line, node.column, hint)
            self.documents.append(Mapping(top.items, top.line, top.column))
            top.items, top.line, top.column, top.key, top.skip = {}, node.line, node.column, node, False
        elif node.value in top.items:
            first = top.items[node.value]
            message = f"the key {shown(node.value)} stands twice, first in line {first.line}"
            self.fault("E_CONFIG_DUPLICATE", message, node.line, node.column, "Remove one of the two.", node.value)
        else:
            top.key, top.skip = node, False

    def _path(self) -> Path:
        steps: list[str | int] = []
        for level in self._stack:
            if not level.mapping:
                steps.append(len(level.items))
            elif level.key is not None:
                steps.append(str(level.key.value))
        return tuple(steps)


_CORE_TAGS: Final = frozenset({"str", "null", "bool", "int", "float"})
_MAP_TAG: Final = "tag:yaml.org,2002:map"
_SEQ_TAG: Final = "tag:yaml.org,2002:seq"
_INT: Final = re.compile(r"[-+]?[0-9]+\Z")
_BASED: Final = re.compile(r"0o[0-7]+\Z|0x[0-9a-fA-F]+\Z")
_FLOAT: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z")
_NAMED: Final[dict[str, Plain]] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
    ".nan": math.nan, ".NaN": math.nan, ".NAN": math.nan,
    ".inf": math.inf, ".Inf": math.inf, ".INF": math.inf,
    "+.inf": math.inf, "+.Inf": math.inf, "+.INF": math.inf,
    "-.inf": -math.inf, "-.Inf": -math.inf, "-.INF": -math.inf,
}  # fmt: skip
#: The range of integers in JSON values (docs/design/wire.md section 2). Others become doubles.
_MIN_INT: Final = -(2**63)
_MAX_INT: Final = 2**64 - 1
#: The most digits of a 64-bit integer. Longer numbers are not converted exactly.
_INT_DIGITS: Final = 20


def resolve(text: str) -> Plain:
    """The value of a plain scalar in the YAML 1.2 core schema. May be an infinity or NaN."""
    if text in _NAMED:
        return _NAMED[text]
    first = text[0]
    if not (first.isdigit() or first in "+-."):
        return text
    if _INT.match(text):
        number = int(text) if len(text) <= _INT_DIGITS + 1 else None
        return number if number is not None and _MIN_INT <= number <= _MAX_INT else float(text)
    if _BASED.match(text):
        if len(text) > 2 + 22:
            return text
        based = int(text, 0)
        return based if based <= _MAX_INT else float(based)
    return float(text) if _FLOAT.match(text) else text


def plain(node: Node) -> Any:
    """A node as a JSON value. Its depth and size were bounded when it was read."""
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Sequence):
        return [plain(item) for item in node.items]
    return {key: plain(entry.value) for key, entry in node.entries.items()}


def _at(event: Any) -> tuple[int, int]:
    return event.start_mark.line + 1, event.start_mark.column + 1


def _syntax(error: yaml.MarkedYAMLError, text: str) -> tuple[str, str, int, int, str | None]:
    mark: Any = error.problem_mark or error.context_mark
    problem = error.problem or "not YAML"
    message = f"{problem} ({error.context})" if error.context else problem
    if mark is None:
        return "E_CONFIG_SYNTAX", message, 1, 1, None
    lines = text.split("\n", mark.line + 1)
    here = lines[mark.line][mark.column : mark.column + 1] if mark.line < len(lines) else ""
    hint = {"\t": "Indent with spaces, not tabs.", "@": _QUOTE, "`": _QUOTE, "%": _QUOTE}.get(here)
    if problem == "mapping values are not allowed in this context":
        message, hint = "a colon with a blank behind it, where no key can stand", _COLON
    return "E_CONFIG_SYNTAX", message, mark.line + 1, mark.column + 1, hint


_COLON: Final = "Put the text in quotes if it holds the colon; else correct the indentation."
_QUOTE: Final = "Put the text in quotes; it begins with a character that YAML reserves."

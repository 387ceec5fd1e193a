"""Reads YAML text into nodes that know their positions.

The C parser gives events, and this module builds the tree from them. So every limit is checked while reading, the depth
among them, and a file with several faults gets an error for each. Scalars follow the YAML 1.2 core schema: `yes`, `on`,
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
from goondan.kernel.bundle.rules.problems import Path, Position, Report, shown
from goondan.schemas.wire.codec import MAX_DEPTH

#: The most values in a whole bundle. An alias counts as often as it is used, so an exploding alias reaches the limit.
MAX_NODES: Final = 100_000
#: The most characters of text in a whole bundle, counted in the same way.
MAX_CHARS: Final = 8 << 20
#: The most faults of one file. After them reading ends, because the rest is no YAML either.
MAX_FAULTS: Final = 50

Plain = str | int | float | bool | None


# The nodes of the bundled manifests are also kept as arrays, each with its tag first (documents.py, prepared.json).


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

    def report_faults(self, file: str, report: Report) -> None:
        """Report what is wrong with the text of this file."""
        for fault in self.faults:
            report.error(
                fault.code, fault.message, Position(file, fault.line, fault.column, fault.path), fault.suggestion
            )


def compose_file(data: bytes, allowance: Allowance) -> Composed:
    """Read every document of a file. Never raises for anything in it."""
    text = decode(data)
    return Composed([], [text], complete=False) if isinstance(text, Fault) else compose(text, allowance)


def compose(text: str, allowance: Allowance) -> Composed:
    """Read every document of `text`. Empty documents are left out. Never raises for anything in the text."""
    builder = _Builder(allowance)
    loader: Any = None
    complete = False
    try:
        loader = yaml.CSafeLoader(text)
        builder.read(loader)
        complete = True
    except _Enough:
        pass
    except yaml.MarkedYAMLError as error:
        builder.fault(*_syntax(error, text))
    except yaml.reader.ReaderError as error:
        line, column = place_of(text, error.position)
        builder.fault("E_CONFIG_SYNTAX", f"not YAML: {error.reason}", line, column)
    except (yaml.YAMLError, ValueError, OverflowError, UnicodeError) as error:
        builder.fault("E_CONFIG_SYNTAX", f"not YAML: {type(error).__name__}", 1, 1)
    finally:
        if loader is not None:
            loader.dispose()
    return Composed(builder.documents, builder.faults, complete)


# As YAML has it, but by what is not allowed: to compile the other set takes five milliseconds more.
_FORBIDDEN: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")


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


class _Enough(Exception):
    """Reading ends before the end of the file."""


class _Builder:
    """Builds nodes from the events of a file, recursively: no more than MAX_DEPTH levels are read."""

    def __init__(self, allowance: Allowance) -> None:
        self.documents: list[Node] = []
        self.faults: list[Fault] = []
        self._allowance = allowance
        self._next: Any = None  # gives the next event
        self._path: list[str | int] = []  # where the next event stands
        self._depth = 0
        # anchor -> (node, nodes in it, characters in it); None while it is being read
        self._anchors: dict[str, tuple[Node, int, int] | None] = {}

    def fault(
        self, code: str, message: str, line: int, column: int, suggestion: str | None = None, key: str | None = None
    ) -> None:
        path = tuple(self._path) if key is None else (*self._path, key)
        self.faults.append(Fault(code, message, line, column, path, suggestion))

    def read(self, loader: Any) -> None:
        """Read all documents. Raises _Enough, and what the parser raises."""
        self._next = loader.get_event
        while loader.check_event():
            event = loader.get_event()
            if isinstance(event, yaml.DocumentStartEvent):
                self._anchors = {}
            elif isinstance(event, yaml.NodeEvent):
                node = self._node(event)
                if not (isinstance(node, Scalar) and node.value is None):
                    self.documents.append(node)

    def _node(self, event: Any) -> Node:
        """The node that begins with this event."""
        if len(self.faults) >= MAX_FAULTS:
            raise _Enough
        line, column = event.start_mark.line + 1, event.start_mark.column + 1
        if isinstance(event, yaml.AliasEvent):
            return self._alias(str(event.anchor), line, column)
        nodes, chars = self._allowance.nodes, self._allowance.chars
        if isinstance(event, yaml.ScalarEvent):
            node: Node = self._scalar(event, line, column)
        else:
            node = self._collection(event, line, column)
        if event.anchor is not None:
            self._anchors[event.anchor] = (node, nodes - self._allowance.nodes, chars - self._allowance.chars)
        return node

    def _scalar(self, event: Any, line: int, column: int) -> Scalar:
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
        return Scalar(value, text, line, column)

    def _tagged(self, tag: str, text: str, line: int, column: int) -> Plain:
        name = tag.removeprefix("tag:yaml.org,2002:")
        value = resolve(text)
        if name == "str":
            return text
        if type(value) in _CORE_TAGS.get(name, ()):
            return value
        what = f"{shown(text)} is no {name}" if name in _CORE_TAGS else f"the tag {shown(tag)} is not supported"
        self.fault("E_CONFIG_SYNTAX", what, line, column, "Write a plain value without a tag.")
        return text

    def _collection(self, event: Any, line: int, column: int) -> Sequence | Mapping:
        mapping = isinstance(event, yaml.MappingStartEvent)
        if event.tag not in (None, "!", _MAP_TAG if mapping else _SEQ_TAG):
            message = f"the tag {shown(event.tag)} is not supported"
            self.fault("E_CONFIG_SYNTAX", message, line, column, "Write a plain value without a tag.")
        if self._depth >= MAX_DEPTH:
            self.fault("E_CONFIG_SYNTAX", f"nested deeper than {MAX_DEPTH} levels", line, column, "Make it flatter.")
            raise _Enough
        self._spend(1, 0, line, column)
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        self._depth += 1
        node = self._mapping(line, column) if mapping else self._sequence(line, column)
        self._depth -= 1
        return node

    def _sequence(self, line: int, column: int) -> Sequence:
        items: list[Node] = []
        self._path.append(0)
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            items.append(self._node(event))
            self._path[-1] = len(items)
        self._path.pop()
        return Sequence(items, line, column)

    def _mapping(self, line: int, column: int) -> Mapping:
        entries: dict[str, MapEntry] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            key = self._node(event)
            if self._depth == 1 and _begins_anew(key, entries):
                message = "another document begins here, in the middle of the one before"
                hint = f"Put a line `---` before line {key.line}."
                self.fault("E_CONFIG_SYNTAX", message, key.line, key.column, hint)
                self.documents.append(Mapping(entries, line, column))
                entries, line, column = {}, key.line, key.column
            name = self._key(key, entries)
            if name is None:
                self._node(self._next())
                continue
            self._path.append(name)
            entries[name] = MapEntry(name, key.line, key.column, self._node(self._next()))
            self._path.pop()
        return Mapping(entries, line, column)

    def _key(self, key: Node, entries: dict[str, MapEntry]) -> str | None:
        """The text of a key. None: it is none, which is reported, and its value is dropped."""
        if not isinstance(key, Scalar) or not isinstance(key.value, str):
            what = shown(key.text) if isinstance(key, Scalar) else "a list or mapping"
            message = f"{what} is no string, and keys are strings"
            self.fault("E_CONFIG_SYNTAX", message, key.line, key.column, "Put the key in quotes.")
        elif key.value == "<<":
            message = "merge keys (<<) are not supported"
            self.fault("E_CONFIG_SYNTAX", message, key.line, key.column, "Write the fields out.")
        elif (first := entries.get(key.value)) is not None:
            message = f"the key {shown(key.value)} stands twice, first in line {first.line}"
            self.fault("E_CONFIG_DUPLICATE", message, key.line, key.column, "Remove one of the two.", key.value)
        else:
            return key.value
        return None

    def _alias(self, anchor: str, line: int, column: int) -> Node:
        target = self._anchors.get(anchor)
        if target is None:
            why = "stands inside its own anchor" if anchor in self._anchors else "has no anchor before it"
            self.fault("E_CONFIG_SYNTAX", f"the alias {shown(anchor)} {why}", line, column)
            return Scalar(None, "", line, column)
        node, nodes, chars = target
        self._spend(nodes, chars, line, column)
        return node

    def _spend(self, nodes: int, chars: int, line: int, column: int) -> None:
        if not self._allowance.spend(nodes, chars):
            message = f"more than {MAX_NODES} values or {MAX_CHARS} characters in one bundle, aliases written out"
            self.fault("E_CONFIG_SYNTAX", message, line, column, "Make the bundle smaller, or use fewer aliases.")
            raise _Enough


def _begins_anew(key: Node, entries: dict[str, MapEntry]) -> bool:
    """Whether a key begins another document, before which `---` is missing."""
    if not isinstance(key, Scalar) or key.value not in ("apiVersion", "kind"):
        return False
    return key.value in entries and not entries.keys().isdisjoint(("metadata", "spec"))


#: Tag -> the types of the values that may have it. `str` is none of them: every text may have it.
_CORE_TAGS: Final[dict[str, tuple[type, ...]]] = {
    "null": (type(None),), "bool": (bool,), "int": (int,), "float": (int, float),
}  # fmt: skip
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

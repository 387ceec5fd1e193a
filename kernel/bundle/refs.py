"""References: the ways to write one, and which resource is meant.

`Kind/name`, {kind, name, package?} and {ref: either} all become one Ref. Which resources exist is not known here.

Source: docs/design/bundle.md section 4; requirement EXT-12.
"""

from __future__ import annotations

from msgspec import Struct

from goondan.kernel.bundle.problems import Path
from goondan.schemas.bundle.resources import AgentUse, ExtensionUse, ObjectRef, RefLike, ToolUse

Use = ToolUse | ExtensionUse | AgentUse


class Ref(Struct, frozen=True):
    """A reference, normalised."""

    #: Kind of the resource.
    kind: str
    #: Name of the resource.
    name: str
    #: The package that it is in.
    package: str | None = None
    #: The path of what was written, below the item.
    at: Path = ()


class BadRef(Struct, frozen=True):
    """Why something is no reference."""

    #: What is wrong. `{}` in it stands for what is written at `at`. "": it was reported already.
    message: str
    #: The path of what was written, below the item.
    at: Path = ()
    #: What to do about it.
    suggestion: str | None = None


def read_ref(value: RefLike, kind: str, at: Path = ()) -> Ref | BadRef:
    """A reference to a resource of `kind`, written at `at`."""
    if isinstance(value, ObjectRef):
        if not value.kind or not value.name:
            return BadRef("", at)
        if value.kind != kind:
            return BadRef(f"a {kind} is wanted here, not {{}}", (*at, "kind"), f"Write kind: {kind}.")
        return Ref(value.kind, value.name, value.package, (*at, "name"))
    found, slash, name = value.partition("/")
    if not value:
        return BadRef("", at)
    if not slash or not found or not name or "/" in name:
        return BadRef("{} is no reference of the form Kind/name", at, f"Write {kind}/NAME.")
    if found != kind:
        return BadRef(f"a {kind} is wanted here, not {{}}", at, f"Write {kind}/NAME.")
    return Ref(found, name, None, at)


def read_entry_agent(value: RefLike) -> Ref | BadRef:
    """`spec.entryAgent` of a Swarm: a reference to an Agent, or its name alone, which can mean nothing else."""
    bare = isinstance(value, str) and value and "/" not in value
    return read_ref(f"Agent/{value}" if bare else value, "Agent", ("entryAgent",))


def read_use(item: str | Use, kind: str, at: Path = ()) -> Ref | BadRef:
    """A reference in a list item: the text itself, by `ref`, or by `kind` and `name`."""
    if isinstance(item, str):
        return read_ref(item, kind, at)
    if item.ref is not None:
        if item.kind is not None or item.name is not None or item.package is not None:
            return BadRef("both `ref` and `kind`, `name` or `package` are given", at, "Write one of the two forms.")
        return read_ref(item.ref, kind, (*at, "ref"))
    if item.kind is None or item.name is None:
        return BadRef("neither `ref` nor `kind` and `name` are given", at, f"Write ref: {kind}/NAME.")
    return read_ref(ObjectRef(item.kind, item.name, item.package), kind, at)

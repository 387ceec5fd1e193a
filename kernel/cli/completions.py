"""The completions that the shell offers when a person presses Tab: agents, tools, instances and logs of the bundle that
the line names.

Rules.
- Only documents are read. Nothing is checked, no module of a tool is loaded, and no kernel is asked. That is quick
  enough for a key press.
- A state root that commands refuse may hold names that another user chose. It is not listed.
- The next Enter runs what a shell has put into a command line, and an instance key is text from outside. So only names
  without special characters of any shell are offered.
- A shell prints the description of a tool as it is, and that is text from outside too. So control characters are
  escaped.
- When anything fails, nothing is offered and no error is shown.

Source: docs/design/commands.md section 3.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from goondan.kernel import paths, state_root
from goondan.kernel.bundle.documents import IN_AGENTS, IN_JAILS, MANIFEST, load_documents, tool_folders
from goondan.kernel.bundle.rules import positions, problems
from goondan.kernel.bundle.rules.tools import BUNDLED_EXPORTS
from goondan.schemas.bundle.address import build_tool_name, is_export_name, is_resource_name, segment_key
from goondan.schemas.text.visible import visible_line
from goondan.schemas.wire.frames import OPERATOR_AGENT

#: The characters that have no special meaning in any shell, anywhere in a word.
SAFE: Final = re.compile(r"[A-Za-z0-9_@%+:,./][A-Za-z0-9_@%+:,./-]*\Z")
#: The most items that are offered. A person would not read more.
MAX_ITEMS: Final = 200

Items = list[CompletionItem[str]]


def offer(source: Callable[[click.Context], Iterable[tuple[str, str]]], ctx: click.Context, incomplete: str) -> Items:
    """The (value, help) pairs of `source` whose value begins with the typed text. Never raises."""
    items: Items = []
    try:
        for value, text in source(ctx):
            if value.startswith(incomplete) and SAFE.match(value):
                # The script of fish takes the text after a comma for something else.
                items.append(CompletionItem(value, help=visible_line(text).replace(",", ";") or None))
                if len(items) == MAX_ITEMS:
                    break
    except Exception:
        return []  # a person who is typing did not ask for an error
    return items


def agents(ctx: click.Context) -> Iterator[tuple[str, str]]:
    """The agents of the bundle."""
    return resources(ctx, "Agent")


def resources(ctx: click.Context, kind: str) -> Iterator[tuple[str, str]]:
    """The resources of a kind that the bundle has."""
    for document in _documents(_bundle(ctx)):
        if _text(document, "kind") == kind and is_resource_name(name := _text(document, "metadata", "name")):
            yield name, ""


def error_codes(ctx: click.Context) -> Iterator[tuple[str, str]]:
    """The codes of errors."""
    from goondan.kernel.cli.commands import load_codes
    from goondan.schemas.wire.errors import CODES

    load_codes()
    return ((code, "") for code in CODES)


def first_agent(ctx: click.Context) -> Iterator[tuple[str, str]]:
    """The agents, for the first of several words. Free text follows it."""
    return iter(()) if ctx.params.get("words") else agents(ctx)


def tools(ctx: click.Context) -> Iterator[tuple[str, str]]:
    """Every tool that `gdn call` can call: the bundle's and the bundled ones, each with its description."""
    own: set[str] = set()
    for document in _documents(_bundle(ctx)):
        own.add(_text(document, "metadata", "name"))
        yield from _exports(document)
    for folder in (*tool_folders(IN_JAILS), *tool_folders(IN_AGENTS)):
        for document in _documents(os.path.join(folder, MANIFEST)):
            if _text(document, "metadata", "name") not in own:
                yield from _exports(document)


def instances(ctx: click.Context) -> Iterator[tuple[str, str]]:
    """Instances with a state: of the agent that the line names, else of all. `call` has an agent of its own."""
    root = os.path.join(_state(ctx), "instances")
    words: Any = ctx.params.get("words") or ()
    named = ctx.params.get("agent") or (words[0] if words and words[0] in os.listdir(root) else None)
    if ctx.info_name == "call":
        named = OPERATOR_AGENT
    seen: set[str] = set()
    for agent in [named] if named else sorted(os.listdir(root)):
        for folder in sorted(os.listdir(os.path.join(root, agent))):
            key = segment_key(folder)
            if key is not None and key not in seen:
                seen.add(key)
                yield key, ""


def roles(ctx: click.Context) -> Iterator[tuple[str, str]]:
    """Processes that have a log."""
    from goondan.kernel.traces.logs import AGENT, role_of, roles

    names = os.listdir(os.path.join(_state(ctx), "logs"))
    found = {role for name in names if (role := role_of(name)) is not None}
    yield from ((role, "") for role in sorted(found & set(roles())))
    yield AGENT, "all agents"
    yield from ((role, "") for role in sorted(found - set(roles())))


def _state(ctx: click.Context) -> str:
    """The state directory. Raises GoondanError E_STATE for a state root that commands refuse."""
    path = paths.state_dir(_bundle(ctx))
    if (refusal := state_root.why_refused(paths.root_of(path))) is not None:
        raise refusal
    return path


def _bundle(ctx: click.Context) -> str:
    given: Any = ctx.params.get("bundle")
    return paths.find_bundle(given if isinstance(given, str) else None)


def _documents(path: str) -> list[Any]:
    return [positions.plain(document.node) for document in load_documents(path, problems.Report()).documents]


def _exports(document: Any) -> Iterator[tuple[str, str]]:
    tool = _text(document, "metadata", "name")
    if _text(document, "kind") != "Tool" or not is_resource_name(tool):
        return
    listed = _value(document, "spec", "exports")
    for item in listed if isinstance(listed, list) else ():
        export = _text(item, "name")
        if is_export_name(export) or export in BUNDLED_EXPORTS:
            yield build_tool_name(tool, export), _text(item, "description").partition("\n")[0]


def _value(value: Any, *path: str) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _text(value: Any, *path: str) -> str:
    found = _value(value, *path)
    return found if isinstance(found, str) else ""

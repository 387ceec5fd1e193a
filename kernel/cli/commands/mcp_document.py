"""Extension documents of MCP servers into a bundle's goondan.yaml, behind the last document, as text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from goondan.schemas.wire.errors import fail


def add_to_bundle(documents: Sequence[Mapping[str, Any]], folder: str, agent: str | None = None) -> str:
    """Add documents to the bundle of a folder, all or none, and have an agent name them; the path of its goondan.yaml.

    Raises GoondanError E_INIT: there is no bundle, it has one of them already, it has no such agent, or it cannot be
    written.
    """
    from goondan.kernel.cli.commands.new_resource import addition, read_bundle
    from goondan.kernel.cli.placing import Placing
    from goondan.kernel.mcp.document import yaml_text
    from goondan.kernel.paths import BUNDLE_FILE

    folder = os.path.expanduser(folder)
    path = os.path.join(folder, BUNDLE_FILE)
    before = None
    for document in documents:
        before = read_bundle(path, document["metadata"]["name"], "Extension")
    if before is None:
        raise fail("E_INIT", f"there is no {path}", suggestion="Begin with `gdn init`, or name the folder with --dir.")
    data = before
    for document in documents:
        data += addition(path, data, yaml_text(document).encode())
        if agent is not None:
            data = naming(path, data, agent, document["metadata"]["name"])
    with Placing(folder) as placing:
        if agent is None:
            placing.append(BUNDLE_FILE, before, data[len(before) :])
        else:
            placing.write({BUNDLE_FILE: data}, replace=True)
    return path


def entry_agent(folder: str) -> str | None:
    """The agent of a folder's goondan.yaml that people speak to, by its name; None when the file does not have it."""
    from goondan.kernel.bundle.documents import load_documents
    from goondan.kernel.bundle.positions import plain
    from goondan.kernel.bundle.problems import Report

    path = os.path.realpath(os.path.join(folder, "goondan.yaml"))
    every = [plain(one.node) for one in load_documents(path, Report()).documents]
    documents = [one for one in every if isinstance(one, dict) and isinstance(one.get("spec"), dict)]
    agents = [_name(one) for one in documents if one.get("kind") == "Agent"]
    entries = [str(one["spec"].get("entryAgent")) for one in documents if one.get("kind") == "Swarm"]
    entry = entries[0].removeprefix("Agent/") if entries else agents[0] if len(agents) == 1 else None
    return entry if entry in agents else None


def naming(path: str, data: bytes, agent: str, extension: str) -> bytes:
    """The text of a goondan.yaml with one more name in an agent's `spec.extensions`; all else stays as it is written.

    Raises GoondanError E_INIT.
    """
    from goondan.kernel.bundle.positions import Budget, Mapping, Sequence, compose, decode, plain

    text, ref = str(decode(data)), f"Extension/{extension}"
    for node in compose(text, Budget()).documents:
        spec = node.get("spec") if isinstance(node, Mapping) else None
        value = plain(node)
        if not isinstance(spec, Mapping) or value.get("kind") != "Agent" or _name(value) != agent:
            continue
        listed = spec.get("extensions")
        places = listed.items if isinstance(listed, Sequence) else [] if listed else [*spec.entries.values()]
        if not places:
            break
        lines = text.splitlines(keepends=True)
        line, at = places[0].line - 1, places[0].column - 1
        before, new = lines[line][:at], f"extensions: [{ref}]" if listed is None else ref
        # In a list or an object on one line it stands before the others, else on a line above.
        lines[line] = before + new + (", " if before.strip(" -") else f"\n{before}") + lines[line][at:]
        made = "".join(lines)
        wanted = {**value["spec"], "extensions": [ref, *value["spec"].get("extensions", ())]}
        if {**value, "spec": wanted} in map(plain, compose(made, Budget()).documents):
            return made.encode()
    hint = f"Name {ref} in the spec.extensions of the agent that is to have it."
    raise fail("E_INIT", f"{path}: {ref} cannot be added to Agent/{agent[:100]}", suggestion=hint)


def _name(document: Mapping[str, Any]) -> Any:
    metadata = document.get("metadata")
    return metadata.get("name") if isinstance(metadata, dict) else None

"""`gdn tool new NAME`: a tool to begin with: `tools/NAME.py`, `tests/test_NAME.py`, and its document in goondan.yaml.

The document is put behind the last one of goondan.yaml, as text: what stands there keeps its comments and its form. A
bundle that has no goondan.yaml gets one with this document alone, which is enough for `gdn call`. Nothing that is
there is replaced, and when anything fails nothing is left.

Source: design section 11; docs/decisions/026.
"""

from __future__ import annotations

import os
from typing import Final

import click

from kernel.cli import options

TEMPLATE: Final = "new-tool"
#: The template's manifest, which becomes part of goondan.yaml.
MANIFEST: Final = "tool.yaml"
#: What stands for the tool's name and for its module's name in the template.
NAME_MARK: Final = "TOOL-NAME"
MODULE_MARK: Final = "TOOL_MODULE"


@click.command(name="new")
@click.argument("name")
@click.option(
    "--dir",
    "folder",
    metavar="DIR",
    default=".",
    shell_complete=options.completed_path("dir"),
    help="The bundle's folder.  [default: here]",
)
@options.as_json
def command(name: str, folder: str, as_json: bool) -> int:
    """Write a new tool into a bundle: its module, its test, and its document in goondan.yaml."""
    from kernel.cli.output import write, write_json
    from kernel.cli.placing import Placing
    from kernel.cli.terminal import printable
    from kernel.paths import BUNDLE_FILE

    folder = os.path.expanduser(folder)
    check_name(name)
    files = filled(name)
    document = files.pop(MANIFEST)
    bundle = os.path.join(folder, BUNDLE_FILE)
    before = read_bundle(bundle, name)
    added = document if before is None else addition(bundle, before, document)
    with Placing(folder) as placing:
        placing.write(files if before is not None else {**files, BUNDLE_FILE: document}, replace=False)
        if before is not None:
            placing.append(BUNDLE_FILE, before, added)
    steps = next_steps(folder, name)
    if as_json:
        changed = "changed" if before is not None else "made"
        write_json({"folder": os.path.abspath(folder), "files": list(files), changed: BUNDLE_FILE, "next": steps})
        return 0
    width = max(len(step["command"]) for step in steps)
    lines = [f"wrote {printable(os.path.join(folder, path))}" for path in files]
    lines.append(f"{'added Tool/' + name + ' to' if before is not None else 'wrote'} {printable(bundle)}")
    lines += ["", "Next:", *(f"  {printable(step['command']):<{width}}   {step['what']}".rstrip() for step in steps)]
    write(*lines)
    return 0


def check_name(name: str) -> None:
    """A name that a Tool can have and no bundled tool has. Raises GoondanError E_USAGE, E_INIT."""
    from kernel.bundle.base import base_tools
    from kernel.bundle.problems import shown
    from schemas.address import MAX_TOOL_NAME, build_tool_name, is_resource_name
    from schemas.errors import CODES, fail

    if not is_resource_name(name) or len(build_tool_name(name, "run")) > MAX_TOOL_NAME:
        raise fail("E_USAGE", f"{shown(name)} cannot be a tool's name", suggestion=CODES["E_CONFIG_INVALID_NAME"])
    if name in base_tools():
        raise fail("E_INIT", f"there is a bundled tool {name!r}", suggestion="Choose another name.")


def module_name(name: str) -> str:
    """A name that Python can import."""
    module = name.replace("-", "_")
    return f"tool_{module}" if module[0].isdigit() else module


def filled(name: str) -> dict[str, bytes]:
    """Relative path -> content: the template for a tool of this name."""
    from kernel.cli.init import template_files

    def fill(text: str) -> str:
        return text.replace(NAME_MARK, name).replace(MODULE_MARK, module_name(name))

    return {fill(path): fill(data.decode("utf-8")).encode() for path, data in template_files(TEMPLATE).items()}


def read_bundle(path: str, name: str, *, kind: str = "Tool") -> bytes | None:
    """The goondan.yaml to which a resource of a kind can be added; None when there is none.

    Raises BundleError for one that is no YAML, GoondanError E_INIT for a link and when it has the resource already.
    """
    from kernel.bundle.load import load_documents
    from kernel.bundle.positions import Scalar, node_at
    from kernel.bundle.problems import BundleError, Report
    from schemas.errors import fail

    if not os.path.lexists(path):
        return None
    if os.path.islink(path):  # a tool could have made it, in a folder that was its workdir
        raise fail("E_INIT", f"{path} is a link", suggestion="Name the folder that has the file itself.")
    report = Report()
    loaded = load_documents(os.path.realpath(path), report)
    if report.errors:
        raise BundleError(report.errors, report.dropped)
    for document in loaded.documents:
        found, named = (node_at(document.node, at)[0] for at in (("kind",), ("metadata", "name")))
        if isinstance(found, Scalar) and isinstance(named, Scalar) and (found.text, named.text) == (kind, name):
            where = document.place("metadata", "name")
            message = f"{kind}/{name} is there already: {where.file}:{where.line}"
            raise fail("E_INIT", message, suggestion="Choose another name.")
    return loaded.sources[0].data


def addition(path: str, before: bytes, document: bytes) -> bytes:
    """What to put behind the last document of a file, so that one is added. Raises GoondanError E_INIT."""
    from kernel.bundle.positions import Budget, Composed, Fault, compose, decode
    from schemas.errors import fail

    def documents(data: bytes) -> int:
        text = decode(data)
        composed = Composed([], [text], complete=False) if isinstance(text, Fault) else compose(text, Budget())
        return len(composed.documents) if not composed.faults else -1

    added = (b"" if before.endswith(b"\n") else b"\n") + b"---\n" + document
    if documents(before + added) != documents(before) + 1:
        raise fail("E_INIT", f"{path}: a document cannot be added behind the last one", suggestion=_END_HINT)
    return added


_END_HINT: Final = "End the file with a complete document, without --- behind it."


def next_steps(folder: str, name: str) -> list[dict[str, str]]:
    """What to do now: {command, what}, in order."""
    from shlex import quote

    enter = [("cd " + quote(folder), "")] if os.path.abspath(folder) != os.getcwd() else []
    steps = [
        *enter,
        (f"gdn tool test {name}", "checks the manifest and runs its examples in the sandbox"),
        (f'gdn call {name}__run \'{{"text": "hello"}}\'', "one call"),
        ("python3 -m unittest discover -s tests", "tests the functions by themselves"),
        (f"- Tool/{name}", "in spec.tools of an Agent lets it use the tool"),
    ]
    return [{"command": line, "what": what} for line, what in steps]

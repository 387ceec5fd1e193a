"""A new Tool or Extension in a bundle: its module, its test, and its document in goondan.yaml.

The document is appended to goondan.yaml as text, so the rest of the file keeps its comments and its form. No existing
file is replaced. When anything fails, everything new is removed again.

Source: docs/design/tools.md section 10.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from typing import Final, NamedTuple

import click

from goondan.kernel.bundle.problems import BundleError, Report, shown
from goondan.kernel.cli import options
from goondan.schemas.wire.errors import CODES, fail

_END_HINT: Final = "End the file with a complete document, without --- behind it."

in_folder: Final = click.option(
    "--dir",
    "folder",
    metavar="DIR",
    default=".",
    shell_complete=options.completed_path("dir"),
    help="The bundle's folder.  [default: here]",
)


class NewResource(NamedTuple):
    """How new resources of one kind are made."""

    #: `Tool` or `Extension`.
    kind: str
    #: The folder of its files below kernel/templates.
    template: str
    #: The file of the template that becomes a document of goondan.yaml.
    manifest: str
    #: The text in the template that is replaced by the resource's name.
    name_mark: str
    #: The text in the template that is replaced by the module's name.
    module_mark: str
    #: Whether there must be a goondan.yaml. If not, a missing one is made with this document alone.
    needs_bundle: bool
    #: The folder of the template with the files of one language. "": the template has one language.
    language: str = ""
    #: What ends the module's name, in place of `TOOL_SUFFIX`.
    suffix: str = "py"
    #: Files that all resources of a language share, beside those of the template. One that is there already stays.
    shared: Mapping[str, bytes] = {}

    def write(self, name: str, folder: str, steps: list[tuple[str, str]], *, as_json: bool) -> None:
        """Write the resource into the bundle of a folder, and say so. `steps` are the next commands and their purposes.

        Raises GoondanError E_INIT, E_USAGE; BundleError for a goondan.yaml that is no YAML.
        """
        from goondan.kernel.cli.output import write, write_json
        from goondan.kernel.cli.placing import Placing
        from goondan.kernel.cli.terminal import printable
        from goondan.kernel.paths import BUNDLE_FILE

        folder = os.path.expanduser(folder)
        files = self.filled(name)
        for path, data in self.shared.items():
            if not os.path.lexists(os.path.join(folder, path)):
                files[path] = data
        document = files.pop(self.manifest)
        bundle = os.path.join(folder, BUNDLE_FILE)
        before = read_bundle(bundle, name, self.kind)
        if before is None and self.needs_bundle:
            hint = "Begin with `gdn init`, or name the folder with --dir."
            raise fail("E_INIT", f"there is no {bundle}", suggestion=hint)
        added = document if before is None else addition(bundle, before, document)
        with Placing(folder) as placing:
            placing.write(files if before is not None else {**files, BUNDLE_FILE: document}, replace=False)
            if before is not None:
                placing.append(BUNDLE_FILE, before, added)
        steps = self._entering(folder, steps)
        if as_json:
            changed = "made" if before is None else "changed"
            plain = [{"command": line, "what": what} for line, what in steps]
            write_json({"folder": os.path.abspath(folder), "files": list(files), changed: BUNDLE_FILE, "next": plain})
            return
        width = max(len(line) for line, _ in steps)
        lines = [f"wrote {printable(os.path.join(folder, path))}" for path in files]
        lines.append(f"{'wrote' if before is None else f'added {self.kind}/{name} to'} {printable(bundle)}")
        lines += ["", "Next:", *(f"  {printable(line):<{width}}   {what}".rstrip() for line, what in steps)]
        write(*lines)

    def filled(self, name: str) -> dict[str, bytes]:
        """Relative path -> content: the template for a resource of this name."""
        from goondan.kernel.cli.commands.init import template_files

        def fill(text: str) -> str:
            filled = text.replace(self.name_mark, name).replace(self.module_mark, module_name(name))
            return filled.replace("TOOL_SUFFIX", self.suffix)

        files = template_files(self.template)
        chosen = {path: data for path, data in files.items() if path == self.manifest or path.startswith(self.language)}
        return {
            fill(path.removeprefix(f"{self.language}/")): fill(data.decode("utf-8")).encode()
            for path, data in chosen.items()
        }

    def _entering(self, folder: str, steps: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """The steps. When the folder is not the current one, `cd` comes first."""
        from shlex import quote

        return steps if os.path.abspath(folder) == os.getcwd() else [("cd " + quote(folder), ""), *steps]


def check_name(name: str, kind: str, bundled: Container[str], *, fits: bool = True) -> None:
    """Check a name: a resource of this kind can have it, and no bundled one has it. `fits`: the names that are made of
    it are short enough.

    Raises GoondanError E_USAGE, E_INIT.
    """
    from goondan.schemas.bundle.address import is_resource_name

    if not is_resource_name(name) or not fits:
        message = f"{shown(name)} cannot be the name of a new {kind}"
        raise fail("E_USAGE", message, suggestion=CODES["E_CONFIG_INVALID_NAME"])
    if name in bundled:
        raise fail("E_INIT", f"there is a bundled {kind} {name!r}", suggestion="Choose another name.")


def module_name(name: str) -> str:
    """The name as one that Python can import. A name that begins with a digit gets a letter before it."""
    module = name.replace("-", "_")
    return f"tool_{module}" if module[0].isdigit() else module


def read_bundle(path: str, name: str, kind: str) -> bytes | None:
    """Read the goondan.yaml to which a resource of a kind can be added. None when there is none.

    Raises BundleError for a file that is no YAML. Raises GoondanError E_INIT for a link, and for a bundle that has the
    resource already.
    """
    from goondan.kernel.bundle.documents import load_documents
    from goondan.kernel.bundle.positions import Scalar, node_at

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
    """The text to append to a file in order to add a document. Raises GoondanError E_INIT."""
    from goondan.kernel.bundle.positions import Budget, Composed, Fault, compose, decode

    def documents(data: bytes) -> int:
        text = decode(data)
        composed = Composed([], [text], complete=False) if isinstance(text, Fault) else compose(text, Budget())
        return len(composed.documents) if not composed.faults else -1

    added = (b"" if before.endswith(b"\n") else b"\n") + b"---\n" + document
    if documents(before + added) != documents(before) + 1:
        raise fail("E_INIT", f"{path}: a document cannot be added behind the last one", suggestion=_END_HINT)
    return added

"""`gdn tool new|test`, `gdn extension new|test`. Here is `new`: a resource to begin with, its module, its test, and its
document in goondan.yaml. No existing file is replaced. When anything fails, everything new is removed again.

A tool in Python is `tools/NAME.py` and `tests/test_NAME.py`; a program in `sh` is `tools/NAME.sh`. With TypeScript come
a tsconfig.json and the types of `@goondan/core`, which jails have and no registry. A folder without a goondan.yaml gets
one with the tool's document alone, which is enough for `gdn call`.

An extension is `extensions/NAME.py` and `tests/test_NAME.py`. There must be a goondan.yaml, because it needs an agent.

Source: docs/design/tools.md section 10.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from shlex import quote
from typing import Final, NamedTuple

import click

from goondan.features.try_out.command.extension_test import command as extension_test
from goondan.features.try_out.command.tool_test import command as tool_test
from goondan.kernel.bundle.documents import IN_JAILS, BaseExtensions, base_tools, in_package
from goondan.kernel.cli import options, output
from goondan.kernel.cli.commands.bundles import files_below
from goondan.kernel.cli.placing import Placing, addition, check_name, read_bundle
from goondan.kernel.paths import BUNDLE_FILE
from goondan.schemas.bundle.address import MAX_TOOL_NAME, build_tool_name
from goondan.schemas.wire.errors import fail

_TEMPLATES: Final = os.path.join(os.path.dirname(__file__), "templates")
#: Language -> what ends the names of its files, and the command that runs the tests by themselves.
_LANGUAGES: Final = {
    "python": ("py", "python3 -m unittest discover -s tests"),
    "typescript": ("ts", "node --test tests/{module}.test.ts"),
    "sh": ("sh", "sh tests/test_{module}.sh"),
}

#: Where the types of `@goondan/core` are, in the package of the tool host and in a bundle.
_TYPES: Final = ("inside/javascript/core/index.d.ts", "types/goondan-core.d.ts")


class NewResource(NamedTuple):
    """How new resources of one kind are made."""

    #: `Tool` or `Extension`.
    kind: str
    #: The folder of its files below `templates`.
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

    def write(self, name: str, folder: str, steps: list[tuple[str, str]]) -> None:
        """Write the resource into the bundle of a folder, and say so. `steps` are the next commands and their purposes.

        Raises GoondanError E_INIT, E_USAGE; BundleError for a goondan.yaml that is no YAML.
        """
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
        if os.path.abspath(folder) != os.getcwd():
            steps = [("cd " + quote(folder), ""), *steps]
        changed = "made" if before is None else "changed"
        plain = [{"command": line, "what": what} for line, what in steps]
        width = max(len(line) for line, _ in steps)
        lines = [f"wrote {output.printable(os.path.join(folder, path))}" for path in files]
        lines.append(f"{'wrote' if before is None else f'added {self.kind}/{name} to'} {output.printable(bundle)}")
        lines += ["", "Next:", *(f"  {output.printable(line):<{width}}   {what}".rstrip() for line, what in steps)]
        output.emit(
            {"folder": os.path.abspath(folder), "files": list(files), changed: BUNDLE_FILE, "next": plain}, lines
        )

    def filled(self, name: str) -> dict[str, bytes]:
        """Relative path -> content: the template for a resource of this name."""

        def fill(text: str) -> str:
            filled = text.replace(self.name_mark, name).replace(self.module_mark, module_name(name))
            return filled.replace("TOOL_SUFFIX", self.suffix)

        files = files_below(os.path.join(_TEMPLATES, self.template))
        chosen = {path: data for path, data in files.items() if path == self.manifest or path.startswith(self.language)}
        return {
            fill(path.removeprefix(f"{self.language}/")): fill(data.decode("utf-8")).encode()
            for path, data in chosen.items()
        }


def module_name(name: str) -> str:
    """The name as one that Python can import. A name that begins with a digit gets a letter before it."""
    module = name.replace("-", "_")
    return f"tool_{module}" if module[0].isdigit() else module


_TOOL: Final = NewResource(
    kind="Tool",
    template="new-tool",
    manifest="tool.yaml",
    name_mark="TOOL-NAME",
    module_mark="TOOL_MODULE",
    needs_bundle=False,
)


_EXTENSION: Final = NewResource(
    kind="Extension",
    template="new-extension",
    manifest="extension.yaml",
    name_mark="EXTENSION-NAME",
    module_mark="EXTENSION_MODULE",
    needs_bundle=True,
)


@click.command(name="new")
@click.argument("name")
@click.option("--language", type=click.Choice([*_LANGUAGES]), default="python", help="What it is written in.")
@options.in_folder("The bundle's folder.  [default: here]")
@options.json
def tool_new(name: str, language: str, folder: str) -> None:
    """Write a new tool into a bundle: its module or program, its test, and its document in goondan.yaml."""
    check_name(name, _TOOL.kind, base_tools(), fits=len(build_tool_name(name, "run")) <= MAX_TOOL_NAME)
    suffix, tests = _LANGUAGES[language]
    steps = [
        (f"gdn tool test {name}", "checks the manifest and runs its examples in the sandbox"),
        (f'gdn call {name}__run \'{{"text": "hello"}}\'', "one call"),
        (tests.format(module=module_name(name)), "tests it by itself"),
        (f"- Tool/{name}", "in spec.tools of an Agent lets it use the tool"),
    ]
    shared = _typescript() if language == "typescript" else {}
    _TOOL._replace(language=language, suffix=suffix, shared=shared).write(name, folder, steps)


def _typescript() -> dict[str, bytes]:
    """The files that all tools in TypeScript share. Raises GoondanError E_INIT without an installed tool host."""
    types = in_package(IN_JAILS, _TYPES[0])
    if types is None:
        raise fail("E_INIT", "the types of @goondan/core are not installed")
    with open(types, "rb") as source:
        return {**files_below(os.path.join(_TEMPLATES, "typescript")), _TYPES[1]: source.read()}


@click.command(name="new")
@click.argument("name")
@options.in_folder("The bundle's folder.  [default: here]")
@options.json
def extension_new(name: str, folder: str) -> None:
    """Write a new extension into a bundle: its module, its test, and its document in goondan.yaml."""
    check_name(name, _EXTENSION.kind, BaseExtensions().names())
    steps = [
        (f"gdn extension test {name} --trust", "loads it, and lets a turn pass through it"),
        ("python3 -m unittest discover -s tests", "tests the functions by themselves"),
        (f"- Extension/{name}", "in spec.extensions of an Agent gives it to the agent"),
    ]
    _EXTENSION.write(name, folder, steps)


COMMANDS: Final[Mapping[str, click.Command]] = {
    "tool new": tool_new,
    "tool test": tool_test,
    "extension new": extension_new,
    "extension test": extension_test,
}

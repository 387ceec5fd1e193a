"""`gdn tool new NAME`: a tool to begin with, its test, and its document in goondan.yaml.

In Python these are `tools/NAME.py` and `tests/test_NAME.py`; a program in `sh` is `tools/NAME.sh`. With TypeScript
come a tsconfig.json and the types of `@goondan/core`, which jails have and no registry.

A folder without a goondan.yaml gets one with this document alone, which is enough for `gdn call`.

Source: docs/design/tools.md section 10.
"""

from __future__ import annotations

from typing import Final

import click

from goondan.kernel.cli import options
from goondan.kernel.cli.commands.new_resource import NewResource, check_name, in_folder, module_name

#: Language -> what ends the names of its files, and the command that runs the tests by themselves.
_LANGUAGES: Final = {
    "python": ("py", "python3 -m unittest discover -s tests"),
    "typescript": ("ts", "node --test tests/{module}.test.ts"),
    "sh": ("sh", "sh tests/test_{module}.sh"),
}

#: Where the types of `@goondan/core` are, in the package of the tool host and in a bundle.
_TYPES: Final = ("inside/javascript/core/index.d.ts", "types/goondan-core.d.ts")

_TOOL: Final = NewResource(
    kind="Tool",
    template="new-tool",
    manifest="tool.yaml",
    name_mark="TOOL-NAME",
    module_mark="TOOL_MODULE",
    needs_bundle=False,
)


@click.command(name="new")
@click.argument("name")
@click.option("--language", type=click.Choice([*_LANGUAGES]), default="python", help="What it is written in.")
@in_folder
@options.as_json
def command(name: str, language: str, folder: str, as_json: bool) -> int:
    """Write a new tool into a bundle: its module or program, its test, and its document in goondan.yaml."""
    from goondan.kernel.bundle.base import base_tools
    from goondan.schemas.bundle.address import MAX_TOOL_NAME, build_tool_name

    check_name(name, _TOOL.kind, base_tools(), fits=len(build_tool_name(name, "run")) <= MAX_TOOL_NAME)
    suffix, tests = _LANGUAGES[language]
    steps = [
        (f"gdn tool test {name}", "checks the manifest and runs its examples in the sandbox"),
        (f'gdn call {name}__run \'{{"text": "hello"}}\'', "one call"),
        (tests.format(module=module_name(name)), "tests it by itself"),
        (f"- Tool/{name}", "in spec.tools of an Agent lets it use the tool"),
    ]
    shared = _typescript() if language == "typescript" else {}
    _TOOL._replace(language=language, suffix=suffix, shared=shared).write(name, folder, steps, as_json=as_json)
    return 0


def _typescript() -> dict[str, bytes]:
    """The files that all tools in TypeScript share. Raises GoondanError E_INIT without an installed tool host."""
    from goondan.kernel.bundle.base import IN_JAILS, in_package
    from goondan.kernel.cli.commands.init import template_files
    from goondan.schemas.wire.errors import fail

    types = in_package(IN_JAILS, _TYPES[0])
    if types is None:
        raise fail("E_INIT", "the types of @goondan/core are not installed")
    with open(types, "rb") as source:
        return {**template_files("typescript"), _TYPES[1]: source.read()}

"""The tools of a bundle, and the search for one by the name that a person gives.

Source: docs/design/tools.md sections 1 and 2; requirements NAME-01, NAME-13, BASE-01.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from goondan.kernel.bundle.loader import inspect_bundle
from goondan.kernel.bundle.problems import BundleError, did_you_mean, shown
from goondan.kernel.bundle.tools import CheckedTool
from goondan.kernel.cli.state import state_of
from goondan.kernel.paths import find_bundle
from goondan.schemas.bundle.address import SEPARATOR, build_tool_name, parse_tool_name
from goondan.schemas.bundle.resources import BASE_PACKAGE, ToolExport
from goondan.schemas.wire.errors import fail

if TYPE_CHECKING:
    from goondan.kernel.bundle.loader import Inspected


def look(bundle: str | None) -> Inspected:
    """Read the bundle that a command means, without its modules. Raises BundleError, GoondanError E_CONFIG_…"""
    path = find_bundle(bundle)
    inspected = inspect_bundle(path, state_dir=state_of(path), handlers=False)
    if inspected.errors:
        raise BundleError(inspected.errors, inspected.dropped)
    return inspected


def find(tools: Mapping[str, CheckedTool], name: str) -> tuple[CheckedTool, ToolExport | None]:
    """The Tool of a name, and the export if the name is a full one (`bash__exec`). `Tool/bash` means `bash`.

    Raises GoondanError E_TOOL_NOT_FOUND, with the closest name.
    """
    plain = name.removeprefix("Tool/")
    parsed = parse_tool_name(plain)
    if parsed is None:
        if plain in tools:
            return tools[plain], None
    else:
        tool = tools.get(parsed[0])
        for export in tool.body.exports if tool is not None else []:
            if tool is not None and export.name == parsed[1]:
                return tool, export
    names = full_names(tools)
    hint = did_you_mean(plain, names if SEPARATOR in plain else tools) or did_you_mean(plain, [*tools, *names])
    raise fail(
        "E_TOOL_NOT_FOUND", f"there is no tool {shown(name)}", suggestion=hint or "`gdn tool list` has them all."
    )


def full_names(tools: Mapping[str, CheckedTool]) -> list[str]:
    """Every name that can be called."""
    return [build_tool_name(tool.name, export.name) for tool in tools.values() for export in tool.body.exports]


def source(tool: CheckedTool) -> str:
    """The source of a tool: the name of its package, or `bundle`."""
    return BASE_PACKAGE if tool.bundled else tool.package or "bundle"

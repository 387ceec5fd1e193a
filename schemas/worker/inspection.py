"""The inspection of tools: question and answer of `python -m goondan.toolhost.inspection`, one JSON object each.

The kernel asks before it runs a bundle whether each tool's module can be loaded, and which handlers it has. The program
loads each module in a jail. Where no jail can be made, it reads the source. A report is data from outside: a module
chooses the names of its handlers and the words of its errors.

Source: docs/design/bundle.md section 5.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from goondan.schemas.bundle.launch import ToolSpec

#: Why a module cannot serve. `sandbox`: no jail can be given what the tool asks for, so the module was not loaded.
#: `runtime`: nothing on this machine can load it.
Reason = Literal["import", "handlers", "timeout", "crash", "sandbox", "runtime"]


class InspectionRequest(Struct, frozen=True, rename="camel", kw_only=True):
    """The tools whose modules are to be looked at."""

    #: The tools.
    tools: list[ToolSpec]
    #: The state directory of the workspace, which no module sees.
    state_dir: str
    #: The documents of the bundle, which no module sees.
    protected: list[str] = []
    #: What each tool may take (seconds).
    timeout_s: float = 5.0
    #: Values of variables; a module gets those that its tool's sandbox.env names.
    values: dict[str, str] = {}


class Refusal(Struct, frozen=True):
    """Why a module cannot serve, also in words."""

    #: The reason.
    reason: Reason
    #: The same in words.
    message: str
    #: What helps; None: nothing beside mending the module.
    suggestion: str | None = None


class ModuleReport(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """What was found out about one tool's module."""

    #: The tool's name.
    name: str
    #: The module was loaded in a jail, or its source was read.
    method: Literal["jail", "source"]
    #: The names in `handlers`. None: they could not be told, or there is an error.
    exports: list[str] | None = None
    #: Why the module cannot serve. None: it can.
    error: Refusal | None = None


class InspectionAnswer(Struct, frozen=True):
    """The reports of all tools that were asked for."""

    #: The reports.
    tools: list[ModuleReport]

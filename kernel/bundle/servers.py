"""Servers in configs of extensions: what the core keeps of them, and what it asks of the feature that knows them. Pure.

A server is a program that a bundled extension names in its config. It runs in a jail as a tool does, or it is an
endpoint. The core has its sessions, its grants and its place in the plan. Only the feature knows the config.

Source: docs/design/features.md section 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Protocol

from msgspec import Struct

from goondan.features import parts
from goondan.kernel.bundle.lookup import Files
from goondan.kernel.bundle.problems import Path, Report
from goondan.kernel.bundle.shape import Document
from goondan.kernel.bundle.tools import CheckedTool
from goondan.kernel.trust.powers import Power
from goondan.schemas.bundle.launch import SandboxSpec, ServerSpec, ToolSpec


class ServerUse(Struct):
    """The config of one server, as one agent uses it."""

    #: The Extension's name.
    extension: str
    #: The config.
    config: dict[str, Any]
    #: The document that has the config.
    document: Document
    #: Where the config stands in it.
    at: Path


class CheckedServer(Struct):
    """A server whose config was checked."""

    #: The server as a tool of the tool host: its name is the prefix.
    tool: CheckedTool
    #: The config that most agents use: that of the first one.
    use: ServerUse
    #: How it is reached, by that config.
    spec: ServerSpec
    #: Agent -> how it is reached and what its jail gets, where that agent's own config differs.
    of_agents: dict[str, tuple[ServerSpec, SandboxSpec]] = {}
    #: Every config, each once.
    uses: list[ServerUse] = []
    #: The agents that have it.
    agents: list[str] = []


class ServerRules(Protocol):
    """What a feature knows of the servers that a bundled extension names in its config."""

    #: The command that shows how they are: `gdn …`.
    shown_by: str

    def are_of(self, entry: str, bundled: bool) -> bool:
        """Whether an extension with this entry is that extension, under whatever name."""

    def prefix(self, extension: str, config: Mapping[str, Any]) -> str:
        """The prefix of the names of a server's tools."""

    def faults(self, extension: str, config: Mapping[str, Any]) -> list[str]:
        """The faults of a config that fits the schema of the extension, worded as the schema's issues are."""

    def check(
        self,
        uses: Iterable[tuple[str, ServerUse]],
        taken: Mapping[str, CheckedTool],
        reserved: frozenset[str],
        files: Files,
        report: Report,
    ) -> dict[str, CheckedServer]:
        """The servers of a bundle by their prefixes. `uses` are agents with the configs that they use. `reserved` are
        names of bundled Tools that a bundle has only with their extensions.
        """

    def powers(self, server: CheckedServer) -> Iterable[Power]:
        """What a bundle can do by a server, for the person who is asked for trust."""

    def without_values(self, holder: dict[str, Any]) -> dict[str, Any]:
        """A copy of an object with a `config`, without the values of variables and headers."""

    def trial(self, server: ToolSpec, agent: str) -> dict[str, Any]:
        """The result of `gdn extension test` for a server, as this agent has it."""


@cache
def server_rules() -> ServerRules | None:
    """`SERVERS` of the feature whose `bundle.py` has them; at most one has. None: there is no such feature."""
    return next((module.SERVERS for module in parts("bundle") if hasattr(module, "SERVERS")), None)


def server_rules_of(entry: str, bundled: bool) -> ServerRules | None:
    """What is known of the servers that an extension with this entry names; None: it names none."""
    known = server_rules()
    return known if known is not None and known.are_of(entry, bundled) else None

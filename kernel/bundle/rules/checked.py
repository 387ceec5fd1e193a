"""A bundle that has been looked at, as plain values; check.py makes it. And what it asks of the packages beside it, and
of the feature that knows the servers in configs of extensions.

A server is a program that a bundled extension names in its config. It runs in a jail as a tool does, or it is an
endpoint. The core has its sessions, its grants and its place in the plan. Only the feature knows the config.

Source: docs/design/features.md section 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from goondan.kernel.bundle.rules.extensions import CheckedExtension
from goondan.kernel.bundle.rules.kinds import brought
from goondan.kernel.bundle.rules.lookup import Files
from goondan.kernel.bundle.rules.problems import Path, Report
from goondan.kernel.bundle.rules.shape import Document
from goondan.kernel.bundle.rules.tools import CheckedTool
from goondan.kernel.grants.powers import Power
from goondan.schemas.bundle import resources
from goondan.schemas.bundle.launch import ExtensionSpec, ModelSpec, SandboxSpec, ServerSpec, ToolSpec
from goondan.schemas.bundle.resources import SwarmPolicy


class CheckedFallback(Struct):
    """A Model that is asked in place of an agent's own."""

    #: Its document.
    document: Document
    #: Its document as a struct.
    body: resources.ModelBody
    #: The model.
    model: ModelSpec


class CheckedAgent(Struct):
    """An Agent with what its references lead to."""

    #: Its document.
    document: Document
    #: Its name.
    name: str
    #: Its document as a struct.
    body: resources.AgentBody
    #: Names of its Tools.
    tools: list[str] = []
    #: Where each of the tools stands in spec.tools.
    uses: dict[str, int] = {}
    #: Its extensions, in order.
    extensions: list[ExtensionSpec] = []
    #: Its model. None after an error.
    model: ModelSpec | None = None
    #: The document of the Model that it names.
    model_document: Document | None = None
    #: That document as a struct.
    model_body: resources.ModelBody | None = None
    #: The models that are asked in place of it.
    fallback: list[CheckedFallback] = []
    #: The system prompt.
    system: str | None = None
    #: The whole document as plain values.
    resource: dict[str, Any] = {}
    #: Tools in spec.tools that an extension registers, by the names that models are shown.
    dynamic: list[str] = []
    #: Names of the bundled Tools that its extensions bring.
    brought: list[str] = []
    #: The configs of its servers.
    servers: list[ServerUse] = []
    #: Folders outside of workdirs that its extensions name for their Tools, as absolute paths.
    named_folders: list[str] = []


class Declared(Struct):
    """A document of a kind that a feature brings."""

    #: It.
    document: Document
    #: Its name.
    name: str
    #: Its `spec` as a struct.
    body: Any


class Checked(Struct):
    """A bundle that was checked. It can be run if the report has no error."""

    #: Its agents, by their names.
    agents: dict[str, CheckedAgent]
    #: The tools that the kernel has, by their names: the bundle's own that the tool host can run, those that bundled
    #: extensions bring, then the other bundled ones.
    tools: dict[str, CheckedTool]
    #: The Swarm's policy.
    policy: SwarmPolicy
    #: The agent that clients talk to by default.
    entry_agent: str = ""
    #: Files that documents point at: prompts, entries of connectors.
    files: list[str] = []
    #: Folders (or single files) of extensions.
    extension_roots: list[str] = []
    #: The Swarm's name. "": there is no Swarm.
    swarm: str = ""
    #: The Swarm's whole document as plain values.
    swarm_resource: dict[str, Any] = {}
    #: The bundle's own extensions, used or not, by their names.
    extensions: dict[str, CheckedExtension] = {}
    #: The servers of its agents, by the prefixes of their tools' names.
    servers: dict[str, CheckedServer] = {}
    #: The documents of kinds that features bring, by the names of the kinds.
    declared: dict[str, list[Declared]] = {}
    #: What they become, by their names, for each part of the plan.
    parts: dict[str, dict[str, Any]] = {}

    @property
    def runs_in_jails(self) -> list[CheckedTool]:
        """The tools and the servers: whatever may be granted something."""
        return [*self.tools.values(), *(server.tool for server in self.servers.values())]


class Package(NamedTuple):
    """A package that is installed."""

    #: Its name.
    name: str
    #: Its folder.
    root: str
    #: Its tools, by their names.
    tools: dict[str, CheckedTool]
    #: The paths of its documents.
    documents: list[str]


class Packages(Protocol):
    """The packages beside a bundle."""

    def find(self, name: str) -> Package | str:
        """The package, or why it cannot be used."""


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
    return next(iter(brought("SERVERS")), None)


def server_rules_of(entry: str, bundled: bool) -> ServerRules | None:
    """What is known of the servers that an extension with this entry names; None: it names none."""
    known = server_rules()
    return known if known is not None and known.are_of(entry, bundled) else None

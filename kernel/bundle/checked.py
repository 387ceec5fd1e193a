"""A bundle that has been looked at, as plain values; check.py makes it. And what it asks of the packages beside it."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from goondan.kernel.bundle.extensions import CheckedExtension
from goondan.kernel.bundle.servers import CheckedServer, ServerUse
from goondan.kernel.bundle.shape import Document
from goondan.kernel.bundle.tools import CheckedTool
from goondan.schemas.bundle import resources
from goondan.schemas.bundle.launch import ExtensionSpec, ModelSpec
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

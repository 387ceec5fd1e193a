"""A bundle that has been looked at, as plain values; check.py makes it. And what it asks of the packages beside it and
of the bundled extensions.

A server is a program that a bundled extension names in its config. It runs in a jail as a tool does, or it is an
endpoint. The core has its sessions, its grants and its place in the plan. Only a feature knows the config (kinds.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from msgspec import Struct, field

from goondan.kernel.bundle.rules.problems import Path
from goondan.kernel.bundle.rules.shape import Document
from goondan.schemas.bundle import launch, resources
from goondan.schemas.bundle.launch import ExtensionSpec, ModelSpec, SandboxSpec, ServerSpec


class CheckedTool(Struct):
    """A Tool whose document was checked."""

    #: Its document.
    document: Document
    #: Its name.
    name: str
    #: The document as a struct.
    body: resources.ToolBody | resources.ToolV09Body
    #: Absolute path of its module. '': it could not be found.
    entry: str = ""
    #: Absolute path of its folder. '': it could not be found.
    root: str = ""
    #: It comes with the kernel.
    bundled: bool = False
    #: What the document asks for, with absolute paths.
    sandbox: launch.SandboxSpec = field(default_factory=launch.SandboxSpec)
    #: The package that it comes from. '': the bundle's own.
    package: str = ""
    #: What it gets (kernel/grants/granting.py).
    granted: launch.SandboxSpec | None = None
    #: What agents leave of that, by the agent's name (kernel/grants/granting.py).
    narrowed: dict[str, launch.SandboxSpec] = {}
    #: Its handlers run in the process of the agent that calls it. Only bundled tools have that.
    in_agent: bool = False
    #: A bundled extension brings it: only agents with that extension have it.
    brought: bool = False
    #: Where in the document its sandbox stands.
    sandbox_at: Path = ("spec", "sandbox")
    #: Its calls name a folder, which their jail shows read-only.
    takes_folder: bool = False
    #: What its calls get by their folders, by the agent's name (kernel/grants/granting.py).
    folders: dict[str, launch.FolderGrants] = {}
    #: What loads an entry in JavaScript or TypeScript (kernel/bundle/javascript.py).
    javascript: launch.JavaScriptRuntime | None = None
    #: Why nothing can load the entry on this machine.
    lack: str = ""
    #: What helps then.
    lack_fix: str = ""

    @property
    def id(self) -> str:
        """What a policy calls it: its name, with its package before it."""
        return f"{self.package}/{self.name}" if self.package else self.name

    @property
    def source(self) -> str:
        """Where it comes from, for a person: the name of its package, or `bundle`."""
        return resources.BASE_PACKAGE if self.bundled else self.package or "bundle"


class CheckedExtension(Struct):
    """An Extension whose document was checked."""

    #: Its document.
    document: Document
    #: Its name.
    name: str
    #: The document as a struct.
    resource: resources.Extension | resources.ExtensionV09
    #: Absolute path of its module. '': it was not found.
    entry: str = ""
    #: Absolute path of its folder. '': it was not found.
    root: str = ""
    #: The modules that it may import from the bundle.
    modules: dict[str, str] = {}
    #: Where these are, if not in `root`.
    beside: list[str] = []
    #: Why an agent cannot use it, although nothing is wrong with it. None: it can.
    missing: str | None = None
    #: Names of the Extensions that it depends on.
    depends_on: list[str] = []
    #: Its code comes with the kernel.
    bundled: bool = False
    #: The Extension whose code it runs.
    code_of: resources.Extension | None = None
    #: The bundled Tools that it brings to its agents.
    tools: list[CheckedTool] = []

    @property
    def schema(self) -> dict[str, Any] | None:
        """The schema of its config. None: anything fits."""
        body = (self.code_of or self.resource).spec
        return body.config_schema if isinstance(body, resources.ExtensionBody) else None


class Bundled(Protocol):
    """The extensions that come with the kernel."""

    def names(self) -> list[str]:
        """All of them."""

    def find(self, name: str) -> CheckedExtension | None:
        """The one of this name."""

    def tool_names(self) -> frozenset[str]:
        """The names of all Tools that they bring."""


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
    #: The configs of its servers, those in which nothing is wrong.
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
    policy: resources.SwarmPolicy
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

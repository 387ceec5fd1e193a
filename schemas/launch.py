"""What a process is told to be: the launch specifications, handed over in `welcome`.

The kernel computes them from a validated bundle (kernel/plan.py); agents and tool hosts receive only their own.
Nothing here is read from a user's file: those structs are in resources.py.

Source: docs/design/bundle.md sections 1 and 8; docs/design/sandbox.md section 1.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import Annotated, Any, Final, Literal, Self

from msgspec import Meta, Struct, field, structs

from schemas.approval_rules import Policy
from schemas.budgets import BudgetLimits, Pricing
from schemas.oauth import OAuthAppSpec

#: ERROR-04
DEFAULT_ERROR_LIMIT: Final = 1000
#: Swarm.spec.policy.maxStepsPerTurn
DEFAULT_MAX_STEPS: Final = 32
#: Agent.spec.policy.stallTimeoutS (seconds). Models that think without a word are heard of within five minutes, because
#: nothing on the way keeps a silent connection for longer; twice that leaves room for one more try.
DEFAULT_STALL_S: Final = 600.0
#: Agent.spec.policy.conversationMb (MiB). A result may have 64 MiB, and needs twice its size for a moment while it is
#: stored; answers that may be asked for again take up to 64 MiB. The rest is a hundred times what models read at once,
#: and a hundred instances that are full fit on an ordinary disk.
DEFAULT_CONVERSATION_MB: Final = 512


class ModelSpec(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The model of one agent, resolved. `api_key` is a secret: never logged, never in an error.

    An empty `model` of a vendor means the first that its server lists. `chosen_by` is the environment variable that
    made `provider: auto` choose this one, "" when none did, None when the bundle names its provider.

    `key_origin` is the only origin (`scheme://host:port`) that the key is sent to; None: the vendor's. `pricing`: what
    it costs; None: nothing.
    """

    provider: Literal["anthropic", "openai", "embedded"]
    model: str = ""
    endpoint: str | None = None
    api_key: str | None = None
    params: dict[str, Any] = {}
    chosen_by: str | None = None
    key_origin: str | None = None
    pricing: Pricing | None = None

    def __repr__(self) -> str:
        """As in a log or a traceback: without the key."""
        key = None if self.api_key is None else "***"
        return (
            f"ModelSpec(provider={self.provider!r}, model={self.model!r}, endpoint={self.endpoint!r}, "
            f"api_key={key!r}, params={self.params!r})"
        )


class McpSource(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Of a tool of an MCP server: the extension that offers it, and the name that the server gives itself (ITEM-03)."""

    extension_name: str
    server_name: str | None = None


class ToolSource(Struct, frozen=True, omit_defaults=True):
    """Where a catalog item comes from: the Tool or the Extension of that name (ITEM-02)."""

    type: Literal["config", "extension", "mcp"]
    name: str
    mcp: McpSource | None = None


class CatalogItem(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One tool as the model sees it, and what the agent needs to call it.

    `parameters` is the export's JSON Schema, None when the export declares none (then arguments are not checked).
    `aliases` maps a documented parameter alias to its canonical name. `tool` and `export` are what an extension keeps
    with an item, the Tool's document and the export's (ITEM-07); no model is shown either. `in_agent`: its
    handler runs in the agent's process (a bundled tool that asks other agents), not in the tool host. `deferred`: it
    may be called and is checked like any other, and the model is not shown it.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    source: ToolSource = ToolSource("config", "")
    error_message_limit: int = DEFAULT_ERROR_LIMIT
    idempotent: bool = False
    aliases: dict[str, str] = {}
    tool: dict[str, Any] | None = None
    export: dict[str, Any] | None = None
    in_agent: bool = False
    deferred: bool = False

    def replace(self, **changes: Any) -> Self:
        """A copy with these fields, for the catalog of one step: items themselves are read-only."""
        return structs.replace(self, **changes)


class ExtensionSpec(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One extension of one agent. `entry` is the module's absolute path, `resource` the whole document as written (with
    the agent's own config in it, if that gives one), `config` its spec.config.

    `exposes_tools`: the tools that it registers are in the next step's catalog by themselves (DYNAMIC-08, DYNAMIC-09).
    `modules` are what it may import from the bundle, by the path from the entry's folder, with the SHA-256 that they
    had when the kernel started (hexadecimal); None: whatever lies in that folder. `config_schema` is the JSON Schema
    that its config must fit, None when it declares none. `bundled`: it comes with the kernel, in `agentproc.base`.
    `confidential`: its config has values of environment variables, so no file may hold it.
    """

    name: str
    entry: str
    resource: dict[str, Any]
    config: dict[str, Any] = {}
    exposes_tools: bool = True
    modules: dict[str, str] | None = None
    config_schema: dict[str, Any] | None = None
    bundled: bool = False
    confidential: bool = False


class AgentSpec(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One agent. `catalog` are the names a step starts with, `registry` everything that can run.

    `extensions` load in this order. After `idle_s` seconds without an event the agent process asks whether it may
    leave. A turn whose model says nothing for `stall_timeout_s` seconds fails. The file of one instance's conversation
    takes up to `conversation_mb` MiB, with what lies beside it. `resource` and `swarm` are the documents of the agent
    and of its Swarm as written, for its extensions; empty when it has none. `budget`: what everything that one message
    to it sets going may use. `addable` are names of the registry that its extensions may add to a step's catalog.
    `dynamic` are names of tools that `spec.tools` names and an extension registers. `approvals` say which of its calls
    a person decides about.
    """

    name: str
    model: ModelSpec
    registry: list[CatalogItem]
    catalog: list[str]
    state_dir: str
    revision: str
    system: str | None = None
    max_steps_per_turn: int = DEFAULT_MAX_STEPS
    allow_registry: list[str] = []
    extensions: list[ExtensionSpec] = []
    durability: Literal["power", "process"] = "power"
    idle_s: float = 300.0
    stall_timeout_s: float = DEFAULT_STALL_S
    conversation_mb: int = DEFAULT_CONVERSATION_MB
    resource: dict[str, Any] = {}
    swarm: dict[str, Any] = {}
    budget: BudgetLimits | None = None
    addable: list[str] = []
    dynamic: list[str] = []
    approvals: list[Policy] = []


class Limits(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """Upper bounds: `cpuSeconds`, `wallSeconds` and `outputMb` for one call, the others for a jail."""

    memory_mb: Annotated[int, Meta(description="Memory of all its processes (MiB).")] = 512
    processes: Annotated[int, Meta(description="Processes and threads at once.")] = 64
    open_files: Annotated[int, Meta(description="Open files of one process.")] = 256
    file_mb: Annotated[int, Meta(description="Size of one file (MiB).")] = 256
    disk_mb: Annotated[int, Meta(description="What it writes to the workdir in all (MiB).")] = 1024
    files: Annotated[int, Meta(description="Files and folders that it makes.")] = 20000
    cpu_seconds: Annotated[int, Meta(description="Processor time of one call (seconds).")] = 60
    wall_seconds: Annotated[int, Meta(description="Duration of one call (seconds).")] = 120
    output_mb: Annotated[int, Meta(description="Result of one call (MiB).")] = 4


class Filesystem(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Paths outside the workdir that a tool asks for."""

    read: Annotated[list[str], Meta(description="Files and folders to read.")] = []
    write: Annotated[list[str], Meta(description="Folders to write to.")] = []


class PythonSpec(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A virtual environment whose packages the tool may import."""

    venv: Annotated[str | None, Meta(description="Its folder.")] = None


class SandboxSpec(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """What a tool asks for; the defaults are what it gets when it asks for nothing."""

    isolation: Literal["shared", "instance", "call"] = "instance"
    network: Any = "none"
    filesystem: Filesystem = field(default_factory=Filesystem)
    env: list[str] = []
    permissions: list[Literal["agents", "restart"]] = []
    python: PythonSpec = field(default_factory=PythonSpec)
    limits: Limits = field(default_factory=Limits)
    min_tier: Literal["full", "reduced"] = "full"


class ExportSpec(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One export as the tool host needs it."""

    name: str
    parameters: dict[str, Any] | None = None
    idempotent: bool = False
    background: bool = False
    aliases: dict[str, str] = {}


class ToolSpec(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One Tool resource as the tool host needs it. `entry` and `root` are absolute paths on the host.

    `root` is the tool's own folder: the only part of the bundle that its jail sees. It is the entry file itself when
    that lies directly in the bundle's root. `sandbox` is what was granted; `narrowed` is what agents that narrow it
    leave of that, by the agent's name. `digest` names the content of `root` (SHA-256, hexadecimal), "" when nobody has
    looked: jails of a tool are not used any more when it changes.
    """

    name: str
    entry: str
    root: str
    exports: list[ExportSpec]
    error_message_limit: int = DEFAULT_ERROR_LIMIT
    sandbox: SandboxSpec = field(default_factory=SandboxSpec)
    bundled: bool = False
    narrowed: dict[str, SandboxSpec] = {}
    cut_from: Filesystem | None = None
    digest: str = ""


class ToolHostSpec(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One tool host. `max_jails` live at once (the least recently used idle one goes first). `sized_workdirs`: those
    that are made for instances get file systems of their own, where that can be done (docs/sandbox.md).

    `protected` are absolute paths that stay read-only in every jail (KernelPlan.protected). `hidden` are folders that
    no jail sees, besides those that every tool host knows: that of the key of OAuth tokens.
    """

    tools: list[ToolSpec]
    state_dir: str
    revision: str
    max_jails: int = 64
    jail_idle_s: float = 60.0
    protected: list[str] = []
    sized_workdirs: bool = False
    hidden: list[str] = []


class KernelPlan(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """A whole validated bundle, ready to run: what the broker and the supervisor are started with.

    `protected` are the bundle's own documents, tool folders and extension folders: read-only in every jail. `swarm` is
    the Swarm's name, "" in a bundle without one. `kept_agents` (None: a sixteenth of `max_live_agents`, one at least),
    `mailbox_mb` and `max_open_events` are the Swarm's policy. `private_copy` is the folder that code of
    the bundle runs from, because others can write to its own; "" when it runs where it is. `spawn_workdirs` are the
    folders that the operator's policy opens as working directories of spawned instances. `oauth_apps` are the bundle's
    OAuthApps by their names, with the secrets of their clients.
    """

    revision: str
    bundle: str
    state_dir: str
    entry_agent: str
    agents: dict[str, AgentSpec]
    toolhost: ToolHostSpec
    protected: list[str] = []
    max_live_agents: int = 256
    agent_idle_s: float = 300.0
    swarm: str = ""
    durability: Literal["power", "process"] = "power"
    kept_agents: int | None = None
    mailbox_mb: int = 256
    max_open_events: int = 65_536
    private_copy: str = ""
    spawn_workdirs: list[str] = []
    oauth_apps: dict[str, OAuthAppSpec] = {}

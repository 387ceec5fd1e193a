"""The launch specifications, which tell a process what it is. They are handed over in `welcome`.

The kernel computes them from a validated bundle (kernel/bundle/rules/plan.py); agents and tool hosts receive only their
own. Nothing here is read from a user's file: those structs are in resources.py.

Source: docs/design/bundle.md sections 1 and 8; docs/design/sandbox.md section 1; docs/structured-answers.md;
docs/design/structured-answers.md sections 2 and 3; docs/design/tools.md section 9; schemas/WORKER.md.
"""

from __future__ import annotations

import posixpath
from typing import Annotated, Any, Final, Literal, Self

from msgspec import Meta, Raw, Struct, field, structs

from goondan.schemas.models.model_providers import KeyHeader, ModelLimits, ModelRetry, ServingProvider
from goondan.schemas.wire import questions, usage
from goondan.schemas.worker.receipts import STRONGEST, Tier

# --- answers ----------------------------------------------------------------------------------------------------------


class OutputSpec(Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    """The form of an agent's answers."""

    schema: Annotated[
        dict[str, Any], Meta(description="The JSON Schema that every answer fits. It describes an object.")
    ]
    via: Annotated[
        Literal["auto", "tool"],
        Meta(
            description="How the model is told: `auto` takes the vendor's own way where it has one for the schema; "
            "`tool` offers a tool `answer` that the model calls."
        ),
    ] = "auto"


class ForcedTool(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """One tool that the model has to call."""

    tool: Annotated[str, Meta(min_length=1, description="Its full name.")]


#: Which tools a model may or has to call. `auto`: as it likes. `none`: none. `required`: any.
ToolChoice = Literal["auto", "none", "required"] | ForcedTool


# --- entries of tools -------------------------------------------------------------------------------------------------

#: `python`: the Python worker loads it. `javascript`: the JavaScript worker loads it, under Node or Bun. `executable`:
#: it is started for each call.
EntryKind = Literal["python", "javascript", "executable"]

#: Suffixes of JavaScript and TypeScript that the worker loads: modules, and what the nearest package.json decides.
JAVASCRIPT: Final = (".js", ".mjs", ".ts", ".mts")
#: Suffixes that nothing loads: CommonJS has no `import`, and JSX needs a compiler. Their files are no programs either.
UNLOADABLE: Final = (".cjs", ".cts", ".jsx", ".tsx")


def entry_kind(entry: str) -> EntryKind | None:
    """What runs this entry. None: nothing does (UNLOADABLE)."""
    suffix = posixpath.splitext(entry)[1]
    if suffix == ".py":
        return "python"
    if suffix in JAVASCRIPT:
        return "javascript"
    return None if suffix in UNLOADABLE else "executable"


# --- agents, tool hosts and the kernel --------------------------------------------------------------------------------

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
    """The model of one agent, resolved."""

    #: Who speaks to it.
    provider: ServingProvider
    #: Its name. Empty for a vendor: the first that its server lists.
    model: str = ""
    #: The server's URL; None: the vendor's own.
    endpoint: str | None = None
    #: A secret: never logged, never in an error.
    api_key: str | None = None
    #: Parameters of each request, as the vendor's server knows them.
    params: dict[str, Any] = {}
    #: The environment variable that made `provider: auto` choose this one. "" when none did, None when the bundle names
    #: its provider.
    chosen_by: str | None = None
    #: The only origin (`scheme://host:port`) that the key is sent to; None: the vendor's.
    key_origin: str | None = None
    #: What it costs; None: nothing.
    pricing: usage.Pricing | None = None
    #: How many tokens its context holds, as the bundle says; None: it does not say.
    context_tokens: int | None = None
    #: Headers of each request, besides the vendor's own; the names are in lower case. The values are secrets, and go
    #: where the key goes.
    headers: dict[str, str] = {}
    #: How the key is sent; None: in the vendor's own way.
    auth: KeyHeader | None = None
    #: The version of the wire that requests name; None: the one that this code speaks.
    api_version: str | None = None
    #: Whether requests say what of them the vendor is to remember, where its wire has a way to.
    caching: bool = True
    #: What its server allows; None: nothing is known.
    limits: ModelLimits | None = None
    #: How long it is asked again when it does not answer.
    retry: ModelRetry = ModelRetry()
    #: Name of its Model document.
    document: str = ""
    #: What it sees besides text; None: it is not known.
    sees: list[Literal["image", "pdf"]] | None = None
    #: The file that a provider without a server answers from: an absolute path.
    file: str = ""

    def __repr__(self) -> str:
        """The text for logs and tracebacks: without the key and the values of headers."""
        key = None if self.api_key is None else "***"
        return (
            f"ModelSpec(provider={self.provider!r}, model={self.model!r}, endpoint={self.endpoint!r}, "
            f"api_key={key!r}, params={self.params!r}, headers={sorted(self.headers)!r})"
        )


def key_headers(model: ModelSpec) -> dict[str, str]:
    """The header with the Model's key, in the way in which it is sent; none without a key."""
    if not model.api_key:
        return {}
    if model.auth == "x-api-key":
        return {"x-api-key": model.api_key}
    return {"authorization": f"Bearer {model.api_key}"}


class ServerSource(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The origin of an MCP server's tool: the extension that offers it, and the name that the server gives itself
    (ITEM-03).
    """

    #: The extension that offers it.
    extension_name: str
    #: The name that the server gives itself; None: it gives none.
    server_name: str | None = None


class ToolSource(Struct, frozen=True, omit_defaults=True):
    """Where a catalog item comes from (ITEM-02)."""

    #: `config`: a Tool. `extension`: an Extension. `mcp`: an MCP server that an Extension offers.
    type: Literal["config", "extension", "mcp"]
    #: Name of the Tool or of the Extension.
    name: str
    #: Which server and tool, of an MCP server.
    mcp: ServerSource | None = None


class CatalogItem(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One tool as the model sees it, and what the agent needs to call it."""

    #: Its full name: `{tool}__{export}`.
    name: str
    #: What it does, for the model.
    description: str | None = None
    #: The export's JSON Schema; None when it declares none (then arguments are not checked).
    parameters: dict[str, Any] | None = None
    #: Where it comes from.
    source: ToolSource = ToolSource("config", "")
    #: Characters of an error message that the model is shown.
    error_message_limit: int = DEFAULT_ERROR_LIMIT
    #: Twice is as good as once: a call that was lost may be made again.
    idempotent: bool = False
    #: Documented other spellings of parameters, each with its canonical name.
    aliases: dict[str, str] = {}
    #: The Tool's document, which an extension keeps with an item (ITEM-07). No model is shown it.
    tool: dict[str, Any] | None = None
    #: The export's part of that document.
    export: dict[str, Any] | None = None
    #: Its handler runs in the agent's process (a bundled tool that asks other agents), not in the tool host.
    in_agent: bool = False
    #: It may be called and is checked like any other, and the model is not shown it.
    deferred: bool = False
    #: How long a call of it may take (seconds), within its turn's time. None: as long as any call.
    call_s: float | None = None

    def replace(self, **changes: Any) -> Self:
        """A copy with these fields, for the catalog of one step: items themselves are read-only."""
        return structs.replace(self, **changes)


class ExtensionSpec(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One extension of one agent."""

    #: The Extension's name.
    name: str
    #: The module: an absolute path.
    entry: str
    #: The whole document as written, with the agent's own config in it, if that gives one.
    resource: dict[str, Any]
    #: Its spec.config.
    config: dict[str, Any] = {}
    #: The tools that it registers are in the next step's catalog by themselves (DYNAMIC-08, DYNAMIC-09).
    exposes_tools: bool = True
    #: The modules that it may import from the bundle: the path from the entry's folder, with the SHA-256 that each had
    #: when the kernel started (hexadecimal). None: whatever lies in that folder.
    modules: dict[str, str] | None = None
    #: The JSON Schema that its config must fit; None when it declares none.
    config_schema: dict[str, Any] | None = None
    #: It comes with the kernel, in `goondan.agentproc.base` or in the folder of a feature.
    bundled: bool = False
    #: Its config has values of environment variables, so no file may hold it.
    confidential: bool = False
    #: Names of the bundled Tools that it brings: no other agent has them.
    tools: list[str] = []
    #: Of the bundled extension `mcp`: the prefix of its server. "": it has none.
    server: str = ""
    #: Of the same: the ServerSpec.digest of that server. Its config here has no values of variables and headers.
    server_digest: str = ""


def is_bundled(name: str, entry: str, bundled: bool) -> bool:
    """Whether an extension with this entry is the bundled one of this name, under whatever name the bundle has it."""
    return bundled and posixpath.basename(posixpath.dirname(entry)) == name.replace("-", "_")


class AgentSpec(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One agent."""

    #: Its name in the bundle.
    name: str
    #: The model that its steps ask.
    model: ModelSpec
    #: Everything that can run.
    registry: list[CatalogItem]
    #: Names of the registry that a step starts with.
    catalog: list[str]
    #: The workspace's folder in the state root.
    state_dir: str
    #: Names the content of the bundle.
    revision: str
    #: The system prompt.
    system: str | None = None
    #: A turn that needs more ends.
    max_steps_per_turn: int = DEFAULT_MAX_STEPS
    #: Patterns of names that may be called without being in the catalog.
    allow_registry: list[str] = []
    #: They load in this order.
    extensions: list[ExtensionSpec] = []
    #: What a stored message survives.
    durability: Literal["power", "process"] = "power"
    #: After so many seconds without an event the process asks whether it may leave.
    idle_s: float = 300.0
    #: A turn whose model says nothing for so many seconds fails.
    stall_timeout_s: float = DEFAULT_STALL_S
    #: The file of one instance's conversation takes so much, with what lies beside it (MiB).
    conversation_mb: int = DEFAULT_CONVERSATION_MB
    #: `agents__request` waits so long for an answer unless it says otherwise (milliseconds).
    request_timeout_ms: int = questions.TIMEOUT_MS
    #: Whether its traces keep arguments and results whole, within bounds, or what the conversation has, in short.
    traces: Literal["short", "whole"] = "short"
    #: The agent's document as written, for its extensions; empty when it has none.
    resource: dict[str, Any] = {}
    #: The same of its Swarm.
    swarm: dict[str, Any] = {}
    #: Names of the registry that its extensions may add to a step's catalog.
    addable: list[str] = []
    #: Names of tools that `spec.tools` names and an extension registers.
    dynamic: list[str] = []
    #: The prefixes of the MCP servers that it may attach to. It may call all of their tools.
    servers: list[str] = []
    #: The form of its answers; None: any text.
    output: OutputSpec | None = None
    #: Which tools its model has to call in the first step of a turn; None: as it likes.
    tool_choice: ToolChoice | None = None
    #: The models that are asked, in this order, when `model` gives no answer.
    fallback: list[ModelSpec] = []
    #: Its answers are from a file that anybody can have written, so it may change nothing outside of agents like it.
    confined: bool = False
    #: Of a confined agent: the kernel's state is its own and is gone afterwards, so it may change that.
    own_state: bool = False
    #: What features have of it, by their names (msgpack). There may be secrets in it.
    parts: dict[str, Raw] = {}

    @property
    def models(self) -> list[ModelSpec]:
        """All models that it may ask, its own first."""
        return [self.model, *self.fallback]


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
    """The request of a tool. A tool that asks for nothing gets the defaults."""

    #: One jail for everyone, one for each agent instance, or that with each call on its own.
    isolation: Literal["shared", "instance", "call"] = "instance"
    #: `none`, `public`, or the hosts that it may reach (schemas/worker/hosts.py).
    network: Any = "none"
    #: Paths outside the workdir.
    filesystem: Filesystem = field(default_factory=Filesystem)
    #: Names of environment variables that it gets.
    env: list[str] = []
    #: What its handlers may ask of the kernel.
    permissions: list[Literal["agents", "restart", "tools"]] = []
    #: A virtual environment.
    python: PythonSpec = field(default_factory=PythonSpec)
    #: Upper bounds.
    limits: Limits = field(default_factory=Limits)
    #: The least of walls that it runs behind.
    min_tier: Tier = STRONGEST


class ServerSpec(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """An MCP server: how it is reached, and who shares it (MCP-03 to MCP-10)."""

    #: The Extension that offers it.
    extension: str
    #: `stdio`: a program in a jail. `http`: a server at `endpoint`.
    transport: Literal["stdio", "http"]
    #: The feature whose worker speaks with it.
    worker: str = ""
    #: Of `stdio`: the program, found by the jail's PATH or by its absolute path, and its arguments.
    command: list[str] = []
    #: Of `stdio`: variables that the program gets on top of its jail's. They may be secrets.
    env: dict[str, str] = {}
    #: Of `http`: the URL.
    endpoint: str | None = None
    #: Of `http`: headers of each request. They may be secrets.
    headers: dict[str, str] = {}
    #: Of `http`: how it is logged in to, for the worker. There may be secrets in it. None: as the server wants it.
    login: dict[str, Any] | None = None
    #: The secrets of `login`.
    login_secrets: list[str] = []
    #: `stateful`: one session as long as somebody is attached. `stateless`: one for each listing and each call.
    mode: Literal["stateful", "stateless"] = "stateful"
    #: `instance`: the agents of one instance key share it, and it sees no workdir. `agent`: each agent instance has its
    #: own, which sees the workdir.
    scope: Literal["instance", "agent"] = "instance"
    #: Whether it is asked for tools.
    tools: bool = False
    #: Whether it is asked for resources.
    resources: bool = False
    #: Whether it is asked for prompts.
    prompts: bool = False
    #: What it may ask for. A person can always be asked (elicitation).
    grants: list[Literal["sampling", "roots"]] = []
    #: A call without news for so many seconds is given up.
    idle_s: float = 60.0
    #: A call that takes so many seconds is given up, whatever its news.
    total_s: float = 600.0
    #: Names transport, scope, mode and sandbox (SHA-256, hexadecimal). A session of another digest is not used.
    digest: str = ""

    def __repr__(self) -> str:
        """The text for logs and tracebacks: without variables and headers."""
        return f"ServerSpec(extension={self.extension!r}, transport={self.transport!r}, scope={self.scope!r})"


class ExportSpec(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One export as the tool host needs it."""

    #: Its name.
    name: str
    #: The JSON Schema of its arguments. None: anything fits.
    parameters: dict[str, Any] | None = None
    #: It may run again when the outcome of a call is unknown.
    idempotent: bool = False
    #: Processes that a call leaves behind may live on.
    background: bool = False
    #: Documented other spellings of parameters, each with its canonical name.
    aliases: dict[str, str] = {}


class FolderGrants(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """What the jail of a call gets whose caller names a folder. A folder in a place that the tool was granted for
    reading (`filesystem.read`) needs none of this: its jail gets the tool's own sandbox.
    """

    #: What it gets for a folder beneath the workdir, where tools can write.
    workdir: SandboxSpec
    #: What it gets where the operator has pinned the content of that folder, by its digest (schemas/system/digests.py).
    pinned: dict[str, SandboxSpec] = {}


class JavaScriptRuntime(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """What loads an entry in JavaScript or TypeScript. The kernel finds it (kernel/bundle/javascript.py)."""

    #: Which one it is.
    name: Literal["node", "bun"]
    #: Its program: an absolute path without links.
    program: str
    #: Its version, such as `22.20.0`. A jail of another one is not used any more.
    version: str
    #: Folders of its libraries, beside those of the system.
    libraries: list[str] = []
    #: The folder of its package, when its version stands there; else ''. Nothing in it may change unseen.
    package: str = ""


class ToolSpec(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One Tool resource as the tool host needs it."""

    #: The Tool's name.
    name: str
    #: The module with its handlers: an absolute path on the host.
    entry: str
    #: The tool's own folder, the only part of the bundle that its jail sees. It is the entry file itself when that lies
    #: directly in the bundle's root.
    root: str
    #: Its functions.
    exports: list[ExportSpec]
    #: Characters of an error message that the model is shown.
    error_message_limit: int = DEFAULT_ERROR_LIMIT
    #: What was granted.
    sandbox: SandboxSpec = field(default_factory=SandboxSpec)
    #: It comes with the kernel.
    bundled: bool = False
    #: The rest of the grant under each agent that narrows it, by the agent's name.
    narrowed: dict[str, SandboxSpec] = {}
    #: Of a narrowed tool: the paths that were granted as a whole.
    cut_from: Filesystem | None = None
    #: Names the content of `root` (SHA-256, hexadecimal), "" when nobody has looked. Jails of a tool are not used any
    #: more when it changes.
    digest: str = ""
    #: The Tool is an MCP server: its exports are what the server lists, and its `name` is the prefix of their names.
    server: ServerSpec | None = None
    #: The server as an agent has it whose own config differs, by the agent's name.
    servers: dict[str, ServerSpec] = {}
    #: By the names of agents: their calls name a folder (ToolCallPayload.folder), which the jail shows read-only.
    folders: dict[str, FolderGrants] = {}
    #: What loads an entry in JavaScript or TypeScript. None: the entry is another one, or `lack` says why nothing does.
    javascript: JavaScriptRuntime | None = None
    #: Why nothing can load the entry here, in words.
    lack: str = ""
    #: What helps then.
    lack_fix: str = ""

    @property
    def variables(self) -> set[str]:
        """Names of the variables of the environment that some jail of it gets."""
        pinned = [sandbox for grants in self.folders.values() for sandbox in grants.pinned.values()]
        return {name for sandbox in (self.sandbox, *pinned) for name in sandbox.env}


class ToolHostSpec(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One tool host."""

    #: Every tool that can run.
    tools: list[ToolSpec]
    #: The workspace's folder in the state root.
    state_dir: str
    #: Names the content of the bundle.
    revision: str
    #: So many live at once; the idle one that was used least recently goes first.
    max_jails: int = 64
    #: A jail that nobody uses goes after so many seconds.
    jail_idle_s: float = 60.0
    #: Absolute paths that stay read-only in every jail (KernelPlan.protected).
    protected: list[str] = []
    #: Folders that no jail sees, besides those that every tool host knows: that of the key of OAuth tokens.
    hidden: list[str] = []


class KernelPlan(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """A whole validated bundle, ready to run: what the broker and the supervisor are started with."""

    #: Names the content of the bundle.
    revision: str
    #: Its absolute path.
    bundle: str
    #: The workspace's folder in the state root.
    state_dir: str
    #: The agent that a message without an address is for; "" when there is none.
    entry_agent: str
    #: By their names.
    agents: dict[str, AgentSpec]
    #: What the tool host is told.
    toolhost: ToolHostSpec
    #: The bundle's own documents, tool folders and extension folders: read-only in every jail.
    protected: list[str] = []
    #: So many agent processes live at once.
    max_live_agents: int = 256
    #: After so many seconds without an event an agent process may leave.
    agent_idle_s: float = 300.0
    #: The Swarm's name, "" in a bundle without one.
    swarm: str = ""
    #: The event that the journal survives: a loss of power, or the end of every process.
    durability: Literal["power", "process"] = "power"
    #: The Swarm's policy.keptAgents; None: a sixteenth of `maxLiveAgents`, one at least.
    kept_agents: int | None = None
    #: The Swarm's policy.mailboxMb (MiB).
    mailbox_mb: int = 256
    #: The Swarm's policy.maxOpenEvents.
    max_open_events: int = 65_536
    #: The folder that code of the bundle runs from, because others can write to its own; "" when it runs where it is.
    private_copy: str = ""
    #: Folders that the operator's policy opens as working directories of spawned instances.
    spawn_workdirs: list[str] = []
    #: The agents that share the working directory of the entry agent, which is one of them.
    sharing_agents: list[str] = []
    #: What features have in the plan, by their names (msgpack). There may be secrets in it.
    parts: dict[str, Raw] = {}

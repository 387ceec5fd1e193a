"""The bundle's kinds: what a person may write in `goondan.yaml`, field by field.

Every struct is strict: a field that it does not know is an error, because a misspelt field of a manifest would
otherwise be a setting that silently does nothing. The descriptions are part of the exported JSON Schema. kernel/bundle/
checks the rules that no type can express: a name's form, a reference that must exist, two fields that exclude each
other.

Source: docs/design/bundle.md section 3; docs/design/sandbox.md section 1; requirements SCHEMA-01 to SCHEMA-12, EXT-01
to EXT-03, COMPAT-01, COMPAT-02, BASE-03.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import Annotated, Any, Final, Literal

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.
from msgspec import Meta, Struct, defstruct, field

from goondan.schemas.bundle import launch
from goondan.schemas.models.model_providers import MAX_FALLBACKS, KeyHeader, ModelLimits, ModelRetry, NamedProvider
from goondan.schemas.models.server_answers import LEAST_WINDOW, MOST_WINDOW
from goondan.schemas.wire import questions, usage
from goondan.schemas.worker.receipts import STRONGEST, Tier

API_V1: Final = "goondan.ai/v1"
#: The older spelling, of v0.9 (COMPAT-01).
API_V1ALPHA1: Final = "agents.example.io/v1alpha1"
#: The package that comes with the kernel.
BASE_PACKAGE: Final = "@goondan/base"

Text = Annotated[str, Meta(min_length=1)]


class Strict(Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    """What every struct of a bundle has in common."""


#: The form of a resource's metadata.name; goondan.schemas.bundle.address.is_resource_name is the rule.
_NAME_SCHEMA: Final = {"maxLength": 64, "pattern": "^[a-z0-9](_?[a-z0-9-])*$"}


class Metadata(Strict, frozen=True):
    """Who a resource is. `name` is unique among the resources of one kind."""

    name: Annotated[
        str, Meta(min_length=1, description="Name of the resource, unique in its kind.", extra_json_schema=_NAME_SCHEMA)
    ]
    labels: Annotated[dict[str, str], Meta(description="Free labels, for example `tier: base`.")] = {}
    annotations: Annotated[dict[str, str], Meta(description="Free notes; the kernel does not read them.")] = {}


# --- references and values ------------------------------------------------------------------------------------------


class ObjectRef(Strict, frozen=True):
    """A reference in its long form. Without `package`: the bundle's own resource, else the bundled one."""

    kind: Annotated[Text, Meta(description="Kind of the resource, for example `Tool`.")]
    name: Annotated[Text, Meta(description="Its metadata.name.")]
    package: Annotated[Text | None, Meta(description="Package that holds it, for example `@goondan/base`.")] = None


RefLike = Annotated[Text | ObjectRef, Meta(description="`Kind/name`, or {kind, name, package?}.")]


class NetworkAllow(Strict, frozen=True):
    """The hosts that a tool may reach."""

    allow: Annotated[
        list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, description="`host:port` or `*.host:port`.")
    ]


class Sandbox(Strict, frozen=True):
    """What a tool asks for. What is left out stays at the least that a tool gets."""

    isolation: Annotated[
        Literal["shared", "instance", "call"],
        Meta(description="One jail for everyone, one per agent instance, or that with each call on its own."),
    ] = "instance"
    network: Annotated[
        Literal["none", "public"] | NetworkAllow,
        Meta(description="No network, public addresses only, or exactly these hosts."),
    ] = "none"
    filesystem: Annotated[launch.Filesystem, Meta(description="Paths outside the workdir.")] = field(
        default_factory=launch.Filesystem
    )
    env: Annotated[list[str], Meta(description="Names of host environment variables that the tool may read.")] = []
    permissions: Annotated[
        list[Literal["agents", "restart", "tools"]],
        Meta(
            description="`agents`: ask other agents through ctx.runtime. `restart` is read and ignored: a restart is "
            "asked for by `self-restart__request`. `tools`: for the bundled tool of code mode only."
        ),
    ] = []
    python: Annotated[launch.PythonSpec, Meta(description="A virtual environment to import from.")] = field(
        default_factory=launch.PythonSpec
    )
    limits: Annotated[launch.Limits, Meta(description="Upper bounds; see the documentation of the sandbox.")] = field(
        default_factory=launch.Limits
    )
    min_tier: Annotated[Tier, Meta(description="Refuse to run where the walls are weaker than this.")] = STRONGEST
    javascript: Annotated[
        Literal["node", "bun"] | None,
        Meta(
            description="What loads an entry in JavaScript or TypeScript. Without it that is Node, or Bun where there "
            "is no Node."
        ),
    ] = None


class FilesystemPart(Strict, frozen=True):
    """Fewer paths, or paths inside them. What is left out stays as it is."""

    read: Annotated[list[str] | None, Meta(description="What may still be read.")] = None
    write: Annotated[list[str] | None, Meta(description="What may still be written.")] = None


class LimitsPart(Strict, frozen=True):
    """Lower limits. What is left out stays as it is."""

    memory_mb: Annotated[int | None, Meta(description="Memory of all its processes (MiB).")] = None
    processes: Annotated[int | None, Meta(description="Processes and threads at once.")] = None
    open_files: Annotated[int | None, Meta(description="Open files of one process.")] = None
    file_mb: Annotated[int | None, Meta(description="Size of one file (MiB).")] = None
    disk_mb: Annotated[int | None, Meta(description="What it writes to the workdir in all (MiB).")] = None
    files: Annotated[int | None, Meta(description="Files and folders that it makes.")] = None
    cpu_seconds: Annotated[int | None, Meta(description="Processor time of one call (seconds).")] = None
    wall_seconds: Annotated[int | None, Meta(description="Duration of one call (seconds).")] = None
    output_mb: Annotated[int | None, Meta(description="Result of one call (MiB).")] = None


class SandboxPart(Strict, frozen=True):
    """Some of a sandbox: what an agent leaves of its tools' grants. What is left out stays as it is."""

    isolation: Annotated[
        Literal["shared", "instance", "call"] | None, Meta(description="`call` instead of `instance`.")
    ] = None
    network: Annotated[
        Literal["none", "public"] | NetworkAllow | None, Meta(description="No network, or fewer hosts.")
    ] = None
    filesystem: Annotated[FilesystemPart | None, Meta(description="Fewer paths, or paths inside them.")] = None
    env: Annotated[list[str] | None, Meta(description="Fewer names of environment variables.")] = None
    permissions: Annotated[
        list[Literal["agents", "restart", "tools"]] | None, Meta(description="Fewer operations on the bus.")
    ] = None
    python: Annotated[launch.PythonSpec | None, Meta(description="The same virtual environment, or none.")] = None
    limits: Annotated[LimitsPart | None, Meta(description="Lower limits.")] = None
    min_tier: Annotated[Tier | None, Meta(description="`full` instead of `reduced`.")] = None


class _Use(Strict, frozen=True):
    """A reference by `ref`, or by `kind` and `name`."""

    ref: Annotated[RefLike | None, Meta(description="The resource: `Kind/name`, or {kind, name, package?}.")] = None
    kind: Annotated[Text | None, Meta(description="Its kind, without `ref`.")] = None
    name: Annotated[Text | None, Meta(description="Its metadata.name, without `ref`.")] = None
    package: Annotated[Text | None, Meta(description="The package that holds it, for example `@goondan/base`.")] = None


class ToolUse(_Use, frozen=True):
    """An item of an agent's `tools`: a reference by `ref`, or by `kind` and `name`."""

    sandbox: Annotated[SandboxPart | None, Meta(description="Narrows what the tool gets from this agent.")] = None


class ExtensionUse(_Use, frozen=True):
    """An item of an agent's `extensions`: a reference by `ref`, or by `kind` and `name`."""

    config: Annotated[dict[str, Any] | None, Meta(description="Replaces the Extension's own config.")] = None


class AgentUse(_Use, frozen=True):
    """An item of a swarm's `agents`: a reference by `ref`, or by `kind` and `name`."""


class ValueFrom(Strict, frozen=True):
    """Where a secret comes from."""

    env: Annotated[str, Meta(min_length=1, description="Name of an environment variable.")]


class ValueSource(Strict, frozen=True):
    """A value, or where it comes from: exactly one of the two."""

    value: Annotated[str | None, Meta(description="The value itself.")] = None
    value_from: Annotated[ValueFrom | None, Meta(description="Where it comes from.")] = None


ValueLike = str | ValueSource


# --- kinds ----------------------------------------------------------------------------------------------------------


class ModelBody(Strict, frozen=True):
    """Which model, and how to reach it."""

    provider: Annotated[
        NamedProvider,
        Meta(
            description="`openai` is any server with chat completions, `responses` any with Open Responses; `auto` "
            "takes Anthropic, OpenAI or a server of your own, whichever the environment names first, else "
            "`embedded`; `replay` answers from a recorded run."
        ),
    ]
    model: Annotated[str, Meta(description="The vendor's name of the model; not needed by `embedded`.")] = ""
    endpoint: Annotated[
        str | None, Meta(description="Base URL. `/v1/messages`, `/chat/completions` or `/responses` is added to it.")
    ] = None
    api_key: Annotated[ValueLike | None, Meta(description="The key; by default the vendor's environment variable.")] = (
        None
    )
    params: Annotated[dict[str, Any], Meta(description="Parameters of every request, for example temperature.")] = {}
    pricing: Annotated[
        usage.Pricing | None, Meta(description="What it costs; [budgets](budgets.md) count with it.")
    ] = None
    context_tokens: Annotated[
        Annotated[int, Meta(ge=LEAST_WINDOW, lt=MOST_WINDOW)] | None,
        Meta(
            description="How many tokens its context holds. Without it: what the server says, or what is known of a "
            "vendor's model, or what a refused request tells ([context](context.md))."
        ),
    ] = None
    headers: Annotated[
        dict[str, ValueLike],
        Meta(
            description="Headers of every request, for example of a gateway. Their values are secrets, like the key. "
            "Those that requests have anyway cannot be set."
        ),
    ] = {}
    auth: Annotated[
        KeyHeader | None,
        Meta(description="How the key is sent: `authorization: Bearer …` (unless set), or `x-api-key: …`."),
    ] = None
    api_version: Annotated[
        str | None,
        Meta(description="The header `anthropic-version`, for a server that knows another version. No other provider."),
    ] = None
    limits: Annotated[
        ModelLimits | None,
        Meta(description="What its server allows; without it the kernel [learns](model-limits.md) it from refusals."),
    ] = None
    retry: Annotated[ModelRetry, Meta(description="How long it is asked again when it does not answer.")] = ModelRetry()
    caching: Annotated[
        bool,
        Meta(
            description="Whether requests to `anthropic` mark what is to be kept in its cache (`cache_control`). "
            "Another server that refuses the marks is sent none from then on."
        ),
    ] = True
    fallback: Annotated[
        list[RefLike],
        Meta(
            max_length=MAX_FALLBACKS,
            description="Models that are asked, in this order, when this one gives no answer. Their own `fallback` "
            "and the agent's `params` do not count then.",
        ),
    ] = []
    sees: Annotated[
        list[Literal["image", "pdf"]] | None,
        Meta(
            description="Which [files](files.md) it sees besides text; `[]`: none. Without it files are sent, and a "
            "server that refuses them is believed."
        ),
    ] = None
    recording: Annotated[
        str,
        Meta(description="Of `replay`: the file of the [recorded run](replay.md), from the bundle's root."),
    ] = ""


class ToolCallPolicy(Strict, frozen=True):
    """What an agent may call beyond its catalog."""

    allow_registry: Annotated[
        list[Text], Meta(description="Names or patterns (`bash__*`) of tools outside the catalog that may be called.")
    ] = []
    extensions_may_add: Annotated[
        list[Text] | None,
        Meta(
            description="Names or patterns of tools that the bundle's own extensions may add to a step. Without it: "
            "every Tool that the bundle declares, none of a package."
        ),
    ] = None


class AgentPolicy(Strict, frozen=True):
    """Rules of one agent."""

    tool_calls: ToolCallPolicy = field(default_factory=ToolCallPolicy)
    stall_timeout_s: Annotated[
        float,
        Meta(
            ge=1,
            le=86_400,
            description="A turn fails when its model is at work and says nothing for this long; what only keeps a "
            "connection alive does not count. A turn that makes progress may last as long as it likes.",
        ),
    ] = launch.DEFAULT_STALL_S
    conversation_mb: Annotated[
        int,
        Meta(
            ge=16,
            le=1_048_576,
            description="Size of one instance's conversation on disk (MiB). A turn that does not fit fails; what is "
            "stored stays.",
        ),
    ] = launch.DEFAULT_CONVERSATION_MB
    request_timeout_ms: Annotated[
        Annotated[int, Meta(ge=1, le=86_400_000)] | None,
        Meta(description="How long `agents__request` waits if it does not say; by default what the Swarm says."),
    ] = None
    traces: Annotated[
        Literal["short", "whole"],
        Meta(description="Whether traces keep arguments and results of calls in short, or whole (16,384 characters)."),
    ] = "short"


class SwarmPolicy(Strict, frozen=True):
    """Rules of the whole swarm."""

    max_steps_per_turn: Annotated[int, Meta(ge=1, le=1000, description="Model calls in one turn.")] = (
        launch.DEFAULT_MAX_STEPS
    )
    durability: Annotated[
        Literal["power", "process"],
        Meta(description="What an accepted message survives: a power loss, or the end of any process."),
    ] = "power"
    max_live_agents: Annotated[
        int,
        Meta(
            ge=1, le=100_000, description="Turns at once, each with an agent process; one sender gets a part of them."
        ),
    ] = 256
    agent_idle_seconds: Annotated[
        float, Meta(gt=0, le=86_400, description="An agent process without work for this long is retired.")
    ] = 300.0
    kept_agents: Annotated[
        Annotated[int, Meta(ge=1, le=100_000)] | None,
        Meta(
            description="Turns beyond `maxLiveAgents`, kept for operators' own messages; by default a sixteenth of it."
        ),
    ] = None
    mailbox_mb: Annotated[
        int, Meta(ge=32, le=65_536, description="MiB that messages may hold until they are answered.")
    ] = 256
    max_open_events: Annotated[
        int, Meta(ge=256, le=10_000_000, description="Messages that may wait or be worked on.")
    ] = 65_536
    request_timeout_ms: Annotated[
        int, Meta(ge=1, le=86_400_000, description="How long `agents__request` waits if it does not say (ms).")
    ] = questions.TIMEOUT_MS


class ModelConfig(Strict, frozen=True):
    """An agent's model."""

    model_ref: Annotated[RefLike, Meta(description="The Model: `Model/NAME`.")]
    params: Annotated[dict[str, Any], Meta(description="Added to the Model's own; these win.")] = {}


class Prompt(Strict, frozen=True):
    """The system prompt: here, or in a file of the bundle. One of the two."""

    system: Annotated[str | None, Meta(description="The text.")] = None
    system_ref: Annotated[Text | None, Meta(description="Path of a text file, from the bundle's root.")] = None


class AgentBody(Strict, frozen=True):
    """An agent: a model, a prompt, and what it may use."""

    model_config: ModelConfig
    prompt: Prompt = field(default_factory=Prompt)
    tools: Annotated[list[Text | ToolUse], Meta(description="Tools; every export of each is in the catalog.")] = []
    extensions: Annotated[list[Text | ExtensionUse], Meta(description="Extensions, in the order they load.")] = []
    sandbox: Annotated[SandboxPart | None, Meta(description="Narrows what every tool gets from this agent.")] = None
    #: Rules of one agent.
    policy: AgentPolicy = field(default_factory=AgentPolicy)
    output: Annotated[
        launch.OutputSpec | None,
        Meta(description="The form of its answers; see [structured answers](structured-answers.md)."),
    ] = None
    tool_choice: Annotated[
        launch.ToolChoice | None,
        Meta(
            description="`required`, or the tool that its model calls first in each turn; `none`: tools are shown, and "
            "none is called."
        ),
    ] = None
    workdir: Annotated[
        Literal["own", "shared"] | None, Meta(description="Its working directory; by default what the Swarm says.")
    ] = None


class SwarmBody(Strict, frozen=True):
    """Which agents run together, and which one is spoken to."""

    entry_agent: Annotated[RefLike, Meta(description="The Agent that gets what names no other: `Agent/NAME`.")]
    agents: Annotated[list[Text | AgentUse], Meta(description="The members; every Agent of the bundle if empty.")] = []
    #: Rules of the whole swarm.
    policy: SwarmPolicy = field(default_factory=SwarmPolicy)
    workdir: Annotated[
        Literal["own", "shared"],
        Meta(description="`shared`: all agents work in [one folder](agents.md#one-folder-for-all); `own`: in its own."),
    ] = "own"


class Example(Strict, frozen=True):
    """Arguments that the export accepts, and what it then answers."""

    input: Annotated[dict[str, Any], Meta(description="The arguments; they must fit the schema.")]
    output: Annotated[Any, Meta(description="What is answered.")] = None


class ToolExport(Strict, frozen=True):
    """One function of a tool, shown to the model as `{tool}__{name}`."""

    name: Annotated[
        str,
        Meta(
            min_length=1,
            description="Lowercase letters, digits, - and _, without __.",
            extra_json_schema={"minLength": 1, "maxLength": 64, "pattern": "^_?([a-z0-9-]_?)*$"},
        ),
    ]
    description: Annotated[str | None, Meta(description="What the model reads about it.")] = None
    parameters: Annotated[
        dict[str, Any] | None, Meta(description="JSON Schema of the arguments, of type `object`.")
    ] = None
    idempotent: Annotated[bool, Meta(description="Running it again does no harm.")] = False
    background: Annotated[bool, Meta(description="Processes it leaves behind live until the jail retires.")] = False
    examples: Annotated[list[Example], Meta(description="Calls as they are meant.")] = []
    aliases: Annotated[
        dict[str, str], Meta(description="Other spellings of parameters: alias to the canonical name.")
    ] = {}


class ToolBody(Strict, frozen=True, kw_only=True):
    """A tool: a module, and the functions in its `handlers`."""

    entry: Annotated[str, Meta(min_length=1, description="Path of the module, from the bundle's root.")]
    error_message_limit: Annotated[int, Meta(ge=1, description="Characters of an error's message.")] = (
        launch.DEFAULT_ERROR_LIMIT
    )
    exports: Annotated[list[ToolExport], Meta(min_length=1, description="What can be called.")]
    sandbox: Sandbox = field(default_factory=Sandbox)


class _ExtensionBody(Strict, frozen=True):
    """What both forms of an Extension have."""

    entry: Annotated[str, Meta(min_length=1, description="Path of the module, from the bundle's root.")]
    config: Annotated[dict[str, Any] | None, Meta(description="Handed to the extension as it is.")] = None
    depends_on: Annotated[list[RefLike], Meta(description="Extensions that an agent must load before this one.")] = []


class ExtensionBody(_ExtensionBody, frozen=True):
    """An extension: a module with `register(api)`, or a bundled one (`@goondan/base/NAME`)."""

    config_schema: Annotated[
        dict[str, Any] | None,
        Meta(description="JSON Schema of the config, of type `object`; without one anything fits."),
    ] = None


class ConnectorEvent(Strict, frozen=True):
    """An event that a connector can emit."""

    name: Annotated[Text, Meta(description="How rules refer to it.")]
    properties: Annotated[dict[str, Any], Meta(description="What it carries, as properties of a JSON Schema.")] = {}


class ConnectorBody(Strict, frozen=True):
    """A process that turns messages from outside into events."""

    entry: Annotated[str, Meta(min_length=1, description="Path of the module, from the bundle's root.")]
    events: Annotated[list[ConnectorEvent], Meta(min_length=1, description="Every event that it can emit.")]


class IngressMatch(Strict, frozen=True):
    """Which events a rule is for; all of them if empty."""

    event: Annotated[Text | None, Meta(description="Name of the event.")] = None
    properties: Annotated[
        dict[str, str | int | float | bool], Meta(description="Properties of the event that must have these values.")
    ] = {}


class IngressRoute(Strict, frozen=True):
    """Where an event goes; the swarm's entry agent by default."""

    agent_ref: Annotated[RefLike | None, Meta(description="The Agent that gets it.")] = None
    instance_key: Annotated[Text | None, Meta(description="The instance, always the same one.")] = None
    instance_key_property: Annotated[Text | None, Meta(description="Property whose value names the instance.")] = None
    instance_key_prefix: Annotated[str | None, Meta(description="Put before the instance's name.")] = None


class IngressRule(Strict, frozen=True, kw_only=True):
    """One rule: the first that matches counts."""

    match: IngressMatch = field(default_factory=IngressMatch)
    route: IngressRoute


class Ingress(Strict, frozen=True):
    """The rules of a connection, in order."""

    rules: Annotated[list[IngressRule], Meta(description="The first that matches counts.")] = []


class ConnectionBody(Strict, frozen=True):
    """A connector in use: its settings, its secrets, and which agent hears what."""

    connector_ref: Annotated[RefLike, Meta(description="The Connector.")]
    swarm_ref: Annotated[RefLike | None, Meta(description="The Swarm that its events go to.")] = None
    config: Annotated[dict[str, ValueLike], Meta(description="Settings that anyone may see.")] = {}
    secrets: Annotated[dict[str, ValueLike], Meta(description="Settings that never reach logs or traces.")] = {}
    ingress: Ingress = field(default_factory=Ingress)


class Dependency(Strict, frozen=True):
    """A package that this one needs."""

    name: Annotated[Text, Meta(description="Its name, for example `@goondan/base`.")]
    version: Annotated[Text, Meta(description="The versions that will do, for example `^1.0.0`.")]


class PackageBody(Strict, frozen=True):
    """The bundle as a package."""

    version: Annotated[str, Meta(min_length=1, description="For example `1.0.0`.")]
    description: Annotated[str | None, Meta(description="What it is for.")] = None
    dependencies: Annotated[list[Dependency], Meta(description="Packages that it needs.")] = []


class ExtensionV09Body(_ExtensionBody, frozen=True):
    """An Extension as v0.9 wrote it. `runtime` is read and ignored (COMPAT-02)."""

    runtime: Annotated[Any, Meta(description="Read and ignored.")] = None


class ToolV09Body(ToolBody, frozen=True, kw_only=True):
    """A Tool as v0.9 wrote it. `runtime` and `auth` are read and ignored (COMPAT-02)."""

    runtime: Annotated[Any, Meta(description="Read and ignored.")] = None
    auth: Annotated[Any, Meta(description="Read and ignored.")] = None


# --- documents ------------------------------------------------------------------------------------------------------


class Tool(Strict, frozen=True):
    """A Tool document."""

    api_version: Literal["goondan.ai/v1"]
    kind: Literal["Tool"]
    metadata: Metadata
    spec: ToolBody


class Extension(Strict, frozen=True):
    """An Extension document."""

    api_version: Literal["goondan.ai/v1"]
    kind: Literal["Extension"]
    metadata: Metadata
    spec: ExtensionBody


class ExtensionV09(Strict, frozen=True):
    """An Extension document of v0.9."""

    api_version: Literal["agents.example.io/v1alpha1"]
    kind: Literal["Extension"]
    metadata: Metadata
    spec: ExtensionV09Body


class ToolV09(Strict, frozen=True):
    """A Tool document of v0.9."""

    api_version: Literal["agents.example.io/v1alpha1"]
    kind: Literal["Tool"]
    metadata: Metadata
    spec: ToolV09Body


def _document(kind: str, body: type[Strict], words: str) -> type[Strict]:
    """The struct of a document that code reads by its `spec` alone. `words` is its docstring."""
    fields = [
        ("api_version", Literal["goondan.ai/v1"]),
        ("kind", Literal[kind]),
        ("metadata", Metadata),
        ("spec", body),
    ]
    namespace = {"__doc__": words}
    return defstruct(kind, fields, bases=(Strict,), frozen=True, module=__name__, namespace=namespace)  # type: ignore[return-value] # its base says so


#: (apiVersion, kind) -> the struct of the document. Features bring further ones (kernel/bundle/rules/kinds.py).
DOCUMENTS: Final[dict[tuple[str, str], type[Strict]]] = {
    (API_V1, "Model"): _document("Model", ModelBody, "A Model document."),
    (API_V1, "Agent"): _document("Agent", AgentBody, "An Agent document."),
    (API_V1, "Swarm"): _document("Swarm", SwarmBody, "A Swarm document."),
    (API_V1, "Tool"): Tool,
    (API_V1, "Extension"): Extension,
    (API_V1, "Connector"): _document("Connector", ConnectorBody, "A Connector document."),
    (API_V1, "Connection"): _document("Connection", ConnectionBody, "A Connection document."),
    (API_V1, "Package"): _document("Package", PackageBody, "A Package document; optional, at most one in a bundle."),
    (API_V1ALPHA1, "Extension"): ExtensionV09,
    (API_V1ALPHA1, "Tool"): ToolV09,
}

"""Servers: what agents, broker, tool host and workers tell each other about them, and the names of their tools.

The names of the frames and codes say which protocol is spoken with the servers that there are now. They are promises to
clients and operators (PROTOCOL.md, docs/errors.md), so they stay; the core has them from here alone.

A server is one ToolSpec whose `server` is set (schemas/bundle/launch.py). Its tools are called like any other tool, as
`{prefix}__{export}`. Which exports there are is known when the server has been asked.

Source: docs/design/tools.md section 11; requirements MCP-13 to MCP-18, NAME-08, NAME-14.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

from msgspec import Struct

from goondan.schemas.bundle.address import MAX_TOOL_NAME, SEPARATOR

#: What agents ask about a server: to be attached to it, what it offers now, and to be detached.
ATTACH: Final = "mcp.attach"
LIST: Final = "mcp.list"
DETACH: Final = "mcp.detach"
#: What an agent is told that is attached to one.
NEWS: Final = "mcp.news"
#: The questions that the tool host answers with a listing.
Listed = Literal["mcp.attach", "mcp.list"]
#: The codes of a server that could not be reached, and of one that has ended.
NOT_CONNECTED: Final = "E_MCP_CONNECT"
GONE: Final = "E_MCP_GONE"
#: The name of errors that a server's session ends with.
ERROR_NAME: Final = "McpError"
#: What stands before the name of a tool in its older spelling, and the kind of its source.
ALIAS: Final = "mcp"
#: The role of a server's process in `gdn ps`.
ROLE: Final = "mcp"
#: The export by which a model reads a resource, when resources are exposed.
READ_RESOURCE: Final = "read_resource"
#: The export by which a model gets a prompt, when prompts are exposed.
GET_PROMPT: Final = "get_prompt"
#: The key of `api.instance.shared` under which other extensions find the resources that the model is told of: a list of
#: ServerResource by the server's prefix.
SHARED_RESOURCES: Final = "mcp:resources"
#: How long a server may take to start and to say what it offers (seconds). A server that a package runner has to
#: prepare takes a few; nothing is installed at a start.
CONNECT_S: Final = 30.0
#: Hexadecimal digits by which names are told apart that would be the same.
_TOLD_APART: Final = 6
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_-]+")

#: `handshake`: the versions up to 2025-11-25, with `initialize` and a session. `modern`: 2026-07-28 and later.
Era = Literal["handshake", "modern"]
#: What has changed. `gone`: the server has ended, and a call starts no other before the next step.
NewsKind = Literal["tools", "resources", "prompts", "resource", "gone"]


class ServerTool(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One tool of a server."""

    #: Its name behind the prefix: vendors accept it, and no other tool of the server has it.
    export: str
    #: Its name at the server.
    name: str
    #: What it does, for the model.
    description: str | None = None
    #: The JSON Schema of its arguments.
    input_schema: dict[str, Any] | None = None
    #: The JSON Schema of its structured result.
    output_schema: dict[str, Any] | None = None
    #: What the server says of it (`readOnlyHint`, `idempotentHint`, …). Hints of somebody hostile: nothing is granted
    #: because of them.
    annotations: dict[str, Any] | None = None
    #: It is no tool of the server: it reads a resource, or gets a prompt.
    offered: bool = False


class ServerResource(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One resource of a server, or one template of resources."""

    #: Its URI. Of a template: a URI with places in braces.
    uri: str
    #: Its name.
    name: str
    #: Its media type.
    mime_type: str | None = None
    #: What it is.
    description: str | None = None


class ServerPrompt(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One prompt of a server."""

    #: Its name.
    name: str
    #: What it is for.
    description: str | None = None
    #: Its arguments: `name`, `description`, `required`.
    arguments: list[dict[str, Any]] | None = None


class ServerListing(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """What a server is and offers. The `reply` to `mcp.attach` and `mcp.list`."""

    #: The name that it gives itself.
    server_name: str = ""
    #: The version that it gives itself.
    server_version: str = ""
    #: The version of the protocol that is spoken with it.
    protocol_version: str = ""
    #: Which kind of version that is.
    era: Era = "handshake"
    #: What it says about its use, for the model.
    instructions: str | None = None
    #: Its tools.
    tools: list[ServerTool] = []
    #: Its resources.
    resources: list[ServerResource] = []
    #: Its templates of resources.
    resource_templates: list[ServerResource] = []
    #: Its prompts.
    prompts: list[ServerPrompt] = []
    #: For how long the lists are good, as the server says (milliseconds). None: until there is news.
    ttl_ms: int | None = None
    #: Names the session. Another number means that the server was started anew.
    session: int = 0


class NamedServer(Struct, frozen=True):
    """Payload of `mcp.attach`, `mcp.list` and `mcp.detach`: the server's prefix."""

    #: The server's prefix.
    server: str


class ServerNews(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Payload of `mcp.news`, from a tool host to the agents that are attached to a server."""

    #: The server's prefix.
    server: str
    #: What has changed.
    kind: NewsKind
    #: Of `resource`: which one.
    uri: str | None = None
    #: Of `gone`: why, with the last words of the server.
    message: str | None = None


class ServerQuestion(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The value of a question of kind `elicit` (schemas/wire/questions.py): a server asks a person."""

    #: `form`: for values that fit `schema`. `url`: to open `url`, and to say when that is done.
    mode: Literal["form", "url"]
    #: What it says to the person.
    message: str
    #: Of `form`: the JSON Schema of one object, whose properties are texts, numbers, booleans and choices.
    schema: dict[str, Any] | None = None
    #: Of `url`: what the person is to open. Nothing of ours opens it.
    url: str | None = None
    #: The server has not begun with the call before it has the answer: the call can be made anew, and asks again.
    again: bool = False


class ServerAnswer(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The value of the answer to a question of kind `elicit`."""

    #: `decline`: the person says no. `cancel`: nobody has decided.
    action: Literal["accept", "decline", "cancel"]
    #: Of `form`, accepted: the values.
    content: dict[str, Any] | None = None


class ServerInit(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """What the MCP worker is told in `init`: the server that it talks to, and what is wanted of it."""

    #: `stdio`: the worker's second descriptor is the server. `http`: the server is at `endpoint`.
    transport: Literal["stdio", "http"]
    #: Of `http`: the URL.
    endpoint: str | None = None
    #: Of `http`: headers of each request. They hold secrets.
    headers: dict[str, str] = {}
    #: Whether the list of its tools is wanted.
    tools: bool = False
    #: Whether its resources are wanted.
    resources: bool = False
    #: Whether its prompts are wanted.
    prompts: bool = False
    #: What the server may ask for: `elicit` is always passed on, these only when they were granted.
    grants: list[Literal["sampling", "roots"]] = []
    #: The folder that is told as the root, when `roots` was granted.
    root: str | None = None
    #: The longest export that fits behind the prefix (characters).
    longest_export: int = 48
    #: A call of which the server says nothing for so long is given up (milliseconds). None: it has only its deadline.
    idle_ms: int | None = None
    #: Of `http`: how it is logged in to, as the feature of the worker has written it.
    login: dict[str, Any] | None = None
    #: The handshake is tried first: this server has ended when it was asked for a version without one.
    handshake: bool = False
    #: What the worker takes out of all that it says (schemas/text/secret_values.py): secrets of variables and headers.
    secrets: list[str] = []

    def __repr__(self) -> str:
        """As in a log or a traceback: without headers and secrets."""
        return f"ServerInit(transport={self.transport!r}, endpoint={self.endpoint!r})"


def holds_server(config: Mapping[str, Any]) -> bool:
    """Whether an extension `mcp` with this config keeps one session with its server (MCP-08). False for a config that
    names no server.
    """
    return "transport" in config and config.get("attach", {}).get("mode", "stateful") == "stateful"


def longest_export(prefix: str) -> int:
    """How many characters an export of this server may have."""
    return MAX_TOOL_NAME - len(prefix) - len(SEPARATOR)


def export_names(names: Iterable[str], longest: int) -> dict[str, str]:
    """A server's own names of tools, each with its export: what vendors accept, at most `longest` characters, no two
    the same.

    What no vendor accepts becomes `_`. A name that was changed into one that another tool has, or cut, ends in a digest
    of the name as it was. So the export of a tool does not depend on the order of the list, and a name that needs no
    change keeps it.
    """
    wanted = list(dict.fromkeys(names))
    plain = {name: _NOT_IN_NAMES.sub("_", name).replace(SEPARATOR, "_") or "_" for name in wanted}
    counted: dict[str, int] = {}
    for export in plain.values():
        counted[export] = counted.get(export, 0) + 1
    kept = {
        name: export
        for name, export in plain.items()
        if len(export) <= longest and (export == name or counted[export] == 1)
    }
    taken = set(kept.values())
    for name in sorted(name for name in wanted if name not in kept):
        kept[name] = _told_apart(name, plain[name], longest, taken)
        taken.add(kept[name])
    return {name: kept[name] for name in wanted}


def _told_apart(name: str, export: str, longest: int, taken: set[str]) -> str:
    """Another digest is taken when a server has a tool of exactly the name that would be made."""
    text = name.encode("utf-8", "surrogatepass")
    while True:
        text = hashlib.sha256(text).hexdigest().encode()
        made = f"{export[: longest - _TOLD_APART - 1]}_{text[:_TOLD_APART].decode()}"
        if made not in taken:
            return made

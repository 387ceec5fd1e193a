"""Decides who may make which patch, by the table of docs/live-config.md. Pure.

| path                          | an extension                           | the operator        |
|-------------------------------|----------------------------------------|---------------------|
| `/prompt/system`              | yes                                    | yes                 |
| `/tools`                      | tools that its agent may call, and its | every Tool that the |
|                               | own dynamic ones; taking out any       | bundle has          |
| `/extensions`: order          | yes                                    | yes                 |
| `/extensions/N/config`        | yes, but of what guards, or is an MCP  | yes, but for what   |
|                               | server                                 | it connects to      |
| `/extensions`: out, in again  | no                                     | those of the agent  |
| `/model/model`                | no                                     | of the same provider|
| `/policy/maxStepsPerTurn`     | no                                     | yes                 |
| everything else               | no                                     | no: in the bundle   |

A patch that the table refuses is E_CHANGESET_DENIED. An invalid configuration has codes of its own.

The config of extensions has to fit their `configSchema` with a new patch. A patch for all of an agent comes on top of
the patches of its instances. It is judged together with each of them: two patches that fit alone may not fit together.
The earlier patch stays and the later one is refused.

The library that compiles schemas takes 20 to 50 ms to import. So `load_checker` is called when nobody waits. A broker
whose extensions declare no schema never imports it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import UNSET, Struct

from goondan.features.changesets.wire import DENIED
from goondan.features.live_config.wire import MAX_OPERATIONS, Operation
from goondan.schemas.bundle import address, effective_config, extensions, json_values
from goondan.schemas.bundle.launch import AgentSpec, ExtensionSpec
from goondan.schemas.wire.codec import check_json
from goondan.schemas.wire.errors import GoondanError, fail

#: Segments of one pointer; effective configurations are not deep.
MAX_SEGMENTS: Final = 32
_INDEX: Final = re.compile(r"(?:0|[1-9][0-9]{0,9})\Z")
_BAD_ESCAPE: Final = re.compile(r"~(?![01])")
#: One error names at most so many issues.
_MAX_NAMED: Final = 5
#: The parts that extensions may patch, and the parts that only operators may patch.
_OPEN: Final = ("extensions", "prompt", "tools")
_OPERATORS: Final = ("model", "policy")
#: Lists: an operation on a whole list touches every entry of it.
_LISTS: Final = ("extensions", "tools")
#: Bundled extensions that bound what an agent may do: their configuration is policy.
_GUARDS: Final = frozenset(f"@goondan/base/{name}" for name in ("approval", "budget", "mcp", "required-tools-guard"))
#: Config keys of bundled extensions: where they connect to, and what their servers may do. The bundle's own extensions
#: may use these names freely.
_TRANSPORTS: Final = ("transport", "sandbox")
_BUNDLED: Final = "@goondan/base/"
#: The extension with an MCP server, and the keys of its config that only say what of it is shown: all others are about
#: the server itself, which was agreed to and is started with what the bundle says.
_SERVERS: Final = "@goondan/base/mcp"
_SHOWN_OF_SERVERS: Final = ("expose", "instructions")
#: The fields that a reference to a tool or an extension may have (EXT-12).
_REFERENCE: Final = frozenset(("apiVersion", "kind", "name", "ref"))
#: The names under which an extension may register dynamic tools.
_DYNAMIC_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,130}\Z")
#: A reference to a variable of the environment, as the documents of a bundle write it.
_VARIABLE: Final = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")
#: The highest number of tools, and of extensions, in one configuration.
MAX_NAMES: Final = 1024
#: The highest number of steps of one turn, as in Swarm.spec.policy.maxStepsPerTurn.
MAX_STEPS: Final = 1000
#: The name of a model: no vendor uses spaces or longer names.
_MODEL: Final = re.compile(r"[!-~]{1,200}\Z")


class Proposer(Struct, frozen=True):
    """Who proposes a patch."""

    #: True for an operator, whom the agent's bounds do not limit.
    operator: bool
    #: The full names of the tools that the agent may call.
    callable: frozenset[str] = frozenset()
    #: The full names of dynamic tools that the agent says it has.
    registered: Sequence[str] = ()


class Judged(Struct, frozen=True):
    """A patch that may be made."""

    #: What it changes.
    change: effective_config.Change
    #: The parts of the configuration that it touches.
    touched: frozenset[effective_config.Touched]


def judge(
    spec: AgentSpec, before: effective_config.Applied, operations: Sequence[Operation], proposer: Proposer
) -> Judged:
    """Judge these operations on the configuration `before` of the agent `spec`.

    Raises GoondanError: E_CHANGESET_DENIED, E_CONFIG_INVALID_VALUE, E_CONFIG_MISSING_REF, E_CONFIG_DUPLICATE.
    """
    if not operations or len(operations) > MAX_OPERATIONS:
        raise fail(
            "E_CONFIG_INVALID_VALUE", f"a patch has 1 to {MAX_OPERATIONS} operations, this has {len(operations)}"
        )
    whole: set[effective_config.Touched] = set()
    document = effective_config.shown(spec, before)
    for operation in operations:
        path = pointer(operation.path)
        if not _is_open(path, proposer):
            raise _denied(operation.path or "the whole configuration", proposer)
        try:
            check_json(None if operation.value is UNSET else operation.value, operation.path[:100])
        except GoondanError as error:
            raise fail("E_CONFIG_INVALID_VALUE", error.info.message) from None
        whole.update(_whole(document, path, operation))
        document = apply_operations(document, (operation,))
    after = _read(spec, before, document, proposer)
    change = effective_config.change_of(before, after)
    _check_model(spec, change, proposer)
    _check_tools(spec, change, proposer)
    _check_extensions(spec, change, proposer)
    return Judged(change, frozenset(effective_config.touches(change) | whole))


def _whole(document: Mapping[str, Any], path: Sequence[str], operation: Operation) -> list[effective_config.Touched]:
    """The parts that an operation touches besides its changes: to write a whole list or object means all of it."""
    if len(path) == 1 and path[0] in _LISTS:
        return [(path[0],)]
    if path[0] != "extensions" or not isinstance(operation.value, dict):
        return []
    if len(path) == 2:
        try:
            named = effective_config.reference_name(operation.value, "Extension")
        except ValueError:
            return []  # no extension, and refused for that
        return [("extensions", named, "config")] if "config" in operation.value else []
    index, listed = path[1], document["extensions"]
    if not isinstance(listed, list) or not index.isascii() or not index.isdigit() or int(index[:9]) >= len(listed):
        return []  # there is nothing, and it is refused for that
    return [("extensions", _reference(listed[int(index[:9])], "Extension"), *path[2:])]


def _is_open(path: Sequence[str], proposer: Proposer) -> bool:
    """Whether the proposer may patch this part of a configuration."""
    if not path or path[0] not in (*_OPEN, *(_OPERATORS if proposer.operator else ())):
        return False
    return path[0] != "extensions" or len(path) <= 2 or path[2] == "config"


def _read(
    spec: AgentSpec, before: effective_config.Applied, document: Mapping[str, Any], proposer: Proposer
) -> effective_config.Applied:
    """Read a configuration from a document."""
    prompt = document.get("prompt")
    system = prompt.get("system") if isinstance(prompt, dict) else None
    if not isinstance(prompt, dict) or prompt.keys() - {"system"} or not isinstance(system, str | None):
        raise fail("E_CONFIG_INVALID_VALUE", "/prompt is {system}, and system a text or null")
    names, configs = _extensions(spec, before, document, proposer)
    tools = _tools(spec, before, document, proposer)
    return effective_config.Applied(
        tools, names, configs, system, _model(before, document, proposer), _max_steps(document, proposer)
    )


def _model(
    before: effective_config.Applied, document: Mapping[str, Any], proposer: Proposer
) -> effective_config.ModelName:
    given = document.get("model")
    if not isinstance(given, dict) or given.keys() - {"provider", "model"}:
        raise _denied("what a Model document says, but for the model's name", proposer)
    provider, model = given.get("provider"), given.get("model")
    if provider != before.model.provider:
        raise _denied("the provider of a model, which has a key and a server of its own", proposer)
    if model != before.model.model and (not isinstance(model, str) or not _MODEL.match(model)):
        message = "/model/model is the name of a model: 1 to 200 printable ASCII characters without a space"
        raise fail("E_CONFIG_INVALID_VALUE", message)
    return effective_config.ModelName(provider, model)


def _max_steps(document: Mapping[str, Any], proposer: Proposer) -> int:
    policy = document.get("policy")
    if not isinstance(policy, dict) or policy.keys() - {"maxStepsPerTurn"}:
        raise _denied("what a policy says, but for maxStepsPerTurn", proposer)
    steps = policy.get("maxStepsPerTurn")
    if type(steps) is not int or not 1 <= steps <= MAX_STEPS:
        raise fail("E_CONFIG_INVALID_VALUE", f"/policy/maxStepsPerTurn is a whole number from 1 to {MAX_STEPS}")
    return steps


def _tools(
    spec: AgentSpec, before: effective_config.Applied, document: Mapping[str, Any], proposer: Proposer
) -> list[str]:
    registered = {address.shown_tool_name(name) for name in proposer.registered if _DYNAMIC_NAME.match(name)}
    declared_tools = {effective_config.tool_of(item) for item in spec.registry if item.source.type == "config"}
    known = declared_tools.union(before.tools, registered)
    names: dict[str, None] = {}
    for given in _list(document, "tools"):
        name = _reference(given, "Tool")
        _check_keys(given, _REFERENCE, f"what Tool/{name[:100]} is", proposer)
        if name not in known and (name := address.shown_tool_name(name)) not in known:
            hint = "`gdn tool list` has every tool of the bundle; dynamic ones must be registered first."
            raise fail("E_CONFIG_MISSING_REF", f"there is no Tool/{name[:100]}", suggestion=hint)
        names[name] = None
    return list(names)


def _extensions(
    spec: AgentSpec, before: effective_config.Applied, document: Mapping[str, Any], proposer: Proposer
) -> tuple[list[str], dict[str, dict[str, Any]]]:
    configs = {**effective_config.declared(spec).configs, **before.configs}
    names: list[str] = []
    for given in _list(document, "extensions"):
        name = _reference(given, "Extension")
        _check_keys(given, _REFERENCE | {"config"}, f"what Extension/{name[:100]} is, but for its config", proposer)
        if name not in configs:
            hint = "Name it in the Agent's spec.extensions: a patch brings no code."
            raise fail(DENIED, f"the agent has no Extension/{name[:100]}", suggestion=hint)
        if name in names:
            raise fail("E_CONFIG_DUPLICATE", f"Extension/{name} is in the list twice", suggestion="Take one out.")
        names.append(name)
        config = given.get("config") if isinstance(given, dict) else None
        if config is None:
            continue
        if not isinstance(config, dict):
            raise fail("E_CONFIG_INVALID_VALUE", f"the config of Extension/{name} is no object")
        configs[name] = config
    return names, configs


def _check_keys(given: Any, known: frozenset[str], what: str, proposer: Proposer) -> None:
    """Refuse a key that has no meaning here: it would look as if it had been patched."""
    if isinstance(given, dict) and not given.keys() <= known:
        raise _denied(what, proposer)


def _check_model(spec: AgentSpec, change: effective_config.Change, proposer: Proposer) -> None:
    if change.model is None:
        return
    if spec.model.pricing is not None:
        raise _denied("the model of a Model document that has a price (`pricing`)", proposer)
    if spec.model.provider == "embedded":
        raise fail("E_CONFIG_INVALID_VALUE", "the provider `embedded` has one model only")


def _check_tools(spec: AgentSpec, change: effective_config.Change, proposer: Proposer) -> None:
    if change.tools is None or proposer.operator:
        return
    for name in change.tools.added:
        if not within_bound(spec, name, proposer.callable):
            hint = "Add the Tool to the Agent's spec.tools; an operator can add it with `gdn config propose`."
            raise fail(DENIED, f"the agent's extensions may not add Tool/{name}", suggestion=hint)


def within_bound(spec: AgentSpec, tool: str, allowed: frozenset[str]) -> bool:
    """Whether an agent may call every export of this Tool. A Tool that is not in the bundle is a dynamic one."""
    return all(item.name in allowed for item in spec.registry if effective_config.tool_of(item) == tool)


def _check_extensions(spec: AgentSpec, change: effective_config.Change, proposer: Proposer) -> None:
    specs = {extension.name: extension for extension in spec.extensions}
    for edit in change.configs:
        for text in _texts(edit.value):
            if _VARIABLE.search(text):
                raise _secret(edit.extension)
        entry = _entry(specs.get(edit.extension))
        transport = entry.startswith(_BUNDLED) and (not edit.path or edit.path[0] in _TRANSPORTS)
        if entry == _SERVERS:
            transport = not edit.path or edit.path[0] not in _SHOWN_OF_SERVERS
        if not proposer.operator and (transport or entry in _GUARDS):
            raise _denied(f"the config of Extension/{edit.extension}", proposer)
        if transport:
            raise _denied(f"where Extension/{edit.extension} connects to", proposer)
    moved = change.extensions
    if moved is not None and (moved.added or moved.removed) and not proposer.operator:
        names = ", ".join((*moved.added, *moved.removed))
        raise _denied(f"which extensions there are ({names[:200]})", proposer)


def _texts(value: Any) -> list[str]:
    """Every text in a JSON value, with keys. Raises GoondanError for a reference to a secret."""
    found: list[str] = []
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, list):
            waiting.extend(item)
        elif isinstance(item, dict):
            if "valueFrom" in item:
                raise _secret("valueFrom")
            waiting.extend(item.values())
    return found


def _secret(where: str) -> GoondanError:
    hint = "Write ${NAME} in the bundle's document; a patch is kept as it is, and holds no secrets."
    message = f"a patch may not refer to variables or secrets ({where[:100]})"
    return fail("E_CONFIG_INVALID_VALUE", message, suggestion=hint)


def _denied(what: str, proposer: Proposer) -> GoondanError:
    if proposer.operator:
        hint = "Edit the bundle's files, then run `gdn restart`; docs/live-config.md says what a patch may change."
    else:
        hint = "An operator changes it in the bundle; docs/live-config.md says what an extension may patch."
    return fail(DENIED, f"no patch may change {what[:200]}", suggestion=hint)


def _entry(spec: ExtensionSpec | None) -> str:
    """The entry as a document of the bundle has it, or would have it: `@goondan/base/NAME` for a bundled extension."""
    if spec is None:
        return ""
    if spec.bundled:
        return _BUNDLED + posixpath.basename(posixpath.dirname(spec.entry)).replace("_", "-")
    return str((spec.resource.get("spec") or {}).get("entry", ""))


def _list(document: Mapping[str, Any], field: str) -> list[Any]:
    given = document.get(field)
    if not isinstance(given, list) or len(given) > MAX_NAMES:
        raise fail("E_CONFIG_INVALID_VALUE", f"/{field} is a list of at most {MAX_NAMES} references")
    return given


def _reference(given: Any, kind: str) -> str:
    try:
        return effective_config.reference_name(given, kind)
    except ValueError as error:
        hint = f"Write {kind}/name or {{kind: {kind}, name: …}}."
        raise fail("E_CONFIG_INVALID_VALUE", str(error), suggestion=hint) from None


# --- JSON Patch (RFC 6902) with `add`, `remove` and `replace`, and JSON Pointer (RFC 6901) ----------------------------


def apply_operations(document: Any, operations: Iterable[Operation]) -> Any:
    """The document after all operations, in order. Raises GoondanError E_CONFIG_INVALID_VALUE: nothing is applied."""
    for operation in operations:
        path = pointer(operation.path)
        if operation.op != "remove" and operation.value is UNSET:
            raise fail("E_CONFIG_INVALID_VALUE", f"{_told(operation)} has no value")
        document = _apply(document, path, operation)
    return document


def pointer(text: str) -> list[str]:
    """The segments of a JSON Pointer. Raises GoondanError E_CONFIG_INVALID_VALUE."""
    if text == "":
        return []
    if not text.startswith("/") or _BAD_ESCAPE.search(text):
        hint = "A path begins with / and writes / as ~1 and ~ as ~0 in a name."
        raise fail("E_CONFIG_INVALID_VALUE", f"{text[:100]!r} is no JSON Pointer", suggestion=hint)
    segments = [segment.replace("~1", "/").replace("~0", "~") for segment in text[1:].split("/")]
    if len(segments) > MAX_SEGMENTS:
        raise fail("E_CONFIG_INVALID_VALUE", f"a path has {len(segments)} segments, and at most {MAX_SEGMENTS}")
    return segments


def _apply(node: Any, path: list[str], operation: Operation) -> Any:
    if not path:
        if operation.op == "remove":
            raise fail("E_CONFIG_INVALID_VALUE", "the whole configuration cannot be removed")
        return operation.value
    key, *rest = path
    adds = operation.op == "add" and not rest
    at: Any = key
    if isinstance(node, list):
        at = len(node) if adds and key == "-" else int(key) if _INDEX.match(key) else -1
    known = 0 <= at < len(node) + adds if isinstance(node, list) else isinstance(node, dict) and (adds or key in node)
    if not known:
        raise fail("E_CONFIG_INVALID_VALUE", f"{_told(operation)}: there is no {key[:80]!r}")
    made = node.copy()  # containers beside the path are shared with the given document
    if rest:
        made[at] = _apply(node[at], rest, operation)
    elif operation.op == "remove":
        del made[at]
    elif adds and isinstance(node, list):
        made.insert(at, operation.value)
    else:
        made[at] = operation.value
    return made


def _told(operation: Operation) -> str:
    return f"{operation.op} {operation.path[:200]}"


# --- whether configs fit their schemas -----------------------------------------------------------------------------


def load_checker(agents: Mapping[str, AgentSpec]) -> None:
    """Import the library that compiles schemas, if an extension of these agents declares one."""
    if any(extension.config_schema is not None for spec in agents.values() for extension in spec.extensions):
        import goondan.schemas.bundle.arguments  # noqa: F401


def check_fit(
    spec: AgentSpec,
    base: effective_config.Applied,
    before: Iterable[effective_config.Change],
    after: Iterable[effective_config.Change],
) -> None:
    """Compare the configuration with the changes `before` and with those `after`. A config that differs has to fit.

    Raises GoondanError E_CONFIG_INVALID_VALUE, E_CONFIG_SCHEMA for a bad schema.
    """
    if all(extension.config_schema is None for extension in spec.extensions):
        return
    for name, issues, _ in _misfits(
        spec, effective_config.apply_changes(base, before), effective_config.apply_changes(base, after)
    ):
        message = f"the config of Extension/{name} would not fit its configSchema: {'; '.join(issues[:_MAX_NAMED])}"
        hint = "`gdn extension list` says where the extension is declared; its configSchema says what fits."
        raise fail("E_CONFIG_INVALID_VALUE", message, suggestion=hint)


def check_instance(
    spec: AgentSpec,
    base: effective_config.Applied,
    before: Iterable[effective_config.Change],
    after: Iterable[effective_config.Change],
    key: str,
) -> None:
    """The same for an instance with patches of its own, when a patch for all of its agent comes or goes.

    If a config did not fit before, this patch is not the cause. The error does not tell the issues: the proposer of a
    patch for all of an agent may not read the patches of each instance. Raises GoondanError E_CONFIG_INVALID_VALUE.
    """
    old = effective_config.apply_changes(base, before)
    for name, _, fitted in _misfits(spec, old, effective_config.apply_changes(base, after)):
        if fitted:
            message = (
                f"with the patches of instance {key!r} the config of Extension/{name} would not fit its configSchema"
            )
            hint = (
                "`gdn config show AGENT --instance KEY` shows that instance's; `gdn config revert` takes a patch back."
            )
            raise fail("E_CONFIG_INVALID_VALUE", message, suggestion=hint)


def with_schema(spec: AgentSpec, change: effective_config.Change) -> frozenset[str]:
    """The extensions with a schema whose config or presence a change may alter."""
    named = {edit.extension for edit in change.configs}
    if change.extensions is not None:
        named.update(change.extensions.added, change.extensions.removed)
    return frozenset(one.name for one in spec.extensions if one.config_schema is not None and one.name in named)


def _misfits(
    spec: AgentSpec, old: effective_config.Applied, new: effective_config.Applied
) -> Iterator[tuple[str, list[str], bool]]:
    """The extensions whose config differs and does not fit: name, issues, and whether it fitted before."""
    for extension in spec.extensions:
        name = extension.name
        was_there = name in old.extensions
        if name not in new.extensions or (was_there and json_values.same_json(old.configs[name], new.configs[name])):
            continue
        issues = extensions.check_config(extension.config_schema, new.configs[name])
        if issues:
            yield name, issues, not was_there or not extensions.check_config(extension.config_schema, old.configs[name])

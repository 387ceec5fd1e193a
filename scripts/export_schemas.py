"""`python -m scripts.export_schemas [DIR] [--check]`: the structs as JSON Schema, for editors and for other languages.

The files in `schemas/json/` are committed; `--check` says whether they still are what the structs give. `gdn schema
export` writes copies of them.

Source: docs/design/wire.md section 1.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, Final, get_args

import msgspec

from goondan.features import parts
from goondan.kernel.bundle.rules.kinds import documents
from goondan.schemas.bundle import effective_config, launch
from goondan.schemas.wire import frames, questions, runtime_events
from goondan.schemas.wire.blobs import MAX_BLOB_BYTES
from goondan.schemas.worker import logins, receipts, servers, worker_frames

DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"
#: Where the committed files are.
COMMITTED: Final = Path(__file__).resolve().parent.parent / "schemas" / "json"

_PAYLOADS: Final = (
    frames.Hello,
    frames.Welcome,
    frames.Credit,
    frames.ErrorPayload,
    frames.AgentEvent,
    frames.OperatorCall,
    frames.OperatorTool,
    frames.ToolCallPayload,
    frames.ToolResult,
    receipts.Receipt,
    frames.Shutdown,
    frames.InstanceEnd,
    frames.InstanceEnded,
    runtime_events.RuntimeEvent,
    runtime_events.ToolProgress,
    runtime_events.Observe,
    runtime_events.Gap,
    frames.Completion,
    questions.ToolAsk,
    questions.ToolAnswer,
    frames.AgentsSpawn,
    frames.AgentsList,
    frames.SpawnedAgent,
    frames.AgentsListed,
    frames.AgentsCatalog,
    frames.RestartRequest,
    frames.RestartAnswer,
    effective_config.LiveChanges,
    logins.ServerWish,
    logins.ServerReply,
    servers.NamedServer,
    servers.ServerListing,
    servers.ServerNews,
    *(payload for module in parts("wire") for payload in getattr(module, "EXPORTED", ())),
)
_SPECS: Final = (launch.AgentSpec, launch.ToolHostSpec)
_WORKER: Final = (*get_args(worker_frames.HostFrame), *get_args(worker_frames.WorkerFrame))


def frame_types() -> list[str]:
    """The types of all frames: those of the core, then those of features."""
    own = [name for module in parts("wire") for name in getattr(module, "FRAMES", ())]
    return [*get_args(frames.FrameType), *own]


def export() -> dict[str, bytes]:
    """File name to content of every schema."""
    return {
        "frame.schema.json": _document(
            "Frame", "One frame of the bus: the header, with an opaque payload.", (frames.Frame,)
        ),
        "payloads.schema.json": _document(
            "Payloads", "What a frame's `payload` holds; PROTOCOL.md says which type of frame has which.", _PAYLOADS
        ),
        "specs.schema.json": _document(
            "Specs", "What `welcome` hands to an agent (AgentSpec) or a tool host (ToolHostSpec).", _SPECS
        ),
        "worker.schema.json": _document(
            "Worker", "Every frame between a tool host and a jailed worker, in both directions.", _WORKER
        ),
        "bundle.schema.json": _document("Bundle", "One YAML document of a bundle.", tuple(documents().values())),
    }


def _document(title: str, description: str, kinds: tuple[type[Any], ...]) -> bytes:
    """One schema: any of `kinds`, with everything that they use in $defs."""
    plain = [_without_raw_defaults(kind) for kind in kinds]
    roots, definitions = msgspec.json.schema_components(plain, ref_template="#/$defs/{name}")
    described = _fields_described(_modules_of(kinds))
    for name, definition in definitions.items():
        _refine(name, definition)
        fields = frozenset(definition.get("properties", ()))
        for field, text in described.get((name, fields), {}).items():
            definition["properties"][field].setdefault("description", text)
    schema: dict[str, Any] = {"$schema": DRAFT, "title": title, "description": description}
    schema |= roots[0] if len(roots) == 1 else {"anyOf": list(roots)}
    schema["$defs"] = dict(sorted(definitions.items()))
    return json.dumps(schema, indent=2, ensure_ascii=False).encode() + b"\n"


def _without_raw_defaults(kind: type[Any]) -> type[Any]:
    """The struct with nil where its default is nil as msgpack bytes, which no JSON Schema can say."""
    fields = msgspec.structs.fields(kind)
    if not any(isinstance(field.default, msgspec.Raw) for field in fields):
        return kind
    described: list[Any] = []
    for field in fields:
        if field.required:
            described.append((field.name, field.type))
        elif field.default_factory is not msgspec.NODEFAULT:
            described.append((field.name, field.type, msgspec.field(default_factory=field.default_factory)))
        else:
            default = None if isinstance(field.default, msgspec.Raw) else field.default
            described.append((field.name, field.type, msgspec.field(default=default)))
    names = {field.name: field.encode_name for field in fields}
    return msgspec.defstruct(kind.__name__, described, rename=names, kw_only=True, namespace={"__doc__": kind.__doc__})


def _modules_of(kinds: Iterable[Any]) -> list[ModuleType]:
    """The modules of these structs, and of all structs that their fields name."""
    found: dict[str, ModuleType] = {}
    left, seen = list(kinds), set()
    while left:
        kind = left.pop()
        if get_args(kind):
            left += get_args(kind)
        elif isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in seen:
            seen.add(kind)
            found[kind.__module__] = sys.modules[kind.__module__]
            left += [field.type for field in msgspec.structs.fields(kind)]
    return list(found.values())


def _fields_described(modules: Iterable[ModuleType]) -> dict[tuple[str, frozenset[str]], dict[str, str]]:
    """The comment above each field (`#:`), for each struct of these modules. A struct is known by its name and its
    fields.
    """
    found: dict[tuple[str, frozenset[str]], dict[str, str]] = {}
    for module in modules:
        source = inspect.getsource(module)
        lines = source.splitlines()
        for node in ast.parse(source).body:
            kind: Any = getattr(module, node.name, None) if isinstance(node, ast.ClassDef) else None
            if not isinstance(node, ast.ClassDef) or not hasattr(kind, "__struct_encode_fields__"):
                continue
            key = node.name, frozenset(kind.__struct_encode_fields__)
            names = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
            for part in node.body:
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    text = _comment_above(lines, part.lineno - 1)
                    if text:
                        found.setdefault(key, {})[names[part.target.id]] = text
    return found


def _comment_above(lines: list[str], at: int) -> str:
    first = at
    while lines[first - 1].lstrip().startswith("#:"):
        first -= 1
    return " ".join(line.lstrip().removeprefix("#:").strip() for line in lines[first:at])


def _refine(name: str, definition: dict[str, Any]) -> None:
    """Adds facts that types cannot express, and takes the indentation out of docstrings."""
    paragraphs = inspect.cleandoc(definition.get("description", "")).split("\n\n")
    definition["description"] = "\n\n".join(" ".join(part.split()) for part in paragraphs)
    if name == "Frame":
        definition["properties"]["type"]["enum"] = frame_types()
        definition["properties"]["stage"] = {"enum": [*get_args(frames.AckStage), None], "default": None}
    if name == "Blob":
        definition["properties"]["file"] |= {"pattern": "^[0-9a-f]{32}$", "maxLength": 32}
        definition["properties"]["digest"] |= {"pattern": "^[0-9a-f]{64}$", "maxLength": 64}
        definition["properties"]["size"] |= {"minimum": 1, "maximum": MAX_BLOB_BYTES}
    if name in ("ToolUse", "ExtensionUse", "AgentUse"):
        definition["oneOf"] = [{"required": ["ref"]}, {"required": ["kind", "name"]}]
    if name == "ValueSource":
        definition["oneOf"] = [{"required": ["value"]}, {"required": ["valueFrom"]}]


def write(folder: Path) -> list[Path]:
    """Write every schema into `folder`, made if need be; the files' paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, content in export().items():
        path = folder / name
        path.write_bytes(content)
        paths.append(path)
    return paths


def drift(folder: Path = COMMITTED) -> list[str]:
    """The differences between the files in `folder` and what the structs give; empty when there are none."""
    wanted = export()
    problems = []
    for name, content in wanted.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif path.read_bytes() != content:
            problems.append(f"{path} is out of date")
    problems += [f"{path} belongs to no struct" for path in sorted(folder.glob("*.json")) if path.name not in wanted]
    return problems


def main(arguments: list[str] | None = None) -> int:
    """Write the schemas, or check them: 1 when they have drifted."""
    parser = argparse.ArgumentParser(prog="python -m scripts.export_schemas", description="The structs as JSON Schema.")
    parser.add_argument("folder", nargs="?", type=Path, default=COMMITTED, help="where to (default: schemas/json)")
    parser.add_argument("--check", action="store_true", help="write nothing; say what is out of date")
    options = parser.parse_args(arguments)
    if not options.check:
        write(options.folder)
        return 0
    problems = drift(options.folder)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        print("run `python -m scripts.export_schemas`", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""Bundled extensions in tests, as the kernel hands them to an agent: from their manifests."""

from __future__ import annotations

from typing import Any

import msgspec
import yaml

from goondan import agentproc
from goondan.schemas.bundle.launch import ExtensionSpec


def bundled(name: str, config: dict[str, Any] | None = None) -> ExtensionSpec:
    """The specification of a bundled extension with the config that an agent gives it."""
    folder = f"{agentproc.__path__[0]}/base/{name.replace('-', '_')}"
    with open(f"{folder}/extension.yaml", encoding="utf-8") as manifest:
        resource = yaml.safe_load(manifest)
    schema = resource["spec"].pop("configSchema")
    tools = resource["spec"].pop("tools", [])
    made = ExtensionSpec(
        name=name,
        entry=f"{folder}/{resource['spec']['entry'].removeprefix('./')}",
        resource={**resource, "spec": {**resource["spec"], "config": config or {}}},
        config=config or {},
        config_schema=schema,
        bundled=True,
        tools=tools,
    )
    return msgspec.json.decode(msgspec.json.encode(made), type=ExtensionSpec)

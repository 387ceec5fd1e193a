"""Bundled extensions in tests, as the kernel hands them to an agent: from their manifests."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import yaml

from goondan import agentproc
from goondan.features import folders
from goondan.schemas.bundle.launch import ExtensionSpec


def bundled(name: str, config: dict[str, Any] | None = None) -> ExtensionSpec:
    """The specification of a bundled extension with the config that an agent gives it."""
    places = [f"{agentproc.__path__[0]}/base", *folders("base")]
    there = (f"{place}/{name.replace('-', '_')}" for place in places)
    folder = next(folder for folder in there if os.path.isdir(folder))
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

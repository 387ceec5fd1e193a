"""The effective configuration of an agent, as its extensions see it. Pure.

Shape: `{swarm, agent, model: {provider, model}, prompt: {system}, tools: [{kind, name}], extensions: [{kind, name,
config}], policy: {maxStepsPerTurn}}`. References are in the order of the agent's document.

Source: requirements PIPELINE-10, CONFIG-03, EXT-12, RECONCILE-02.
"""

from __future__ import annotations

from typing import Any

from schemas.launch import AgentSpec


def effective_config(spec: AgentSpec) -> dict[str, Any]:
    """What an agent runs with."""
    registry = {item.name: item for item in spec.registry}
    tools = dict.fromkeys(registry[name].source.name for name in spec.catalog if name in registry)
    return {
        "swarm": (spec.swarm.get("metadata") or {}).get("name", ""),
        "agent": spec.name,
        "model": {"provider": spec.model.provider, "model": spec.model.model},
        "prompt": {"system": spec.system},
        "tools": [{"kind": "Tool", "name": name} for name in tools],
        "extensions": [{"kind": "Extension", "name": item.name, "config": item.config} for item in spec.extensions],
        "policy": {"maxStepsPerTurn": spec.max_steps_per_turn},
    }

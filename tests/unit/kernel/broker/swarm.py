"""The swarm that lives in world.py."""

from __future__ import annotations

from typing import Any

from goondan.schemas.bundle.launch import (
    AgentSpec,
    CatalogItem,
    ExportSpec,
    ExtensionSpec,
    KernelPlan,
    ModelSpec,
    SandboxSpec,
    ToolHostSpec,
    ToolSpec,
)

TOOL = "bash__exec"

#: Tools and extensions of an agent whose configuration is patched.
TOOLS = ("bash__exec", "notes__add", "secret__tool")


def extension(name: str, entry: str = "x.py", **config: Any) -> ExtensionSpec:
    resource = {"kind": "Extension", "metadata": {"name": name}, "spec": {"entry": entry, "config": config}}
    return ExtensionSpec(name=name, entry=f"/b/{entry}", resource=resource, config=config)


EXTENSIONS = [
    extension("one", level=1, nested={"a": 1, "b": [1]}),
    extension("two"),
    extension("gate", "@goondan/base/approval", rules=["bash__*"]),
    extension("remote", "@goondan/base/mcp", transport={"command": ["x"]}, prefix="r"),
]


def plan(max_live_agents: int = 256, max_open_events: int = 65_536) -> KernelPlan:
    """Two agents with one tool, which may ask agents when `coder` calls it."""
    item = CatalogItem(name=TOOL)
    agents = {
        name: AgentSpec(
            name=name,
            model=ModelSpec(provider="embedded"),
            registry=[item, CatalogItem(name="secret__tool")],
            catalog=[TOOL],
            state_dir="/state",
            revision="r1",
        )
        for name in ("coder", "reviewer")
    }
    tool = ToolSpec(
        name="bash",
        entry="/b/bash.py",
        root="/b",
        exports=[ExportSpec(name="exec")],
        sandbox=SandboxSpec(permissions=["agents"]),
        narrowed={"reviewer": SandboxSpec()},
    )
    return KernelPlan(
        revision="r1",
        bundle="/b",
        state_dir="/state",
        entry_agent="coder",
        agents=agents,
        toolhost=ToolHostSpec(tools=[tool], state_dir="/state", revision="r1"),
        swarm="pair",
        max_live_agents=max_live_agents,
        max_open_events=max_open_events,
    )

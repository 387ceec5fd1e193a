"""What of a kernel that runs a new plan affects. Pure.

An agent is affected by what it is told: its model, prompt, policy, extensions, and the tools that it can reach. Its
processes take that over at their next step, where they can (schemas/bundle/effective_config.py). A tool
is affected by its manifest, its grants and its code. Limits of the whole swarm are read once, when a broker or a tool
host starts: when they change, the kernel restarts in place.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from goondan.schemas.bundle.effective_config import can_follow
from goondan.schemas.bundle.launch import AgentSpec, KernelPlan, ToolSpec
from goondan.schemas.wire.frames import OPERATOR_AGENT

#: Fields of a plan that a broker or a tool host takes only when it starts.
_WHOLE: Final = (
    "state_dir", "max_live_agents", "agent_idle_s", "durability", "kept_agents", "mailbox_mb", "max_open_events",
    "spawn_workdirs",
)  # fmt: skip
_WHOLE_HOST: Final = ("state_dir", "max_jails", "jail_idle_s")


class Difference(Struct, frozen=True, kw_only=True):
    """What a new revision changes."""

    #: The agents that changed, came or went.
    agents: list[str] = []
    #: The tools that changed, came or went.
    tools: list[str] = []
    #: The agents whose processes cannot go on with the new revision.
    replaced: list[str] = []
    #: The setting for which the whole kernel has to restart. None: there is none.
    whole: str | None = None
    #: A change for which no process has to restart: for example of the entry agent, of the files that jails may not
    #: write, or of what features have in the plan. Who is concerned by the last is told.
    quiet: bool = False

    @property
    def nothing(self) -> bool:
        """Whether everything can go on as it is."""
        return not (self.agents or self.tools or self.whole or self.quiet)


def difference(old: KernelPlan, new: KernelPlan) -> Difference:
    """What `new` changes in a kernel that runs `old`."""
    whole = next((name for name in _WHOLE if getattr(old, name) != getattr(new, name)), None) or next(
        (name for name in _WHOLE_HOST if getattr(old.toolhost, name) != getattr(new.toolhost, name)), None
    )
    if whole is None and _variables(new) - _variables(old):
        whole = "sandbox.env"  # a tool host gets the values when it starts
    before, after = (_agents(plan) for plan in (old, new))
    tools_before, tools_after = (_tools(plan) for plan in (old, new))
    return Difference(
        agents=sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)),
        tools=sorted(
            name for name in tools_before.keys() | tools_after.keys() if tools_before.get(name) != tools_after.get(name)
        ),
        replaced=sorted(name for name, spec in old.agents.items() if not _goes_on(spec, new.agents.get(name))),
        whole=whole,
        quiet=_quiet(old) != _quiet(new),
    )


def _goes_on(old: AgentSpec, new: AgentSpec | None) -> bool:
    return new is not None and can_follow(old, new)


def _quiet(plan: KernelPlan) -> tuple[Any, ...]:
    return plan.swarm, plan.entry_agent, plan.protected, plan.parts


def _variables(plan: KernelPlan) -> set[str]:
    return {name for tool in plan.toolhost.tools for name in tool.variables}


def _agents(plan: KernelPlan) -> dict[str, Any]:
    return {name: _told(spec, plan.private_copy) for name, spec in plan.agents.items() if name != OPERATOR_AGENT}


def _told(spec: AgentSpec, copy: str) -> AgentSpec:
    """The tools that an agent uses: those of the registry that it can reach, or the whole registry when extensions may
    look at it.
    """
    extensions = [replace(one, entry=one.entry.removeprefix(copy)) for one in spec.extensions]
    registry = spec.registry
    if not extensions:
        registry = [
            item
            for item in registry
            if item.name in spec.catalog or any(fnmatchcase(item.name, pattern) for pattern in spec.allow_registry)
        ]
    return replace(spec, registry=registry, extensions=extensions, revision="")


def _tools(plan: KernelPlan) -> dict[str, ToolSpec]:
    copy = plan.private_copy
    return {
        tool.name: replace(tool, entry=tool.entry.removeprefix(copy), root=tool.root.removeprefix(copy))
        for tool in plan.toolhost.tools
    }

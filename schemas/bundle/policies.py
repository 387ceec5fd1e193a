"""What a bundle may say in `policy` of an Agent and of its Swarm, and what all parts of a bundle have in
common.

Source: docs/design/bundle.md section 3.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from goondan.schemas.bundle.launch import DEFAULT_CONVERSATION_MB, DEFAULT_MAX_STEPS, DEFAULT_STALL_S
from goondan.schemas.wire.questions import TIMEOUT_MS

Text = Annotated[str, Meta(min_length=1)]


class Strict(Struct, frozen=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    """What every struct of a bundle has in common."""


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
    ] = DEFAULT_STALL_S
    conversation_mb: Annotated[
        int,
        Meta(
            ge=16,
            le=1_048_576,
            description="Size of one instance's conversation on disk (MiB). A turn that does not fit fails; what is "
            "stored stays.",
        ),
    ] = DEFAULT_CONVERSATION_MB
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

    max_steps_per_turn: Annotated[int, Meta(ge=1, le=1000, description="Model calls in one turn.")] = DEFAULT_MAX_STEPS
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
    ] = TIMEOUT_MS

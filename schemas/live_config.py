"""What agents and the broker say to each other about live configuration. docs/live-config.md has the rules.

Source: requirements CONFIG-01, CONFIG-02.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import Any, Final, Literal

import msgspec
from msgspec import Raw, Struct, UnsetType

from schemas.effective_config import Change
from schemas.frames import NO_PAYLOAD, ErrorPayload

#: Who a patch is for: the instance whose extension proposes it, or all instances of its agent.
Scope = Literal["instance", "agent"]
#: Operations of one patch: more is no patch but another configuration.
MAX_OPERATIONS: Final = 64
#: Bytes of one proposal as msgpack. A prompt of 30 pages fits; what is larger belongs into a file of the bundle.
MAX_PROPOSAL_BYTES: Final = 64 << 10
#: Characters of a reason that are kept.
MAX_REASON: Final = 500
#: Characters of a patch's id.
MAX_PATCH_ID: Final = 64


class Operation(Struct, frozen=True, omit_defaults=True):
    """One operation of a JSON Patch (RFC 6902). `value` is there for `add` and `replace`."""

    op: Literal["add", "remove", "replace"]
    path: str
    value: Any | UnsetType = msgspec.UNSET


class ConfigProposal(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """Payload of `config.propose`.

    `id` names the patch: the same proposal under the same id is the same patch. `revision` and `base` say which
    configuration it was made from: the number of the last patch in it, and the digest of what the bundle says
    (schemas/effective_config.py). `extension` is who proposes, for the record. `registered` are dynamic tools that the
    agent has and that the patch may name.
    """

    id: str
    patches: list[Operation]
    revision: int
    base: str
    reason: str | None = None
    scope: Scope = "instance"
    extension: str | None = None
    registered: list[str] = []


class ConfigOutcome(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The `reply` to `config.propose`. `revision` is the number of the accepted patch, 0 of a rejected one."""

    status: Literal["accepted", "rejected"]
    patch_id: str
    revision: int = 0
    error: ErrorPayload | None = None


class LiveChanges(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """Payload of `config.changed`, and `config` of `welcome`: every change that is in force for the instance, in order.

    `revision` is the number of the last patch or of the last revert; `base` names what the changes are for. `spec` is
    what the bundle says of the agent from now on (schemas.launch.AgentSpec, msgpack), nil when that has not changed: so
    a step sees the bundle's part and the patches' part of one moment.
    """

    revision: int = 0
    base: str = ""
    changes: list[Change] = []
    spec: Raw = NO_PAYLOAD

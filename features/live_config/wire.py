"""The messages of agents and the broker about live configuration. docs/live-config.md has the rules.

Source: requirements CONFIG-01, CONFIG-02.
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import Any, Final, Literal

import msgspec
from msgspec import Struct, UnsetType

from goondan.schemas.wire.errors import ASK, ErrorCode, add_codes
from goondan.schemas.wire.frames import ErrorPayload

CONFLICT: Final = "E_CONFIG_CONFLICT"
LIMIT: Final = "E_CONFIG_LIMIT"
NOT_FOUND: Final = "E_PATCH_NOT_FOUND"
ERRORS: Final = add_codes(
    {
        CONFLICT: ErrorCode("Look at the configuration of the next step, and propose the patch anew from there."),
        LIMIT: ErrorCode("Revert patches that are not needed any more: `gdn config list`, `gdn config revert`.", ASK),
        NOT_FOUND: ErrorCode("`gdn config list` shows those that there are.", ASK),
    }
)
#: The types of its frames.
FRAMES: Final = ("config.propose",)

#: The instances that a patch is for: the one whose extension proposes it, or all instances of its agent.
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
    """One operation of a JSON Patch (RFC 6902)."""

    #: What it does.
    op: Literal["add", "remove", "replace"]
    #: A JSON Pointer to what it changes.
    path: str
    #: Of `add` and `replace`: the new value.
    value: Any | UnsetType = msgspec.UNSET


class ConfigProposal(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """Payload of `config.propose`."""

    #: Names the patch. The same proposal under the same id is the same patch.
    id: str
    #: The operations, in order.
    patches: list[Operation]
    #: The number of the last patch in the configuration that the proposal was made from.
    revision: int
    #: The digest of what the bundle said in that configuration (schemas/bundle/effective_config.py).
    base: str
    #: Why, in the proposer's words.
    reason: str | None = None
    #: For whom the patch counts.
    scope: Scope = "instance"
    #: The extension that proposes it, for the record.
    extension: str | None = None
    #: The dynamic tools that the agent has. The patch may name them.
    registered: list[str] = []


class ConfigOutcome(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The `reply` to `config.propose`."""

    #: Whether the patch is in force.
    status: Literal["accepted", "rejected"]
    #: The id of the proposal.
    patch_id: str
    #: The number of the accepted patch. 0 for a rejected one.
    revision: int = 0
    #: Why the patch was rejected.
    error: ErrorPayload | None = None


#: What agents see, for the exported schema.
EXPORTED: Final = (ConfigProposal, ConfigOutcome)

"""Budgets as processes tell each other of them: the limits that a bundle gives, and the error when one is spent.

Source: docs/budgets.md; PROTOCOL-AGENTS.md "Budgets".
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import Annotated, Final

from msgspec import Meta, Struct

from goondan.schemas.wire.errors import ASK, ErrorCode, add_codes

#: The name of the feature: of its part of an agent's specification, and of what it keeps with an event.
FEATURE: Final = "budgets"

ERRORS: Final = add_codes(
    {
        "E_BUDGET_SPENT": ErrorCode(
            "Raise the limit of the agent's Extension/budget, or ask for less; `gdn budget` shows the rest.",
            for_models=ASK,
            finish_reason="budget",
            refuser="budget",
            passed_on=True,
        )
    }
)

_Count = Annotated[int, Meta(ge=1, le=10**12)]


class BudgetLimits(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """`limits` of the extension `budget`: what everything that one message sets going may use. None: no limit."""

    #: Calls of models and of tools together.
    calls: _Count | None = None
    #: Calls of models.
    model_calls: _Count | None = None
    #: Calls of tools.
    tool_calls: _Count | None = None
    #: Tokens that models read and write.
    tokens: _Count | None = None
    #: Tokens that models read.
    input_tokens: _Count | None = None
    #: Tokens that models write.
    output_tokens: _Count | None = None
    #: What model calls cost, in units of `currency`.
    money: Annotated[float, Meta(gt=0, le=10**9)] | None = None
    #: Time since the message was accepted (seconds). Time in which a person was asked does not count.
    wall_seconds: Annotated[float, Meta(ge=1, le=10**9)] | None = None
    #: The currency's code: three capital letters.
    currency: Annotated[str, Meta(pattern="^[A-Z]{3}$")] = "USD"

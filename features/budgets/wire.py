"""Budgets as processes tell each other of them: limits, model calls, and the error when one is spent.

Source: docs/budgets.md; PROTOCOL-AGENTS.md "Budgets".
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import Annotated, Final, Literal

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

#: The types of its frames.
FRAMES: Final = ("budget.reserve", "budget.settle")
#: Tokens that one frame may name: more than any model reads or writes at once, by far.
MAX_TOKENS_NAMED: Final = 1_000_000_000

_Count = Annotated[int, Meta(ge=1, le=10**12)]
_Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS_NAMED)]


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


class BudgetReserve(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Payload of `budget.reserve`: a call that is about to be made."""

    #: Names the call; for a tool call it is the callId. A repeat with the same id is the same call.
    id: str
    #: `tool`: a call that the agent runs itself. It is counted at once.
    kind: Literal["model", "tool"]
    #: Of a model call: how many tokens it will read, as far as is known.
    input_tokens: _Tokens = 0
    #: Of a model call: the most tokens that it may write, as far as is known.
    output_tokens: _Tokens = 0
    #: Of a model call: the Model document that is asked, whose price counts. "": the agent's own.
    model: str = ""


class BudgetLeft(Struct, frozen=True):
    """How much is left of one dimension of a budget. Money is in units, time in seconds."""

    #: The agent whose budget it is.
    whose: str
    #: Name of the dimension, as in BudgetLimits.
    dimension: str
    #: How much is left.
    left: float
    #: The limit.
    limit: float


class BudgetGranted(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The `reply` to `budget.reserve`."""

    #: How many tokens the model may write at most. None: as many as were named.
    output_tokens: int | None = None
    #: How long the call may take (milliseconds). None: any time.
    left_ms: int | None = None
    #: What is left of each budget that the call counts in.
    left: list[BudgetLeft] = []


class BudgetSettle(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Payload of `budget.settle`: what a model call used."""

    #: The call, as in BudgetReserve.
    id: str
    #: The call was not made, so nothing of it is counted.
    unused: bool = False
    #: False: nobody has said how many tokens the call used. Then all that was reserved is counted.
    known: bool = True
    #: All tokens that were read.
    input_tokens: _Tokens = 0
    #: All tokens that were written.
    output_tokens: _Tokens = 0
    #: How many of the tokens read came from the vendor's cache.
    cached_tokens: _Tokens = 0
    #: How many of the tokens read were put into the vendor's cache.
    cache_write_tokens: _Tokens = 0
    #: The Model document that was asked, as in BudgetReserve.
    model: str = ""


#: Its payloads, for the exported schema.
EXPORTED: Final = (BudgetReserve, BudgetGranted, BudgetSettle)

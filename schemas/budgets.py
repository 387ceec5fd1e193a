"""Budgets: the limits that a bundle gives, what a model costs, and what an agent and the broker say about model calls.

Source: docs/budgets.md; PROTOCOL.md "Budgets".
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

#: The bundled extension that gives an agent a budget.
BUDGET_EXTENSION: Final = "budget"
#: Tokens that one frame may name: more than any model reads or writes at once, by far.
MAX_TOKENS_NAMED: Final = 1_000_000_000

_Count = Annotated[int, Meta(ge=1, le=10**12)]
_Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS_NAMED)]


class BudgetLimits(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """`limits` of the extension `budget`: what everything that one message sets going may use. None: as much as it
    likes.

    `calls` are calls of models and of tools together; `money` is in units of `currency`; `wall_seconds` are counted
    from the moment in which the message was accepted, without the time in which a person was asked.
    """

    calls: _Count | None = None
    model_calls: _Count | None = None
    tool_calls: _Count | None = None
    tokens: _Count | None = None
    input_tokens: _Count | None = None
    output_tokens: _Count | None = None
    money: Annotated[float, Meta(gt=0, le=10**9)] | None = None
    wall_seconds: Annotated[float, Meta(ge=1, le=10**9)] | None = None
    currency: Annotated[str, Meta(pattern="^[A-Z]{3}$")] = "USD"


class Pricing(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """What a model costs, for a million tokens each."""

    input_per_million: Annotated[float, Meta(ge=0, le=10**9, description="For tokens that it reads.")]
    output_per_million: Annotated[float, Meta(ge=0, le=10**9, description="For tokens that it writes.")]
    cached_input_per_million: Annotated[
        Annotated[float, Meta(ge=0, le=10**9)] | None,
        Meta(description="For tokens that it reads from the vendor's cache; without it as much as for others."),
    ] = None
    cache_write_per_million: Annotated[
        Annotated[float, Meta(ge=0, le=10**9)] | None,
        Meta(description="For tokens that are put into the vendor's cache; without it as much as for others."),
    ] = None
    currency: Annotated[str, Meta(pattern="^[A-Z]{3}$", description="Its code: three capital letters.")] = "USD"


class BudgetReserve(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Payload of `budget.reserve`: a call that is about to be made. `id` names it; a repeat is the same call.

    `kind` `tool`: a call that the agent runs itself, counted at once; `id` is its callId. Of a model call
    `input_tokens` is what it will read, and `output_tokens` the most that it may write, as far as is known.
    """

    id: str
    kind: Literal["model", "tool"]
    input_tokens: _Tokens = 0
    output_tokens: _Tokens = 0


class BudgetLeft(Struct, frozen=True):
    """How much of one dimension of the budget of agent `whose` is left, and its limit. Money in units, time in
    seconds.
    """

    whose: str
    dimension: str
    left: float
    limit: float


class BudgetGranted(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The `reply` to `budget.reserve`. The model may write `output_tokens` at most, None: as many as were named; the
    call may take `left_ms` milliseconds, None: any time.
    """

    output_tokens: int | None = None
    left_ms: int | None = None
    left: list[BudgetLeft] = []


class BudgetSettle(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Payload of `budget.settle`: what a model call came to.

    `unused`: it was not made, so nothing of it is counted. `known` false: nobody has said how many tokens it took, so
    all that was reserved is counted. `input_tokens` are all that were read; of these came `cached_tokens` from the
    vendor's cache, and `cache_write_tokens` were put into it.
    """

    id: str
    unused: bool = False
    known: bool = True
    input_tokens: _Tokens = 0
    output_tokens: _Tokens = 0
    cached_tokens: _Tokens = 0
    cache_write_tokens: _Tokens = 0

"""Budgets: what an agent and the broker say about model calls.

Source: docs/budgets.md; PROTOCOL-AGENTS.md "Budgets".
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

#: Tokens that one frame may name: more than any model reads or writes at once, by far.
MAX_TOKENS_NAMED: Final = 1_000_000_000

_Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS_NAMED)]


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

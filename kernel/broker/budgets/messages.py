"""Describes budgets for people and models, in words and numbers. Pure."""

from __future__ import annotations

from typing import Any, Final

from goondan.kernel.broker.budgets.amounts import Dimension, Spend
from goondan.kernel.broker.budgets.book import UNKNOWN, Account, BudgetLine, Shortage, Tree
from goondan.schemas.budgets import BudgetLeft
from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.wire.usage import NANO

#: An error names so many of the agents that have spent a budget, the largest part first.
MAX_SPENDERS: Final = 5
#: Ids and names come from others, so only so many characters of each are shown.
_SHOWN: Final = 100
_WORDS: Final[dict[Dimension, str]] = {
    "calls": "calls",
    "modelCalls": "model calls",
    "toolCalls": "tool calls",
    "tokens": "tokens",
    "inputTokens": "input tokens",
    "outputTokens": "output tokens",
    "money": "",
    "wallSeconds": "seconds",
}


def budget_spent(root: str, shortage: Shortage, agent: str) -> GoondanError:
    """E_BUDGET_SPENT: the budget and its dimension, what was spent and by whom. `agent` wanted more."""
    account, dimension = shortage.account, shortage.dimension
    currency = account.limits.currency if account.limits is not None else ""
    spent, limit = _amount(dimension, shortage.spent, ""), _amount(dimension, shortage.limit, currency)
    message = f"the budget of agent {account.agent!r} is spent: {spent} of {limit}"
    if spenders := _spenders(account, dimension):
        message += f" ({spenders})"
    if shortage.wanted and shortage.spent < shortage.limit:
        message += f"; the next model call of {agent!r} may take {_amount(dimension, shortage.wanted, currency)}"
    shown = root[:_SHOWN]
    suggestion = (
        f"`gdn budget {shown}` shows it all. Raise limits.{dimension} of the agent's Extension/budget, or ask for less."
    )
    return GoondanError(error_payload("E_BUDGET_SPENT", message, suggestion=suggestion))


def left_of(line: BudgetLine, lasted_ms: int) -> list[BudgetLeft]:
    """What is left of each limit of a line. Its tree has used the time `lasted_ms` (milliseconds)."""
    rows = []
    for account in line.accounts:
        limits = account.limits
        for dimension, limit in [] if limits is None else limits.rows:
            used = lasted_ms if dimension == "wallSeconds" else account.spent.of(dimension)
            left = max(0, limit - used - account.held.of(dimension))
            unit = _unit(dimension)
            rows.append(BudgetLeft(account.agent, dimension, left / unit, limit / unit))
    return rows


def report(tree: Tree, lasted_ms: int) -> dict[str, Any]:
    """A tree for `gdn budget`: for each budget its limits, what was spent, by whom, and what is held now."""
    return {
        "rootEvent": tree.root,
        "beganMs": tree.began_ms,
        "endedMs": tree.ended_ms,
        "budgets": [_account(account, lasted_ms) for account in tree.accounts.values()],
    }


def _account(account: Account, lasted_ms: int) -> dict[str, Any]:
    limits = account.limits
    return {
        "agent": account.agent,
        "currency": None if limits is None else limits.currency,
        "limits": {} if limits is None else {name: limit / _unit(name) for name, limit in limits.rows},
        "spent": {**_amounts(account.spent), "wallSeconds": lasted_ms / 1000},
        "held": _amounts(account.held),
        "by": {spender or "unknown": _amounts(amount) for spender, amount in account.by.items()},
    }


def _amounts(amount: Spend) -> dict[str, float]:
    names = [name for name in _WORDS if name != "wallSeconds"]
    return {name: amount.of(name) / NANO if name == "money" else amount.of(name) for name in names}


def _spenders(account: Account, dimension: Dimension) -> str:
    """The agents that have spent it, the largest part first."""
    parts = sorted(((amount.of(dimension), name) for name, amount in account.by.items()), reverse=True)
    named = [(part, name) for part, name in parts if part]
    texts = [
        f"{name[:_SHOWN] if name != UNKNOWN else 'unknown after a crash'} {_amount(dimension, part, '')}"
        for part, name in named[:MAX_SPENDERS]
    ]
    if len(named) > MAX_SPENDERS:
        texts.append(f"{len(named) - MAX_SPENDERS} others")
    return ", ".join(texts)


def _unit(dimension: Dimension) -> int:
    """How many counted pieces are one unit for people."""
    return NANO if dimension == "money" else 1000 if dimension == "wallSeconds" else 1


def _amount(dimension: Dimension, amount: int, currency: str) -> str:
    """An amount in words; with `currency`, also its unit."""
    if dimension == "money":
        return f"{amount / NANO:.6f}".rstrip("0").rstrip(".") + (f" {currency}" if currency else "")
    number = f"{amount / 1000:.0f}" if dimension == "wallSeconds" else f"{amount:,}"
    return f"{number} {_WORDS[dimension]}" if currency else number

"""The budgets of a bundle: what the extension `budget` says for an agent, and whether it can be counted. Pure.

Source: docs/decisions/070.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from goondan.features.budgets.wire import FEATURE, BudgetLimits
from goondan.kernel.bundle.rules import checked, problems, shape
from goondan.schemas.bundle.launch import ExtensionSpec, ModelSpec, is_bundled


class BudgetExtension:
    """The bundled extension `budget`, under whatever names a bundle has it (rules/kinds.py)."""

    feature: Final = FEATURE
    extension: Final = "budget"

    def faults(self, config: Mapping[str, Any]) -> list[str]:
        """None: the schema has all that there is to one config."""
        return []

    def check(self, agents: Sequence[checked.CheckedAgent], report: problems.Report) -> None:
        """Report what cannot be counted."""
        check_budgets(agents, report)

    def part(self, extensions: Sequence[ExtensionSpec]) -> BudgetLimits | None:
        """The limits of an agent."""
        return limits_in(extensions)


EXTENSION: Final = BudgetExtension()


def is_budget(extension: ExtensionSpec) -> bool:
    """Whether this is the bundled extension, under whatever name the bundle has it."""
    return is_bundled(EXTENSION.extension, extension.entry, extension.bundled)


def limits_in(extensions: Sequence[ExtensionSpec]) -> BudgetLimits | None:
    """The limits that an agent's extensions give; None: there are none, or they are no limits (which was reported)."""
    for extension in extensions:
        if is_budget(extension):
            try:
                return msgspec.convert(extension.config.get("limits"), BudgetLimits)
            except msgspec.ValidationError:
                return None
    return None


def check_budgets(agents: Sequence[checked.CheckedAgent], report: problems.Report) -> None:
    """Report an agent with two budgets, and models whose price nobody knows where money is limited: what one agent asks
    of another is charged to both, so that is every model of the swarm.
    """
    wanted: dict[str, str] = {}
    for agent in agents:
        named = [extension.name for extension in agent.extensions if is_budget(extension)]
        if len(named) > 1:
            message = f"an agent has one budget, and {' and '.join(named)} are two"
            place = agent.document.place("spec", "extensions")
            report.error("E_CONFIG_DUPLICATE", message, place, "Put all limits into one of them.")
        limits = limits_in(agent.extensions)
        if limits is not None and limits.money is not None:
            wanted.setdefault(limits.currency, agent.name)
    told: set[str] = set()
    for currency, whose in wanted.items():
        for model, document in (pair for agent in agents for pair in _models(agent)):
            if model.provider == "embedded" or document.resource in told:
                continue
            if model.pricing is None:
                message = f"agent {whose!r} has a budget of money, and nobody knows what {document.resource} costs"
                hint = f"Add pricing: {{inputPerMillion: …, outputPerMillion: …, currency: {currency}}}."
                report.error("E_CONFIG_MISSING_FIELD", message, document.place("spec"), hint)
                told.add(document.resource)
            elif model.pricing.currency != currency:
                own = model.pricing.currency
                message = f"agent {whose!r} has a budget in {currency}, and {document.resource} is priced in {own}"
                hint = "Give all prices and budgets of a bundle in one currency."
                report.error("E_CONFIG_INVALID_VALUE", message, document.place("spec", "pricing"), hint)
                told.add(document.resource)


def _models(agent: checked.CheckedAgent) -> Iterator[tuple[ModelSpec, shape.Document]]:
    """Every model that an agent may ask, with its document."""
    if agent.model is not None and agent.model_document is not None:
        yield agent.model, agent.model_document
    yield from ((fallback.model, fallback.document) for fallback in agent.fallback)

"""Budgets in a bundle: what the extension says, what models cost, and what cannot be counted."""

from __future__ import annotations

import subprocess
import sys

import pytest
from msgspec import structs

from goondan.features.budgets.bundle import limits_in
from goondan.features.budgets.wire import FEATURE, BudgetLimits
from goondan.kernel.bundle.documents import BaseExtensions
from goondan.kernel.bundle.rules.plan import build_plan
from goondan.schemas.bundle.launch import AgentSpec, KernelPlan
from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.usage import Pricing
from tests.unit.kernel.bundle.conftest import GOOD, Look
from tests.unit.kernel.bundle.test_bundled_extensions import own, using

PRICED = "spec:\n  provider: anthropic\n  model: m\n  apiKey: k\n  pricing: {PRICING}\n"


def with_budget(limits: str, pricing: str | None = None) -> str:
    bundle = using(f"{{ref: Extension/budget, config: {{limits: {{{limits}}}}}}}")
    if pricing is None:
        return bundle
    return bundle.replace("spec:\n  provider: embedded\n", PRICED.replace("{PRICING}", f"{{{pricing}}}"), 1)


def plan_of(look: Look, bundle: str) -> KernelPlan:
    seen = look(bundle)
    assert seen.errors == []
    return build_plan(seen.checked, bundle="/b", state_dir="/s", revision="r", documents=[])


def limits_of(spec: AgentSpec) -> BudgetLimits:
    return from_raw(spec.parts[FEATURE], BudgetLimits)


def test_the_plan_has_the_limits_and_the_prices(look: Look) -> None:
    limits = "calls: 100, modelCalls: 5, tokens: 20000, money: 2.5, currency: EUR, wallSeconds: 90.5"
    pricing = "inputPerMillion: 3, outputPerMillion: 15.5, cachedInputPerMillion: 0.3, currency: EUR"
    spec = plan_of(look, with_budget(limits, pricing)).agents["helper"]
    assert limits_of(spec) == BudgetLimits(
        calls=100, model_calls=5, tokens=20_000, money=2.5, currency="EUR", wall_seconds=90.5
    )
    assert spec.model.pricing == Pricing(
        input_per_million=3.0, output_per_million=15.5, cached_input_per_million=0.3, currency="EUR"
    )


def test_the_manifest_knows_the_limits_that_there_are() -> None:
    found = BaseExtensions().find("budget")
    assert found is not None
    assert found.schema is not None
    fields = {field.encode_name for field in structs.fields(BudgetLimits)}
    assert set(found.schema["properties"]["limits"]["properties"]) == fields


def test_without_the_extension_there_is_no_budget(look: Look) -> None:
    assert FEATURE not in plan_of(look, GOOD).agents["helper"].parts


def test_an_own_extension_with_its_code_is_one(look: Look) -> None:
    bundle = own('entry: "@goondan/base/budget", config: {limits: {calls: 7}}') + using("Extension/mine")
    assert limits_of(plan_of(look, bundle).agents["helper"]) == BudgetLimits(calls=7)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ("", "limits"),
        *((f"calls: {wrong}", "calls") for wrong in ("0", "-1", "1.5", "'5'", "true", "null")),
        *((f"money: {wrong}", "money") for wrong in ("0", "-1", "'2.50'", "1.0e+300")),
        *((f"wallSeconds: {wrong}", "wallSeconds") for wrong in ("0", "0.5", "true")),
        ("tokens: 1180591620717411303424", "tokens"),
        ("Calls: 5", "Calls"),
        ("calls: 5, call: 5", "call"),
        ("money: 1, currency: dollars", "currency"),
    ],
)
def test_limits_that_are_none_are_named(look: Look, limits: str, words: str) -> None:
    seen = look(with_budget(limits))
    assert seen.errors, limits
    assert words in seen.errors[0].message


@pytest.mark.parametrize("warn_at", ["-0.1", "1.5", "'0.1'", "null", "true", "[]"])
def test_a_part_that_is_none(look: Look, warn_at: str) -> None:
    assert look(using(f"{{ref: Extension/budget, config: {{limits: {{calls: 5}}, warnAt: {warn_at}}}}}")).errors


def test_a_budget_without_limits_is_refused(look: Look) -> None:
    (error, *_) = look(using("Extension/budget")).errors
    assert (error.code, "limits" in error.message) == ("E_CONFIG_MISSING_FIELD", True)


def test_two_budgets_of_one_agent_are_refused(look: Look) -> None:
    bundle = own('entry: "@goondan/base/budget", config: {limits: {calls: 7}}') + using(
        "Extension/mine\n    - {ref: Extension/budget, config: {limits: {calls: 8}}}"
    )
    (error,) = look(bundle).errors
    assert (error.code, error.message) == ("E_CONFIG_DUPLICATE", "an agent has one budget, and mine and budget are two")


def test_money_needs_the_price_of_every_model_in_one_currency(look: Look) -> None:
    price = "inputPerMillion: 1, outputPerMillion: 2"
    unpriced = with_budget("money: 1", price).replace(f"  pricing: {{{price}}}\n", "")
    (error,) = look(unpriced).errors
    assert error.code == "E_CONFIG_MISSING_FIELD"
    assert error.message == "agent 'helper' has a budget of money, and nobody knows what Model/main costs"
    (error,) = look(with_budget("money: 1, currency: EUR", price)).errors
    assert (error.code, "priced in USD" in error.message) == ("E_CONFIG_INVALID_VALUE", True)
    assert look(with_budget("money: 1")).errors == [], "the embedded console costs nothing"
    assert look(unpriced.replace("money: 1", "calls: 1")).errors == []


@pytest.mark.parametrize("price", ["inputPerMillion: -1, outputPerMillion: 2", "inputPerMillion: 1", "perMillion: 1"])
def test_a_price_that_is_none_is_refused(look: Look, price: str) -> None:
    assert look(with_budget("calls: 1", price)).errors


def test_a_price_in_no_currency_is_refused(look: Look) -> None:
    price = "inputPerMillion: 1, outputPerMillion: 2, currency: euros"
    assert look(with_budget("calls: 1", price)).errors


def test_limits_that_cannot_be_read_are_no_budget() -> None:
    assert limits_in([]) is None


def test_money_needs_the_price_of_models_in_anothers_place(look: Look) -> None:
    price = "inputPerMillion: 1, outputPerMillion: 2"
    head = "---\napiVersion: goondan.ai/v1\nkind: Model\nmetadata: {name: spare}\n"
    spare = head + "spec: {provider: openai, model: s, apiKey: k}\n"
    bundle = with_budget("money: 1", price).replace("  model: m\n", "  model: m\n  fallback: [Model/spare]\n") + spare
    (error,) = look(bundle).errors
    assert error.message == "agent 'helper' has a budget of money, and nobody knows what Model/spare costs"
    priced = bundle.replace("apiKey: k}", "apiKey: k, pricing: {" + price + "}}")
    assert look(priced).errors == []


@pytest.mark.parametrize(
    "load",
    [
        "from goondan.agentproc.turn.parts import kinds; kinds()",
        "from goondan.kernel.broker.__main__ import features; features()",
        "import goondan.kernel.cli.commands.traces",
        "import goondan.toolhost.app",
    ],
    ids=["agent", "broker", "gdn denied", "tool host"],
)
def test_every_process_knows_the_code(load: str) -> None:
    """No handler can speak with it, and a turn that fails by it ends as one that has spent its budget."""
    code = f"{load}; from goondan.schemas.wire.errors import row_of; assert row_of('E_BUDGET_SPENT').refuser"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

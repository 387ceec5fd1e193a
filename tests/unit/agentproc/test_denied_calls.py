"""Who refused a call, and the line that would allow it."""

from __future__ import annotations

from typing import Any

import pytest

from goondan.agentproc.machine.catalog import REFUSERS, refusal, refused_by, unreachable
from goondan.schemas.bundle.launch import AgentSpec, CatalogItem, ModelSpec
from goondan.schemas.traces.turn_notes import RefusedDetail
from goondan.schemas.wire.errors import CODES, row_of

SPEC = AgentSpec(
    name="coder",
    model=ModelSpec(provider="embedded"),
    registry=[CatalogItem(name="bash__exec"), CatalogItem(name="json-query__query")],
    catalog=["bash__exec"],
    state_dir="/s",
    revision="r",
)


def found(code: str, tool: str = "bash__exec", said: str = "no", hint: str | None = None) -> Any:
    return refusal(SPEC, tool, code, said, hint)


def test_each_code_of_a_refusal_has_somebody_who_refuses_and_a_line() -> None:
    known = {*REFUSERS, *(code for code in CODES if row_of(code).refuser)}
    for code in known:
        assert code in CODES
        told = found(code)
        assert isinstance(told, RefusedDetail)
        assert told.allow
        assert (told.code, told.message, told.tool_name) == (code, "no", "bash__exec")
    for code in CODES.keys() - known:
        assert found(code) is None


@pytest.mark.parametrize(
    ("tool", "line"),
    [
        ("json-query__query", "Agent/coder: spec.tools: [Tool/json-query]"),
        ("bash__exec", "an extension of Agent/coder has taken it out of this step, and can leave it in"),
        ("no__such", "nothing: there is no such tool (gdn tool list)"),
    ],
)
def test_the_catalog(tool: str, line: str) -> None:
    told = found("E_TOOL_NOT_IN_CATALOG", tool)
    assert (told.by, told.allow) == ("catalog", line)


@pytest.mark.feature("budgets")
def test_grants_and_budgets_say_it_themselves_and_an_extension_is_named() -> None:
    grant = "Grant it: spec.sandbox.network: {allow: ['x:1']}."
    assert (found("E_SANDBOX_DENIED", hint=grant).by, found("E_SANDBOX_DENIED", hint=grant).allow) == ("grant", grant)
    assert found("E_BUDGET_SPENT").allow == CODES["E_BUDGET_SPENT"]
    error = refused_by("guard", "not here").info
    assert error.message == "Extension/guard refused it: not here"
    told = found(error.code, said=error.message, hint=error.suggestion)
    assert (told.by, told.allow) == ("extension", "the config or the code of Extension/guard, which decides")
    told = unreachable("bash__exec", ["a:1", "b:2"])
    assert (told.by, told.allow) == ("grant", "Tool/bash: spec.sandbox.network: {allow: [a:1, b:2]}")

"""The rules of the bundled extension `approval`: what the broker gets, and what is wrong there."""

from __future__ import annotations

import pytest

from goondan.features.approvals.bundle import EXTENSION
from tests.unit.kernel.bundle.conftest import GOOD, Look

WITH = GOOD.replace("  tools:\n", "  extensions:\n    - {use}\n  tools:\n", 1)
OWN = """\
apiVersion: goondan.ai/v1
kind: Extension
metadata: {name: guard}
spec: {entry: "@goondan/base/approval", config: {default: ask}}
---
"""


def using(config: str) -> str:
    return WITH.replace("{use}", "{ref: Extension/approval, config: " + config + "}")


def test_the_rules_of_an_agent_are_those_of_its_extensions(look: Look) -> None:
    rule = '{tools: ["bash__*"], action: ask, when: {args.command: {startsWith: rm}}, expiresAfter: 15m}'
    use = "{ref: Extension/approval, config: {rules: [" + rule + "]}}\n    - Extension/guard\n    - Extension/logging"
    seen = look(OWN + WITH.replace("{use}", use))
    assert seen.errors == []
    own, guard = EXTENSION.part(seen.checked.agents["helper"].extensions) or []
    assert (own.name, guard.name, guard.default, guard.rules) == ("approval", "guard", "ask", [])
    (found,) = own.rules
    assert (found.tools, found.action, found.expires_s) == (["bash__*"], "ask", 900.0)
    assert [(one.path, one.operator, one.value) for one in found.when] == [(["command"], "startsWith", "rm")]


@pytest.mark.parametrize(
    ("config", "code", "said"),
    [
        ("{rules: [{tools: [x], action: aks}]}", "E_CONFIG_INVALID_VALUE", "rules[0].action"),
        ("{ruels: []}", "E_CONFIG_UNKNOWN_FIELD", "ruels"),
        ("{rules: [{tools: [x], action: ask, when: {command: {equals: 1}}}]}", "E_CONFIG_INVALID_VALUE", "args.NAME"),
        ("{rules: [{tools: [x], action: ask, expiresAfter: soon}]}", "E_CONFIG_INVALID_VALUE", "expiresAfter"),
        ('{rules: [{tools: [x], action: ask, when: {args.a: {matches: "*****************"}}}]}', None, "stars"),
    ],
)
def test_a_mistake_in_a_rule_is_an_error_of_the_bundle(look: Look, config: str, code: str | None, said: str) -> None:
    (error,) = look(using(config)).errors
    assert error.code == (code or "E_CONFIG_INVALID_VALUE")
    assert said in error.message


def test_an_extension_of_that_name_that_is_the_bundles_own_has_no_rules(look: Look) -> None:
    """Its config is its own: nobody but the bundled code promises what these words mean."""
    document = OWN.replace("guard", "approval").replace("@goondan/base/approval", "./ext/a.py")
    files = {"ext/a.py": "def register(api): ..."}
    seen = look(document + using("{rules: [{tools: [x], action: ask}]}"), files=files)
    assert seen.errors == []
    assert EXTENSION.part(seen.checked.agents["helper"].extensions) is None

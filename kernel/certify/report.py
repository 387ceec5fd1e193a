"""What a certificate says: a row for each rule, made from what was played. Pure.

Source: docs/certify.md; docs/design/tests.md section 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from goondan.kernel.certify.trace import Played, Rule

Outcome = Literal["holds", "broken", "not offered"]


class Row(Struct, rename="camel"):
    """A rule, and what was seen."""

    #: The heading of the document that states it.
    section: str
    #: It, in one line.
    rule: str
    #: Ids of the document's sentences.
    ids: list[str]
    #: `not offered`: the program said that it cannot do what the rule is about.
    outcome: Outcome
    #: What broke it, or in how many scenarios there was an occasion.
    seen: str


class Report(Struct, rename="camel"):
    """The document of --json."""

    #: Every rule that was tried holds.
    certified: bool
    #: What was certified: `client` or `worker`.
    kind: str
    #: Its argument list.
    command: list[str]
    #: Each rule.
    rules: list[Row]


def report(kind: str, command: Sequence[str], played: Sequence[Played], rules: Sequence[Rule]) -> Report:
    """The rows of the scenarios, then those of the rules for which there was an occasion."""
    rows = [_row(one) for one in played] + [row for rule in rules if (row := _judged(rule, played)) is not None]
    return Report(all(row.outcome != "broken" for row in rows), kind, list(command), rows)


def _row(one: Played) -> Row:
    scenario = one.scenario
    outcome: Outcome = "broken" if one.fault is not None else "holds" if one.offered else "not offered"
    seen = one.fault or ("as it should" if one.offered else "it cannot do this")
    return Row(scenario.section, scenario.name, scenario.must, outcome, seen)


def _judged(rule: Rule, played: Sequence[Played]) -> Row | None:
    judged = [(one.scenario.name, found) for one in played if (found := rule.judge(one.trace)) is not None]
    if not judged:
        return None
    broken = [(name, found) for name, found in judged if found]
    if not broken:
        return Row(rule.section, rule.text, list(rule.must), "holds", f"in {len(judged)} scenarios")
    name, found = broken[0]
    more = f" (and in {len(broken) - 1} more)" if len(broken) > 1 else ""
    return Row(rule.section, rule.text, list(rule.must), "broken", f"{found[0]}, in: {name}{more}")

"""Scenarios as they are written down. A file has `short` (steps for which one word stands), `rules` and `scenarios`.

In the steps of a word, `%n` is the number that it is given, `%key` any other value, and a map with `%more` gets all the
values that it is given besides. `each` of a scenario is a list of such values: one scenario for each of them. Pure.

Source: docs/certify.md; schemas/vectors/README.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from goondan.kernel.certify.trace import Rule, Scenario
from goondan.schemas.errors import fail


def read(document: dict[str, Any], judges: Sequence[Any]) -> tuple[list[Scenario], list[Rule]]:
    """The scenarios and the rules of a file. `judges`: functions whose names are those of the rules."""
    short = document.get("short", {})
    scenarios = []
    for one in document["scenarios"]:
        for values in one.pop("each", [{}]):
            made = _put(one, values, {})
            steps = [step for written in made["steps"] for step in _whole(written, short)]
            scenarios.append(scenario(made | {"steps": steps}))
    judge = {one.__name__: one for one in judges}
    rules = [
        Rule(row["section"], row["text"], judge[name], row.get("must", [])) for name, row in document["rules"].items()
    ]
    return scenarios, rules


def scenario(one: dict[str, Any]) -> Scenario:
    """A scenario whose steps are whole."""
    long = one.get("long", False) or sum(step.get("passes", 0) for step in one["steps"]) > 2000
    return Scenario(one["name"], one["section"], one["steps"], one.get("must", []), long, one.get("offered"))


def _whole(step: dict[str, Any] | str, short: dict[str, Any]) -> list[dict[str, Any]]:
    whole: dict[str, Any] = {step: {}} if isinstance(step, str) else step
    name = next(iter(whole))
    if name not in short:
        return [whole]
    given = whole[name] if isinstance(whole[name], dict) else {"n": whole[name]}
    values = {"instanceKey": "default"} | given
    more = {key: value for key, value in given.items() if key != "n"}
    return [_put(one, values, more) for written in short[name] for one in _whole(written, short)]


def _put(value: Any, values: dict[str, Any], more: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        made = {key: _put(item, values, more) for key, item in value.items() if key != "%more"}
        return _merged(made, more) if "%more" in value else made
    if isinstance(value, list):
        return [_put(item, values, more) for item in value]
    if not isinstance(value, str) or "%" not in value:
        return value
    for key, item in values.items():
        if value == f"%{key}":
            return item
        value = value.replace(f"%{key}", item if isinstance(item, str) else json.dumps(item))
    return value


def _merged(made: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    deep = {
        key: _merged(made[key], item)
        for key, item in more.items()
        if isinstance(item, dict) and isinstance(made.get(key), dict)
    }
    return made | more | deep


def chosen(scenarios: Sequence[Scenario], words: Sequence[str]) -> list[Scenario]:
    """Those whose name or section has one of the words, without words all; the longest first. Raises E_USAGE."""
    low = [word.lower() for word in words]
    found = [one for one in scenarios if not low or any(word in f"{one.section} {one.name}".lower() for word in low)]
    if not found:
        raise fail("E_USAGE", f"no scenario has {words[0]!r} in its name or section")
    return sorted(found, key=lambda one: not one.long)

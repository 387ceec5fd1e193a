"""What `gdn budget` prints of the broker's answer."""

from __future__ import annotations

from typing import Any

from goondan.features.budgets.command import render


def amounts(**given: float) -> dict[str, float]:
    names = ("calls", "modelCalls", "toolCalls", "tokens", "inputTokens", "outputTokens", "money", "wallSeconds")
    return {name: given.get(name, 0) for name in names}


def tree(**changes: Any) -> dict[str, Any]:
    budget = {
        "agent": "lead",
        "currency": "EUR",
        "limits": {"calls": 200.0, "money": 2.5, "wallSeconds": 1800.0},
        "spent": amounts(calls=61, money=0.412305, wallSeconds=42.1),
        "held": amounts(calls=8, money=0.09),
        "by": {
            "lead": amounts(calls=9, modelCalls=1, toolCalls=8),
            "worker\x1b[1m": amounts(calls=52, tokens=81_200, money=0.39),
            "unknown": amounts(),
        },
    }
    return {"rootEvent": "e1", "beganMs": 1, "endedMs": None, "budgets": [budget], **changes}


def test_a_message_its_limits_and_who_has_spent_most_first() -> None:
    lines = render({"trees": [tree(), tree(rootEvent="e0", endedMs=5, budgets=[])], "more": 3})
    assert lines[:5] == [
        "e1 is worked on",
        "  budget of lead",
        "    calls: 61 of 200 spent, 8 held",
        "    money: 0.412305 of 2.5 EUR spent, 0.09 held",
        "    wallSeconds: 42.1 of 1,800 spent",
    ]
    assert "\x1b" not in lines[5]
    assert lines[5].endswith(": calls 52, tokens 81,200, money 0.39")
    assert lines[6:] == [
        "    lead: calls 9, modelCalls 1, toolCalls 8",
        "    unknown: nothing",
        "e0 is over",
        "and 3 more",
    ]


def test_nothing_is_counted() -> None:
    assert render({"trees": [], "more": 0}) == ["no message has a budget"]

"""Which calls a person decides about: the first rule that fits, by the tool's name and by argument."""

from __future__ import annotations

import time
from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.features.approvals.wire import (
    DEFAULT_EXPIRY_S,
    MAX_STARS,
    UNREADABLE,
    concerns,
    decide,
    matches,
    read_policy,
)


def action(config: dict[str, Any], tool: str, args: Any) -> str:
    policy, problems = read_policy("p", config)
    assert not problems
    found = decide([policy], tool, args).action
    assert found == "allow" or concerns([policy], tool), "a call that is held back is looked at"
    return found


def when(condition: dict[str, Any], value: Any, path: str = "args.a") -> bool:
    """Whether a call with this argument is asked about."""
    args = {} if value is KeyError else {"a": value}
    return action({"rules": [{"tools": ["x"], "action": "ask", "when": {path: condition}}]}, "x", args) == "ask"


@pytest.mark.parametrize(
    ("condition", "fits", "fits_not"),
    [
        ({"equals": "ls"}, ["ls"], ["ls ", "LS", ["ls"], None, KeyError]),
        ({"equals": 1}, [1, 1.0], [True, "1", KeyError]),
        ({"equals": False}, [False], [0, None, ""]),
        ({"equals": {"b": [1]}}, [{"b": [1]}], [{"b": [1, 2]}]),
        ({"in": ["a", 2]}, ["a", 2], ["b", True, KeyError]),
        ({"startsWith": "rm"}, ["rm -rf /", "rm"], ["sudo rm", "", KeyError, ["rm"]]),
        ({"endsWith": ".py"}, ["x.py"], ["x.pyc"]),
        ({"contains": "sudo"}, ["x; sudo y", ["sudo"], {"b": "sudo"}], ["SUDO", KeyError]),
        ({"matches": "git push*--force*"}, ["git push -u origin --force\nx"], ["git push", "x git push --force"]),
        ({"exists": True}, [None, "", 0], [KeyError]),
        ({"exists": False}, [KeyError], [None]),
        ({"startsWith": "a", "endsWith": "z"}, ["a to z"], ["a", "z"]),
    ],
)
def test_conditions(condition: dict[str, Any], fits: list[Any], fits_not: list[Any]) -> None:
    assert [when(condition, value) for value in fits] == [True] * len(fits)
    assert [when(condition, value) for value in fits_not] == [False] * len(fits_not)


def test_a_path_leads_into_objects_only() -> None:
    assert when({"equals": 1}, {"b": 1}, "args.a.b")
    assert not when({"equals": 1}, [1], "args.a.0")
    assert not when({"equals": 1}, "b", "args.a.b")


def test_the_first_rule_decides_and_then_the_default() -> None:
    config = {
        "default": "deny",
        "rules": [
            {"tools": ["bash__*"], "action": "allow", "when": {"args.command": {"in": ["ls", "pwd"]}}},
            {"tools": ["bash__exec", "file-system__write"], "action": "ask"},
        ],
    }
    assert action(config, "bash__exec", {"command": "ls"}) == "allow"
    assert action(config, "bash__exec", {"command": "ls; rm x"}) == "ask"
    assert action(config, "bash__script", {"command": "x"}) == "deny"
    assert action(config, "file-system__write", {}) == "ask"


def test_the_strictest_of_several_policies_counts() -> None:
    policies = [
        read_policy(name, {"rules": [{"tools": ["*"], "action": what}]})[0]
        for name, what in (("a", "ask"), ("b", "allow"), ("c", "deny"), ("d", "ask"))
    ]
    assert decide(policies, "x", {}).action == "deny"
    assert decide(policies[:2], "x", {}).action == "ask"
    assert decide([], "x", {}).action == "allow"


def test_what_cannot_be_read_is_never_let_through_by_a_condition() -> None:
    condition = {"args.a": {"equals": 1}}
    for what, then in (("ask", "ask"), ("deny", "deny"), ("allow", "ask")):
        config = {"rules": [{"tools": ["x"], "action": what, "when": condition}, {"tools": ["x"], "action": "ask"}]}
        assert action(config, "x", UNREADABLE) == then


@given(st.text("ab*", max_size=12), st.text("ab", max_size=12))
def test_stars_mean_what_they_mean_everywhere(pattern: str, text: str) -> None:
    assert matches(text, pattern) == fnmatchcase(text, pattern)


def test_no_text_takes_long() -> None:
    pattern = "*".join(["a" * 20 + "b"] * MAX_STARS)
    began = time.process_time()
    assert not matches("a" * (256 << 10), pattern)
    assert not matches(("a" * 21 + "b") * 10_000, pattern + "c")
    assert time.process_time() - began < 1.0


def test_times() -> None:
    def expires(value: Any) -> float:
        policy, problems = read_policy("p", {"rules": [{"tools": ["x"], "action": "ask", "expiresAfter": value}]})
        return -1.0 if problems else policy.rules[0].expires_s

    assert [expires(value) for value in ("90s", "15m", "12h", "7d", 30, 1.5)] == [90, 900, 43_200, 604_800, 30, 1.5]
    wrongs: list[Any] = ["", "m", "0s", "91d", "1w", "-5s", "1.5h", 0, True, None, [], "٣s", "9" * 50 + "s"]
    for wrong in wrongs:
        assert expires(wrong) == -1.0, wrong
    assert read_policy("p", {"rules": [{"tools": ["x"], "action": "ask"}]})[0].rules[0].expires_s == DEFAULT_EXPIRY_S


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"rule": []}, ("rule",)),
        ({"default": "no"}, ("default",)),
        ({"rules": {}}, ("rules",)),
        ({"rules": ["x"]}, ("rules", 0)),
        ({"rules": [{"tools": [], "action": "ask"}]}, ("rules", 0, "tools")),
        ({"rules": [{"tools": "x", "action": "ask"}]}, ("rules", 0, "tools")),
        ({"rules": [{"tools": ["x"]}]}, ("rules", 0, "action")),
        ({"rules": [{"tools": ["x"], "action": "ask", "reson": "x"}]}, ("rules", 0, "reson")),
        ({"rules": [{"tools": ["x"], "action": "deny", "expiresAfter": "1h"}]}, ("rules", 0, "expiresAfter")),
        ({"rules": [{"tools": ["x"], "action": "ask", "when": {"a": {"equals": 1}}}]}, ("rules", 0, "when", "a")),
        (
            {"rules": [{"tools": ["x"], "action": "ask", "when": {"args.a": {"like": "x"}}}]},
            ("rules", 0, "when", "args.a", "like"),
        ),
        (
            {"rules": [{"tools": ["x"], "action": "ask", "when": {"args.a": {"matches": "*" * 17}}}]},
            ("rules", 0, "when", "args.a", "matches"),
        ),
        ({"rules": [{"tools": ["x"], "action": "ask", "when": {"args.a": {}}}]}, ("rules", 0, "when", "args.a")),
    ],
)
def test_every_mistake_is_named_where_it_is(config: dict[str, Any], path: tuple[str | int, ...]) -> None:
    assert [problem.path for problem in read_policy("p", config)[1]] == [path]

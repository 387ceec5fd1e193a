"""Which calls a person decides about: the first rule that fits, by the tool's name and by argument.

Source: docs/approvals.md.
"""

from __future__ import annotations

import time
from fnmatch import fnmatchcase
from itertools import permutations
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

MISSING: Any = object()


def policy(config: Any) -> Any:
    found, problems = read_policy("p", config)
    assert not problems, (config, problems)
    return found


def action(config: dict[str, Any], tool: str, args: Any) -> str:
    made = policy(config)
    found = decide([made], tool, args).action
    assert found == "allow" or concerns([made], tool), "a call that is held back is looked at"
    return found


def when(condition: dict[str, Any], value: Any, path: str = "args.a") -> bool:
    """Whether a call with this argument is asked about."""
    args = {} if value is MISSING else {"a": value}
    return action({"rules": [{"tools": ["x"], "action": "ask", "when": {path: condition}}]}, "x", args) == "ask"


#: A condition, what fits it, and what does not.
FITS: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"equals": "ls"}, ["ls"], ["ls ", "LS", ["ls"], None, MISSING]),
    ({"equals": 1}, [1, 1.0], [True, "1", MISSING]),
    ({"equals": False}, [False], [0, None, ""]),
    ({"in": ["a", 2]}, ["a", 2], ["b", True, MISSING]),
    ({"endsWith": ".py"}, ["x.py"], ["x.pyc"]),
    ({"matches": "git push*--force*"}, ["git push -u origin --force\nx"], ["git push", "x git push --force"]),
    ({"equals": "é"}, ["é"], ["e\u0301", "E", "É", " é"]),
    ({"equals": None}, [None], [MISSING, "", 0, False, "null"]),
    ({"equals": 0}, [0, 0.0, -0.0], [False, "0", None, ""]),
    ({"equals": 10**18}, [10**18], [10**18 + 1, str(10**18)]),
    ({"equals": {"b": 1, "a": 2}}, [{"a": 2, "b": 1}], [{"a": 2}, {"a": 2, "b": True}, [["a", 2], ["b", 1]]]),
    ({"equals": [1, 2]}, [[1, 2]], [[2, 1], [1, 2, 3], "[1,2]"]),
    ({"in": [None]}, [None], [MISSING, ""]),
    ({"in": ["git status"]}, ["git status"], ["git status; rm -rf .", "git status ", "git\tstatus", "GIT STATUS"]),
    ({"in": [[1], {"a": 1}]}, [[1], {"a": 1}], [1, {"a": 2}]),
    ({"exists": True}, [None, "", 0, False, [], {}], [MISSING]),
    ({"exists": False}, [MISSING], [None, "", 0, False]),
    ({"startsWith": "5"}, [5, 55, 5.5, "5"], [15, MISSING]),
    ({"startsWith": "true"}, [True, "true"], [False, "True", 1]),
    ({"startsWith": "rm"}, ["rm"], [" rm", "\nrm", "Rm", "r\u200bm", "ｒｍ"]),
    ({"endsWith": "\n"}, ["a\n"], ["a", "a\n "]),
    ({"contains": "sudo"}, [["a", "sudo"], {"sudo": 1}, "pseudosudo"], ["su do", ["su", "do"], MISSING]),
    ({"contains": "한"}, ["한국", ["한국"], {"한": 1}], ["\u1112\u1161\u11ab"]),
    ({"matches": "*"}, ["", "a\nb", "x" * 100_000, 5, None], [MISSING]),
    ({"matches": "a*b"}, ["ab", "a\nb", "a\r\nxb"], ["ab\n", "xab", "aB"]),
    ({"matches": "a.b[cd]?"}, ["a.b[cd]?"], ["axbc", "a.bc", "a.b[cd]"]),
    ({"matches": "**a**"}, ["a", "xaX"], ["b", ""]),
    ({"matches": "*.env*"}, ["/x/.env", ".env.local", "a\n.env"], ["env", "x.nev"]),
    ({"matches": "a\\*b"}, ["a\\b", "a\\xb"], ["a*b"]),
    ({"startsWith": "a", "endsWith": "b"}, ["ab", "a b"], ["a", "b", "ba"]),
    ({"exists": True, "equals": None}, [None], [MISSING]),
    ({"exists": False, "equals": 1}, [], [1, MISSING]),
    ({"contains": "x", "in": ["x", "xy"]}, ["x", "xy"], ["xyz", "y"]),
]


@pytest.mark.parametrize(("condition", "fits", "fits_not"), FITS)
def test_conditions(condition: dict[str, Any], fits: list[Any], fits_not: list[Any]) -> None:
    assert [value for value in fits if not when(condition, value)] == []
    assert [value for value in fits_not if when(condition, value)] == []


def test_a_path_leads_into_objects_only() -> None:
    leads: list[Any] = [{"b": 1}, {"b": None}]
    leads_nowhere: list[Any] = [{}, [{"b": 1}], "b", None, MISSING, {"B": 1}]
    for value in (*leads, *leads_nowhere):
        there = value in leads
        assert when({"exists": True}, value, "args.a.b") is there, value
        assert when({"exists": False}, value, "args.a.b") is not there, value
    assert not when({"equals": 1}, [1], "args.a.0")


@pytest.mark.parametrize("args", [None, [], "text", 5, True, [["command", "x"]]])
def test_arguments_that_are_no_object_have_no_argument(args: Any) -> None:
    """What cannot be looked into must not slip through what asks, nor be allowed by what allows."""
    asks = {"rules": [{"tools": ["*"], "action": "ask"}]}
    assert action(asks, "t__x", args) == "ask"
    denies = {"rules": [{"tools": ["*"], "action": "allow", "when": {"args.a": {"exists": True}}}], "default": "deny"}
    assert action(denies, "t__x", args) == "deny"


def test_the_first_rule_that_fits_decides_whichever_is_stricter() -> None:
    deny, ask, allow = ({"tools": ["t__*"], "action": one} for one in ("deny", "ask", "allow"))
    for rules, first in (([deny, allow], "deny"), ([allow, deny], "allow"), ([ask, deny], "ask"), ([ask, ask], "ask")):
        assert action({"rules": rules}, "t__x", {}) == first
    narrow = {"tools": ["t__x"], "action": "deny", "when": {"args.a": {"equals": 1}}}
    assert action({"rules": [narrow, allow], "default": "ask"}, "t__x", {"a": 1}) == "deny"
    assert action({"rules": [narrow, allow], "default": "ask"}, "t__x", {"a": 2}) == "allow"
    assert action({"rules": [narrow, allow], "default": "ask"}, "u__x", {"a": 1}) == "ask"


def test_nothing_fits_and_nothing_is_written() -> None:
    assert action({"rules": []}, "t__x", {}) == "allow"
    for default in ("allow", "ask", "deny"):
        assert action({"rules": [], "default": default}, "t__x", {}) == default
        assert action({"rules": [{"tools": ["u__*"], "action": "allow"}], "default": default}, "t__x", {}) == default


def test_patterns_of_tools() -> None:
    for pattern, fits, fits_not in [
        ("bash__*", ["bash__exec", "bash__"], ["xbash__exec", "Bash__exec", "bash_exec", "bash"]),
        ("*", ["a", "a__b", "a__b__c"], []),
        ("*__delete", ["x__delete"], ["x__delete2", "delete"]),
        ("bash__exec", ["bash__exec"], ["bash__exec2", "bash__exe"]),
        ("b?sh__*", ["bash__x"], ["baash__x", "bsh__x"]),
        ("[ab]__x", ["a__x"], ["c__x", "ab__x"]),
        ("a.*", ["a.x"], ["abx"]),
        ("a*b*c", ["abc", "axbxc", "abcbc"], ["acb", "ab"]),
    ]:
        config = {"rules": [{"tools": [pattern], "action": "deny"}]}
        assert [name for name in fits if action(config, name, {}) != "deny"] == [], pattern
        assert [name for name in fits_not if action(config, name, {}) != "allow"] == [], pattern


def test_of_several_extensions_the_strictest_counts_in_every_order() -> None:
    made = [policy({"rules": [], "default": one}) for one in ("allow", "ask", "deny")]
    for few in ([made[0]], made[:2], made):
        strictest = ("allow", "ask", "deny")[len(few) - 1]
        for order in permutations(few):
            assert decide(list(order), "t__x", {}).action == strictest
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


RULE: dict[str, Any] = {"tools": ["t__*"], "action": "ask"}


def test_times() -> None:
    def expires(value: Any) -> float:
        found, problems = read_policy("p", {"rules": [{**RULE, "expiresAfter": value}]})
        return -1.0 if problems else found.rules[0].expires_s

    good = {"1s": 1, "90s": 90, "15m": 900, "12h": 43_200, "7d": 604_800, "90d": 7_776_000, 30: 30, 1.5: 1.5, 1: 1}
    assert {value: expires(value) for value in good} == good
    texts = ["", "m", "5", "0s", "91d", "1w", "1y", "-5s", "1.5h", "5 m", "1h30m", "5M", "٥m", "1m\n", "9" * 50 + "s"]
    for wrong in (*texts, 0, -5, 1e9, True, None, [], ["1h"]):
        assert expires(wrong) == -1.0, wrong
    assert policy({"rules": [RULE]}).rules[0].expires_s == DEFAULT_EXPIRY_S


#: Rules that are none.
BAD: list[Any] = [
    {"rules": None},
    {"rules": "ask"},
    {"rules": [None]},
    {"rules": [[]]},
    {"rules": [{}]},
    {"rules": [{"action": "ask"}]},
    {"rules": [{"tools": [5], "action": "ask"}]},
    {"rules": [{"tools": [""], "action": "ask"}]},
    {"rules": [{**RULE, "action": "Ask"}]},
    {"rules": [{**RULE, "action": "maybe"}]},
    {"rules": [{**RULE, "action": None}]},
    {"rules": [{**RULE, "actions": "x"}]},
    {"rules": [{**RULE, "reason": 5}]},
    {"rules": [{**RULE, "when": None}]},
    {"rules": [{**RULE, "when": []}]},
    {"rules": [{**RULE, "when": {"command": {"equals": 1}}}]},
    {"rules": [{**RULE, "when": {"args": {"equals": 1}}}]},
    {"rules": [{**RULE, "when": {"args.": {"equals": 1}}}]},
    {"rules": [{**RULE, "when": {"args.a.": {"equals": 1}}}]},
    {"rules": [{**RULE, "when": {"args..a": {"equals": 1}}}]},
    {"rules": [{**RULE, "when": {"arg.a": {"equals": 1}}}]},
    {"rules": [{**RULE, "when": {"args.a": "x"}}]},
    {"rules": [{**RULE, "when": {"args.a": None}}]},
    {"rules": [{**RULE, "when": {"args.a": {"regex": ".*"}}}]},
    {"rules": [{**RULE, "when": {"args.a": {"Equals": 1}}}]},
    {"rules": [{**RULE, "when": {"args.a": {"in": "abc"}}}]},
    {"rules": [{**RULE, "when": {"args.a": {"in": []}}}]},
    {"rules": [{**RULE, "when": {"args.a": {"startsWith": ""}}}]},
    {"rules": [{**RULE, "when": {"args.a": {"matches": ""}}}]},
    {"rules": [{**RULE, "when": {"args.a": {"in": {"a": 1}}}}]},
    {"rules": [{**RULE, "when": {"args.a": {"startsWith": 5}}}]},
    {"rules": [{**RULE, "when": {"args.a": {"endsWith": None}}}]},
    {"rules": [{**RULE, "when": {"args.a": {"contains": ["x"]}}}]},
    {"rules": [{**RULE, "when": {"args.a": {"matches": True}}}]},
    {"rules": [{**RULE, "when": {"args.a": {"exists": "yes"}}}]},
    {"rules": [{**RULE, "when": {"args.a": {"exists": 1}}}]},
    {"rules": [RULE], "default": "maybe"},
    {"rules": [RULE], "default": None},
    {"rules": [RULE], "defaults": "ask"},
]


def test_rules_that_are_none_are_said_and_never_an_exception() -> None:
    assert [config for config in BAD if not read_policy("p", config)[1]] == []


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

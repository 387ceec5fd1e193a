"""Twists of approvals and budgets as a bundle writes them: docs/approvals.md and docs/budgets.md, nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from goondan.features.approvals.wire import decide, read_policy

MISSING: Any = object()


def policy(config: Any) -> Any:
    found, problems = read_policy("approval", config)
    assert not problems, (config, problems)
    return found


def action(config: Any, tool: str, args: Any) -> str:
    return str(decide([policy(config)], tool, args).action)


def asked(condition: dict[str, Any], value: Any, path: str = "args.a") -> bool:
    rule = {"tools": ["t__x"], "action": "ask", "when": {path: condition}}
    return action({"rules": [rule]}, "t__x", {} if value is MISSING else {"a": value}) == "ask"


FITS: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
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


@pytest.mark.parametrize("at", range(len(FITS)))
def test_conditions(at: int) -> None:
    condition, fits, not_these = FITS[at]
    assert [value for value in fits if not asked(condition, value)] == []
    assert [value for value in not_these if asked(condition, value)] == []


def test_a_path_goes_through_objects_only() -> None:
    for value, there in [
        ({"b": 1}, True),
        ({"b": None}, True),
        ({}, False),
        ([{"b": 1}], False),
        ("b", False),
        (None, False),
        (MISSING, False),
        ({"B": 1}, False),
    ]:
        assert asked({"exists": True}, value, "args.a.b") is there, value
        assert asked({"exists": False}, value, "args.a.b") is not there, value


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
    from itertools import permutations

    made = [policy({"rules": [], "default": one}) for one in ("allow", "ask", "deny")]
    for few in ([made[0]], made[:2], made):
        strictest = ("allow", "ask", "deny")[len(few) - 1]
        for order in permutations(few):
            assert decide(list(order), "t__x", {}).action == strictest


RULE: dict[str, Any] = {"tools": ["t__*"], "action": "ask"}
BAD: list[Any] = [
    {"rules": None},
    {"rules": {}},
    {"rules": "ask"},
    {"rules": [None]},
    {"rules": [[]]},
    {"rules": [{}]},
    {"rules": [{"tools": ["t"]}]},
    {"rules": [{"action": "ask"}]},
    {"rules": [{"tools": [], "action": "ask"}]},
    {"rules": [{"tools": "t__*", "action": "ask"}]},
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
    {"rules": [{**RULE, "when": {"args.a": {}}}]},
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
    *(
        {"rules": [{**RULE, "expiresAfter": each}]}
        for each in (
            "",
            "5",
            "0s",
            "-1h",
            "1.5h",
            "5 m",
            "1h30m",
            "5M",
            "91d",
            "1y",
            "٥m",
            "1m\n",
            0,
            -5,
            1e9,
            None,
            True,
            ["1h"],
        )
    ),
]


def test_rules_that_are_none_are_said_and_never_an_exception() -> None:
    assert [config for config in BAD if not read_policy("approval", config)[1]] == []


def test_expiries_that_are_good() -> None:
    for each in ("1s", "90s", "15m", "12h", "7d", "90d", "2160h", 1, 0.5e3):
        policy({"rules": [{**RULE, "expiresAfter": each}]})

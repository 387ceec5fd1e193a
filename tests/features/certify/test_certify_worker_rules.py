"""The rules of a worker's certificate: each is broken by a trace that breaks it, and by no other."""

from __future__ import annotations

import math
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from goondan.features.certify.command.rules import Seen, Trace, read
from goondan.features.certify.command.worker import JUDGES

DOCUMENT = (Path(__file__).parents[3] / "schemas" / "WORKER.md").read_text(encoding="utf-8")
SCENARIOS, RULES = read(
    yaml.safe_load(files("goondan.features.certify.command").joinpath("worker.yaml").read_bytes()), JUDGES
)
RULE = {rule.judge.__name__: rule for rule in RULES}
CALL = {"type": "call", "callId": "1"}
INIT = {"type": "init", "permissions": ["agents"]}


def trace(*rows: tuple[Any, Any]) -> Trace:
    return [Seen(float(at), kind, what) for at, (kind, what) in enumerate(rows)]


def result(status: str = "ok", **more: Any) -> dict[str, Any]:
    return {"type": "result", "callId": "1", "status": status, **more}


def ask(number: int = 1, call: str = "1") -> dict[str, Any]:
    return {"type": "ask", "callId": call, "askId": number}


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


#: What breaks each rule, then what does not.
CASES: list[tuple[str, Trace, Trace]] = [
    ("frames", trace(("odd", "a frame that is none")), trace(("got", result()))),
    ("results", trace(("got", result())), trace(("sent", CALL), ("got", result()))),
    (
        "results",
        trace(("sent", CALL), ("got", result()), ("got", result())),
        trace(("sent", CALL), ("got", result("pending", continues=True)), ("got", result())),
    ),
    ("results", trace(("sent", CALL), ("got", result("pending")), ("got", result())), []),
    ("errors", trace(("got", result("error"))), trace(("got", result("error", error={"name": "E"})))),
    ("errors", trace(("got", result("pending", handle="a\nb"))), trace(("got", result("pending", handle="a b")))),
    (
        "values",
        trace(("got", result(output={"a": [math.inf]}))),
        trace(("got", result(output={"a": [0.5, None, "x"]}))),
    ),
    ("values", trace(("got", result(output=b"x"))), []),
    ("values", trace(("got", result(output={1: 2}))), []),
    ("values", trace(("got", result(output=nested(61)))), trace(("got", result(output=nested(60))))),
    (
        "asks",
        trace(("sent", CALL), ("got", ask())),
        trace(("sent", INIT), ("sent", CALL), ("got", ask()), ("got", ask(2))),
    ),
    ("asks", trace(("sent", INIT), ("got", ask(call="2"))), []),
    (
        "asks",
        trace(("sent", INIT), ("sent", CALL), ("got", ask()), ("got", ask())),
        trace(("sent", INIT), ("sent", CALL), ("got", ask()), ("sent", ask() | {"type": "answer"}), ("got", ask())),
    ),
    ("news", [Seen(1.0, "got", {"type": "log"})] * 20_001, [Seen(1.0, "got", {"type": "log"})] * 20_000),
]


@pytest.mark.parametrize(("name", "broken", "kept"), CASES, ids=[f"{n}-{case[0]}" for n, case in enumerate(CASES)])
def test_a_rule_is_broken_by_what_breaks_it(name: str, broken: Trace, kept: Trace) -> None:
    assert RULE[name].judge(broken)
    assert not RULE[name].judge(kept)


def test_every_rule_is_tried_here_and_says_nothing_without_an_occasion() -> None:
    assert {case[0] for case in CASES} == set(RULE)
    assert [rule.text for rule in RULES if rule.judge([]) is not None] == []


def test_sections_and_ids_are_those_of_the_document() -> None:
    headings = {heading.strip("`") for heading in re.findall(r"^##+ (.*)$", DOCUMENT, re.MULTILINE)}
    ids = set(re.findall(r"\[(W-[A-Z]+-\d+)\]", DOCUMENT))
    tried = [(one.section, one.must) for one in SCENARIOS] + [(rule.section, rule.must) for rule in RULES]
    assert {section for section, _ in tried} <= headings
    named = {one for _, must in tried for one in must}
    assert named <= ids
    #: Imports of a folder are the language's; what comes after the end, and what is left behind, only a jail shows.
    assert ids - named == {"W-INIT-3", "W-ASK-3", "W-LEFT-1", "W-LEFT-2", "W-LEFT-3"}

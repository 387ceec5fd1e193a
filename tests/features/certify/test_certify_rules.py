"""The rules of a client's certificate: each is broken by a trace that breaks it, and by no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from goondan.features.certify.command.client import playable, scenarios
from goondan.features.certify.command.rules import Names, Played, Scenario, Seen, Trace, chosen, read, report
from goondan.kernel.cli import execute
from goondan.schemas.wire.errors import GoondanError

PROTOCOL = (Path(__file__).parents[3] / "schemas" / "PROTOCOL.md").read_text(encoding="utf-8")
SCENARIOS, RULES = scenarios()
RULE = {rule.judge.__name__: rule for rule in RULES}
WELCOME = {"type": "welcome", "payload": {"credit": 2}}
ANSWER = {"type": "event", "id": "b.1", "inReplyTo": "q-1", "eventId": "e-1:answer"}
ACK = {"type": "ack", "stage": "done", "eventId": "e-1:answer", "inReplyTo": "b.1"}


def event(n: int = 1, **more: Any) -> dict[str, Any]:
    payload = {"id": f"e-{n}", "type": "user.message", "createdAt": "2026-11-24T09:30:00Z"}
    frame = {"type": "event", "id": f"c.{n}", "to": "a", "instanceKey": "i", "eventId": f"e-{n}", "payload": payload}
    return frame | {"replyTo": {"target": "client", "correlationId": f"q-{n}"}} | more


def hello(**payload: Any) -> dict[str, Any]:
    return {"type": "hello", "id": "c.0", "payload": {"token": "t", "incarnation": "me"} | payload}


def overloaded(ms: int) -> dict[str, Any]:
    return {"type": "error", "inReplyTo": "c.1", "payload": {"code": "E_OVERLOADED", "retryAfterMs": ms}}


def trace(*rows: tuple[Any, ...]) -> Trace:
    """Rows of kind, what, seconds since the last one (0), connection (1)."""
    made, now = [], 0.0
    for kind, what, *rest in rows:
        now += rest[0] if rest else 0.0
        made.append(Seen(now, kind, what, rest[1] if len(rest) > 1 else 1))
    return made


#: Rules of a client that its certificate cannot see.
UNSEEN = {"C-DEFAULT-1", "C-RECEIVE-3", "C-RECEIVE-7", "C-BLOB-3", "C-BLOB-12", "C-LIVE-3"}
#: What breaks each rule, then what does not.
CASES: list[tuple[str, Trace, Trace]] = [
    ("routing_ids", trace(("link", "ab" * 5)), trace(("link", "ab" * 16), ("link", None))),
    ("frames", trace(("odd", "2 parts")), trace(("got", event()))),
    ("frames", trace(("got", {"type": "tool.call"})), trace(("got", {"type": "admin"}))),
    ("frames", trace(("odd", "no msgpack")), trace(("got", event()), ("odd", "a line of rubbish"))),
    ("names", trace(("got", event(eventId="a/b"))), trace(("got", event()))),
    ("names", trace(("got", event(instanceKey="a\x9bb"))), trace(("got", event(instanceKey="한국")))),
    ("names", trace(("got", event(replyTo={"target": "client", "correlationId": ""}))), trace(("got", event()))),
    (
        "hello_first",
        trace(("got", hello()), ("got", event()), ("sent", WELCOME)),
        trace(("got", hello()), ("sent", WELCOME), ("got", event()), ("got", event(), 0, 2), ("got", hello(), 0, 2)),
    ),
    ("hello_first", trace(("got", event())), trace(("got", hello()), ("got", {"type": "ping"}))),
    ("acknowledged", trace(("sent", ANSWER), ("got", ACK), ("got", ACK)), trace(("sent", ANSWER), ("got", ACK))),
    ("acknowledged", trace(("sent", ANSWER), ("got", event(), 2)), []),
    (
        "order",
        trace(
            ("sent", WELCOME),
            ("got", event(1)),
            ("got", event(2)),
            ("sent", WELCOME, 0, 2),
            ("got", event(2), 0, 2),
            ("got", event(1), 0, 2),
        ),
        # The second is seen first, on a connection that is not welcome: nobody takes it there.
        trace(("got", event(2)), ("sent", WELCOME, 0, 2), ("got", event(1), 0, 2), ("got", event(2), 0, 2)),
    ),
    ("repeats", trace(("got", event()), ("got", event(id="c.9"))), trace(("got", event()), ("got", event(live=True)))),
    ("repeats", trace(("got", event()), ("got", event(payload={}))), []),
    (
        "credit",
        trace(("sent", WELCOME), *(("got", event(n)) for n in (1, 2, 3))),
        trace(
            ("sent", WELCOME),
            ("got", event(1)),
            ("got", event(2)),
            ("sent", {"type": "ack", "inReplyTo": "c.1"}),
            ("got", event(3)),
        ),
    ),
    (
        "deadlines",
        trace(("got", event(deadlineMs=9000)), ("got", event(deadlineMs=9000), 2)),
        trace(("got", event(deadlineMs=9000)), ("got", event(deadlineMs=7100), 2)),
    ),
    (
        "blobs",
        trace(
            ("file", {"asked": {"file": "a" * 32, "size": 1}, "found": {"file": "a" * 32, "size": 2}, "mode": 0o600})
        ),
        trace(
            ("file", {"asked": {"file": "a" * 32, "size": 1}, "found": {"file": "a" * 32, "size": 1}, "mode": 0o600})
        ),
    ),
    ("blobs", trace(("file", {"asked": {"file": "../x"}, "found": "no", "mode": 0})), []),
    (
        "lines",
        trace(("do", {"ref": "1"}), ("said", {"ref": "1", "answer": {}}), ("said", {"ref": "1", "error": {}})),
        trace(("do", {"ref": "1"}), ("said", {"ref": "1", "event": {}}), ("said", {"ref": "1", "answer": {}})),
    ),
    ("lines", trace(("said", {"ref": "9", "answer": {}})), []),
]


@pytest.mark.parametrize(
    ("name", "broken", "kept"), CASES, ids=[f"{number}-{case[0]}" for number, case in enumerate(CASES)]
)
def test_a_rule_is_broken_by_what_breaks_it(name: str, broken: Trace, kept: Trace) -> None:
    assert RULE[name].judge(broken)
    assert not RULE[name].judge(kept)


def test_every_rule_is_tried_here() -> None:
    assert {case[0] for case in CASES} == set(RULE)


def test_a_rule_without_an_occasion_says_nothing() -> None:
    assert [rule.text for rule in RULES if rule.judge([]) is not None] == []


def test_sections_and_ids_are_those_of_the_document() -> None:
    headings = {*re.findall(r"^##+ (.*)$", PROTOCOL, re.MULTILINE), "The line protocol"}
    ids = set(re.findall(r"\[(C-[A-Z]+-\d+)\]", PROTOCOL))
    tried = [(one.section, one.must) for one in SCENARIOS] + [(rule.section, rule.must) for rule in RULES]
    assert {section for section, _ in tried} <= headings
    named = {one for _, must in tried for one in must}
    assert named <= ids
    #: What a program does inside itself or with a full machine, what only a broker can send, what the lines cannot say.
    assert ids - named == UNSEEN


def test_a_report_has_what_broke_first_and_how_often() -> None:
    scenario = Scenario("it does", "Ask", [], ["C-ASK-1"])
    bad = trace(("odd", "2 parts"))
    played = [
        Played(scenario, trace(("got", event()))),
        Played(scenario, bad, "why"),
        Played(scenario, bad, None, False),
    ]
    made = report("client", ["x"], played, RULES[:1])
    assert [(row.outcome, row.seen) for row in made.rules] == [
        ("holds", "as it should"),
        ("broken", "why"),
        ("not offered", "it cannot do this"),
        ("broken", "2 parts, in: it does (and in 1 more)"),
    ]
    assert not made.certified


def test_names_are_found_and_put_in() -> None:
    names = Names(["e-1"])
    assert names.differs({"id": "$a", "eventId": "e-1", "more": None}, {"id": "x", "eventId": "y", "z": 1}) is None
    assert names.fill({"id": "$a", "event": "e-1:answer", "text": {"repeat": "ab", "times": 2}}) == {
        "id": "x",
        "event": "y:answer",
        "text": "abab",
    }
    assert names.differs({"id": "$a"}, {"id": "other"}) == 'id is "other", and was "x"'
    assert names.differs({"a": {"b": 1}}, {"a": {"b": 2}}) == "a.b is 2, not 1"
    assert names.differs({"a": None}, {"a": 2}) == "a is 2, not null"
    assert names.differs({"deadlineMs": 900}, {"deadlineMs": 2000}) == "deadlineMs is 2000, and 900 are left"
    with pytest.raises(KeyError):
        Names(["q-1"]).fill("q-1")


def test_a_sequence_that_no_program_can_be_told_is_not_played() -> None:
    assert playable([{"do": "ask", "eventId": "e-1"}, {"do": "cancel", "eventId": "e-1"}, {"passes": 1}])
    assert not playable([{"do": "cancel", "eventId": "e-1"}])
    given_up = [{"do": "ask", "eventId": "e-1"}, {"do": "cancel", "eventId": "e-1"}]
    assert not playable([*given_up, {"told": {"eventId": "e-1", "response": "done"}}])
    assert not playable([{"of the future": 1}])


def test_words_stand_for_steps() -> None:
    document = {
        "short": {
            "one": [{"client": {"id": "c.%n", "payload": {"a": 1, "%more": {}}}}, {"two": "%n"}],
            "two": [{"told": "%n"}],
        },
        "rules": {"lines": {"section": "Ask", "text": "x"}},
        "scenarios": [
            {
                "name": "of %what",
                "section": "Ask",
                "each": [{"what": "a"}, {"what": [1]}],
                "steps": [{"told": "%what"}, {"one": {"n": 3, "b": 2}}],
            }
        ],
    }
    made, rules = read(document, [RULE["lines"].judge])
    assert [one.name for one in made] == ["of a", "of [1]"]
    assert made[1].steps == [{"told": [1]}, {"client": {"id": "c.3", "payload": {"a": 1, "b": 2}}}, {"told": 3}]
    assert rules[0].text == "x"


def test_scenarios_are_chosen_by_words() -> None:
    made = [Scenario("a b", "Ask", []), Scenario("c", "Silence", [], long=True)]
    assert [one.name for one in chosen(made, [])] == ["c", "a b"]
    assert [one.name for one in chosen(made, ["A B"])] == ["a b"]
    with pytest.raises(GoondanError, match="no scenario has 'd'"):
        chosen(made, ["d"])


def test_the_certificates_have_their_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["certify"]) == 2
    listed = capsys.readouterr().err
    assert "Try a client" in listed
    assert "Try a worker" in listed
    for name in ("client", "worker"):
        assert execute(["certify", name, "--help"]) == 0
        shown = capsys.readouterr().out
        assert "-- COMMAND…" in shown
        assert "--json" in shown

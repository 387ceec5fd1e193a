"""Scenarios: how they are written down, what was seen of a program in one, and what a certificate says of them. Pure.

A file has `short` (steps for which one word stands), `rules` and `scenarios`. In the steps of a word, `%n` is the
number that it is given, `%key` any other value, and a map with `%more` gets all the values that it is given besides.
`each` of a scenario is a list of such values: one scenario for each of them. Names that the program chose are put into
what it is sent, and found in what it sends.

Source: docs/certify.md; docs/design/tests.md section 7; schemas/vectors/README.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal

from msgspec import Raw, Struct

from goondan.schemas.wire.errors import fail

Kind = Literal["link", "lost", "got", "odd", "sent", "file", "said", "do", "token"]


class Seen(Struct, frozen=True):
    """One thing that was seen."""

    #: When (seconds, of a clock that does not jump).
    at: float
    #: `link`: the program connected. `lost`: its connection was taken away. `got`: it sent this frame. `odd`: it sent
    #: what is no frame. `sent`: it was sent this frame. `file`: what was found under the name of its blob. `said`: it
    #: wrote this line. `do`: it was told this. `token`: the token was written.
    kind: Kind
    #: The frame, the line, the token, or why it is odd.
    what: Any = None
    #: The connection, counted from 1.
    link: int = 0


Trace = list[Seen]


class Rule(Struct, frozen=True):
    """A rule that holds in every scenario."""

    #: The heading of the document that states it.
    section: str
    #: It, in one line.
    text: str
    #: What in a trace breaks it; None when there was no occasion.
    judge: Callable[[Trace], list[str] | None]
    #: Ids of the document's sentences.
    must: list[str] = []


class Scenario(Struct, frozen=True):
    """A scenario: one rule, shown by a row of steps."""

    #: The rule that it shows, in one line.
    name: str
    #: The heading of the document that states it.
    section: str
    #: What happens, in order.
    steps: list[dict[str, Any]]
    #: Ids of the document's sentences.
    must: list[str] = []
    #: It lasts long because of what it is about, so it begins first.
    long: bool = False
    #: A program that answers with this code does not offer what the scenario is about.
    refused: str | None = None


class Played(Struct):
    """How a scenario went."""

    #: It.
    scenario: Scenario
    #: What was seen.
    trace: Trace
    #: What was not as the steps say. None: all was.
    fault: str | None = None
    #: The program said that it cannot do what the scenario is about.
    offered: bool = True


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


#: Characters of a value that a report shows.
SHOWN: Final = 160
#: Lists in lists that are values, and may come back.
SHALLOW: Final = 60
#: Milliseconds by which a deadline may be more than the steps say: what was waited on a machine is never exact.
DEADLINE_SLACK_MS: Final = 250


class Names:
    """What `$name`, and each text of `chosen`, stands for. The first frame that has it decides."""

    def __init__(self, chosen: Iterable[str] = ()) -> None:
        self.known: dict[str, Any] = {}
        self._chosen = frozenset(chosen)

    def fill(self, value: Any) -> Any:
        """A value of a step as it is sent. {"repeat": text, "times": n} is a long text, {"nest": n} lists in lists.

        Raises KeyError for a text of `chosen` that the program has not said yet.
        """
        if isinstance(value, dict):
            if value.keys() == {"repeat", "times"}:
                return value["repeat"] * value["times"]
            if value.keys() == {"nest"}:
                return _nested(value["nest"])
            return {key: self.fill(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.fill(item) for item in value]
        if isinstance(value, str):
            name, colon, rest = value.partition(":")
            if value in self.known or value in self._chosen:
                return self.known[value]
            return f"{self.known[name]}:{rest}" if colon and name in self._chosen and name in self.known else value
        return value

    def differs(self, wanted: Any, got: Any, at: str = "") -> str | None:
        """Where `got` is not what a step wants; None when it is. It may have more fields. null: the field is absent."""
        if isinstance(wanted, dict) and not wanted.keys() & {"repeat", "nest"}:
            if not isinstance(got, dict):
                return f"{at or 'it'} is {short(got)}"
            return next(
                (
                    text
                    for key, item in wanted.items()
                    if (text := self._field(key, item, got.get(key), at)) is not None
                ),
                None,
            )
        if isinstance(wanted, str) and (wanted.startswith("$") or wanted in self._chosen):
            known = self.known.setdefault(wanted, got)
            good = known == got and isinstance(got, str | int)
            return None if good else f"{at} is {short(got)}, and was {short(known)}"
        if self.fill(wanted) == got and isinstance(wanted, bool) == isinstance(got, bool):
            return None
        return f"{at} is {short(got)}, not {short(self.fill(wanted))}"

    def _field(self, key: str, wanted: Any, got: Any, at: str) -> str | None:
        if got is None and (key == "versions" or (wanted is not None and wanted in (0, False, []))):
            return None  # what has its default is absent
        if key == "exports" and isinstance(got, list):
            return self.differs(sorted(wanted), sorted(map(str, got)), key)
        if key == "deadlineMs" and wanted is not None:
            good = isinstance(got, int) and 1 <= got <= wanted + DEADLINE_SLACK_MS
            return None if good else f"{at}{key} is {short(got)}, and {wanted} are left"
        return self.differs(wanted, got, f"{at}.{key}" if at else key)


def _nested(depth: int) -> Any:
    if depth > SHALLOW:
        return Raw(b"\x91" * (depth - 1) + b"\x90")  # an encoder of values would not go so deep
    return [_nested(depth - 1)] if depth > 1 else []


def short(value: Any) -> str:
    """A value for a report, on one line."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (TypeError, ValueError, RecursionError):  # TypeError: a key that is none of JSON's
        text = repr(type(value))
    text = text.encode("utf-8", "backslashreplace").decode()  # a lone surrogate cannot be printed
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


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

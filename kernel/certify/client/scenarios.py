"""The scenarios of a client: the sequences of schemas/vectors, and those of scenarios.yaml.

A step of scenarios.yaml is one of schemas/vectors/README.md, one of playing.py, or short for several of them:

    greet: {…}           hello, with these fields of the welcome
    ask: {n, …}          question n is asked, and its event comes; event: {n} waits for the event alone
    accept: n            it is accepted
    answer: {n, …}       its answer, with these header fields; `answer` has its own
    acked: {n, id}       the answer is acknowledged
    done: n              answer, acknowledgement, and the asker is told

Source: docs/certify.md; schemas/vectors/README.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any, Final

from kernel.certify.client.model import CREATED_AT
from kernel.certify.client.playing import STEPS
from kernel.certify.trace import Scenario

#: The welcome of a scenario that says nothing else.
WELCOME: Final = {"version": 1, "principal": "client/7", "broker": "b", "credit": 4, "maxFrame": 1 << 20}


#: What every client has to be able to: to connect, to say that it is ready, and to end.
PROBE: Final = Scenario(
    "it connects, says that it is ready, and ends",
    "The line protocol",
    [
        {"broker": {"type": "error", "payload": {"code": "E_HELLO_REQUIRED", "message": "say hello"}}},
        {"client": {"type": "hello", "id": "$hello"}},
        {"broker": {"type": "welcome", "inReplyTo": "$hello", "payload": WELCOME}},
        {"ready": True},
    ],
)


def scenarios() -> list[Scenario]:
    """All of them, those that last long first."""
    import yaml

    recorded = json.loads(files("schemas").joinpath("vectors/sequences.json").read_bytes())["sequences"]
    ours = yaml.safe_load(files("kernel.certify.client").joinpath("scenarios.yaml").read_bytes())
    found = [_scenario(one, one["steps"]) for one in recorded if _playable(one["steps"])]
    for one in ours:
        for variant in one.pop("each", [{}]):
            made = json.loads(_put(json.dumps(one), variant))
            found.append(_scenario(made, [step for short in made["steps"] for step in _whole(short)]))
    return sorted(found, key=lambda scenario: not scenario.long)


def _scenario(one: dict[str, Any], steps: list[dict[str, Any]]) -> Scenario:
    passing = sum(step.get("passes", 0) for step in steps)
    long = passing > 2000 or one.get("long", False)
    return Scenario(one["name"], one["section"], steps, one.get("must", []), long, one.get("offered"))


def _put(text: str, variant: dict[str, Any]) -> str:
    for key, value in variant.items():
        text = text.replace(f'"%{key}"', json.dumps(value)).replace(f"%{key}", str(value))
    return text


def _playable(steps: list[dict[str, Any]]) -> bool:
    """Whether a program can be told what is to be done: it can cancel what it has asked, and nothing else."""
    asked = {step["eventId"] for step in steps if step.get("do") == "ask"}
    known = all(step.keys() & STEPS for step in steps)
    return known and all(step["eventId"] in asked for step in steps if step.get("do") == "cancel")


def _whole(step: dict[str, Any] | str) -> list[dict[str, Any]]:
    whole: dict[str, Any] = {step: {}} if isinstance(step, str) else step
    name = next(iter(whole))
    return _SHORT[name](whole[name]) if name in _SHORT else [whole]


def _greet(welcome: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"broker": {"type": "error", "payload": {"code": "E_HELLO_REQUIRED", "message": "say hello"}}},
        {"client": {"type": "hello", "id": "$hello", "payload": {"versions": [1]}}},
        {"broker": {"type": "welcome", "inReplyTo": "$hello", "payload": WELCOME | welcome}},
    ]


def _ask(given: dict[str, Any]) -> list[dict[str, Any]]:
    n = given["n"]
    do = {
        "do": "ask",
        "eventId": f"e-{n}",
        "correlationId": f"q-{n}",
        "to": "coder",
        "instanceKey": "default",
        "text": "hi",
    }
    return [do | {key: value for key, value in given.items() if key != "n"}, *_event(given)]


def _event(given: dict[str, Any]) -> list[dict[str, Any]]:
    n = given["n"]
    frame = {
        "type": "event",
        "id": f"$e-{n}",
        "to": "coder",
        "eventId": f"e-{n}",
        "instanceKey": given.get("instanceKey", "default"),
    }
    frame["replyTo"] = {"target": "client", "correlationId": f"q-{n}"}
    return [{"client": frame}]


def _accept(n: int) -> list[dict[str, Any]]:
    return [{"broker": {"type": "ack", "stage": "accepted", "inReplyTo": f"$e-{n}", "eventId": f"e-{n}"}}]


def _answer(given: dict[str, Any]) -> list[dict[str, Any]]:
    header = {key: value for key, value in given.items() if key not in ("n", "answer")}
    return [{"broker": answer_frame(given["n"], given.get("answer", {})) | header}]


def answer_frame(n: int, answer: dict[str, Any]) -> dict[str, Any]:
    """The answer to question n, as the broker sends it."""
    event = f"e-{n}"
    answer = {"turnId": event, "status": "completed", "response": "done"} | answer
    payload = {
        "id": f"{event}:answer",
        "type": "agent.response",
        "createdAt": CREATED_AT,
        "metadata": {"inReplyTo": event},
    }
    return {
        "type": "event",
        "id": f"b.9{n}",
        "inReplyTo": f"q-{n}",
        "eventId": f"{event}:answer",
        "payload": payload | {"answer": answer},
    }


def _acked(given: dict[str, Any]) -> list[dict[str, Any]]:
    n = given["n"]
    return [
        {
            "client": {
                "type": "ack",
                "stage": "done",
                "eventId": f"e-{n}:answer",
                "inReplyTo": given.get("id", f"b.9{n}"),
            }
        }
    ]


def _done(n: int) -> list[dict[str, Any]]:
    return [*_answer({"n": n}), *_acked({"n": n}), {"told": {"eventId": f"e-{n}", "response": "done"}}]


_SHORT: Final[dict[str, Callable[[Any], list[dict[str, Any]]]]] = {
    "greet": _greet,
    "ask": _ask,
    "event": _event,
    "accept": _accept,
    "answer": _answer,
    "acked": _acked,
    "done": _done,
}

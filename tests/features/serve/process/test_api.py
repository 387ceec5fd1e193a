"""The API of the door, with a real kernel and a model that waits in the middle of its answer."""

from __future__ import annotations

import base64
import json
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from goondan.features.serve.door.messages import event_id_of
from tests.features.serve.process.test_gdn_serve import door
from tests.features.serve.streams import Api, Heard
from tests.kernel_fixture import BUNDLE, Sandbox, has_feature, sandbox, wait_until
from tests.process.model_servers import server

SECOND = """\
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: other}
spec: {modelConfig: {modelRef: Model/console}}
"""
TOKENS = """\
looker   look     looker-0123456789   *
talker   talk     talker-0123456789   main
operator operate  operator-012345678  *
"""
PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)


@pytest.fixture(scope="module")
def model() -> Iterator[str]:
    with server("gated_llm") as url:
        yield url


@pytest.fixture(scope="module")
def kernel(model: str) -> Iterator[Sandbox]:
    spec = f'{{provider: openai, model: m, endpoint: "{model}/v1", apiKey: k}}'
    bundle = BUNDLE.replace("{provider: embedded}", spec).replace(
        "{ref: Agent/main}]", "{ref: Agent/main}, {ref: Agent/other}]"
    )
    with sandbox(bundle + SECOND) as made:
        (made.home / "tokens").write_text(TOKENS)
        (made.home / "tokens").chmod(0o600)
        yield made


@pytest.fixture(scope="module")
def told(kernel: Sandbox) -> Iterator[dict[str, Any]]:
    kernel.detach()
    with door(kernel, "--token-file", str(kernel.home / "tokens")) as told:
        yield told


@pytest.fixture
def operator(told: dict[str, Any]) -> Api:
    return Api(told["port"], "operator-012345678")


@pytest.fixture
def talker(told: dict[str, Any]) -> Api:
    return Api(told["port"], "talker-0123456789")


@pytest.fixture
def looker(told: dict[str, Any]) -> Api:
    return Api(told["port"], "looker-0123456789")


def go(model: str) -> None:
    """Let the model go on."""
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{model}/__go").close()


def reached(model: str) -> int:
    """How many requests have come so far as to wait for a go."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{model}/__reached") as answer:
        return int(json.load(answer)["reached"])


def test_a_message_gets_its_answer(talker: Api) -> None:
    status, _, answer = talker.ask("POST", "/messages", {"text": "hello", "instance": "waits"})
    assert (status, answer["status"], answer["response"]) == (200, "completed", "hello")
    status, _, again = talker.ask("GET", f"/messages/{answer['eventId']}?waitS=10")
    assert (status, again) == (200, answer)


def test_a_key_makes_a_repeat_the_same_message(talker: Api, operator: Api) -> None:
    sent = {"text": "once", "instance": "keys"}
    first, second = (talker.ask("POST", "/messages", sent, idempotency_key="k 1") for _ in range(2))
    assert first[0] == second[0] == 200
    assert first[2] == second[2]
    assert operator.ask("POST", "/messages", sent, idempotency_key="k 1")[2]["eventId"] != first[2]["eventId"]
    status, headers, problem = talker.ask("POST", "/messages", sent | {"text": "other"}, idempotency_key="k 1")
    assert (status, headers["content-type"]) == (409, "application/problem+json")
    assert problem["code"] == "E_FRAME_INVALID" and problem["eventId"] == first[2]["eventId"]


def test_a_message_is_left_and_looked_for(talker: Api, looker: Api, model: str) -> None:
    status, headers, left = talker.ask(
        "POST", "/messages", {"text": "so|wait|later", "instance": "left"}, prefer="respond-async"
    )
    assert (status, left["status"]) == (202, "accepted")
    where = headers["location"].removeprefix("/api/v1")
    assert looker.ask("GET", f"{where}?agent=main&instance=left")[0] == 202
    go(model)
    status, _, answer = looker.ask("GET", f"{where}?waitS=20&agent=main&instance=left")
    assert (status, answer["response"], answer["traceId"]) == (200, "solater", left["traceId"])


def test_what_was_answered_long_ago_is_there_at_once(told: dict[str, Any], talker: Api) -> None:
    answer = talker.ask("POST", "/messages", {"text": "done", "instance": "past"})[2]
    for _ in range(2):  # nobody has waited for it, and nobody waits
        status, _, found = talker.ask("GET", f"/messages/{answer['eventId']}")
        assert (status, found) == (200, answer)


def test_a_message_that_is_waited_for_is_heard_by_who_follows_it(talker: Api, model: str) -> None:
    call = 'call bash__exec {"command":"echo hi"}'
    sent, heard = {"text": f"a |wait|{call}|b |wait|c", "instance": "both"}, Heard()
    where = f"/messages/{event_id_of('talker', 'both')}"
    with ThreadPoolExecutor(1) as waiting:
        answer = waiting.submit(talker.ask, "POST", "/messages", sent, idempotency_key="both")
        while talker.ask("GET", f"{where}?agent=main&instance=both")[0] == 404:
            time.sleep(0.02)
        with talker.stream(f"{where}/stream") as events:
            assert next(events).kind == "accepted"
            go(model)
            for event in events:
                heard.take(event)
                if event.kind == "text" and event.data["text"] == "b ":  # it is no more than heard yet
                    go(model)
        assert answer.result()[2]["response"] == heard.texts[2] == "b c"


def test_a_door_that_ends_says_when_to_come_back(kernel: Sandbox, talker: Api, model: str) -> None:
    sent, before = {"text": "wait|late", "instance": "ends"}, reached(model)
    with (
        door(kernel, "--token-file", str(kernel.home / "tokens")) as first,
        Api(first["port"], talker.token).asked("POST", "/messages", sent, accept="text/event-stream") as answer,
    ):
        assert b"event: accepted\n" in list(islice(answer, 4))
        first["process"].send_signal(signal.SIGTERM)
        assert list(answer)[-2:] == [b"retry: 1000\n", b"\n"]
        assert first["process"].wait(20) == 143
    wait_until(lambda: reached(model) > before)
    go(model)


def test_a_stream_tells_text_and_calls_as_they_come(talker: Api, model: str) -> None:
    call = 'call bash__exec {"command":"echo hi"}'
    heard = Heard()
    with talker.stream("/messages", {"text": f"one |{call}|two |wait|three", "instance": "streams"}) as events:
        kinds = []
        for event in events:
            kinds.append(event.kind)
            heard.take(event)
            if event.kind == "text" and event.data["text"] == "two ":
                go(model)
    assert kinds[0] == "accepted"
    assert heard.texts == {1: "one ", 2: "two three"}
    assert [end for _, end in heard.calls] == ["called", "completed"]
    assert heard.answer["response"] == "two three"
    assert heard.position == "end"


def test_a_stream_goes_on_where_it_was_broken_off(talker: Api, model: str) -> None:
    sent, heard = {"text": "first |wait|second", "instance": "broken"}, Heard()
    with talker.stream("/messages", sent, idempotency_key="broken") as events:
        for event in events:
            heard.take(event)
            if heard.texts:
                break
    assert heard.texts == {1: "first "}
    with talker.stream("/messages", sent, after=heard.position, idempotency_key="broken") as events:
        assert next(events).kind == "accepted"
        go(model)
        for event in events:
            heard.take(event)
    assert heard.texts == {1: "first second"}
    where = f"/messages/{heard.answer['eventId']}/stream"
    with talker.stream(where) as events:  # anew, from what is stored
        anew = Heard()
        for event in events:
            anew.take(event)
    assert (anew.texts, anew.answer) == (heard.texts, heard.answer)
    assert talker.ask("GET", where, last_event_id="end")[0] == 204
    status, _, problem = talker.ask("GET", where, last_event_id="1.2")
    assert (status, problem["code"]) == (400, "E_USAGE")


def test_a_door_that_was_started_since_goes_on_with_a_stream(kernel: Sandbox, talker: Api, model: str) -> None:
    call = 'call bash__exec {"command":"echo hi"}'
    sent, heard = {"text": f"a |{call}|b |wait|c", "instance": "doors"}, Heard()
    with door(kernel, "--token-file", str(kernel.home / "tokens")) as first:
        with Api(first["port"], talker.token).stream("/messages", sent, idempotency_key="doors") as events:
            event_id = next(events).data["eventId"]
            for event in events:
                heard.take(event)
                if heard.texts.get(2):
                    break
            first["process"].kill()
    where = f"/messages/{event_id}/stream?agent=main&instance=doors"
    with talker.stream(where, after=heard.position) as events:  # this door has never seen the message
        assert next(events).kind == "accepted"
        go(model)
        for event in events:
            heard.take(event)
    assert heard.texts == {1: "a ", 2: "b c"}
    assert [end for _, end in heard.calls] == ["called", "completed"]
    with talker.stream("/messages", sent, after="1.0.00000000.", idempotency_key="doors") as events:
        again = [event.kind for event in events]
    assert again == ["accepted", "text", "tool.called", "tool.completed", "step.started", "text", "answer"]


def test_a_message_is_cancelled_by_its_sender(talker: Api, operator: Api, model: str) -> None:
    sent, before = {"text": "wait|never", "instance": "cancelled"}, reached(model)
    left = talker.ask("POST", "/messages", sent, prefer="respond-async")[2]
    others = operator.ask("POST", "/messages", sent, prefer="respond-async")[2]
    where = "cancel?agent=main&instance=cancelled"
    wait_until(lambda: reached(model) > before)
    status, _, problem = talker.ask("POST", f"/messages/{others['eventId']}/{where}")
    assert (status, problem["code"]) == (403, "E_FORBIDDEN")
    for one in (others, left):
        answer = operator.ask("POST", f"/messages/{one['eventId']}/{where}")
        assert answer[0] == 200 and answer[2] == {"eventId": one["eventId"], "status": "cancelled"}
    status, _, problem = talker.ask("GET", f"/messages/{left['eventId']}?waitS=5")
    assert (status, problem["code"], problem["eventId"]) == (409, "E_CANCELLED", left["eventId"])
    go(model)  # for the request that nobody waits for any more


def test_a_turn_that_is_too_slow_is_a_timeout(talker: Api, model: str) -> None:
    sent, before = {"text": "wait|late", "instance": "late", "timeoutS": 0.3}, reached(model)
    status, _, problem = talker.ask("POST", "/messages", sent)
    assert (status, problem["code"], problem["title"]) == (504, "E_AGENT_TIMEOUT", "E_AGENT_TIMEOUT")
    if reached(model) > before:  # else a later request would take it
        go(model)


def test_a_token_leads_to_its_agents_and_role(talker: Api, looker: Api) -> None:
    for api, body, status in (
        (looker, {"text": "x"}, 403),
        (talker, {"text": "x", "agent": "other"}, 403),
        (talker, {"text": "x", "workdir": "/tmp"}, 403),
        (talker, {"text": "x", "agent": "main", "instance": "a\nb"}, 400),
        (talker, {"text": " "}, 400),
        (talker, {"text": "x", "no": 1}, 400),
        (talker, {"text": "x", "files": [{"data": base64.b64encode(b"text").decode()}]}, 400),
    ):
        answered, headers, problem = api.ask("POST", "/messages", body)
        assert (answered, headers["content-type"]) == (status, "application/problem+json"), body
        assert problem["detail"] and problem["code"].startswith("E_")


def test_a_picture_comes_with_a_message(talker: Api, kernel: Sandbox) -> None:
    files = [{"data": base64.b64encode(PNG).decode(), "name": "dot.png"}]
    status, _, answer = talker.ask("POST", "/messages", {"text": "seen", "instance": "files", "files": files})
    assert status == 200, answer
    stored = kernel.gdn("instance", "export", "main", "files").json["messages"][0]
    assert stored["data"]["files"][0]["name"] == "dot.png"
    assert [
        path.read_bytes() for path in Path(kernel.home, "state").glob("workspaces/*/instances/main/files/files/*")
    ] == [PNG]


def test_what_there_is_is_shown_page_by_page(talker: Api, looker: Api) -> None:
    call = 'call bash__exec {"command":"echo shown"}'
    turns = [
        talker.ask("POST", "/messages", {"text": text, "instance": "shown"})[2]["turnId"]
        for text in (f"one|{call}|end", "two", 'call bash__exec {"command":7}|bad')
    ]
    assert looker.ask("GET", "/agents")[2] == [{"agent": "main", "entry": True}, {"agent": "other", "entry": False}]
    assert talker.ask("GET", "/agents")[2] == [{"agent": "main", "entry": True}]
    found = [row for row in looker.ask("GET", "/instances?agent=main")[2] if row["instanceKey"] == "shown"]
    assert found and looker.ask("GET", "/instances?agent=other")[2] == []
    shown = looker.ask("GET", "/agents/main/instance?instance=shown")[2]
    assert shown["lastTurn"]["turnId"] == turns[-1] and shown["conversation"]["messages"] == 10

    for wrong in ("-1", "9" * 30, "x"):
        assert looker.ask("GET", f"/agents/main/conversation?before={wrong}")[0] == 400
    roles: list[str] = []
    page: dict[str, Any] = {"before": ""}
    while page["before"] is not None:
        more = f"&before={page['before']}" if page["before"] else ""
        page = looker.ask("GET", f"/agents/main/conversation?instance=shown&limit=3{more}")[2]
        roles[:0] = [message["data"]["role"] for message in page["messages"]]
    assert roles == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]

    def listed(query: str) -> list[str]:
        found = looker.ask("GET", f"/traces?instance=shown&{query}")
        assert found[0] == 200, found
        return [turn["turnId"] for turn in found[2]["traces"]]

    assert listed("") == turns[::-1]
    first = looker.ask("GET", "/traces?instance=shown&limit=2")[2]
    assert listed(f"before={first['before']}") == turns[:1]
    assert listed("tool=bash__*") == [turns[2], turns[0]]
    assert listed("error=E_TOOL_INVALID_ARGS") == [turns[2]]
    assert listed("text=ECHO") == [turns[0]] and listed("state=failed") == [] and listed("minCost=1") == []
    trace = looker.ask("GET", f"/traces/{turns[0]}")[2]
    assert trace["steps"][0]["tools"][0]["toolName"] == "bash__exec" and trace["total"]["turns"] == 1
    (receipt,) = looker.ask("GET", f"/traces/{turns[0]}/receipts")[2]
    assert receipt["receipt"]["jail"]["tier"]
    assert looker.ask("GET", "/traces/no-such-turn")[0] == 404
    assert {row["role"] for row in looker.ask("GET", "/processes")[2]} >= {"broker", "supervisor", "agent"}


def test_operators_ask_the_broker(talker: Api, looker: Api, operator: Api, model: str) -> None:
    left = talker.ask("POST", "/messages", {"text": "wait", "instance": "asked"}, prefer="respond-async")[2]
    events = looker.ask("GET", "/mailbox?agent=main&instance=asked")[2]["events"]
    assert [event["eventId"] for event in events] == [left["eventId"]]
    go(model)
    for path, feature, key in (
        ("/waits", "waits", "waits"),
        ("/dead-letters", "dead_letters", "events"),
        ("/approvals", "approvals", "items"),
        ("/approvals?answered=true", "approvals", "answered"),
        ("/approvals?always=true", "approvals", "always"),
        ("/budgets", "budgets", "trees"),
        ("/usage", "usage", "total"),
    ):
        status, _, told = looker.ask("GET", path)
        if has_feature(feature):
            assert status == 200 and key in told, (path, told)
        else:
            assert status in (404, 501), path
    for path in ("/dead-letters/none", "/approvals/none", "/budgets?eventId=none"):
        assert looker.ask("GET", path)[0] in (404, 501), path
    for path, body in (("/dead-letters/none/drop", None), ("/approvals/none", {"decision": "no"})):
        assert looker.ask("POST", path, body)[0] == 403, path
        assert operator.ask("POST", path, body)[0] in (404, 501), path
    large = {"decision": "answer", "answer": 10**30}
    assert operator.ask("POST", "/approvals/none", large)[2]["code"] == "E_USAGE", "no frame holds it"
    told = operator.ask("POST", "/agents/main/restart")[2]
    assert told.get("restarted") == "agent", told
    assert looker.ask("GET", "/traces?limit=0")[0] == looker.ask("GET", "/traces?no=1")[0] == 400
    told = looker.ask("GET", "/openapi.json")[2]
    assert told["openapi"].startswith("3.1") and "/api/v1/messages" in told["paths"]


def test_a_token_is_shown_what_is_of_its_agents(talker: Api, operator: Api) -> None:
    turn = operator.ask("POST", "/messages", {"text": "secret", "agent": "other"})[2]
    for path in (
        f"/messages/{turn['eventId']}",
        f"/messages/{turn['eventId']}/stream",
        "/agents/other/conversation",
        "/agents/other/instance",
        "/mailbox?agent=other",
    ):
        assert talker.ask("GET", path)[0] == 403, path
    assert talker.ask("GET", f"/traces/{turn['turnId']}")[0] == 404
    assert talker.ask("GET", f"/traces/{turn['traceId']}/receipts")[0] == 404
    assert all(row["agent"] == "main" for row in talker.ask("GET", "/instances")[2])
    assert all(row["agent"] == "main" for row in talker.ask("GET", "/traces?limit=100")[2]["traces"])


def test_without_a_kernel_it_says_so_and_finds_the_next(kernel: Sandbox, talker: Api) -> None:
    answer = talker.ask("POST", "/messages", {"text": "kept"})[2]
    kernel.gdn("stop")
    status, _, problem = talker.ask("POST", "/messages", {"text": "x"})
    assert (status, problem["code"]) == (503, "E_KERNEL_NOT_RUNNING")
    assert talker.ask("GET", f"/messages/{answer['eventId']}?waitS=5")[2] == answer
    kernel.detach()
    assert talker.ask("POST", "/messages", {"text": "x"})[0] == 200


def test_a_stream_outlives_a_restart_of_the_kernel(kernel: Sandbox, talker: Api, model: str) -> None:
    heard = Heard()
    with talker.stream("/messages", {"text": "before |wait|after", "instance": "restarted"}) as events:
        for event in events:
            heard.take(event)
            if heard.texts == {1: "before "}:
                assert kernel.gdn("stop").status == 0
                kernel.detach()
                for _ in range(6):  # also for requests that nobody waits for any more: it is the last test
                    go(model)
                break
        for event in events:
            heard.take(event)
    assert heard.texts == {1: "before after"}
    assert json.dumps(heard.answer["response"]) == '"before after"'

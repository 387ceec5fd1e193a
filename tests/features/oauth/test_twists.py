"""Twists of access tokens: 004 §2 `api.oauth` (OAUTH-01, OAUTH-02) and docs/oauth.md.

The test is everybody but the broker's router: extensions by what they hand over, the agent, the process with tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from goondan.features.oauth.agent import read_request
from goondan.features.oauth.wire import GrantedNews, OAuthAppSpec
from goondan.kernel.broker.state.entities import CONTROL
from goondan.schemas.bundle.launch import ExtensionSpec
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import AgentEvent, Frame
from goondan.schemas.wire.tokens import Claims
from tests.unit.kernel.broker.approving import Bench, Peer, answer, code_of

REF = "OAuthApp/calendar"
APP = OAuthAppSpec(name="calendar", client_id="c", token_url="https://l.example/t", scopes=["cal.read", "cal.write"])
MACHINE = OAuthAppSpec(
    name="machine", flow="clientCredentials", client_id="c", client_secret="s", token_url="https://m"
)

WRONG: list[Any] = [
    None,
    5,
    "OAuthApp/calendar",
    [],
    {},
    {"oauthAppRef": None},
    {"oauthAppRef": ""},
    {"oauthAppRef": "calendar"},
    {"oauthAppRef": "OAuthApp/"},
    {"oauthAppRef": "oauthapp/calendar"},
    {"oauthAppRef": "Tool/calendar"},
    {"oauthAppRef": "OAuthApp/a/b"},
    {"oauthAppRef": {"kind": "OAuthApp"}},
    {"oauthAppRef": {"kind": "OAuthApp", "name": ""}},
    {"oauthAppRef": {"kind": "Tool", "name": "calendar"}},
    {"oauthAppRef": {"kind": "OAuthApp", "name": ["calendar"]}},
    {"oauthAppRef": [REF]},
    {"oauthAppRef": 7},
    {"app": REF},
    {"oauthAppRef": REF, "scope": ["cal.read"]},
    {"oauthAppRef": REF, "scopes": "cal.read"},
    {"oauthAppRef": REF, "scopes": 5},
    {"oauthAppRef": REF, "scopes": [5]},
    {"oauthAppRef": REF, "scopes": [None]},
    {"oauthAppRef": REF, "scopes": {"cal.read": 1, 5: 2}},
    {"oauthAppRef": REF, "subject": 5},
    {"oauthAppRef": REF, "subject": ["ann"]},
    {"oauthAppRef": REF, 5: "x"},
]


def test_what_no_request_is() -> None:
    for request in WRONG:
        with pytest.raises(GoondanError) as refused:
            read_request(request)
        assert refused.value.code == "E_USAGE", request


def test_a_request_is_what_it_was_when_it_was_made() -> None:
    scopes = ["cal.read"]
    asked: dict[str, Any] = {"oauthAppRef": {"kind": "OAuthApp", "name": "calendar"}, "scopes": scopes}
    made = read_request(asked)
    scopes.append("cal.write")
    asked["oauthAppRef"]["name"] = "other"
    assert (made.app, made.scopes) == ("calendar", ["cal.read"])
    assert read_request({"oauthAppRef": REF, "scopes": ("cal.read",)}).scopes == ["cal.read"]
    assert read_request({"oauthAppRef": REF, "scopes": None, "subject": None}).scopes is None


class Asking:
    """`coder/k` at work on an event, and the process with tokens."""

    def __init__(self, auth: Any = None) -> None:
        self.bench = Bench({"rules": []})
        extension = ExtensionSpec(name="e", entry="/e.py", resource={})
        coder = structs.replace(self.bench.plan.agents["coder"], extensions=[extension])
        self.bench.plan = structs.replace(
            self.bench.plan,
            agents={**self.bench.plan.agents, "coder": coder},
            parts={"oauth": to_raw({"calendar": APP, "machine": MACHINE})},
        )
        self.bench.router = self.bench._router()
        self.client = self.bench.client()
        self.launch = 0
        self.holder = self.new_holder()
        self.agent = self.bench.agent()
        self.begin("e1", auth)

    def begin(self, event: str, auth: Any = None) -> None:
        more: dict[str, Any] = {} if auth is None else {"auth": to_raw(auth)}
        self.bench.ask(self.client, event, **more)
        self.agent.take()

    def end(self, event: str) -> None:
        epoch = self.bench.instance("coder").epoch
        self.agent.say(Frame("ack", stage="done", event_id=event, epoch=epoch, payload=answer()))
        self.agent.take()

    def new_holder(self) -> Peer:
        self.launch += 1
        claims = Claims("control", agent="oauth", launch=self.launch)
        return Peer(self.bench, CONTROL, claims, f"o{self.launch}").hello()

    def ask(self, payload: Any, name: str = "") -> str | None:
        """The code of the refusal; None: it is ordered, or answered."""
        return code_of(self.agent.say(Frame("oauth.token", id=name, payload=to_raw(payload))))

    def orders(self) -> list[dict[str, Any]]:
        return [from_raw(frame.payload, dict) for frame in self.holder.take("oauth.order")]


SUBJECTS: list[tuple[Any, str | None]] = [
    (None, "local"),
    ({"subject": "ann"}, "ann"),
    ({"actor": {"id": "ann"}}, "ann"),
    ({"subject": "ann", "actor": {"id": "bob"}}, "ann"),
    ({"subject": "local"}, "local"),
    ({"subject": "Ann"}, "Ann"),
    ({"subject": "한글 이름"}, "한글 이름"),
    ({"subject": "../../etc/passwd"}, "../../etc/passwd"),
    ({"subject": "x" * 256}, "x" * 256),
    ({"subject": "x" * 257}, None),
    ({"subject": ""}, None),
    ({"subject": "", "actor": {"id": "ann"}}, None),
    ({"subject": None, "actor": {"id": "ann"}}, "ann"),
    ({"subject": 5, "actor": {"id": "ann"}}, None),
    ({"subject": ["ann"]}, None),
    ({"subject": "a\x00b"}, None),
    ({"subject": "a\u202eb"}, None),
    ({"actor": "ann"}, None),
    ({"actor": {"id": None}}, None),
    ({"actor": {"id": ""}}, None),
    ({"actor": {"name": "ann"}}, None),
    ({}, None),
    ([], None),
    (["ann"], None),
    (5, None),
    (True, None),
    ("ann", None),
    ({"Subject": "ann"}, None),
]


@pytest.mark.requirement("OAUTH-01")
def test_whose_token_it_is_says_the_event_and_nobody_else() -> None:
    made, wrong = Asking(), []
    made.end("e1")
    for number, (auth, subject) in enumerate(SUBJECTS):
        event = f"s{number}"
        made.begin(event, auth)
        code = made.ask({"app": "calendar"})
        orders = made.orders()
        found = [order["subject"] for order in orders]
        if (found, code) != (([subject], None) if subject is not None else ([], "E_OAUTH_SUBJECT")):
            wrong.append((auth, code, found))
        # Another name is nobody's to ask for.
        others = {"bob", "app", "", "ANN", (subject or "") + " "} - {subject}
        given = [other for other in others if made.ask({"app": "calendar", "subject": other}) is None]
        assert (auth, given) == (auth, [])
        made.end(event)
    assert wrong == []


@pytest.mark.requirement("OAUTH-01")
def test_an_agent_that_asks_itself_is_nobody_and_one_without_extensions_gets_nothing() -> None:
    made = Asking()
    made.end("e1")
    assert made.ask({"app": "calendar"}) == "E_OAUTH_SUBJECT", "between turns"
    reviewer = made.bench.agent("reviewer")
    event = AgentEvent(id="x", type="user.message", created_at="now", input="x")
    frame = Frame("event", to="coder", instance_key="k", event_id="x", payload=to_raw(event))
    frame.auth = to_raw({"subject": "ann"})
    reviewer.say(frame)
    made.agent.take()
    for more in ({}, {"subject": "ann"}, {"subject": "local"}):
        assert made.ask({"app": "calendar", **more}) == "E_OAUTH_SUBJECT"
    made.end("x")
    made.bench.ask(made.client, "e2", "reviewer")
    reviewer.take()
    for app in ("calendar", "machine"):
        assert code_of(reviewer.say(Frame("oauth.token", payload=to_raw({"app": app})))) == "E_FORBIDDEN"
    assert made.orders() == []


@pytest.mark.requirement("OAUTH-02", "EVENTS-09")
def test_only_the_holder_is_given_orders_and_answers_them() -> None:
    made = Asking({"subject": "ann"})
    supervisor = Peer(made.bench, CONTROL, Claims("control"), "s").hello()
    news = to_raw(GrantedNews("calendar", "ann", ["cal.read"], [("coder", "k")]))
    for peer, kinds in ((made.agent, 2), (made.client, 2), (supervisor, 1)):
        for kind in ("oauth.granted", "oauth.order")[:kinds]:
            assert code_of(peer.say(Frame(kind, payload=news))) == "E_FRAME_TYPE"
    assert made.bench.client(operator=False).admin(op="auth.list")["code"] == "E_FRAME_INVALID"
    for _ in range(2):
        assert made.ask({"app": "machine"}, "twice") is None
    (order,) = made.holder.take("oauth.order")
    assert from_raw(order.payload, dict) == {
        "order": "token", "app": "machine", "subject": "app", "agent": "coder", "instanceKey": "k",
    }  # fmt: skip
    ready = to_raw({"status": "ready", "accessToken": "x"})
    for number, asked in enumerate(("made-up", order.id)):
        made.holder.say(Frame("reply", id=f"r{number}", in_reply_to=asked, payload=ready))
    assert [frame.in_reply_to for frame in made.agent.take("reply")] == ["twice"]
    codes = [made.ask({"app": "machine"}, f"n{number}") for number in range(17)]
    assert codes == [None] * 16 + ["E_OVERLOADED"]


def test_an_app_of_its_own_has_its_own_subject() -> None:
    made = Asking({"subject": "ann"})
    assert made.ask({"app": "machine"}) is None
    assert made.ask({"app": "machine", "subject": "ann"}, "x") in (None, "E_OAUTH_SUBJECT")
    assert {order["subject"] for order in made.orders()} == {"app"}


SCOPES: list[tuple[Any, bool]] = [
    (None, True),
    (["cal.read"], True),
    (["cal.read", "cal.write"], True),
    (["cal.write", "cal.read"], True),
    (["cal.read "], False),
    (["cal.read cal.write"], False),
    ([""], False),
    (['"'], False),
    (["cal.read\n"], False),
    (["x" * 300], False),
    (["cal.read"] * 65, False),
    ("cal.read", False),
    ([5], False),
    ({"cal.read": 1}, False),
]


def test_scopes_that_are_none_are_ordered_of_nobody() -> None:
    """Which of them the app has, the process with tokens judges (tests/features/oauth/process/test_oauth_broker.py)."""
    made, wrong = Asking({"subject": "ann"}), []
    for number, (scopes, good) in enumerate(SCOPES):
        code = made.ask({"app": "calendar", "scopes": scopes}, f"q{number}")
        orders = made.orders()
        if (code is None and len(orders) == 1) is not good or (code is not None and not code.startswith("E_")):
            wrong.append((scopes, code, orders))
    assert wrong == []


def test_rubbish_in_the_frame() -> None:
    made = Asking({"subject": "ann"})
    rubbish: list[Any] = [None, 5, [], "calendar", {}, *({"app": app} for app in (5, None, "", "nobody", "x" * 9999))]
    for payload in rubbish:
        code = made.ask(payload)
        assert code is not None, payload
        assert code.startswith("E_"), payload
    assert made.orders() == []
    assert made.ask({"app": "calendar"}) is None


def test_between_turns_and_in_the_next_turn() -> None:
    """A turn of ann's ends while her token is fetched; what comes then is not the next turn's."""
    made = Asking({"subject": "ann"})
    assert made.ask({"app": "calendar"}, "first") is None
    (order,) = made.holder.take("oauth.order")
    made.end("e1")
    assert made.ask({"app": "calendar"}, "between") == "E_OAUTH_SUBJECT"
    made.begin("e2", {"subject": "bob"})
    assert made.ask({"app": "calendar"}, "second") is None
    assert [one["subject"] for one in made.orders()] == ["bob"]
    token = {"status": "ready", "accessToken": "of ann", "tokenType": "Bearer", "scopes": [], "subject": "ann"}
    made.holder.say(Frame("reply", id="r", in_reply_to=order.id, payload=to_raw(token)))
    told = [frame for frame in made.agent.take() if frame.in_reply_to == "second"]
    assert told == [], "ann's answer is not the answer to bob's question"


def test_the_holder_is_another_one_in_the_middle() -> None:
    """Its orders are carried out by the next process, each answered once; the first one's late word is nobody's."""
    made = Asking({"subject": "ann"})
    assert made.ask({"app": "calendar"}, "q") is None
    (order,) = made.holder.take("oauth.order")
    first, made.holder = made.holder, made.new_holder()
    (again,) = made.holder.take("oauth.order")
    token = {"status": "ready", "accessToken": "t", "tokenType": "Bearer", "scopes": [], "subject": "ann"}
    made.holder.say(Frame("reply", id="r", in_reply_to=again.id, payload=to_raw(token)))
    assert [frame.in_reply_to for frame in made.agent.take("reply")] == ["q"]
    assert first is not made.holder
    assert order.type == again.type


def test_news_reach_who_asked_and_no_other_kind_of_peer_tells_them() -> None:
    made = Asking({"subject": "ann"})
    news = to_raw(GrantedNews("calendar", "ann", ["cal.read"], [("coder", "k"), ("coder", "gone"), ("nobody", "k")]))
    made.holder.say(Frame("oauth.granted", id="n", payload=news))
    (told,) = made.agent.take("oauth.granted")
    assert from_raw(told.payload, dict) == {"oauthAppRef": REF, "subject": "ann", "scopes": ["cal.read"]}
    for peer in (made.agent, made.client):
        assert code_of(peer.say(Frame("oauth.granted", payload=news))) is not None
    assert made.agent.take("oauth.granted") == []

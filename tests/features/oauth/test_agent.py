"""`api.oauth` in an agent: what it asks the kernel for, and what becomes of the token that comes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from goondan.agentproc.start.log import REMEMBERED, HidingFormatter, KnownSecrets
from goondan.agentproc.turn.runner import TurnRunner
from goondan.features.oauth.agent import ANSWER_S
from goondan.features.oauth.wire import AuthorizationRequired, Granted, TokenReady, TokenRequest
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload, fail
from goondan.schemas.wire.frames import Frame
from tests.unit.agentproc.extensions.test_points import result_of
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says, wants
from tests.unit.agentproc.turns import Make, api_of, the_answer

TOKEN = "ya29.a0AfH6SMBx-3k9"
REQUEST = {"oauthAppRef": "OAuthApp/cal", "scopes": ["a"], "subject": "ann"}


class KernelLink(FakeLink):
    """A link whose kernel has this answer."""

    def __init__(self, answer: Any = None) -> None:
        super().__init__()
        self.answer = answer
        self.requests: list[TokenRequest] = []
        self.replies["oauth.token"] = self._answer

    def _answer(self, frame: Frame) -> Any:
        self.requests.append(from_raw(frame.payload, TokenRequest))
        return self.answer


READY = TokenReady(TOKEN, "Bearer", ["a"], "ann", "2026-01-01T00:00:00Z")


def started(make: Make, answer: Any, *script: Any) -> tuple[KernelLink, TurnRunner]:
    link = KernelLink(answer)
    return link, make(link, FakeModel(*script))


@pytest.mark.requirement("OAUTH-01")
async def test_an_extension_gets_a_token(make: Make) -> None:
    link, runner = started(make, READY)
    answer = await api_of(runner).oauth.get_access_token(REQUEST)
    assert answer == {
        "status": "ready", "accessToken": TOKEN, "tokenType": "Bearer", "scopes": ["a"], "subject": "ann",
        "expiresAt": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    assert link.requests == [TokenRequest("cal", ["a"], "ann")]
    await api_of(runner).oauth.get_access_token({"oauthAppRef": {"kind": "OAuthApp", "name": "cal"}})
    assert link.requests[1] == TokenRequest("cal")


@pytest.mark.requirement("OAUTH-01")
async def test_an_extension_hears_that_somebody_has_to_agree(make: Make) -> None:
    link, runner = started(make, AuthorizationRequired("https://a", "open https://a", ["a"], "ann", "2026", "WDJB"))
    answer = await api_of(runner).oauth.get_access_token({"oauthAppRef": "OAuthApp/cal"})
    assert (answer["status"], answer["authorizationUrl"], answer["userCode"]) == (
        "authorization_required", "https://a", "WDJB",
    )  # fmt: skip


async def test_what_the_kernel_refuses_is_raised_with_its_code(make: Make) -> None:
    _, runner = started(make, fail("E_OAUTH_SUBJECT", "nobody"))
    with pytest.raises(GoondanError) as refused:
        await api_of(runner).oauth.get_access_token(REQUEST)
    assert refused.value.code == "E_OAUTH_SUBJECT"


async def test_who_gives_up_is_forgotten(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    link, runner = started(make, None)
    monkeypatch.setattr("goondan.features.oauth.agent.ANSWER_S", 0.01)
    with pytest.raises(GoondanError) as refused:
        await api_of(runner).oauth.get_access_token(REQUEST)
    assert refused.value.code == "E_OAUTH_UNAVAILABLE"
    assert link.forgotten == [link.posted[-1].id]
    assert ANSWER_S > 60  # longer than the broker takes to say so itself


@pytest.mark.requirement("OAUTH-02", "EVENTS-09")
async def test_extensions_hear_that_somebody_has_agreed(make: Make) -> None:
    _, runner = started(make, None)
    heard: list[Any] = []
    api_of(runner).events.once("auth.granted", heard.append)
    frame = Frame("oauth.granted", payload=to_raw(Granted("OAuthApp/cal", "ann", ["a"])))
    runner.takes["oauth.granted"](frame)
    runner.takes["oauth.granted"](frame)
    assert heard == [{"type": "auth.granted", "oauthAppRef": "OAuthApp/cal", "subject": "ann", "scopes": ["a"]}]


async def test_no_error_of_an_extension_tells_the_token(make: Make) -> None:
    link, runner = started(make, READY, wants(("a", "ext__leak", {})), says("done"), says("done"))
    api = api_of(runner)

    async def leak(ctx: Any, given: Any) -> Any:
        answer = await api.oauth.get_access_token(REQUEST)
        raise ValueError(f"what is {answer['accessToken']}?")

    api.tools.register({"name": "ext.leak", "description": "x"}, leak)
    await runner.run(event_frame("e1", "go"))
    error = result_of(runner, "a").error
    assert error is not None
    assert error.message == "what is ***?"

    async def broken(ctx: Any) -> Any:
        raise ValueError(f"again {TOKEN}")

    api.pipeline.register("turn", broken)
    await runner.run(event_frame("e2", "go"))
    told = the_answer(link).error if len(link.answers()) == 1 else link.answers()[-1].error
    assert told is not None
    assert told.message.endswith("again ***")


def test_a_log_hides_what_is_known_tracebacks_too() -> None:
    secrets = KnownSecrets()
    form = HidingFormatter("%(message)s", secrets)
    try:
        raise ValueError(TOKEN)
    except ValueError as error:
        record = logging.LogRecord("x", 20, "x", 1, "the token is %s", (TOKEN,), (type(error), error, None))
    assert TOKEN in form.format(record)
    record.exc_text = None
    secrets.add(TOKEN)
    told = form.format(record)
    assert "the token is ***" in told
    assert TOKEN not in told
    assert secrets.out_of_error(None) is None
    hidden = secrets.out_of_error(error_payload("E_TOOL", f"x {TOKEN}"))
    assert hidden is not None
    assert hidden.message == "x ***"


def test_the_latest_secrets_are_remembered() -> None:
    secrets = KnownSecrets()
    for number in range(REMEMBERED + 1):
        secrets.add(f"secret-number-{number:04}-of-many")
        secrets.add("the one that comes again")
    assert secrets.redact("the one that comes again") == "***"
    assert secrets.redact(f"secret-number-{REMEMBERED:04}-of-many") == "***"
    assert secrets.redact("secret-number-0000-of-many") != "***"


@pytest.mark.requirement("OAUTH-01")
async def test_the_example_of_the_page_works(make: Make) -> None:
    """What docs/oauth.md shows, run as it stands."""
    text = (Path(__file__).parents[3] / "docs" / "oauth.md").read_text(encoding="utf-8")
    code = next(part.partition("```")[0] for part in text.split("```python\n")[1:] if "def register" in part)

    async def fetch(token: str) -> dict[str, str]:
        return {"fetched with": token}

    space: dict[str, Any] = {"fetch": fetch}
    exec(compile(code, "oauth.md", "exec"), space)
    for call, answer, seen in (
        ("a", READY, {"fetched with": TOKEN}),
        ("b", AuthorizationRequired("https://a", "open https://a", ["a"], "ann", "2026"), {"please": "open https://a"}),
    ):
        link, runner = started(make, answer, wants((call, "events__list", {})), says("done"))
        space["register"](api_of(runner, "calendar"))
        await runner.run(event_frame(call, "go"))
        assert from_raw(result_of(runner, call).output, dict) == seen  # type: ignore[arg-type]
        assert link.requests == [TokenRequest("calendar", ["calendar.read"])]

"""What to do when a token is asked for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from goondan.features.oauth.process import rules
from goondan.features.oauth.process.rules import Grant, Login, Tokens, judge
from goondan.features.oauth.wire import OAuthAppSpec

APP = OAuthAppSpec(name="cal", client_id="c", issuer="https://login.example", scopes=["a", "b"])
TOKENS = Tokens("at", "Bearer", 600.0, "rt", None)
GRANT = rules.granted(APP, "ann", TOKENS, ["a"], now=1000.0)


def test_a_good_token_is_used_and_one_that_ends_is_replaced() -> None:
    assert judge(GRANT, APP, ["a"], 1000.0) == "use"
    assert judge(GRANT, APP, ["a"], 1000.0 + 539) == "use"
    assert judge(GRANT, APP, ["a"], 1000.0 + 541) == "refresh"
    assert judge(GRANT, APP, ["a"], 999.0) == "refresh"  # a clock that was set back
    short = replace(GRANT, lifetime_s=10.0)
    assert (judge(short, APP, [], 1004.0), judge(short, APP, [], 1006.0)) == ("use", "refresh")
    assert judge(replace(GRANT, lifetime_s=None), APP, ["a"], 1e12) == "use"


def test_a_person_is_asked_where_nothing_else_helps() -> None:
    def reason(grant: Grant | None, app: OAuthAppSpec = APP, scopes: list[str] | None = None) -> str:
        verdict = judge(grant, app, scopes or ["a"], 2000.0)
        assert isinstance(verdict, Login)
        return verdict.reason

    assert "nobody" in reason(None)
    assert "scopes: b" in reason(GRANT, scopes=["a", "b"])
    assert "no other to follow" in reason(replace(GRANT, refresh_token=None))
    assert "interrupted" in reason(rules.lost(GRANT, interrupted=True))
    assert "does not accept" in reason(rules.lost(GRANT, interrupted=False))


@pytest.mark.parametrize("now", [1001.0, 2000.0])
@pytest.mark.parametrize("issuer", ["https://login.example", None])
@pytest.mark.parametrize(
    "changes", [{"issuer": "https://evil.example"}, {"client_id": "C"}, {"token_url": "T", "issuer": None}]
)
def test_a_token_is_sent_to_nobody_but_the_server_it_is_from(
    now: float, issuer: str | None, changes: dict[str, str | None]
) -> None:
    app = replace(APP, issuer=issuer, token_url="t")
    grant = rules.granted(app, "ann", TOKENS, ["a"], now=1000.0)
    verdict = judge(grant, replace(app, **changes), ["a"], now)
    assert isinstance(verdict, Login)
    assert "another server or another client" in verdict.reason


def test_an_app_of_its_own_asks_nobody() -> None:
    machine = replace(APP, flow="clientCredentials")
    assert judge(None, machine, ["a"], 0.0) == "fetch"
    assert judge(GRANT, machine, ["a"], 1000.0) == "use"
    assert judge(GRANT, machine, ["b"], 1000.0) == "fetch"
    assert judge(GRANT, machine, ["a"], 5000.0) == "fetch"


def test_a_refresh_keeps_what_the_server_does_not_say() -> None:
    begun = rules.begun(GRANT, 1500.0)
    assert begun.refreshing_since == 1500.0
    after = rules.refreshed(begun, Tokens("at2", "Bearer", None, None, None), 1501.0)
    assert (after.access_token, after.refresh_token, after.scopes) == ("at2", "rt", ["a"])
    assert (after.refreshing_since, after.expires_at) == (None, None)
    rotated = rules.refreshed(begun, Tokens("at2", "Bearer", 10.0, "rt2", ["a", "b"]), 1501.0)
    assert (rotated.refresh_token, rotated.scopes, rotated.expires_at) == ("rt2", ["a", "b"], 1511.0)


def test_what_is_lost_holds_no_token() -> None:
    gone = rules.lost(rules.begun(GRANT, 1.0), interrupted=True)
    assert (gone.access_token, gone.refresh_token, gone.refreshing_since) == ("", None, None)
    assert "rt" not in repr(GRANT)


@given(st.floats(0, 1e6), st.floats(0.001, 1e6), st.floats(0, 1e6), st.booleans())
def test_a_token_is_used_from_its_first_moment_on_and_never_when_it_has_ended(
    obtained: float, lifetime: float, later: float, refreshable: bool
) -> None:
    grant = replace(GRANT, obtained_at=obtained, lifetime_s=lifetime, refresh_token="rt" if refreshable else None)
    assert judge(grant, APP, ["a"], obtained) == "use"
    for now in (obtained + lifetime + later, math.nextafter(obtained, -1) - later):
        judged = judge(grant, APP, ["a"], now)
        assert judged == "refresh" if refreshable else isinstance(judged, Login)

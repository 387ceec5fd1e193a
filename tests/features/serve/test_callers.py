"""Tokens: what a line of a token file says, and what a caller may do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.features.serve.api.rules.callers import MAX_CALLERS, Caller, digest_of, parse
from goondan.schemas.wire.errors import GoondanError

ONE, TWO = "0123456789abcdef", "fedcba9876543210"
FILE = f"""
# name  role  token  agents
phone   talk  {ONE}  assistant help-*
grafana look  {TWO}\t*
"""


def test_each_line_is_a_caller() -> None:
    tokens = parse(FILE)
    phone, grafana = tokens.known(digest_of(ONE.encode())), tokens.known(digest_of(TWO.encode()))
    assert phone == Caller("phone", "talk", ("assistant", "help-*"))
    assert grafana == Caller("grafana", "look", ("*",))
    assert tokens.known(digest_of(b"")) is None
    assert tokens.known(digest_of(ONE.encode() + b" ")) is None


@pytest.mark.parametrize(
    ("role", "may"),
    [("look", [True, False, False]), ("talk", [True, True, False]), ("operate", [True, True, True])],
)
def test_each_role_has_what_those_before_it_have(role: str, may: list[bool]) -> None:
    caller = Caller("a", role)  # type: ignore[arg-type]
    assert [caller.may("look"), caller.may("talk"), caller.may("operate")] == may


@pytest.mark.parametrize(
    "agent",
    ["ASSISTANT", "assistant ", " assistant", "assist", "assistant/x", "аssistant", "assistant\n", "help",
     "%61ssistant", "a\u017fsistant", "help-\u212a", "help-..", "help-/../other", "_operator", "assistant\0",
     "help-__x", ""],
)  # fmt: skip
def test_nothing_else_than_its_agents_is_spoken_to(agent: str) -> None:
    caller = Caller("a", "talk", ("assistant", "help-*"))
    assert caller.may_speak_to("assistant")
    assert caller.may_speak_to("help-me")
    assert not caller.may_speak_to(agent)
    with pytest.raises(GoondanError) as refused:
        caller.check_agent(agent)
    assert refused.value.info.code == "E_FORBIDDEN"


@given(st.text(max_size=12))
def test_no_pattern_leads_to_what_is_no_agent(agent: str) -> None:
    assert not Caller("a", "talk", ("?*",)).may_speak_to(agent + "/")


@pytest.mark.parametrize(
    "text",
    [
        "", "\n# nothing\n", ONE, f"phone talk {ONE}", f"phone root {ONE} *", f"phone Talk {ONE} *",
        f"PHONE talk {ONE} *", "phone talk short *", f"phone talk {'a' * 5000} *", f"phone talk {ONE} MAIN",
        f"phone talk {ONE} [a-z]",
        f"phone talk {ONE} *\nphone talk {TWO} *", f"phone talk {ONE} *\nother talk {ONE} *", f"../x talk {ONE} *",
        "\n".join(f"n{number} look {number:020} *" for number in range(MAX_CALLERS + 1)),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_gives_no_tokens_and_is_not_quoted(text: str) -> None:
    with pytest.raises(GoondanError) as wrong:
        parse(text)
    assert wrong.value.info.code == "E_USAGE"
    said = f"{wrong.value.info.message} {wrong.value.info.suggestion}"
    assert ONE not in said
    assert "short" not in said

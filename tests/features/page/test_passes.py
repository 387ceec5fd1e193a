"""Codes and tokens of the page: once, in time, no more than they say, and gone with the token that made them."""

from __future__ import annotations

import pytest

from goondan.features.page.door.passes import CODE_S, IDLE_S, MAX_PASSES, Kind, Passes
from goondan.features.serve.api.rules.callers import Caller, digest_of
from goondan.schemas.wire.errors import GoondanError

OWNER = Caller("local", "operate", ("main", "help-*"))
BEHIND = b"digest of the owner's token"


class Door:
    """Passes with numbers for secrets."""

    def __init__(self) -> None:
        self.passes = Passes()
        self.number = 0

    def secret(self, size: int) -> bytes:
        self.number += 1
        return bytes([self.number % 32, self.number // 32, *bytes(size - 2)])

    def code(self, kind: Kind = "look", now: float = 0.0) -> str:
        return self.passes.make_code(kind, OWNER, BEHIND, self.secret(12), now)

    def spend(self, code: str, now: float = 0.0) -> str | None:
        found = self.passes.spend(digest_of(code.encode()), self.secret(32), now)
        return None if found is None else found[0]

    def token(self, kind: Kind = "look", now: float = 0.0) -> str:
        token = self.spend(self.code(kind, now), now)
        assert token is not None
        return token

    def known(self, token: str, now: float = 0.0) -> Caller | None:
        return self.passes.known(digest_of(token.encode()), now)


def test_a_code_becomes_one_token_once() -> None:
    door = Door()
    code = door.code()
    assert [len(part) for part in code.split("-")] == [4, 4, 4]
    token = door.spend(code)
    assert token is not None and len(token) == 64
    assert door.spend(code) is None
    assert door.known(code) is None, "a code is no token"
    assert door.known(token) == Caller("local+page", "look", OWNER.agents, BEHIND)


def test_a_code_is_late_after_its_time_also_when_it_is_tried_in_vain() -> None:
    door = Door()
    good, late = door.code(now=5.0), door.code(now=5.0)
    assert door.spend(good, 5.0 + CODE_S - 0.01) is not None
    assert door.spend(late, 5.0 + CODE_S) is None
    assert door.spend(late, 5.0) is None


def test_looking_lasts_and_acting_is_gone_without_use() -> None:
    door = Door()
    looks, acts, again = door.token("look"), door.token("act"), door.token("act")
    found = door.known(acts, 1.0)
    assert found is not None and found.role == "operate"
    assert door.known(again, IDLE_S - 1) is not None
    assert door.known(again, 2 * IDLE_S - 2) is not None, "it was used"
    assert door.known(acts, IDLE_S + 1.0) is None
    assert door.known(acts, 2.0) is None, "what is gone stays gone"
    assert door.known(looks, 1e9) is not None


def test_of_each_kind_there_are_a_few_and_the_oldest_goes() -> None:
    door = Door()
    acts = door.token("act")
    tokens = [door.token() for _ in range(MAX_PASSES + 1)]
    assert [door.known(token) is None for token in tokens] == [True] + [False] * MAX_PASSES
    assert door.known(acts) is not None, "those that look push out none that act"
    codes = [door.code() for _ in range(MAX_PASSES + 1)]
    assert [door.spend(code) is None for code in codes] == [True] + [False] * MAX_PASSES


def test_what_a_pass_has_made_could_outlive_it_so_it_makes_none() -> None:
    door = Door()
    caller = door.known(door.token("act"))
    assert caller is not None
    with pytest.raises(GoondanError) as refused:
        door.passes.make_code("act", caller, b"its digest", bytes(12), 0.0)
    assert refused.value.info.code == "E_FORBIDDEN"

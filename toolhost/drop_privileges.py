"""Changes from root to the tool host's own user. Everything that needs root is found, made and started before.

Each program of this package that makes jails calls it, before it has threads and before it reads a byte from outside.
Under an ordinary user the user does not change, and only the launcher is started.

A directory service (LDAP, Active Directory through SSSD or winbind) can have an account for any number, and a jail with
that number would own that person's files. So each tool host asks, while it is root, before it takes a block of numbers.

What the tool host becomes is a user with three powers, and no way to more. The privileged helper, which was started
before, and the launcher (launcher/), which the helper forks, do what it can no longer do. With its three powers it
reads folders that are closed to others, looks at what jails use, and ends their processes. Where root has no number for
it, as in some containers, it stays root and keeps only the powers that it needs.

Source: docs/design/sandbox.md section 3.1; capabilities(7); docs/decisions/039.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from goondan.schemas.system import broker_identity, startup, users
from goondan.schemas.wire.errors import GoondanError
from goondan.toolhost.launcher import syscalls
from goondan.toolhost.lookup.hiding import runtime_folders
from goondan.toolhost.lookup.this_host import STAGES, code_folders, gather, home
from goondan.toolhost.policy import plan, seccomp
from goondan.toolhost.policy.subject import ARGS_FD, FILTER_FD, GUARDED_NAMES, JAIL_CODE, SYSTEM, TOP, HostFacts
from goondan.toolhost.privileges.launcher_link import spawn
from goondan.toolhost.privileges.powers import Ordinary, Powers, Rooted, Uids, beside, find_tree, hand_over

if TYPE_CHECKING:
    from goondan.toolhost.launcher.requests import AllowList, Enclosed

#: The name of the account that an operator may make for our user number, so that programs show a name.
_OUR_ACCOUNT: Final = "goondan"
#: Numbers of a block that are asked of a service one by one: more jails than these are seldom alive at once.
ASKED: Final = 96
#: Longest wait for a service (seconds, for a whole block): one that does not answer must not hold up the start.
PATIENCE_S: Final = 2.0
#: Sources of accounts that are files, or whose numbers are elsewhere by definition.
_KNOWN: Final = frozenset(("files", "compat", "systemd", "mymachines", "db"))
#: More than any file of accounts has that a person wrote (bytes).
_MAX_FILE: Final = 8 << 20
#: The powers that it keeps: reach closed folders; end jails; look at their memory and their files in /proc.
KEPT: Final = {"DAC_READ_SEARCH": 2, "KILL": 5, "SYS_PTRACE": 19}
#: What it also keeps where it must stay root: with this, root opens what it does not own.
OF_ROOT: Final = {"DAC_OVERRIDE": 1}
#: Without these it cannot become another user, or could not work as one.
_NEEDED: Final = {"CHOWN": 0, "DAC_READ_SEARCH": 2, "SETGID": 6, "SETUID": 7, "SETPCAP": 8}


class Unprivileged(NamedTuple):
    """What this process has after it gave root up."""

    #: The operations that others do for it.
    powers: Powers
    #: The facts about the machine that it found out before. See facts.gather.
    facts: HostFacts | GoondanError


def drop_privileges(endpoint: str = "", broker_uid: int | None = None, *, umask: int | None = None) -> Unprivileged:
    """Start the launcher or, under root, the privileged helper, which forks launchers. Then give root up.

    Raises OSError when the system refuses to give root up.

    From now on, files of this process and of those two are closed to other users. Files of jails are made under `umask`
    (None: the umask that this process had).

    `endpoint` is that of the broker, whose socket must let us in afterwards. `broker_uid` is the broker's user (None:
    ours). A launcher that cannot be started is reported by the first jail.
    """
    inherited = startup.close_to_others()
    umask = inherited if umask is None else umask
    if os.geteuid() != 0:
        ordinary = Ordinary(umask)
        with suppress(OSError):
            ordinary.launcher.start()
        return Unprivileged(ordinary, gather(ordinary))
    # Only root with all of its powers sees that a control group was delegated to it.
    powers = Rooted(Uids(os.getpid(), users.NUMBERS), find_tree())
    helper: tuple[socket.socket, int] | None = None
    with suppress(OSError):
        helper = spawn(umask, "helper")  # it starts while this process finds out what it may be asked for
    user = future_user()
    _choose_numbers(user, powers.uids)
    os.environ.setdefault("HOME", home())  # what `~` means in a grant
    facts = gather(powers)
    filter_ = None if isinstance(facts, GoondanError) else seccomp.own_program("host", facts.machine)
    if user:
        if powers.tree is not None:
            hand_over(powers.tree, user)
        # A socket that another user may have put there is not touched. The link says why it is not used.
        with suppress(GoondanError):
            if endpoint.startswith("ipc://") and broker_identity.BrokerIdentity(endpoint, broker_uid).is_there():
                startup.admit_toolhost(endpoint.removeprefix("ipc://"))
    if helper is not None:
        with suppress(OSError):
            powers.start(*helper, _allowed(user, endpoint, powers, facts))
    drop_capabilities(user, filter_)
    return Unprivileged(powers, facts)


def _choose_numbers(user: int, uids: Uids) -> None:
    """Check that nobody else has the numbers of our own user and of our jails. Raises OSError."""
    if (wrong := users.problem()) is not None:
        raise OSError(errno.EINVAL, wrong)
    name = account_of(user) if user else None
    if name is not None and not name.startswith(_OUR_ACCOUNT):
        text = f"user {user}, which the tool host would be, is {name}: set {users.VARIABLE}=FIRST-LAST to a free range"
        raise OSError(errno.EBUSY, text)
    if not uids.pass_over(Accounts().taken):
        text = f"the user numbers for jails are somebody's: set {users.VARIABLE}=FIRST-LAST to a free range"
        raise OSError(errno.EBUSY, text)


def _enclosed(facts: HostFacts | GoondanError) -> list[Enclosed]:
    """The command lines that start bubblewrap without user namespaces: with and without power over networks."""
    if isinstance(facts, GoondanError) or not facts.bwrap:
        return []  # bubblewrap could not be started anyway
    ways: list[Enclosed] = []
    for net_admin in (True, False):
        host = msgspec.structs.replace(facts, user_namespaces=False, net_admin=net_admin)
        if (enclosure := plan.enclosure_of(host)) is not None:
            ways.append(
                {
                    "enclosure": enclosure,
                    "argv": plan.start_of(host.bwrap, host.boot(JAIL_CODE)),
                    "walls": plan.isolation(host),
                    "options": ARGS_FD,
                    "filter": FILTER_FD,
                }
            )
    return ways


def _allowed(user: int, endpoint: str, powers: Powers, facts: HostFacts | GoondanError) -> AllowList:
    tree = powers.tree
    machine = None if isinstance(facts, GoondanError) else facts.machine
    return {
        "user": user,
        "jails": powers.uids.bounds,
        "instances": users.NUMBERS.instances,
        "stages": list(STAGES),
        "closed": [*SYSTEM, *code_folders(), *runtime_folders(endpoint)],
        "top": list(TOP),
        "home": home(),
        "groups": [] if tree is None else tree.folders,
        "beside": None if tree is None else beside(tree),
        "guarded": list(GUARDED_NAMES),
        "enclosed": _enclosed(facts),
        "filters": [
            seccomp.program(machine, sockets=sockets, drops=True).hex() for sockets in (False, True) if machine
        ],
    }


class Accounts:
    """What is known of this machine, found out once."""

    def __init__(self, etc: str = "/etc", proc: str = "/proc") -> None:
        self._numbers = {*_second_field(f"{etc}/passwd"), *_second_field(f"{etc}/group"), *_owners(proc)}
        self._ranges = [*_ranges(f"{etc}/subuid"), *_ranges(f"{etc}/subgid")]
        self._asks = _has_services(f"{etc}/nsswitch.conf")

    def taken(self, first: int, last: int) -> bool:
        """Whether somebody has a number from `first` to `last`, as far as can be told."""
        if any(start <= last and first < start + count for start, count in self._ranges):
            return True
        if any(first <= number <= last for number in self._numbers):
            return True
        if not self._asks:
            return False
        until = time.monotonic() + PATIENCE_S
        for number in range(first, min(last, first + ASKED - 1) + 1):
            if account_of(number) is not None:
                return True
            if time.monotonic() > until:
                return False
        return False


def account_of(number: int) -> str | None:
    """The name of the user or group with that number; None when there is none."""
    with suppress(KeyError, OSError, OverflowError):
        return pwd.getpwuid(number).pw_name
    with suppress(KeyError, OSError, OverflowError):
        return grp.getgrgid(number).gr_name
    return None


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as source:
            return source.read(_MAX_FILE).splitlines()
    except OSError:
        return []


def _second_field(path: str) -> list[int]:
    """The numbers of the accounts in a file: name:password:NUMBER:…"""
    fields = (line.split(":") for line in _lines(path))
    return [int(found[2]) for found in fields if len(found) > 2 and found[2].isdecimal()]


def _ranges(path: str) -> list[tuple[int, int]]:
    """The ranges that users have for their containers, from a file: name:FIRST:COUNT"""
    fields = (line.split(":") for line in _lines(path))
    found = [entry for entry in fields if len(entry) == 3 and entry[1].isdecimal() and entry[2].isdecimal()]
    return [(int(first), int(count)) for _, first, count in found]


def _has_services(path: str) -> bool:
    """Whether accounts come from more than files."""
    for line in _lines(path):
        name, _, sources = line.partition("#")[0].partition(":")
        words = [word for word in sources.split() if not word.startswith("[")]
        if name.strip() in ("passwd", "group") and not _KNOWN.issuperset(words):
            return True
    return False


def _owners(proc: str) -> set[int]:
    """The users that run processes; jails of other tool hosts are among them."""
    found = set()
    with suppress(OSError):
        for name in os.listdir(proc):
            if name.isdigit():
                with suppress(OSError):
                    found.add(os.stat(f"{proc}/{name}").st_uid)
    return found


def future_user() -> int:
    """The user that this process, which is root, will become: TOOLHOST_UID, or 0 where that is not possible."""
    held = syscalls.permitted_capabilities()
    able = all(held >> number & 1 for number in _NEEDED.values())
    return users.TOOLHOST_UID if able and _is_mapped("uid_map") and _is_mapped("gid_map") else 0


def _is_mapped(name: str) -> bool:
    with suppress(OSError, ValueError), open(f"/proc/self/{name}", encoding="ascii") as source:
        for line in source:
            first, _, count = map(int, line.split())
            if first <= users.TOOLHOST_UID < first + count:
                return True
    return False


def drop_capabilities(user: int, filter_program: bytes | None) -> None:
    """Become `user` (see `future_user`) and give up the rest for good.

    Call it before there are threads, because each thread has powers of its own. `filter_program` is for this process
    and all its threads; None on a machine without a filter. Raises OSError when the system refuses.
    """
    held = syscalls.permitted_capabilities()
    wanted = KEPT if user else KEPT | OF_ROOT
    kept = held & sum(1 << number for number in wanted.values())
    if held >> _NEEDED["SETPCAP"] & 1:
        syscalls.bound_capabilities(())
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        syscalls.prctl(syscalls.PR_SET_KEEPCAPS, 1)  # else a change of user leaves nothing to keep
        os.setresuid(user, user, user)
        syscalls.prctl(syscalls.PR_SET_KEEPCAPS, 0)
        # Other processes of this user, such as tool hosts of other kernels, may not look into us.
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    syscalls.keep_capabilities(kept)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    try:
        if filter_program is not None:
            syscalls.install_filter(filter_program)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EINVAL):
            raise
        # A kernel that has none, or an emulated machine. No jail can be made there either, and the probe says so.

"""Changes from root to the tool host's own user. Everything that needs root is found, made and started before.

Each program of this package that makes jails calls it, before it has threads and before it reads a byte from outside.
Under an ordinary user the user does not change, and only the launcher is started.

Source: docs/design/sandbox.md section 3.1; docs/decisions/039.
"""

from __future__ import annotations

import errno
import hashlib
import os
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from goondan.schemas.errors import GoondanError
from goondan.schemas.system import own_users
from goondan.schemas.system.broker_identity import BrokerIdentity
from goondan.schemas.system.startup import admit_toolhost, close_to_others
from goondan.schemas.system.users import VARIABLE
from goondan.toolhost.launcher.allow_list import AllowList
from goondan.toolhost.launcher.request import Enclosed
from goondan.toolhost.policy.conventions import ARGS_FD, FILTER_FD, JAIL_CODE
from goondan.toolhost.policy.enclosure import enclosure_of
from goondan.toolhost.policy.facts import STAGES, code_folders, gather, home
from goondan.toolhost.policy.hiding import runtime_folders
from goondan.toolhost.policy.plan import isolation, start_of
from goondan.toolhost.policy.refusals import GUARDED_NAMES, SYSTEM, TOP
from goondan.toolhost.policy.subject import HostFacts
from goondan.toolhost.privileges.accounts import Accounts, account_of
from goondan.toolhost.privileges.capabilities import drop_capabilities, future_user
from goondan.toolhost.privileges.launcher_link import spawn
from goondan.toolhost.privileges.ordinary import Ordinary
from goondan.toolhost.privileges.own_groups import beside, find_tree, hand_over
from goondan.toolhost.privileges.powers import Powers
from goondan.toolhost.privileges.rooted import Rooted
from goondan.toolhost.privileges.uids import Uids
from goondan.toolhost.seccomp.program import host_program, program

#: The name of the account that an operator may make for our user number, so that programs show a name.
_OUR_ACCOUNT: Final = "goondan"


class Unprivileged(NamedTuple):
    """What this process has after it gave root up."""

    #: The operations that others do for it.
    powers: Powers
    #: The facts about the machine that it found out before. See facts.gather.
    facts: HostFacts | GoondanError


def drop_privileges(endpoint: str = "", broker_uid: int | None = None, *, umask: int | None = None) -> Unprivileged:
    """Start the launcher and, under root, the privileged helper. Then give root up.

    Raises OSError when the system refuses to give root up.

    From now on, files of this process and of those two are closed to other users. Files of jails are made under `umask`
    (None: the umask that this process had).

    `endpoint` is that of the broker, whose socket must let us in afterwards. `broker_uid` is the broker's user (None:
    ours). A launcher that cannot be started is reported by the probe.
    """
    inherited = close_to_others()
    umask = inherited if umask is None else umask
    if os.geteuid() != 0:
        ordinary = Ordinary(umask)
        with suppress(OSError):
            ordinary.launcher.start()
        return Unprivileged(ordinary, gather(ordinary))
    # Only root with all of its powers sees that a control group was delegated to it.
    powers = Rooted(Uids(os.getpid(), own_users.NUMBERS), find_tree())
    user = future_user()
    _choose_numbers(user, powers.uids)
    os.environ.setdefault("HOME", home())  # what `~` means in a grant
    facts = gather(powers)
    filter_ = None if isinstance(facts, GoondanError) else host_program(facts.machine)
    if user:
        if powers.tree is not None:
            hand_over(powers.tree, user)
        # A socket that another user may have put there is not touched. The link says why it is not used.
        with suppress(GoondanError):
            if endpoint.startswith("ipc://") and BrokerIdentity(endpoint, broker_uid).is_there():
                admit_toolhost(endpoint.removeprefix("ipc://"))
    with suppress(OSError):
        powers.start(*spawn(umask, "helper"), _allowed(user, endpoint, powers, facts))
        powers.launcher.start()
    drop_capabilities(user, filter_)
    return Unprivileged(powers, facts)


def _choose_numbers(user: int, uids: Uids) -> None:
    """Check that nobody else has the numbers of our own user and of our jails. Raises OSError."""
    if (wrong := own_users.problem()) is not None:
        raise OSError(errno.EINVAL, wrong)
    name = account_of(user) if user else None
    if name is not None and not name.startswith(_OUR_ACCOUNT):
        text = f"user {user}, which the tool host would be, is {name}: set {VARIABLE}=FIRST-LAST to a free range"
        raise OSError(errno.EBUSY, text)
    if not uids.pass_over(Accounts().taken):
        text = f"the user numbers for jails are somebody's: set {VARIABLE}=FIRST-LAST to a free range"
        raise OSError(errno.EBUSY, text)


def _enclosed(facts: HostFacts | GoondanError) -> list[Enclosed]:
    """The command lines that start bubblewrap without user namespaces: with and without power over networks."""
    if isinstance(facts, GoondanError) or not facts.bwrap:
        return []  # bubblewrap could not be started anyway
    ways: list[Enclosed] = []
    for net_admin in (True, False):
        host = msgspec.structs.replace(facts, user_namespaces=False, net_admin=net_admin)
        if (enclosure := enclosure_of(host)) is not None:
            filters = (program(host.machine, sockets=sockets, drops=True) for sockets in (False, True))
            ways.append(
                {
                    "enclosure": enclosure,
                    "argv": start_of(host.bwrap, host.boot(JAIL_CODE)),
                    "walls": isolation(host),
                    "filters": [hashlib.sha256(code).hexdigest() for code in filters],
                    "options": ARGS_FD,
                    "filter": FILTER_FD,
                }
            )
    return ways


def _allowed(user: int, endpoint: str, powers: Powers, facts: HostFacts | GoondanError) -> AllowList:
    tree = powers.tree
    return {
        "user": user,
        "jails": powers.uids.bounds,
        "instances": own_users.NUMBERS.instances,
        "stages": list(STAGES),
        "closed": [*SYSTEM, *code_folders(), *runtime_folders(endpoint)],
        "top": list(TOP),
        "home": home(),
        "groups": [] if tree is None else tree.folders,
        "beside": None if tree is None else beside(tree),
        "guarded": list(GUARDED_NAMES),
        "enclosed": _enclosed(facts),
    }

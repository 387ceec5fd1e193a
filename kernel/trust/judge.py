"""The decision whether a bundle may run: from its powers and from what was agreed to. Pure.

A bundle that asks for nothing beyond its jails needs no agreement. Everything else needs one that covers all of it: a
record, `--trust` or GOONDAN_TRUST=1 for one command, the revision that runs already, or being the shipped quickstart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from msgspec import Struct

from goondan.kernel.trust.powers import Module, OwnModel, Power, changed_modules, grown, others
from goondan.schemas.wire.errors import GoondanError, fail

#: Set to 1, it trusts every bundle of the command: for CI, where nobody is asked and the bundle is the subject.
VARIABLE: Final = "GOONDAN_TRUST"
#: The powers of the shipped quickstart. A quickstart that asks for more is somebody's own.
SHIPPED: Final[tuple[Power, ...]] = (OwnModel(),)


class Consent(Struct, frozen=True, kw_only=True):
    """What the user has agreed to before this look."""

    #: The powers that were agreed to.
    agreed: Sequence[Power] = ()
    #: There is a record of this bundle.
    known: bool = False
    #: The user says that the folder is their own work.
    own: bool = False
    #: The user agrees to everything, for one command.
    everything: bool = False
    #: The bundle comes with the kernel.
    shipped: bool = False
    #: The folder is a clone of a repository that others can change.
    elsewhere: bool = False
    #: The powers of the revision that runs.
    running: Sequence[Power] | None = None


class Judgement(Struct, frozen=True, kw_only=True):
    """Whether the bundle is trusted, and why."""

    #: All powers that it asks for.
    powers: list[Power]
    #: The powers that nobody has agreed to.
    missing: list[Power]
    #: The modules whose bytes have changed since the agreement. They need a new one.
    changed: list[Module]
    #: Why it is trusted or not.
    reason: Literal["nothing to ask", "record", "command", "shipped", "running", "not trusted"]
    #: It was agreed to once.
    known: bool = False
    #: The folder is a clone of a repository that others can change.
    elsewhere: bool = False
    #: Why records cannot be read or written. None: they can.
    unbelieved: str | None = None

    @property
    def trusted(self) -> bool:
        """Whether it may run, and whether its modules may be shown what they ask for."""
        return self.reason != "not trusted"


def judge(powers: Sequence[Power], consent: Consent, unbelieved: str | None = None) -> Judgement:
    """Whether a bundle that asks for `powers` may run."""
    agreed = [*consent.agreed, *(consent.running or ())]
    missing = grown(agreed, [power for power in powers if not _is_asleep(power)])
    changed: list[Module] = []
    if (consent.elsewhere and not consent.own) or others(powers):
        changed = changed_modules(agreed, powers)
    reason: Literal["nothing to ask", "record", "command", "shipped", "running", "not trusted"] = "not trusted"
    if consent.everything:
        reason = "command"
    elif not missing and not changed:
        reason = "running" if consent.running is not None else "record" if consent.known else "nothing to ask"
    elif consent.shipped and not grown(SHIPPED, [power for power in powers if power not in others(powers)]):
        reason = "shipped"
    trusted = reason != "not trusted"
    return Judgement(
        powers=list(powers),
        missing=[] if trusted else missing,
        changed=[] if trusted else changed,
        reason=reason,
        known=consent.known,
        elsewhere=consent.elsewhere,
        unbelieved=unbelieved,
    )


def everything_trusted(env: Mapping[str, str]) -> bool:
    """Whether the environment says that every bundle is trusted."""
    return env.get(VARIABLE) == "1"


def untrusted(judgement: Judgement, bundle: str, *, running: bool = False) -> GoondanError:
    """The error for a bundle that may not run. `running`: an earlier revision of it does, and goes on."""
    from shlex import quote

    what = f"{_counted(judgement)} your agreement"
    if running:
        message = f"the changed bundle asks for {what}; the revision that runs stays"
    elif judgement.known:
        message = f"{bundle} was trusted before, and now asks for {what}"
    else:
        message = f"{bundle} has not been run by you before, and asks for {what}"
    command = f"gdn trust {quote(bundle)}"
    hint = f"Run `{command}` to see what it asks for and to trust it"
    hint += "." if running else ", or add --trust (or GOONDAN_TRUST=1) for one time."
    if judgement.unbelieved is not None:
        message += f" (records of trust are not read: {judgement.unbelieved})"
    return fail("E_BUNDLE_UNTRUSTED", message, suggestion=hint)


def _counted(judgement: Judgement) -> str:
    number, changed = len(judgement.missing), len(judgement.changed)
    parts = [f"{number} {'thing' if number == 1 else 'things'}"] if number else []
    if changed:
        parts.append(f"{changed} changed {'module' if changed == 1 else 'modules'} outside of jails")
    need = "needs" if number + changed == 1 else "need"
    return f"{' and '.join(parts) or 'nothing new'} that {need}"


def _is_asleep(power: Power) -> bool:
    return isinstance(power, OwnModel) and power.asleep

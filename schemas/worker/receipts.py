"""The receipt of a tool call, and the tiers of the sandbox: what the sandbox was, as the tool host saw it. Nothing in
it is a jail's word but one number, by which nothing is decided. Pure.

A tier says how strong the walls of a jail are; toolhost/policy/plan.py says what each is made of.

A receipt stands beside `status` in a `tool.result` and is for operators: agents keep it with the call's notes, for
traces, and show it to no model. Values are grouped by what they are about: `jail` (all of its life so far, all of its
calls) or `call` (this one alone).

Source: docs/design/sandbox.md section 7.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from goondan.schemas.wire.errors import cut_message

#: The strongest first.
Tier = Literal["full", "reduced"]
TIERS: Final[tuple[Tier, ...]] = get_args(Tier)
#: What a tool runs behind that asks for no less.
STRONGEST: Final = TIERS[0]


def is_weaker(tier: Tier, than: Tier) -> bool:
    """Whether the walls of `tier` are weaker than those of `than`."""
    return TIERS.index(tier) > TIERS.index(than)


# --- receipts ---------------------------------------------------------------------------------------------------------

Wall = Literal["namespaces", "seccomp", "landlock", "uid", "limits"]
Mechanism = Literal["cgroup", "rlimit", "watched", "host"]

#: Limits of a receipt in a trace: how many hosts of each list, the last ones, and how many characters of why the jail
#: ended. So one receipt takes at most some 5 KiB, whatever the jail tried.
KEPT_HOSTS: Final = 8
KEPT_EXIT_CHARS: Final = 300


class JailReceipt(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The jail."""

    #: How much of the walls it had.
    tier: Tier
    #: Its walls.
    walls: list[Wall]
    #: What keeps each limit. `cgroup`: the Linux kernel, for all of the jail. `rlimit`: the Linux kernel, for each
    #: process or user namespace. `watched`: looks from outside while calls run. `host`: the tool host.
    limits: dict[str, Mechanism]
    #: Processor time (milliseconds). It is the Linux kernel's count where a control group keeps both this and the
    #: memory. Else it is a sample, at most a second old.
    cpu_ms: int = 0
    #: The largest memory (KiB). It is the Linux kernel's count where a control group keeps both, and then pages of
    #: files are included. Else it is the largest sum that was seen of the memory peaks of living processes.
    peak_memory_kb: int = 0
    #: Where its network connections went, as "host:port".
    reached: list[str] = []
    #: Where its network connections could not go, as "host:port".
    denied: list[str] = []
    #: Why the jail ended, when it has ended.
    exit: str | None = None
    #: How the calls of a tool with `isolation: call` are kept apart. `forked`: each has walls of its own inside this
    #: jail. `alone`: this jail is for one call, because the Linux kernel allows no such walls.
    calls: Literal["forked", "alone"] | None = None


class CallReceipt(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The call, seen from the host."""

    #: From the hand-over to the jail until the result (milliseconds).
    wall_ms: float
    #: Of a call that was `forked`: why its processes ended before it had a result; None: they did not.
    exit: str | None = None
    #: Where network connections of the jail could not go while it ran, as "host:port".
    denied: list[str] = []
    #: When the tool host got the call (CLOCK_BOOTTIME, microseconds).
    came_us: int = 0
    #: When it handed the call to the jail, by the same clock.
    began_us: int = 0
    #: How long the worker had it, as the worker says: no more than `wall_ms` (milliseconds). 0: that is not known.
    handler_ms: float = 0.0


class Receipt(Struct, frozen=True, rename="camel", kw_only=True):
    """Both."""

    #: What was seen of the jail.
    jail: JailReceipt
    #: What was seen of the call.
    call: CallReceipt


def kept(receipt: Receipt) -> Receipt:
    """The receipt as a trace has it: its lists end with how many more hosts there were."""
    jail = receipt.jail
    if (
        len(jail.exit or "") <= KEPT_EXIT_CHARS
        and max(len(jail.reached), len(jail.denied), len(receipt.call.denied)) <= KEPT_HOSTS
    ):
        return receipt
    bounded = replace(
        jail,
        reached=_last(jail.reached),
        denied=_last(jail.denied),
        exit=None if jail.exit is None else cut_message(jail.exit, KEPT_EXIT_CHARS),
    )
    return Receipt(jail=bounded, call=replace(receipt.call, denied=_last(receipt.call.denied)))


def _last(hosts: list[str]) -> list[str]:
    more = len(hosts) - KEPT_HOSTS
    return hosts if more <= 0 else [*hosts[-KEPT_HOSTS:], f"and {more} more"]

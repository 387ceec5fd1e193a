"""The receipt of a tool call: what the sandbox was, as the tool host saw it. Nothing in it is a jail's word.

It stands beside `status` in a `tool.result` and is for operators; no model is shown one. Values are grouped by what
they are about: `jail` (all of its life so far, all of its calls) or `call` (this one alone).

Source: sandbox.md section 7.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Wall = Literal["namespaces", "seccomp", "landlock", "uid", "limits"]
Mechanism = Literal["cgroup", "rlimit", "watched", "host"]


class JailReceipt(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The jail. `limits` says for each limit what keeps it: `cgroup` (the kernel, for all of the jail), `rlimit` (the
    kernel, for each process or user namespace), `watched` (looks from outside while calls run), `host` (us).

    `cpu_ms` and `peak_memory_kb` are the kernel's counts where a control group keeps both, files' pages included. Else
    they are samples, at most a second old; the latter is then the largest sum that was seen of the memory peaks of
    living processes. `exit` is why it ended, when it has. `reached` and `denied` are "host:port".
    """

    tier: Literal["full", "reduced"]
    walls: list[Wall]
    limits: dict[str, Mechanism]
    cpu_ms: int = 0
    peak_memory_kb: int = 0
    reached: list[str] = []
    denied: list[str] = []
    exit: str | None = None


class CallReceipt(Struct, frozen=True, rename="camel", kw_only=True):
    """The call: milliseconds from its hand-over to the jail until its result, seen from the host."""

    wall_ms: float


class Receipt(Struct, frozen=True, rename="camel", kw_only=True):
    """Both."""

    jail: JailReceipt
    call: CallReceipt

"""Merging sandboxes: what an agent leaves, what the operator adds, and what goes beyond. Pure.

`narrow` gives what both sides allow, field by field; what a part leaves out stays. Narrowing never gives more, in
whatever order it is done and however often (tests/unit/kernel/grants/test_merge.py). `widen` gives what either allows.
`beyond` says what a part names that a sandbox does not have: narrowing leaves it out, and validation calls it an error.

Isolation has an order of its own: `call` is narrower than `instance`. A shared jail has less (no workdir, no variables)
but is shared with everyone, so it is neither narrower nor wider than the others, and no agent changes to or from it.

Source: docs/design/sandbox.md section 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from goondan.schemas.bundle.launch import Filesystem, Limits, PythonSpec, SandboxSpec
from goondan.schemas.worker import hosts
from goondan.schemas.worker.grantable import within
from goondan.schemas.worker.receipts import STRONGEST, Tier, is_weaker

Isolation = Literal["shared", "instance", "call"]


class Part(Struct, frozen=True, kw_only=True):
    """A part of a sandbox, with absolute paths. None: the part does not say."""

    #: How calls are kept apart.
    isolation: Isolation | None = None
    #: What may be reached.
    network: Any = None
    #: What may be read.
    read: list[str] | None = None
    #: What may be written.
    write: list[str] | None = None
    #: Variables of the environment.
    env: list[str] | None = None
    #: What handlers may ask of the bus.
    permissions: list[Literal["agents", "restart", "tools"]] | None = None
    #: The part says something about `venv`. Without it `venv` does not count.
    says_venv: bool = False
    #: The virtual environment.
    venv: str | None = None
    #: Limits, by the names of their attributes.
    limits: dict[str, int] = {}
    #: The tier that the tool needs at least.
    min_tier: Tier | None = None


class Excess(Struct, frozen=True):
    """A part names something that a sandbox does not have. `field` is its place in the part, as it is written."""

    #: Its place in the part, as it is written.
    field: tuple[str | int, ...]
    #: What there is too much.
    what: str

    @property
    def name(self) -> str:
        """The field without its number in a list."""
        return ".".join(step for step in self.field if isinstance(step, str))


#: What a tool gets that asks for nothing.
DEFAULTS = SandboxSpec()


def narrow(base: SandboxSpec, part: Part) -> SandboxSpec:
    """What `base` allows and `part` leaves."""
    files = base.filesystem
    write = files.write if part.write is None else meet_paths(files.write, part.write)
    # A place that can be written can be read. A place that may no longer be written stays readable unless `read` says
    # else.
    read = [*files.read, *files.write]
    if part.read is not None:
        read = meet_paths(read, [*part.read, *(part.write or [])])
    limits = {name: min(getattr(base.limits, name), value) for name, value in part.limits.items()}
    venv = base.python.venv
    if part.says_venv and part.venv != venv:
        venv = None
    return replace(
        base,
        isolation="call" if part.isolation == "call" and base.isolation == "instance" else base.isolation,
        network=base.network if part.network is None else _meet_networks(base.network, part.network),
        filesystem=Filesystem(read=_outside(read, write), write=write),
        env=base.env if part.env is None else [name for name in base.env if name in part.env],
        permissions=base.permissions
        if part.permissions is None
        else [name for name in base.permissions if name in part.permissions],
        python=PythonSpec(venv=venv),
        limits=replace(base.limits, **limits),
        min_tier=_tier(part, base, weaker=False),
    )


def widen(base: SandboxSpec, part: Part) -> SandboxSpec:
    """What `base` or `part` allows. Isolation stays, and a shared jail gets no variables and no permissions."""
    files = base.filesystem
    write = join_paths([*files.write, *(part.write or [])])
    limits = {name: max(getattr(base.limits, name), value) for name, value in part.limits.items()}
    alone = base.isolation != "shared"
    return replace(
        base,
        network=base.network if part.network is None else _join_networks(base.network, part.network),
        filesystem=Filesystem(read=_outside(join_paths([*files.read, *(part.read or [])]), write), write=write),
        env=sorted({*base.env, *(part.env or [])}) if alone and part.env else base.env,
        permissions=sorted({*base.permissions, *(part.permissions or [])})
        if alone and part.permissions
        else base.permissions,
        python=PythonSpec(venv=base.python.venv or part.venv),
        limits=replace(base.limits, **limits),
        min_tier=_tier(part, base, weaker=True),
    )


def beyond(part: Part, base: SandboxSpec) -> list[Excess]:
    """What `part` names that `base` does not have."""
    found: list[Excess] = []
    if part.isolation not in (None, base.isolation) and (part.isolation, base.isolation) != ("call", "instance"):
        found.append(Excess(("isolation",), f"{part.isolation} instead of {base.isolation}"))
    if part.network is not None:
        more = hosts.beyond(hosts.read_network(part.network), hosts.read_network(base.network))
        found += [Excess(("network",), rule) for rule in more]
    files = base.filesystem
    found += _not_inside(("filesystem", "read"), part.read or [], [*files.read, *files.write])
    found += _not_inside(("filesystem", "write"), part.write or [], files.write)
    found += [Excess(("env", at), name) for at, name in enumerate(part.env or []) if name not in base.env]
    found += [
        Excess(("permissions", at), name)
        for at, name in enumerate(part.permissions or [])
        if name not in base.permissions
    ]
    if part.says_venv and part.venv is not None and part.venv != base.python.venv:
        found.append(Excess(("python", "venv"), part.venv))
    spelled = dict(zip(Limits.__struct_fields__, Limits.__struct_encode_fields__, strict=True))
    for name, value in part.limits.items():
        if value > getattr(base.limits, name):
            found.append(Excess(("limits", spelled[name]), f"{value} instead of {getattr(base.limits, name)}"))
    if part.min_tier is not None and is_weaker(part.min_tier, base.min_tier):
        found.append(Excess(("minTier",), f"{part.min_tier} instead of {base.min_tier}"))
    return found


def _not_inside(field: tuple[str, ...], paths: Iterable[str], folders: Iterable[str]) -> list[Excess]:
    there = list(folders)
    return [
        Excess((*field, at), path) for at, path in enumerate(paths) if not any(within(path, folder) for folder in there)
    ]


def as_part(sandbox: SandboxSpec) -> Part:
    """A whole sandbox as a part that says everything but the isolation."""
    return Part(
        network=sandbox.network,
        read=sandbox.filesystem.read,
        write=sandbox.filesystem.write,
        env=sandbox.env,
        permissions=sandbox.permissions,
        says_venv=True,
        venv=sandbox.python.venv,
        limits={name: getattr(sandbox.limits, name) for name in Limits.__struct_fields__},
        min_tier=sandbox.min_tier,
    )


def without_grants(request: SandboxSpec) -> SandboxSpec:
    """The grant of a tool whose request nobody has accepted: the defaults, and less where it asks for less."""
    return narrow(request, as_part(DEFAULTS))


def requested(request: SandboxSpec) -> list[str]:
    """The parts of a request beyond the defaults, each in words that a person decides on."""
    found: list[str] = []
    network = hosts.read_network(request.network)
    if not network.none:
        found.append(f"network: {network}")
    found += [f"read: {path}" for path in request.filesystem.read]
    found += [f"write: {path}" for path in request.filesystem.write]
    found += [f"env: {name}" for name in request.env]
    found += [f"permission: {name}" for name in request.permissions]
    if request.python.venv is not None:
        found.append(f"python.venv: {request.python.venv}")
    for name, key in zip(Limits.__struct_fields__, Limits.__struct_encode_fields__, strict=True):
        if getattr(request.limits, name) > getattr(DEFAULTS.limits, name):
            found.append(f"limits.{key}: {getattr(request.limits, name)}")
    if request.min_tier != STRONGEST:
        found.append(f"minTier: {request.min_tier}")
    return found


def _tier(part: Part, base: SandboxSpec, *, weaker: bool) -> Tier:
    """The tier of `part`, if it has one that is weaker (or, without `weaker`, stronger) than that of `base`."""
    wanted = base.min_tier if part.min_tier is None else part.min_tier
    first, second = (wanted, base.min_tier) if weaker else (base.min_tier, wanted)
    return wanted if is_weaker(first, second) else base.min_tier


# --- fields ---------------------------------------------------------------------------------------------------------


def meet_paths(one: Iterable[str], other: Iterable[str]) -> list[str]:
    """The places that lie in both."""
    there = list(other)
    both = [b if within(b, a) else a for a in one for b in there if within(a, b) or within(b, a)]
    return join_paths(both)


def join_paths(paths: Iterable[str]) -> list[str]:
    """Every place once, without those inside another."""
    every = sorted(set(paths))
    return [path for path in every if not any(other != path and within(path, other) for other in every)]


def _outside(read: Iterable[str], write: Iterable[str]) -> list[str]:
    """The places to read that are not below a place to write: what can be written can be read as well."""
    writable = list(write)
    return [path for path in join_paths(read) if not any(within(path, folder) for folder in writable)]


def _meet_networks(one: Any, other: Any) -> Any:
    return hosts.write_network(hosts.meet(hosts.read_network(one), hosts.read_network(other)))


def _join_networks(one: Any, other: Any) -> Any:
    return hosts.write_network(hosts.join(hosts.read_network(one), hosts.read_network(other)))

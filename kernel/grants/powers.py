"""Powers: what a bundle can do to the person who runs it, beyond what a jail can do; and the decision whether it may
run, from its powers and from what was agreed to. Pure.

A list of powers is what a person agrees to. `grown` compares two lists, and is the only function that does: at a start,
and for a kernel that runs and gets a new revision. What it does not name needs no question.

To add a kind of power: one struct here, with its identity in its fields; one place in
kernel/bundle/rules/asked_powers.py that finds it; and one row in kernel/cli/consent.py that says it in words. A record
that holds a kind which this version does not know is not read, so that the person is asked again.

A bundle that asks for nothing beyond its jails needs no agreement. Everything else needs one that covers all of it: a
record, `--trust` or GOONDAN_TRUST=1 for one command, the revision that runs already, or being the shipped quickstart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

from msgspec import Struct

from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.worker import grantable, hosts


class Module(Struct, frozen=True, rename="camel", tag="module"):
    """Code of the bundle that runs in agent processes, outside of every jail, as the user."""

    #: Name of the Extension.
    extension: str
    #: The module's path from the bundle's folder.
    entry: str
    #: SHA-256 of all modules that it may import, in hexadecimal digits. It is no part of the identity: see
    #: `changed_modules`.
    digest: str


class Variable(Struct, frozen=True, rename="camel", tag="variable"):
    """A variable of the user's environment that the bundle reads.

    `use` says where its value goes: `tool NAME` (sandbox.env), `key` (the key or a header of a model), `client` (of an
    OAuthApp), or the kind of the document whose text has it as `${NAME}`.
    """

    #: The name of the variable.
    name: str
    #: Where its value goes, see above.
    use: str


class Folder(Struct, frozen=True, rename="camel", tag="folder"):
    """A file or folder outside of the bundle that a tool reads, or any that it writes to."""

    #: The tool.
    tool: str
    #: What the tool may do with it.
    access: Literal["read", "write"]
    #: Its absolute path.
    path: str


class Reach(Struct, frozen=True, rename="camel", tag="network"):
    """A network that a tool reaches. `rule` is `public`, `HOST:PORT` or `*.DOMAIN:PORT`."""

    #: The tool.
    tool: str
    #: `public`, `HOST:PORT` or `*.DOMAIN:PORT`.
    rule: str


class Command(Struct, frozen=True, rename="camel", tag="command"):
    """A program that runs in a jail because the bundle names it as an MCP server.

    `words` is the command as it is written: variables of the user's stand in it by their names.
    """

    #: The name of the server.
    server: str
    #: The command as it is written.
    words: str


class ServerEndpoint(Struct, frozen=True, rename="camel", tag="serverEndpoint"):
    """An MCP server that gets the arguments of tool calls, and the headers that the bundle names.

    `origin` is `scheme://host:port`, or the text of the document where the address has variables of the user's.
    """

    #: The name of the server.
    server: str
    #: `scheme://host:port`, or the text of the document.
    origin: str


class Endpoint(Struct, frozen=True, rename="camel", tag="endpoint"):
    """A server that gets conversations, because the bundle names it as the server of a model.

    `origin` is `scheme://host:port`, or `${NAME}` where the whole address is the value of the user's variable. `key` is
    the variable whose value is sent as the key; "" for none of the user's.
    """

    #: `scheme://host:port`, or `${NAME}` for the value of a variable.
    origin: str
    #: The user's variable whose value is sent; "": none.
    key: str


class TokenServer(Struct, frozen=True, rename="camel", tag="tokenServer"):
    """A server at which people are asked to sign in, because the bundle names it as that of an OAuthApp. Extensions get
    access tokens of it.

    `origin` is `scheme://host:port`. `key` is the user's variable whose value is sent as the client's secret; "" for
    none of the user's.
    """

    #: Where it is: `scheme://host:port`.
    origin: str
    #: The user's variable that is sent as the client's secret; "": none.
    key: str


class OpenKey(Struct, frozen=True, rename="camel", tag="openKey"):
    """A key that is sent over http, which anybody on the way can read, to a machine that is not this one."""

    #: Where it is: `scheme://host:port`.
    origin: str
    #: The user's variable whose value is sent; "": none.
    key: str


class OwnModel(Struct, frozen=True, rename="camel", tag="ownModel"):
    """Conversations go to the model that the user's own environment names (`provider: auto`), with its key.

    `asleep`: it names none today, so that nothing is sent. This is no part of the identity.
    """

    #: The environment names none today.
    asleep: bool = False


class Permission(Struct, frozen=True, rename="camel", tag="permission"):
    """A permission of a tool inside the kernel: `agents` (to ask other agents) or `restart`."""

    #: The tool.
    tool: str
    #: `agents`, `restart` or `tools`.
    name: str


class Setting(Struct, frozen=True, rename="camel", tag="setting"):
    """A rule of the sandbox or the kernel that the bundle makes weaker."""

    #: The resource, for example Tool/NAME.
    whose: str
    #: The field: `minTier`, `allowRegistry`, `extensionsMayAdd`, or a limit that is above its default.
    name: str
    #: What it is set to.
    value: str


class Owner(Struct, frozen=True, rename="camel", tag="owner"):
    """Another user owns files of the bundle, or a folder above them, and can change what is run."""

    #: The number of the user.
    uid: int


class Writers(Struct, frozen=True, rename="camel", tag="writers"):
    """Others may write to files of the bundle, or to a folder above them: a group, or everybody (`gid` None)."""

    #: The number of the group; None: everybody.
    gid: int | None = None


Power = (
    Module
    | Variable
    | Folder
    | Reach
    | Command
    | ServerEndpoint
    | Endpoint
    | TokenServer
    | OpenKey
    | OwnModel
    | Permission
    | Setting
    | Owner
    | Writers
)


def grown(agreed: Iterable[Power], wanted: Iterable[Power]) -> list[Power]:
    """Those of `wanted` that `agreed` does not cover, in their order. Empty: nothing has grown."""
    known = list(agreed)
    return [power for power in wanted if not _covered(power, known)]


def changed_modules(agreed: Iterable[Power], wanted: Iterable[Power]) -> list[Module]:
    """Modules of `wanted` that `agreed` has under the same names, but never with these bytes."""
    known: dict[tuple[str, str], set[str]] = {}
    for power in agreed:
        if isinstance(power, Module):
            known.setdefault((power.extension, power.entry), set()).add(power.digest)
    return [
        power
        for power in wanted
        if isinstance(power, Module) and power.digest not in known.get((power.extension, power.entry), {power.digest})
    ]


def others(powers: Iterable[Power]) -> list[Owner | Writers]:
    """Who else can change the bundle."""
    return [power for power in powers if isinstance(power, Owner | Writers)]


def _covered(power: Power, known: Sequence[Power]) -> bool:
    match power:
        case Module(extension, entry):
            return any(isinstance(k, Module) and (k.extension, k.entry) == (extension, entry) for k in known)
        case Folder(tool, access, path):
            return any(
                isinstance(k, Folder)
                and k.tool == tool
                and grantable.within(path, k.path)
                and (access == "read" or k.access == "write")
                for k in known
            )
        case Reach(tool, rule):
            return _reached(rule, [k.rule for k in known if isinstance(k, Reach) and k.tool == tool])
        case Endpoint(origin, key):
            return any(isinstance(k, Endpoint) and k.origin == origin and key in ("", k.key) for k in known)
        case OwnModel():
            return any(isinstance(k, OwnModel) for k in known)
        case Setting(whose, name, value) if name.startswith(("limits.", "policy.")):
            same = [k.value for k in known if isinstance(k, Setting) and (k.whose, k.name) == (whose, name)]
            return any(_number(k) >= _number(value) for k in same)
        case _:
            return power in known


def _reached(rule: str, rules: list[str]) -> bool:
    """Whether `rules` lead to all that `rule` leads to.

    Patterns and `public` lead to public addresses only, an exact host to private ones as well: so nothing but the same
    host covers it.
    """
    if rule in rules:
        return True
    if not rule.startswith("*."):
        return False
    if "public" in rules:
        return True
    try:
        wanted = hosts.parse_rule(rule)
        return any(hosts.parse_rule(known).covers(wanted) for known in rules)
    except hosts.BadHost:
        return False


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


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

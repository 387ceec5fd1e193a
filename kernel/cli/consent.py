"""The question that `gdn` asks before a bundle runs that asks for more than the user has agreed to: a bundle's powers
in words, on one screen.

The kernel decides: it refuses to start with E_BUNDLE_UNTRUSTED. Then this module reads the bundle and shows what it
asks for. The user agrees to what was shown. The kernel compares this with what it reads itself. So a change of the
files in between does no harm: the kernel refuses the changed bundle again, and the user is asked again.

Everything in a row may be text from outside: names, paths, addresses. So each row is one line of printable characters
with a bounded length. A section has a bounded number of rows, and the number of the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Final, Literal

from goondan.kernel.bundle.loader import Inspected, inspect_bundle
from goondan.kernel.bundle.rules import problems, variables
from goondan.kernel.cli.output import Style, asked_at_terminal, columns_of, printable, style_of
from goondan.kernel.cli.rules.plain import broken, fit
from goondan.kernel.cli.state import BundleTarget
from goondan.kernel.grants import powers
from goondan.kernel.paths import root_of
from goondan.kernel.trust import records
from goondan.kernel.trust.judgement import group_name, owner_name

#: The most rows of all sections together. If there are more, each section shows the first ones and a number. So the
#: whole text fits on a terminal of 40 lines, and its top does not scroll away.
MANY_ROWS: Final = 14
MAX_ROWS: Final = 2
#: The width of one row (columns). With its indent it fits into 80 columns, so text from outside never begins a line.
MAX_ROW: Final = 76
#: In front of what does not fit into a row of a narrow terminal: no row of a section begins so.
BROKEN: Final = "┊ "
#: The width of the part after a path or an address (columns): the tool, or the key.
MAX_REST: Final = 36
Answer = Literal["always", "once", "no"]

_MODEL_TITLE: Final = "Sends conversations, with what its agents read, to"
_OTHERS_TITLE: Final = "Its files can be changed by others (so it is run from a private copy)"
#: The kinds and their meanings, the most important one first.
_SECTIONS: Final[tuple[tuple[tuple[type, ...], str], ...]] = (
    ((powers.Module,), "Runs this code as you, outside of every jail: it can do whatever you can"),
    ((powers.OpenKey,), "Sends a key over plain http: everybody on the way can read it"),
    ((powers.Variable,), "Reads these variables of your environment"),
    ((powers.Folder,), "Its tools open files of yours"),
    ((powers.Reach,), "Its tools reach the network"),
    ((powers.Command,), "Runs these programs in jails, as MCP servers"),
    ((powers.ServerEndpoint,), "Sends what its agents ask MCP servers to"),
    ((powers.Endpoint, powers.OwnModel), _MODEL_TITLE),
    ((powers.TokenServer,), "Asks people to sign in, and gives its extensions access tokens, at"),
    ((powers.Permission,), "Its tools direct the kernel"),
    ((powers.Setting,), "Loosens rules"),
    ((powers.Owner, powers.Writers), _OTHERS_TITLE),
)


def screen(judgement: powers.Judgement, bundle: str, style: Style | None = None, columns: int = 80) -> list[str]:
    """The text that a person should read before agreeing: everything the first time, later only the new powers.
    `columns`: the width of the terminal.
    """
    paint = style or Style()
    if judgement.trusted:
        title, asked = "This bundle asks for:", judgement.powers
    elif not judgement.known:
        title, asked = "You have not run this bundle before:", judgement.powers
    else:
        title, asked = "This bundle asks for more than you have agreed to:", judgement.missing
    lines = ["", paint.bold(title), *_set_off(_row(bundle), 2, columns), ""]
    for title, rows in sections(asked, judgement):
        lines += [f"  {paint.warning(title)}:", *(piece for row in rows for piece in _set_off(row, 4, columns))]
    rest = "Everything else that its tools do stays in jails, which see a working directory and nothing else."
    lines += ["", rest]
    return lines


def question(judgement: powers.Judgement) -> str:
    """The line that the answer is typed below."""
    if judgement.unbelieved is not None:
        return f"Do you trust it? It cannot be remembered: {_row(judgement.unbelieved)}. [y = this time / N = no]"
    return "Do you trust it? Say yes only if you know who wrote it. [y = yes / o = only this time / N = no]"


def sections(asked: Sequence[powers.Power], judgement: powers.Judgement | None = None) -> list[tuple[str, list[str]]]:
    """The titles and their rows, together no more than fit on a screen. `judgement` says what has changed."""
    groups: list[tuple[list[powers.Power], str]] = []
    if judgement is not None and judgement.changed:
        why = ", and it has changed in what is a clone" if judgement.elsewhere else ", and it has changed"
        groups.append(([*judgement.changed], f"Runs this code as you, outside of every jail{why}"))
    groups += [([power for power in asked if isinstance(power, kinds)], title) for kinds, title in _SECTIONS]
    many = sum(len(found) for found, _ in groups) > MANY_ROWS
    return [(title, _rows(found, many)) for found, title in groups if found]


def words(power: powers.Power) -> str:
    """One power in words that are harmless on a terminal."""
    return _row(_WORDS[type(power)](power))


def _rows(asked: Sequence[powers.Power], many: bool) -> list[str]:
    if not many or len(asked) <= MAX_ROWS:
        return [words(power) for power in asked]
    rows = [words(power) for power in sorted(asked, key=_harmless)[: MAX_ROWS - 1]]
    return [*rows, f"… and {len(asked) - len(rows)} more; `gdn trust --show --json` has all of them"]


def _harmless(power: powers.Power) -> tuple[bool, ...]:
    """The order of rows in a section that is not shown whole: the worst first, so that many small powers do not hide a
    great one.
    """
    match power:
        case powers.Variable(name):
            return (not variables.is_secret_by_name(name),)
        case powers.Folder(_, access, path):
            return (access != "write", "/." not in path and path.count("/") > 1)
        case powers.Reach(_, rule):
            return (rule != "public", not rule.startswith("*."))
        case powers.Endpoint(_, key) | powers.TokenServer(_, key):
            return (not key,)
        case _:
            return ()


def _row(text: str) -> str:
    """One line of at most MAX_ROW columns."""
    return _short(text, MAX_ROW)


def _set_off(row: str, indent: int, columns: int) -> list[str]:
    """A row with its indent, in as many lines as a narrow terminal needs. Each of the others has a mark."""
    if fit(row, columns - indent) == row:
        return [" " * indent + row]
    first, *rest = broken(row, max(20, columns - indent - len(BROKEN) - 3))
    return [" " * indent + first, *(" " * (indent + 1) + BROKEN + piece for piece in rest)]


def _short(text: str, columns: int) -> str:
    """A text without control characters, at most so wide. Both ends stay: the end of a host's name says whose it is."""
    # Cut before escaping: escaping a megabyte takes time, and makes the text longer.
    head, tail = printable(text[: 2 * columns]), printable(text[-2 * columns :])
    if len(text) <= 2 * columns and fit(head, columns) == head:
        return head
    return f"{fit(head, columns // 3)}…{fit(tail[::-1], columns - columns // 3 - 1)[::-1]}"


def _with(what: str, rest: str) -> str:
    """A row of two parts. A long second part does not push the end of the first part out of sight."""
    rest = _short(rest, MAX_REST)
    return _short(what, MAX_ROW - len(rest)) + rest


def _variable(power: powers.Variable) -> str:
    kind, _, name = power.use.partition(" ")
    if kind == "tool":
        return f"{power.name}, for Tool/{name}"
    if kind in _USES:
        return f"{power.name}, as {_USES[kind]}"
    return f"{power.name}, in the text of {kind} documents"


#: Use of a variable -> the words for it.
_USES: Final = {"key": "the key of a model", "client": "the id or secret of an OAuth client"}


def _reach(power: powers.Reach) -> str:
    where = "every public address" if power.rule == "public" else power.rule
    if where.endswith(":*"):
        where = f"every port of {where[:-2]}, on this machine"
    return _with(where, f" (Tool/{power.tool})")


def _endpoint(power: powers.Endpoint | powers.TokenServer) -> str:
    rest = f", with your {power.key}" if power.key else ""
    if power.origin.startswith("${"):
        return _with(f"the address in your {power.origin[2:-1]}", rest)
    return _with(_origin(power.origin), rest)


def _server_endpoint(power: powers.ServerEndpoint) -> str:
    return _with(_origin(power.origin), f" ({power.server})")


def _origin(origin: str) -> str:
    """An address as people write it: without the default port."""
    port = {"https": ":443", "http": ":80"}.get(origin.partition(":")[0], "")
    return origin.removesuffix(port) if port else origin


def _own_model(power: powers.OwnModel) -> str:
    now = " (today it names none: the built-in console answers)" if power.asleep else ""
    return f"the model that your environment names{now}"


def _permission(power: powers.Permission) -> str:
    what = {"agents": "asks other agents", "restart": "restarts agents"}.get(power.name, power.name)
    return f"{what} (Tool/{power.tool})"


def _setting(power: powers.Setting) -> str:
    if power.name == "allowRegistry":
        return f"{power.whose} may call tools that it does not list: {power.value}"
    if power.name == "extensionsMayAdd":
        return f"extensions of {power.whose} may add tools that it does not list: {power.value}"
    if power.name == "minTier":
        return f"{power.whose} also runs where jails are weaker"
    return f"{power.whose}: {power.name} is {power.value}"


def _writers(power: powers.Writers) -> str:
    return "everybody on this machine" if power.gid is None else f"the group {group_name(power.gid)}"


_WORDS: Final[dict[type, Callable[..., str]]] = {
    powers.Module: lambda power: _with(power.entry, f" (Extension/{power.extension})"),
    powers.OpenKey: lambda power: f"{power.key or 'a key that it brings along'}, to {_origin(power.origin)}",
    powers.Variable: _variable,
    powers.Folder: lambda power: _with(f"{power.access}s {power.path}", f" (Tool/{power.tool})"),
    powers.Reach: _reach,
    powers.Command: lambda power: _with(power.words, f" ({power.server})"),
    powers.ServerEndpoint: _server_endpoint,
    powers.Endpoint: _endpoint,
    powers.TokenServer: _endpoint,
    powers.OwnModel: _own_model,
    powers.Permission: _permission,
    powers.Setting: _setting,
    powers.Owner: lambda power: f"{owner_name(power.uid)}, who owns files or folders of it",
    powers.Writers: _writers,
}


def look_again(place: BundleTarget) -> Inspected:
    """Read the bundle again, without its modules. Raises BundleError when it has errors now."""
    inspected = inspect_bundle(place.bundle, state_dir=place.state_dir, handlers=False, policy=place.policy)
    # A variable that is not set keeps the bundle from running, but it can still be read.
    broken = [problem for problem in inspected.errors if problem.code != "E_CONFIG_MISSING_ENV"]
    if broken:
        raise problems.BundleError(broken, inspected.dropped)
    return inspected


def ask(inspected: Inspected) -> Answer:
    """Show what the bundle asks for, and ask the person. Anything but a clear yes is a no."""
    from goondan.kernel.cli.consent import question, screen

    judgement = inspected.judgement
    lines = screen(judgement, inspected.path, style_of(sys.stderr), columns_of(sys.stderr, 80))
    said = asked_at_terminal(*lines, question(judgement))
    if said in ("y", "yes"):
        return "always" if judgement.unbelieved is None else "once"
    return "once" if said in ("o", "once") else "no"


def remember(inspected: Inspected, state_dir: str, *, how: str, own: bool | None = None) -> None:
    """Record that the user has agreed to everything that the bundle asks for. Raises GoondanError E_STATE."""
    root = root_of(state_dir)
    known = records.read(root, inspected.path)
    is_own = known is not None and known.own if own is None else own
    records.write(root, inspected.path, inspected.judgement.powers, own=is_own, how=how)

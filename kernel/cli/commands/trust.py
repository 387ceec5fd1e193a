"""`gdn trust [PATH]`: shows what a bundle can do beyond its jails, and records that the user agrees to it. `--list` and
`--revoke` are for earlier agreements.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from goondan.kernel.cli import options
from goondan.kernel.cli.output import columns_of, is_terminal, write, write_json, write_result
from goondan.kernel.cli.state import checked_root, state_of
from goondan.kernel.cli.trust_screen import screen, words
from goondan.kernel.paths import find_bundle
from goondan.schemas.wire.errors import fail

if TYPE_CHECKING:
    from goondan.kernel.bundle.loader import Inspected
    from goondan.kernel.trust.judge import Judgement


@click.command()
@click.argument("path", required=False, metavar="[PATH]", shell_complete=options.completed_path("file"))
@click.option("--show", is_flag=True, help="Only show what the bundle asks for.")
@click.option("--list", "list_", is_flag=True, help="List the bundles that you trust.")
@click.option("--revoke", is_flag=True, help="Trust the bundle no more.")
@click.option("--own", is_flag=True, help="It is your own work: do not ask again when its code changes.")
@click.option("--state-root", is_flag=True, help="Believe again what is in a state root that others could write to.")
@options.as_json
def command(path: str | None, show: bool, list_: bool, revoke: bool, own: bool, state_root: bool, as_json: bool) -> int:
    """Trust a bundle: a goondan.yaml or its directory (default: ./goondan.yaml, else the quickstart).

    Shows what it can do beyond its jails and, on a terminal, asks. Without a terminal the command itself is the answer.
    """
    if show + list_ + revoke + state_root > 1 or (own and (show or list_ or revoke or state_root)):
        raise fail("E_USAGE", "give one of --show, --list, --revoke, --own and --state-root")
    if state_root:
        if path is not None:
            raise fail("E_USAGE", "--state-root is about the state of all bundles; GOONDAN_STATE_ROOT names it")
        return _confirm(as_json)
    if list_:
        return _list(as_json)
    if revoke:
        return _revoke(path, as_json)
    return _trust(path, as_json, show=show, own=own)


def _trust(path: str | None, as_json: bool, *, show: bool, own: bool) -> int:
    from goondan.kernel.cli.attach import BundleTarget
    from goondan.kernel.cli.consent import ask, can_ask, look_again, remember
    from goondan.kernel.trust.judge import untrusted

    bundle = find_bundle(path)
    place = BundleTarget(bundle, state_of(bundle))
    inspected = look_again(place)
    judgement = inspected.judgement
    wanted = not show and (bool(judgement.powers) or own)
    if show or not wanted:
        if as_json:
            write_json(_document(inspected, judgement.trusted))
        elif judgement.powers:
            write(*_shown(inspected), f"trusted: {_why(inspected)}")
        else:
            write(f"{bundle} asks for nothing beyond its jails: it runs without a question")
        return 0
    if not judgement.trusted and can_ask():
        if ask(inspected) != "always":
            raise untrusted(judgement, bundle)
    elif not as_json and not judgement.trusted:
        write(*_shown(inspected))
    remember(inspected, place.state_dir, how="command", own=own or None)
    write_result(_document(inspected, True), f"trusted: {bundle}", as_json=as_json)
    return 0


def _shown(inspected: Inspected) -> list[str]:
    """The screen. Without a terminal, values of the environment are hidden: addresses can contain them, and the output
    may end up in a log.
    """
    from goondan.kernel.cli.terminal import style_of

    judgement = inspected.judgement if is_terminal(sys.stdout) else _without_values(inspected)
    return screen(judgement, inspected.path, style_of(sys.stdout), columns_of(sys.stdout, 80))


def _without_values(inspected: Inspected) -> Judgement:
    """The judgement with `***` for values of the environment that a bundle has put into addresses and paths."""
    from msgspec.structs import replace

    from goondan.kernel.trust.powers import Endpoint, Folder, OpenKey, Power, TokenServer

    def hidden(power: Power) -> Power:
        if isinstance(power, Endpoint | OpenKey | TokenServer):
            return replace(power, origin=inspected.redact(power.origin))
        return replace(power, path=inspected.redact(power.path)) if isinstance(power, Folder) else power

    judgement = inspected.judgement
    return replace(
        judgement,
        powers=[hidden(power) for power in judgement.powers],
        missing=[hidden(power) for power in judgement.missing],
    )


def _why(inspected: Inspected) -> str:
    reason = inspected.judgement.reason
    return {"not trusted": "no", "record": "yes", "shipped": "yes, it came with goondan"}.get(reason, f"yes ({reason})")


def _document(inspected: Inspected, trusted: bool) -> dict[str, Any]:
    judgement = _without_values(inspected)
    return {
        "bundle": inspected.path,
        "trusted": trusted,
        "powers": judgement.powers,
        "new": [] if trusted else [*judgement.missing, *judgement.changed],
    }


def _confirm(as_json: bool) -> int:
    from goondan.kernel.state_root import confirm, doubt

    root = checked_root()
    confirm(root)
    why = doubt(root)
    if why is not None:
        raise fail("E_STATE", why, suggestion="Set GOONDAN_STATE_ROOT to a folder of your own outside of it.")
    write_result({"stateRoot": root, "believed": True}, f"believed: what is in {root}", as_json=as_json)
    return 0


def _list(as_json: bool) -> int:
    from goondan.kernel.trust.records import every

    found = every(checked_root())
    if as_json:
        write_json(found)
        return 0
    lines: list[str] = []
    for record in found:
        mine = ", your own work" if record.own else ""
        lines.append(f"{record.bundle}  (since {record.when}{mine})")
        lines += [f"    {words(power)}" for power in record.powers]
    write(*(lines or ["you have trusted no bundle"]))
    return 0


def _revoke(path: str | None, as_json: bool) -> int:
    from goondan.kernel.trust.records import forget

    # The records can still name a folder that is gone.
    gone = path is not None and not os.path.lexists(os.path.expanduser(path))
    bundle = os.path.abspath(os.path.expanduser(path or "")) if gone else find_bundle(path)
    revoked = forget(checked_root(), bundle)
    if as_json:
        write_json({"bundle": bundle, "revoked": revoked})
    elif revoked:
        write(f"no longer trusted: {bundle}. A kernel that runs keeps running until it is stopped.")
    else:
        write(f"{bundle} was not trusted")
    return 0

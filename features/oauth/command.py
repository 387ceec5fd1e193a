"""`gdn auth login|list|revoke`: OAuth tokens that people have agreed to.

A process of the kernel holds the tokens. When no kernel runs, one is started for as long as the command needs it.

Source: docs/oauth.md.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

import click

from goondan.kernel.cli import attach, options, output
from goondan.kernel.cli.session import Interrupts, Session, over_session
from goondan.kernel.cli.state import locate
from goondan.schemas.wire.errors import fail

#: How long an answer may take (seconds): longer than the broker waits for the process that holds tokens.
_PATIENCE_S: Final = 70.0
#: How long a person may take (seconds): longer than any authorization lasts.
_PERSON_S: Final = 2000.0

_subject = click.option(
    "--subject", metavar="NAME", help="Whose token it is: as `auth` of messages names people.  [default: local, you]"
)


@click.group()
def auth() -> None:
    """Agree to what extensions may do with OAuth; see and revoke what was agreed to."""


@auth.command()
@click.argument("app", shell_complete=options.completed("resources", "OAuthApp"))
@_subject
@click.option("--device", is_flag=True, help="By a code that is typed in a browser anywhere.")
@click.option("--scope", "scopes", metavar="SCOPE", multiple=True, help="Only this one; repeatable.  [default: all]")
@options.bundle
@options.policy
@options.trust
@options.json
def login(
    app: str,
    subject: str | None,
    device: bool,
    scopes: tuple[str, ...],
    bundle: str | None,
    policy: str | None,
    trust: bool,
) -> None:
    """Have a person agree to an OAuthApp: show the page to open, and wait until they have."""
    question: dict[str, Any] = {"app": _name_of(app), "subject": subject, "device": device}

    async def ask(session: Session) -> dict[str, Any]:
        asked = await session.admin({"op": "auth.login", **question, "scopes": list(scopes) or None}, _PATIENCE_S)
        output.write(*instructions(asked), stream=sys.stderr)
        return await session.admin({"op": "auth.wait", **question, "subject": asked["subject"]}, _PERSON_S) | {
            "app": question["app"],
            "subject": asked["subject"],
        }

    done = _with_kernel(ask, bundle, policy, trust)
    text = f"{done['subject']} has agreed to {done['app']}: {' '.join(done['scopes']) or 'no scopes'}"
    output.emit(done, [text])


@auth.command(name="list")
@options.bundle
@options.policy
@options.trust
@options.json
def list_(bundle: str | None, policy: str | None, trust: bool) -> None:
    """List what was agreed to, and who is being asked. No token is shown."""
    found = _with_kernel(lambda session: session.admin({"op": "auth.list"}, _PATIENCE_S), bundle, policy, trust)
    output.emit(found, render(found))


@auth.command()
@click.argument("app", shell_complete=options.completed("resources", "OAuthApp"))
@_subject
@options.bundle
@options.policy
@options.trust
@options.json
def revoke(app: str, subject: str | None, bundle: str | None, policy: str | None, trust: bool) -> int:
    """Forget the tokens of an OAuthApp, and have its server forget them. Exit status 1 if the server did not."""
    name = _name_of(app)
    done = _with_kernel(
        lambda session: session.admin({"op": "auth.revoke", "app": name, "subject": subject}, _PATIENCE_S),
        bundle,
        policy,
        trust,
    )
    if not done["revoked"]:
        raise fail("E_OAUTH_APP", f"no token of {name} is held for this subject", suggestion="See `gdn auth list`.")
    output.emit({"app": name, **done}, [f"forgotten here; the server: {done['server']}"])
    return 1 if str(done["server"]).startswith("failed") else 0


def instructions(asked: dict[str, Any]) -> list[str]:
    """The lines that tell a person what to do."""
    scopes = " ".join(asked["scopes"])
    lines = [f"{asked['subject']} is asked for {scopes or 'an agreement'}, until {asked['expiresAt']}."]
    if asked.get("userCode") is None:
        return [*lines, "Open this page in a browser on this machine:", f"  {asked['authorizationUrl']}"]
    return [*lines, f"Open {asked['authorizationUrl']} anywhere, and give this code:", f"  {asked['userCode']}"]


def render(found: dict[str, Any]) -> list[str]:
    """One line for each grant. Where a person has to agree again, a second line gives the reason."""
    lines: list[str] = []
    for one in found["grants"]:
        until = f"token until {one['expiresAt']}" if one["expiresAt"] else "token without an end"
        what = f"{until}{', renewed by itself' if one['refreshable'] else ''}"
        if one["status"] != "ready":
            what = "login required"
        lines.append(f"{one['app']}  {one['subject']}  {what}  {' '.join(one['scopes'])}".rstrip())
        if one["reason"]:
            lines.append(f"    {one['reason']}")
    for one in found["waiting"]:
        what = f"waits until {one['expiresAt']}"
        lines.append(f"{one['app']}  {one['subject']}  {what}  {' '.join(one['scopes'])}".rstrip())
        code = f" (code {one['userCode']})" if one["userCode"] else ""
        lines.append(f"    {one['authorizationUrl']}{code}")
    if not lines:
        apps = ", ".join(found["apps"])
        return [f"nobody has agreed to anything; apps: {apps}" if apps else "the bundle has no OAuthApp"]
    return lines


def _name_of(app: str) -> str:
    """An OAuthApp by its name or its reference."""
    return app.removeprefix("OAuthApp/")


def _with_kernel(
    ask: Callable[[Session], Coroutine[Any, Any, dict[str, Any]]],
    bundle: str | None,
    policy: str | None,
    trust: bool,
) -> dict[str, Any]:
    async def until_signal(session: Session) -> dict[str, Any]:
        task = asyncio.ensure_future(ask(session))
        with Interrupts(task.cancel, signal.SIGINT, signal.SIGTERM) as interrupts:
            try:
                return await task
            except asyncio.CancelledError:
                if interrupts.number:
                    raise SystemExit(interrupts.status) from None
                raise

    with attach.attach_or_start(locate(bundle, policy, trust=trust), ()) as kernel:
        return over_session(kernel, until_signal)


COMMANDS: Final[Mapping[str, click.Command]] = {"auth": auth}

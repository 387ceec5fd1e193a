"""`gdn config list|show|propose|revert`: patches of the configuration of agents that run.

Source: docs/live-config.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Final

import click
import msgspec

from goondan.kernel.cli import options
from goondan.kernel.cli.operator_question import ask_broker
from goondan.kernel.cli.output import emit, error_lines, pretty_lines, wants_json, write
from goondan.kernel.cli.rules.plain import one_line
from goondan.schemas.text.times import rfc3339_seconds
from goondan.schemas.wire import errors, frames

#: The most of a name, a reason or a value that is shown (characters). All are text from outside.
_MAX_SHOWN: Final = 160

_instance: Final = click.option(
    "--instance",
    metavar="KEY",
    shell_complete=options.completed("instances"),
    help="The instance of the agent.  [default: all of them]",
)
_agent: Final = click.argument("agent", shell_complete=options.completed("agents"))


@click.group()
def config() -> None:
    """Show, propose and revert patches of agents that run."""


@config.command(name="list")
@click.option("--agent", metavar="NAME", shell_complete=options.completed("agents"), help="Of this agent only.")
@_instance
@options.bundle
@options.json
def list_(agent: str | None, instance: str | None, bundle: str | None) -> None:
    """List what was proposed, by whom, and what came of it; the oldest first."""
    agent, instance = options.named(agent, instance)
    answer = ask_broker(bundle, {"op": "config.list", "agent": agent, "instanceKey": instance})
    emit(answer, render(answer))


@config.command()
@_agent
@_instance
@options.bundle
@options.json
def show(agent: str, instance: str | None, bundle: str | None) -> None:
    """Show the prompt, tools and extensions that are in force. Of an extension's config it shows what patches set."""
    agent, instance = options.named(agent, instance)
    answer = ask_broker(bundle, {"op": "config.show", "agent": agent, "instanceKey": instance})
    emit(answer, pretty_lines(answer))


@config.command()
@_agent
@click.argument("patch")
@_instance
@click.option("--reason", metavar="TEXT", help="Why, for the audit.")
@click.option("--revision", type=click.IntRange(min=0), help="The revision it is made from.  [default: the newest]")
@options.bundle
@options.json
def propose(
    agent: str,
    patch: str,
    instance: str | None,
    reason: str | None,
    revision: int | None,
    bundle: str | None,
) -> int:
    """Change an agent from its next step on. PATCH is a JSON list of {op, path, value}. The exit status is 1 if it is
    rejected.

    For example: '[{"op": "add", "path": "/tools/-", "value": "Tool/notes"}]'
    """
    agent, instance = options.named(agent, instance)
    question = {
        "op": "config.propose",
        "id": f"cfg-{os.urandom(10).hex()}",
        "agent": agent,
        "instanceKey": instance,
        "patches": _read(patch),
        "reason": reason,
        "revision": revision,
    }
    answer = ask_broker(bundle, question)
    accepted: bool = answer["status"] == "accepted"
    if accepted or wants_json():
        emit(answer, [f"{answer['patchId']} is in force from the next step on (revision {answer['revision']})"])
    else:
        write(*error_lines(msgspec.convert(answer["error"], frames.ErrorPayload)), stream=sys.stderr)
    return 0 if accepted else 1


@config.command()
@click.argument("patch_id", metavar="PATCH")
@options.bundle
@options.json
def revert(patch_id: str, bundle: str | None) -> None:
    """Take one patch back, by its id; the others stay as they are."""
    answer = ask_broker(bundle, {"op": "config.revert", "patchId": patch_id})
    emit(answer, [f"{patch_id} is reverted (revision {answer['revision']})"])


def render(answer: Mapping[str, Any]) -> list[str]:
    """The lines of each patch: its name and who proposed it, what it changes, and whether it was accepted."""
    lines: list[str] = []
    for patch in answer["patches"]:
        whole = "every instance" if patch["instanceKey"] is None else one_line(patch["instanceKey"], _MAX_SHOWN)
        at = rfc3339_seconds(patch["atMs"] / 1000)
        head = one_line(f"{patch['patchId']}  {patch['agent']} ({whole})  {at}", _MAX_SHOWN)
        lines.append(f"{patch['revision']:>4}  {head}  {patch['status']}")
        lines.append(f"      by {one_line(_who(patch), _MAX_SHOWN)}")
        what = ", ".join(patch["asked"])
        if patch["status"] != "rejected":
            what += " → " + msgspec.json.encode(patch["change"]).decode()
        lines.append(f"      {one_line(what, _MAX_SHOWN)}")
        if patch["reason"]:
            lines.append(f"      because: {one_line(patch['reason'], _MAX_SHOWN)}")
        if patch["error"] is not None:
            error = patch["error"]
            lines.append(f"      {one_line(error['message'], _MAX_SHOWN)} [{error['code']}]")
        lines += [f"      without effect: {one_line(why, _MAX_SHOWN)}" for why in patch["idle"]]
    if answer["more"]:
        lines.append(f"and {answer['more']} older ones")
    return lines or ["no patch was proposed"]


def _who(patch: Mapping[str, Any]) -> str:
    if patch["by"] != "agent":
        return str(patch["by"])
    event = "" if patch["eventId"] is None else f", event {patch['eventId']}"
    return f"extension {patch['extension']} of {patch['agent']}/{patch['byInstance']}{event}"


def _read(text: str) -> Any:
    try:
        patch = msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise errors.fail("E_USAGE", f"the patch is no JSON: {error}") from None
    if not isinstance(patch, list):
        raise errors.fail("E_USAGE", "a patch is a JSON list of {op, path, value}")
    return patch


COMMANDS: Final = {"config": config}

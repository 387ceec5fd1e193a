"""The commands of `gdn`: their names, one line of help for each, and the import of one when it is used.

The core's commands are in the table below. A feature has its own in its row (features/__init__.py), so that neither
`gdn --help` nor a command of the core imports one.

Source: docs/design/commands.md section 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from goondan.features import FEATURES, parts
from goondan.kernel.start import asyncio_without_tls, import_whole

if TYPE_CHECKING:
    import click

#: The module of the link. While a kernel starts, there is time to import it.
SESSION: Final = "goondan.kernel.cli.session"


def import_session(module: str = SESSION) -> None:
    """Import a module that speaks over the link. asyncio comes without TLS: the link stays on this machine."""
    import_whole(module, asyncio_without_tls)


#: name -> the module of this package that has the command, and one line of help. A command of a group has the group's
#: name before its own; a group has no module. `COMMANDS` of a module has its commands by their names.
CORE: Final[Mapping[str, tuple[str, str]]] = {
    "init": ("bundles", "Write a new bundle to begin with."),
    "run": ("run", "Start a swarm and talk to its entry agent."),
    "send": ("messages", "Send one message to a running swarm and print the answer."),
    "call": ("call", "Call one tool, or a batch of tools, in the sandbox."),
    "cancel": ("messages", "Cancel a turn with all its calls, or a message that waits."),
    "instance": ("", "List and show the instances of agents; take back what they have said, or delete them."),
    "instance list": ("instances", "List them, the one that was used last first."),
    "instance show": ("instances", "Show one: its conversation in numbers, its files, its process, its last turn."),
    "instance export": ("instances", "Print a conversation as one JSON document, with all its messages."),
    "instance delete": ("instances", "Delete one for good: its conversation, its traces and its workdir."),
    "ps": ("processes", "Show the processes of a running swarm."),
    "logs": ("logs", "Show what the processes of a swarm wrote."),
    "trace": ("traces", "Show what a turn did and how long it took."),
    "turns": ("traces", "List the last messages of people, and what became of them."),
    "denied": ("traces", "List the calls that were refused, and what would allow them."),
    "restart": ("processes", "Restart a running swarm in place; its conversations and messages stay."),
    "stop": ("processes", "Stop a running swarm."),
    "tool": ("", "List, show, make and test tools."),
    "tool list": ("bundles", "List every tool that can be called."),
    "tool show": ("bundles", "Show a tool's parameters, limits, sandbox and examples."),
    "extension": ("", "List, make and test extensions."),
    "extension list": ("bundles", "List every extension that an agent can have."),
    "explain": ("reference", "Print the page of an error, by its code."),
    "validate": ("bundles", "Check a bundle and report everything that is wrong with it."),
    "trust": ("permissions", "Show what a bundle can do, and trust it; list or revoke what is trusted."),
    "grant": ("", "Show what tools ask for; accept or revoke the requests of packaged tools."),
    "grant list": ("permissions", "Show every tool that asks for more than the defaults, and what it gets."),
    "grant accept": (
        "permissions",
        "Grant a packaged TOOL (PACKAGE/NAME) what it requests, for exactly the code that is there now.",
    ),
    "grant revoke": ("permissions", "Take back what was accepted for TOOL."),
    "grant files": ("permissions", "Show files of the bundle that a tool may have written; accept them."),
    "completion": ("reference", "Print the script that completes gdn's commands in a shell."),
    "schema": ("reference", "Write the contract as JSON Schema files."),
}


def load_codes() -> None:
    """Know the error codes of all features."""
    parts("wire")


def helps(group: str = "") -> dict[str, str]:
    """The commands of a group by their names in it, each with its line of help: first the core's, then those of
    features in the order of their table. Without `group`: those of `gdn` itself.
    """
    lines = {name: line for name, (_, line) in CORE.items()}
    for feature in FEATURES:
        lines |= feature.commands
    before = f"{group} " if group else ""
    inside = {name.removeprefix(before): line for name, line in lines.items() if name.startswith(before)}
    return {name: line for name, line in inside.items() if " " not in name}


def command_of(name: str) -> click.Command:
    """Import the command of this whole name, such as `tool list`. It is in a table, and is no group."""
    import click

    if name in CORE:
        module = f"{__package__}.{CORE[name][0]}"
    else:
        module = next(f"goondan.features.{one.name}.command" for one in FEATURES if name in one.commands)
    command = import_whole(module).COMMANDS[name]
    if not isinstance(command, click.Command):
        command = command()  # one that is used without click as well
    made: click.Command = command
    return made

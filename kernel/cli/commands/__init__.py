"""The commands of `gdn`: their names, one line of help for each, and groups that import a command when it is used.

The core's commands are in the table below. A feature has its own in its row (features/__init__.py), so that neither
`gdn --help` nor a command of the core imports one.

An import is whole before a signal is handled. Python raises KeyboardInterrupt wherever it is when the signal comes. In
the middle of an import that can be a callback of the import system, which swallows the exception, or the initialisation
of an extension module, which crashes. One Ctrl-C in a hundred had one of these effects while `gdn run` imported asyncio
and ZeroMQ.

Source: docs/design/commands.md section 1.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import click

from goondan.features import FEATURES, parts

#: The signals that end a command.
_ENDING: Final = {signal.SIGINT, signal.SIGTERM}


def import_whole(name: str) -> ModuleType:
    """Import a module. A signal that ends commands and comes meanwhile is handled when the import is over.

    Raises what the import raises, and what the handler of the signal raises.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        return import_module(name)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


#: name -> one line of help. A command of a group has the group's name before its own. What is no group has a module:
#: that of MODULES, else its own, so `tool list` is goondan.kernel.cli.commands.catalog.
CORE: Final[Mapping[str, str]] = {
    "init": "Write a new bundle to begin with.",
    "run": "Start a swarm and talk to its entry agent.",
    "send": "Send one message to a running swarm and print the answer.",
    "call": "Call one tool, or a batch of tools, in the sandbox.",
    "cancel": "Cancel a turn with all its calls, or a message that waits.",
    "instance": "List and show the instances of agents; take back what they have said, or delete them.",
    "instance list": "List them, the one that was used last first.",
    "instance show": "Show one: its conversation in numbers, its files, its process, its last turn.",
    "instance export": "Print a conversation as one JSON document, with all its messages.",
    "instance delete": "Delete one for good: its conversation, its traces and its workdir.",
    "ps": "Show the processes of a running swarm.",
    "logs": "Show what the processes of a swarm wrote.",
    "trace": "Show what a turn did and how long it took.",
    "turns": "List the last messages of people, and what became of them.",
    "denied": "List the calls that were refused, and what would allow them.",
    "restart": "Restart a running swarm in place; its conversations and messages stay.",
    "stop": "Stop a running swarm.",
    "tool": "List, show, make and test tools.",
    "tool list": "List every tool that can be called.",
    "tool show": "Show a tool's parameters, limits, sandbox and examples.",
    "extension": "List, make and test extensions.",
    "extension list": "List every extension that an agent can have.",
    "explain": "Print the page of an error, by its code.",
    "validate": "Check a bundle and report everything that is wrong with it.",
    "trust": "Show what a bundle can do, and trust it; list or revoke what is trusted.",
    "grant": "Show what tools ask for; accept or revoke the requests of packaged tools.",
    "grant list": "Show every tool that asks for more than the defaults, and what it gets.",
    "grant accept": "Grant a packaged TOOL (PACKAGE/NAME) what it requests, for exactly the code that is there now.",
    "grant revoke": "Take back what was accepted for TOOL.",
    "grant files": "Show files of the bundle that a tool may have written; accept them.",
    "completion": "Print the script that completes gdn's commands in a shell.",
    "schema": "Write the contract as JSON Schema files.",
}

#: The commands that belong together in a module: name -> the module in this package. Its `COMMANDS` has them by their
#: names.
MODULES: Final[Mapping[str, str]] = {
    "init": "bundles",
    "validate": "bundles",
    "send": "messages",
    "instance list": "instances",
    "instance show": "instances",
    "instance export": "instances",
    "instance delete": "instances",
    "cancel": "messages",
    "ps": "processes",
    "logs": "processes",
    "restart": "processes",
    "stop": "processes",
    "trace": "traces",
    "turns": "traces",
    "denied": "traces",
    "tool list": "catalog",
    "tool show": "catalog",
    "extension list": "catalog",
    "explain": "reference",
    "completion": "reference",
    "schema": "reference",
    "trust": "permissions",
    "grant list": "permissions",
    "grant accept": "permissions",
    "grant revoke": "permissions",
    "grant files": "permissions",
}


def load_codes() -> None:
    """Know the error codes of all features."""
    parts("wire")


def helps(group: str = "") -> dict[str, str]:
    """The commands of a group by their names in it, each with its line of help: first the core's, then those of
    features in the order of their table. Without `group`: those of `gdn` itself.
    """
    before = f"{group} " if group else ""
    return {
        name.removeprefix(before): line
        for table in (CORE, *(feature.commands for feature in FEATURES))
        for name, line in table.items()
        if name.startswith(before) and " " not in name.removeprefix(before)
    }


def command_of(name: str) -> click.Command | None:
    """Import the command of this whole name, such as `tool list`; it is no group. None when there is none."""
    if name in MODULES:
        return _commands_in(f"{__package__}.{MODULES[name]}")[name]
    if name in CORE:
        command: click.Command = import_whole(f"{__package__}.{name.replace(' ', '_')}").command
        return command
    owner = next((feature for feature in FEATURES if name in feature.commands), None)
    return None if owner is None else _commands_in(f"goondan.features.{owner.name}.command")[name]


def _commands_in(module: str) -> Mapping[str, click.Command]:
    commands: Mapping[str, click.Command] = import_whole(module).COMMANDS
    return commands


class Group(click.Group):
    """A group that knows the names and lines of help of its commands, and imports one when it is used. `whole`: its
    name with those of the groups that it is in; "" for `gdn`.
    """

    def __init__(self, *args: Any, whole: str = "", **options: Any) -> None:
        super().__init__(*args, **options)
        self._whole = whole

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the tables."""
        return list(helps(self._whole))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """One command, or a group in this one. None when there is none of this name."""
        lines = helps(self._whole)
        if cmd_name not in lines:
            return None
        whole = f"{self._whole} {cmd_name}".lstrip()
        if helps(whole):
            return Group(cmd_name, whole=whole, help=lines[cmd_name])
        return command_of(whole)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table of `--help`."""
        with formatter.section("Commands"):
            formatter.write_dl(list(helps(self._whole).items()))

"""The features: one folder each, with one file (or folder) for each process that loads it.

    wire.py     its frames, records, structs and errors       bundle.py    its kind of document, its fields in others
    broker.py   what the broker loads                         command.py   its commands
    agent.py    what an agent's process loads                 process.py   a supervised program of its own
    host.py     what the tool host loads                      jail/        what runs in jails
    console.py  what a command loads that talks to a swarm    api.py       what features that need this one may call
    status.py   what `gdn ps` shows below the processes       program.py   a program of its own, with an agent's code
    door.py     its ways into a swarm over HTTP, for what serves them
    base/       bundled extensions, and bundled tools that run in an agent's process

`FEATURES` is the one table. A process of the kernel knows of features by `parts` alone, so no module of the core names
one. Privileged programs and workers in jails load nothing by this table.

The order of the rows is security. In an agent, a row wraps all rows below it, and the layers of extensions wrap them
all. So no extension stands between a rule and what the rule is about: it cannot take the rule back, answer in its
place, or see that something passed without it.

- Recordings come first. A call that is played again from a recording was allowed and paid for when it was recorded.
- Approvals come before budgets. What a person refuses costs nothing, and what waits for a person has reserved nothing.
- Code mode lies between them. A call of a script begins at the outermost layer, as every call does, so it passes the
  rules of both. A script that is played again from a recording does not run, so it makes none.
- Budgets come last, so nothing between a budget and the call that it counts can make one more call.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Final, NamedTuple


class Feature(NamedTuple):
    """A row: one feature."""

    #: The name of its folder.
    name: str
    #: Which files its folder has, without `.py`. One that is missing stops the process that loads it: no feature is
    #: left out in silence because an installation is damaged.
    files: tuple[str, ...]
    #: Names of the features whose `wire` and `api` it imports.
    needs: tuple[str, ...] = ()
    #: Its commands of `gdn`, each with one line of help. `COMMANDS` of its `command.py` has them under these names.
    commands: Mapping[str, str] = MappingProxyType({})
    #: Those of its commands that `gdn run --NAME[=VALUE]` starts beside its kernel, each with one line of help.
    #: `BESIDE` of its `command.py` has for each the words that a value makes (kernel/cli/beside.py).
    beside: Mapping[str, str] = MappingProxyType({})
    #: What is typed as `/NAME` in the console of `gdn run`, each with one line of help. `TYPED` of its `command.py` has
    #: it: a function of the conversation.
    typed: Mapping[str, str] = MappingProxyType({})
    #: Commands to try with a new bundle (`gdn init`), each with what it does.
    to_try: Mapping[str, str] = MappingProxyType({})


FEATURES: Final[tuple[Feature, ...]] = (
    Feature(
        "recordings",
        ("wire", "agent", "bundle", "command"),
        commands={
            "record": "Write a run to a file, to repeat it without a model.",
            "replay": "Repeat a recorded run, and show where it differs first.",
        },
        needs=("approvals",),
    ),
    Feature(
        "approvals",
        ("wire", "bundle", "broker", "agent", "command", "console", "base"),
        commands={"approve": "Show calls that wait for a person; approve or deny them."},
    ),
    Feature(
        "acp",
        ("command",),
        commands={"acp": "Be an agent of an editor (Agent Client Protocol) on standard input and output."},
    ),
    Feature(
        "certify",
        ("wire", "command"),
        commands={"certify": "Try whether a program keeps the rules of a client or of a worker."},
    ),
    Feature(
        "changesets",
        ("wire", "bundle", "broker", "agent", "command", "process"),
        commands={"changeset": "List what agents have changed in the bundle; show it, or take it back."},
    ),
    Feature("code_mode", ("wire", "agent", "base", "jail")),
    Feature(
        "dead_letters",
        ("broker", "command"),
        commands={"dead": "Show messages that were given up; send them again, or drop them."},
    ),
    Feature(
        "doctor",
        ("command",),
        needs=("model_servers",),
        commands={"doctor": "Check this machine, the sandbox and the bundle, and say how to mend what is wrong."},
        to_try={"gdn doctor": "checks this machine"},
    ),
    Feature(
        "edits",
        ("wire", "agent", "command", "door"),
        commands={
            "instance undo": "Take the last turn of a conversation back.",
            "instance reset": "Remove every message of a conversation.",
            "instance fork": "Begin another instance with a copy of a conversation.",
        },
        typed={"undo": "take the last turn back; what its tools have done stays done"},
    ),
    Feature("gates", ("wire", "broker", "agent", "status")),
    Feature(
        "live_config",
        ("wire", "bundle", "broker", "agent", "command"),
        commands={"config": "Show, propose and revert patches of agents that run."},
        needs=("changesets",),
    ),
    Feature(
        "mcp",
        ("wire", "api", "broker", "agent", "bundle", "command", "door", "base", "jail"),
        commands={
            "mcp": "Use MCP servers, and offer an agent's tools to MCP clients.",
            "mcp add": "Install the package of an MCP server, and write its Extension.",
            "mcp inspect": "Start an MCP server in a jail; show what it offers and what it was refused.",
            "mcp list": "Show the MCP servers of a bundle: state, calls, memory, last error.",
            "mcp import": "Convert the MCP servers of other programs into Extensions.",
        },
    ),
    Feature(
        "mcp_serve",
        ("command",),
        needs=("mcp", "serve"),
        commands={"mcp serve": "Offer the tools of an agent to MCP clients."},
    ),
    Feature(
        "oauth",
        ("wire", "bundle", "broker", "agent", "host", "command", "process"),
        commands={"auth": "Agree to what extensions may do with OAuth; list or revoke it."},
    ),
    Feature("model_servers", ("api", "bundle")),
    Feature("openai_door", ("door",), needs=("serve",)),
    Feature("restart", ("broker", "base")),
    Feature(
        "serve",
        ("wire", "api", "door", "command"),
        commands={"serve": "Serve a swarm over HTTP, to whoever has a token."},
        beside={"serve": "Serve the swarm over HTTP as well, at this port; see gdn serve."},
    ),
    Feature(
        "page",
        ("door", "command"),
        needs=("serve",),
        commands={"ui": "Look at a swarm in a browser."},
        beside={"ui": "Show the swarm in a browser as well; see gdn ui."},
    ),
    Feature(
        "skills",
        ("api", "bundle", "command", "base", "jail"),
        commands={"grant skill": "Show what a skill asks for and gets, or pin its content."},
    ),
    Feature(
        "try_out",
        ("command", "program"),
        commands={
            "tool new": "Write a new tool: its module, its manifest and its test.",
            "tool test": "Check a tool's manifest and run its examples in the sandbox.",
            "extension new": "Write a new extension: its module, its document and its test.",
            "extension test": "Load extensions, and let a turn pass through each.",
        },
    ),
    Feature(
        "usage",
        ("api", "door", "command"),
        commands={"usage": "Show the tokens that models have used, and what they cost."},
    ),
    Feature("telemetry", ("wire", "bundle", "broker", "status", "process", "door")),
    Feature("waits", ("broker",)),
    Feature(
        "budgets",
        ("wire", "bundle", "broker", "agent", "command", "base"),
        commands={"budget": "Show what messages have used of their budgets."},
    ),
)


def folders(file: str) -> list[str]:
    """The folders `goondan/features/NAME/FILE` of all features that have that file as a folder of this name."""
    return [f"{__path__[0]}/{feature.name}/{file}" for feature in FEATURES if file in feature.files]


def parts(file: str) -> list[ModuleType]:
    """The modules `goondan.features.NAME.FILE` of all features that have that file, in the order of the table.

    Raises: ImportError when a file of a row cannot be imported.
    """
    return [import_module(f"{__name__}.{feature.name}.{file}") for feature in FEATURES if file in feature.files]

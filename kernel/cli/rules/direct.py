"""Command lines that are read without click. Pure.

To import click, and to make a command of it, takes a sixth of a `gdn call`. So the commands that scripts use most are
read here when their words are plain: options of the table below, each once and with its value in the next word, and
words that begin with no hyphen. click reads every other line from its beginning: help, a mistake, `--`,
`--option=value`, the rest of the options, a line that a shell completes. A test shows that both read the same.

Source: docs/design/commands.md section 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

#: Where events and calls go when no instance is named.
DEFAULT_INSTANCE: Final = "default"


class Line(NamedTuple):
    """A command line that was read."""

    #: The command's name, which is that of its function, and of its module.
    command: str
    #: The parameters of the function.
    given: dict[str, Any]
    #: `--json` is among the options.
    as_json: bool


class _Command(NamedTuple):
    #: The options with a value, each with its parameter.
    values: Mapping[str, str]
    #: The options without one.
    flags: Mapping[str, str]
    #: What the parameters are that are not given.
    left_out: dict[str, Any]
    #: The parameters of the first word, and of all further ones; none where it takes no words.
    words: tuple[str, str] | None = None


_JSON: Final = "--json"
_VALUES: Final = {name: name[2:] for name in ("--bundle", "--policy", "--workdir", "--instance")}
_COMMANDS: Final = {
    "call": _Command(
        values=_VALUES,
        flags={"--trust": "trust"},
        left_out={"instance": DEFAULT_INSTANCE, "batch": None, "allow_net": ()},
        words=("tool", "words"),
    ),
    "run": _Command(
        values=_VALUES,
        flags={
            "--detach": "detach",
            "--watch": "watch",
            "--trust": "trust",
            "--accept-loss": "accept_loss",
            "--new": "is_new",
            "--reasoning": "reasoning",
        },
        left_out={},
    ),
}


def read(arguments: Sequence[str]) -> Line | None:
    """Read the words behind `gdn`. None when click has to."""
    command = _COMMANDS.get(arguments[0]) if arguments else None
    if command is None:
        return None
    given: dict[str, Any] = {}
    words = []
    left = iter(arguments[1:])
    for word in left:
        if not word.startswith("-"):
            words.append(word)
            continue
        parameter = command.values.get(word)
        value: Any = True
        if parameter is None:
            parameter = _JSON if word == _JSON else command.flags.get(word)
        else:
            value = next(left, "-")
        if parameter is None or parameter in given or (value is not True and value.startswith("-")):
            return None
        given[parameter] = value
    if command.words is not None and words:
        given |= dict(zip(command.words, (words[0], tuple(words[1:])), strict=True))
    elif command.words is not None or words:
        return None
    as_json = given.pop(_JSON, False)
    others: dict[str, Any] = dict.fromkeys(command.values.values())
    others |= dict.fromkeys(command.flags.values(), False) | command.left_out
    return Line(arguments[0], {**others, **given}, as_json)

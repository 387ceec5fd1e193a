"""Programs of features that the supervisor runs: what a feature says of one.

A program is started when the broker first asks for it, and from then on it is started again when it ends. It says hello
on the control socket with a token that has its name.

Source: docs/design/features.md section 7.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from goondan.features import parts


class Program(NamedTuple):
    """One program: `PROGRAM` of a feature's `process`. Its log has its name."""

    #: Its name in `gdn ps`, in its token, and in the broker's rows (`Take.peers`).
    name: str
    #: The module that runs.
    module: str
    #: Its arguments, from the state directory of the workspace. Those by which it finds the broker come before them.
    arguments: Callable[[str], Sequence[str]]
    #: The variables of the supervisor's environment that it gets besides those that every program gets.
    variables: Collection[str]
    #: Variables of it with secrets: if one of them is set, the program gets them on `--secrets-fd` (msgpack: their
    #: values by their names).
    secrets: Collection[str] = ()


@cache
def programs() -> Mapping[str, Program]:
    """All such programs by their names."""
    found: list[Program] = [module.PROGRAM for module in parts("process") if hasattr(module, "PROGRAM")]
    return {program.name: program for program in found}

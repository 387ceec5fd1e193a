"""What was seen of a program in one scenario, in order, and what came of the scenario. Pure.

Source: docs/design/tests.md section 7.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from msgspec import Struct

Kind = Literal["link", "lost", "got", "odd", "sent", "file", "said", "do", "token"]


class Seen(Struct, frozen=True):
    """One thing that was seen."""

    #: When (seconds, of a clock that does not jump).
    at: float
    #: `link`: the program connected. `lost`: its connection was taken away. `got`: it sent this frame. `odd`: it sent
    #: what is no frame. `sent`: it was sent this frame. `file`: what was found under the name of its blob. `said`: it
    #: wrote this line. `do`: it was told this. `token`: the token was written.
    kind: Kind
    #: The frame, the line, the token, or why it is odd.
    what: Any = None
    #: The connection, counted from 1.
    link: int = 0


Trace = list[Seen]


class Rule(Struct, frozen=True):
    """A rule that holds in every scenario."""

    #: The heading of the document that states it.
    section: str
    #: It, in one line.
    text: str
    #: What in a trace breaks it; None when there was no occasion.
    judge: Callable[[Trace], list[str] | None]
    #: Ids of the document's sentences.
    must: list[str] = []


class Scenario(Struct, frozen=True):
    """A scenario: one rule, shown by a row of steps."""

    #: The rule that it shows, in one line.
    name: str
    #: The heading of the document that states it.
    section: str
    #: What happens, in order.
    steps: list[dict[str, Any]]
    #: Ids of the document's sentences.
    must: list[str] = []
    #: It lasts long because of what it is about, so it begins first.
    long: bool = False
    #: A program that answers with this code does not offer what the scenario is about.
    refused: str | None = None


class Played(Struct):
    """How a scenario went."""

    #: It.
    scenario: Scenario
    #: What was seen.
    trace: Trace
    #: What was not as the steps say. None: all was.
    fault: str | None = None
    #: The program said that it cannot do what the scenario is about.
    offered: bool = True

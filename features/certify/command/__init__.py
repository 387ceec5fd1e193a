"""`gdn certify client|worker -- COMMAND…`: whether a program keeps the rules of the bus, or of the channel into a jail.

The program is started once for each scenario, beside a kernel or a tool host that is played here, good and hostile.
What goes to and fro is written down with its time. Whether a rule held is decided from that alone.

Exit status 0 when every rule that was tried holds, 1 when one is broken or the program cannot be tried.

Source: docs/certify.md; docs/design/tests.md section 7.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

import click
import yaml

from goondan.features.certify.command import client, worker
from goondan.features.certify.command.playing import PATIENCE_S, Player, play_all, probe
from goondan.features.certify.command.rules import Report, Row, Rule, Scenario, chosen, read, report
from goondan.kernel.cli import options
from goondan.kernel.cli.output import Style, emit, printable, style_of

#: The tools that workers are certified with, by their language.
SAMPLES: Final = {"python": "tool.py", "javascript": "tool.mjs"}
#: How the report sums up each outcome.
_WORDS: Final = {"holds": "hold", "broken": "broken", "not offered": "not offered"}
#: What follows `--` is the program's.
_ARGV: Final[dict[str, Any]] = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.group(name="certify")
def certify() -> None:
    """Try whether a program keeps the rules of a client or of a worker."""


@certify.command(name="client", context_settings=_ARGV)
@click.argument("argv", metavar="-- COMMAND…", nargs=-1, required=True)
@click.option("--only", multiple=True, metavar="WORDS", help="Only scenarios that have these words in name or section.")
@options.json
def try_client(argv: tuple[str, ...], only: tuple[str, ...]) -> int:
    """Try a client: COMMAND is started beside a kernel that is played here. docs/certify.md has its lines."""
    return _show(certify_client(argv, os.environ, only))


@certify.command(name="worker", context_settings=_ARGV)
@click.argument("argv", metavar="-- COMMAND…", nargs=-1, required=True)
@click.option("--entry", default="python", metavar="python|javascript|FILE", help="The tool that it loads.")
@click.option("--only", multiple=True, metavar="WORDS", help="Only scenarios that have these words in name or section.")
@options.json
def try_worker(argv: tuple[str, ...], entry: str, only: tuple[str, ...]) -> int:
    """Try a worker: COMMAND is started on a socket to a tool host that is played here. docs/certify.md has the tool."""
    return _show(certify_worker(argv, os.environ, entry, only))


def _show(report: Report) -> int:
    emit(report, render(report, style_of(sys.stdout)))
    return 0 if report.certified else 1


def render(report: Report, style: Style) -> list[str]:
    """The report for a person: a line for each rule by section, what broke it beneath, and the sums."""
    paint = {"holds": style.good, "broken": style.bad, "not offered": style.warning}
    lines: list[str] = []
    sections: dict[str, list[Row]] = {}
    for row in report.rules:
        sections.setdefault(row.section, []).append(row)
    for section, rows in sections.items():
        lines.append(style.bold(section))
        for row in rows:
            ids = style.dim(f"  {' '.join(row.ids)}") if row.ids else ""
            lines.append(f"  {paint[row.outcome](f'{row.outcome:<11}')}  {printable(row.rule)}{ids}")
            if row.outcome == "broken":
                lines.append(f"               {printable(row.seen)}")
    counts = {outcome: sum(row.outcome == outcome for row in report.rules) for outcome in paint}
    said = ", ".join(f"{count} {_WORDS[outcome]}" for outcome, count in counts.items() if count)
    return [*lines, f"{printable(' '.join(report.command))}: {said}"]


def certify_client(
    argv: Sequence[str], env: Mapping[str, str], words: Sequence[str] = (), patience: float = PATIENCE_S
) -> Report:
    """Play the scenarios that have one of `words` (without: all). After `patience` seconds a wait is in vain.

    Raises GoondanError E_CERTIFY when the program cannot be started, does not connect, or does not end; E_USAGE when no
    scenario has the words.
    """

    def player(scenario: Scenario, stopping: threading.Event) -> Player:
        return client.Stage(argv, env, scenario, stopping, patience)

    return _certified("client", argv, words, client.scenarios(), player)


def certify_worker(
    argv: Sequence[str], env: Mapping[str, str], entry: str, words: Sequence[str] = (), patience: float = PATIENCE_S
) -> Report:
    """The same for a worker. `entry`: a language of SAMPLES, or the path of a tool with the same exports."""
    folder = files(__name__)
    path = str(folder.joinpath("samples", SAMPLES[entry])) if entry in SAMPLES else os.path.abspath(entry)

    def player(scenario: Scenario, stopping: threading.Event) -> Player:
        return worker.Host(argv, env, path, scenario, stopping, patience)

    written = read(yaml.safe_load(folder.joinpath("worker.yaml").read_bytes()), worker.JUDGES)
    return _certified("worker", argv, words, written, player)


def _certified(
    kind: str,
    argv: Sequence[str],
    words: Sequence[str],
    written: tuple[list[Scenario], list[Rule]],
    player: Callable[[Scenario, threading.Event], Player],
) -> Report:
    (first, *rest), rules = written
    picked = chosen(rest, words)
    probe(argv, lambda stopping: player(first, stopping))
    return report(kind, argv, play_all(picked, player), rules)


COMMANDS: Final[Mapping[str, click.Command]] = {"certify": certify}

"""`gdn certify client|worker -- COMMAND…`: whether a program keeps the rules of the bus, or of the channel into a jail.

Exit status 0 when every rule that was tried holds, 1 when one is broken or the program cannot be tried.

Source: docs/certify.md; docs/design/tests.md section 7.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from goondan.kernel.certify.report import Report, Row
    from goondan.kernel.cli.terminal import Style

#: What follows `--` is the program's.
_ARGV: Final[dict[str, Any]] = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.group(name="certify")
def command() -> None:
    """Try whether a program keeps the rules of a client or of a worker."""


@command.command(name="client", context_settings=_ARGV)
@click.argument("argv", metavar="-- COMMAND…", nargs=-1, required=True)
@click.option("--only", multiple=True, metavar="WORDS", help="Only scenarios that have these words in name or section.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def client(argv: tuple[str, ...], only: tuple[str, ...], as_json: bool) -> int:
    """Try a client: COMMAND is started beside a kernel that is played here. docs/certify.md has its lines."""
    from goondan.kernel.certify.certificates import certify_client

    return _show(certify_client(argv, os.environ, only), as_json)


@command.command(name="worker", context_settings=_ARGV)
@click.argument("argv", metavar="-- COMMAND…", nargs=-1, required=True)
@click.option("--entry", default="python", metavar="python|javascript|FILE", help="The tool that it loads.")
@click.option("--only", multiple=True, metavar="WORDS", help="Only scenarios that have these words in name or section.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def worker(argv: tuple[str, ...], entry: str, only: tuple[str, ...], as_json: bool) -> int:
    """Try a worker: COMMAND is started on a socket to a tool host that is played here. docs/certify.md has the tool."""
    from goondan.kernel.certify.certificates import certify_worker

    return _show(certify_worker(argv, os.environ, entry, only), as_json)


def _show(report: Report, as_json: bool) -> int:
    from goondan.kernel.cli.output import write_result
    from goondan.kernel.cli.terminal import style_of

    write_result(report, *render(report, style_of(sys.stdout)), as_json=as_json)
    return 0 if report.certified else 1


def render(report: Report, style: Style) -> list[str]:
    """The report for a person: a line for each rule by section, what broke it beneath, and the sums."""
    from goondan.kernel.cli.terminal import printable

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


_WORDS: Final = {"holds": "hold", "broken": "broken", "not offered": "not offered"}

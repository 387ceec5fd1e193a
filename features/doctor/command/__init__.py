"""`gdn doctor`: checks whether everything that the kernel needs is there, and tells how to mend what is missing.

Exit status 1 when there is a problem. With --json one document: {ok, problems, warnings, findings}.

Source: docs/design/commands.md section 7.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final

import click

from goondan.features.doctor.command.gathering import gather_facts
from goondan.features.doctor.command.rules.findings import Finding, judge
from goondan.features.model_servers import api
from goondan.features.model_servers.api.offering import offer
from goondan.kernel import paths
from goondan.kernel.cli import options
from goondan.kernel.cli.output import Style, emit, printable, style_of, wants_json
from goondan.kernel.cli.state import checked_root
from goondan.schemas.wire.errors import GoondanError


@click.command()
@click.option("--forget-server", is_flag=True, help="Forget which model server of this machine you have chosen.")
@options.bundle
@options.json
def doctor(forget_server: bool, bundle: str | None) -> int:
    """Check this machine, the sandbox, the bundle and its model servers; every finding comes with its fix.

    On a terminal it also looks for model servers on the usual ports of this machine, and asks before one is used.
    """
    if forget_server:
        _forget_server()
        return 0
    findings = judge(gather_facts(bundle))
    problems = sum(finding.level == "problem" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    document = {"ok": problems == 0, "problems": problems, "warnings": warnings, "findings": findings}
    emit(document, render(findings, style_of(sys.stdout)))
    if not wants_json():
        _offer_server(bundle)
    return 1 if problems else 0


def _forget_server() -> None:
    forgotten = api.forget(checked_root())
    text = "forgotten: no model server of this machine is chosen" if forgotten else "no model server was chosen"
    emit({"forgotten": forgotten}, [text])


def _offer_server(bundle: str | None) -> None:
    """Ask about a model server that runs here. What cannot be kept is no reason to fail: the findings are printed."""
    with suppress(GoondanError):
        path = paths.find_bundle(bundle)
        offer(paths.root_of(paths.state_dir(path)), path)


def render(findings: Iterable[Finding], style: Style) -> list[str]:
    """The report for a person, by area, and the number of problems and warnings."""
    paint = {"ok": style.good, "warning": style.warning, "problem": style.bad}
    lines: list[str] = []
    area = ""
    counted = {"problem": 0, "warning": 0}
    for finding in findings:
        if finding.area != area:
            area = finding.area
            lines.append(style.bold(area))
        lines.append(f"  {paint[finding.level](f'{finding.level:<8}')} {printable(finding.message)}")
        if finding.fix is not None:
            lines.append(f"           fix: {printable(finding.fix)}")
        if finding.level in counted:
            counted[finding.level] += 1
    words = [f"{count} {level}{'' if count == 1 else 's'}" for level, count in counted.items() if count]
    return [*lines, "", ", ".join(words) or style.good("everything is in order")]


COMMANDS: Final[Mapping[str, click.Command]] = {"doctor": doctor}

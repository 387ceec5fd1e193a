"""`gdn doctor`: checks whether everything that the kernel needs is there, and tells how to mend what is missing.

Exit status 1 when there is a problem. With --json one document: {ok, problems, warnings, findings}.

Source: docs/design/commands.md section 7.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from kernel.cli import options

if TYPE_CHECKING:
    from kernel.cli.terminal import Style
    from kernel.doctor.findings import Finding


@click.command()
@options.bundle
@options.as_json
def command(bundle: str | None, as_json: bool) -> int:
    """Check this machine, the sandbox and the bundle; every finding comes with its fix."""
    import sys

    from kernel.cli.output import write, write_json
    from kernel.cli.terminal import style_of
    from kernel.doctor.findings import judge
    from kernel.doctor.look import look

    findings = judge(look(bundle))
    problems = sum(finding.level == "problem" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    if as_json:
        write_json({"ok": problems == 0, "problems": problems, "warnings": warnings, "findings": findings})
    else:
        write(*render(findings, style_of(sys.stdout)))
    return 1 if problems else 0


def render(findings: Iterable[Finding], style: Style) -> list[str]:
    """The report for a person, by area, and the number of problems and warnings."""
    from kernel.cli.terminal import printable

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

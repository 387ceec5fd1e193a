"""`gdn explain CODE`: the page of an error, as docs/errors.md has it. No network, bundle or kernel is needed.

Source: docs/design/commands.md section 2; requirement ERROR-07.
"""

from __future__ import annotations

import os
from typing import Final

import click

from goondan.kernel.cli import options

#: Begins the next heading, of a code or of a part of the page.
_NEXT: Final = "\n##"


@click.command()
@click.argument("code", shell_complete=options.completed("error_codes"))
@options.as_json
def command(code: str, as_json: bool) -> int:
    """Print the page of an error: when it happens, and what to do about it.

    CODE is what stands in brackets behind the message, such as E_SANDBOX_DENIED, or a code of the operating system,
    such as ENOENT.
    """
    from goondan.kernel.bundle.problems import did_you_mean
    from goondan.kernel.cli.commands import load_codes
    from goondan.kernel.cli.output import write_result
    from goondan.schemas.wire.errors import CODES, fail, help_url, is_os_error_code

    load_codes()
    name = code.strip("[] ").rpartition("/")[2].upper()
    if name not in CODES and not is_os_error_code(name):
        message = f"no error has the code {code[:80]!r}"
        raise fail("E_USAGE", message, suggestion=did_you_mean(name, CODES) or "docs/errors.md has all codes.")
    text = page(name)
    write_result({"code": name, "text": text, "helpUrl": help_url(name)}, *text.splitlines(), as_json=as_json)
    return 0


def page(code: str) -> str:
    """The section of docs/errors.md about a code, its heading first."""
    from goondan import kernel

    with open(f"{os.path.dirname(kernel.__file__)}/error_pages.txt", encoding="utf-8") as file:
        document = file.read()
    _, found, text = document.partition(f"\n### {code}\n")
    if not found:  # a code of the operating system: they have the last section together
        _, _, text = document.rpartition("\n## ")[2].partition("\n")
    return f"{code}\n{text.partition(_NEXT)[0].strip()}"

"""`gdn explain`, `gdn schema` and `gdn completion`: pages of errors, the contract as JSON Schema, and what completes
commands in a shell. They need no network, bundle or kernel.

The script of a shell calls `gdn` with _GDN_COMPLETE in its environment; completions.py has the answers.

Source: docs/design/commands.md sections 2 and 3; docs/design/wire.md section 1; requirement ERROR-07.
"""

from __future__ import annotations

import os
from typing import Final

import click

from goondan.kernel.cli import commands, options, output
from goondan.schemas.wire.errors import CODES, fail, help_url, is_os_error_code

#: Begins the next heading, of a code or of a part of the page.
_NEXT: Final = "\n##"


@click.command()
@click.argument("code", shell_complete=options.completed("error_codes"))
@options.json
def explain(code: str) -> None:
    """Print the page of an error: when it happens, and what to do about it.

    CODE is what stands in brackets behind the message, such as E_SANDBOX_DENIED, or a code of the operating system,
    such as ENOENT.
    """
    name = code.strip("[] ").rpartition("/")[2].upper()
    if name not in CODES and not is_os_error_code(name):
        commands.load_codes()  # those of features; most codes are the core's, and known at once
    if name not in CODES and not is_os_error_code(name):
        from goondan.kernel.bundle.rules.problems import did_you_mean

        message = f"no error has the code {code[:80]!r}"
        raise fail("E_USAGE", message, suggestion=did_you_mean(name, CODES) or "docs/errors.md has all codes.")
    text = page(name)
    output.emit({"code": name, "text": text, "helpUrl": help_url(name)}, text.splitlines())


def page(code: str) -> str:
    """The section of docs/errors.md about a code, its heading first."""
    from goondan import kernel

    with open(f"{os.path.dirname(kernel.__file__)}/error_pages.txt", encoding="utf-8") as file:
        document = file.read()
    _, found, text = document.partition(f"\n### {code}\n")
    if not found:  # a code of the operating system: they have the last section together
        _, _, text = document.rpartition("\n## ")[2].partition("\n")
    return f"{code}\n{text.partition(_NEXT)[0].strip()}"


@click.group(name="schema")
def schema() -> None:
    """The contract as JSON Schema."""


@schema.command(name="export")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False))
@options.json
def export(folder: str) -> None:
    """Write the schemas of bundles, frames and workers into DIR."""
    from importlib.resources import files

    from goondan.kernel.cli.placing import Placing

    schemas = {
        file.name: file.read_bytes() for file in files("goondan.schemas").joinpath("json").iterdir() if file.is_file()
    }
    with Placing(folder) as placing:
        written = [os.path.join(folder, name) for name in placing.write(schemas, replace=True)]
    output.emit({"files": written}, written)


@click.command(
    epilog="bash: add  source <(gdn completion bash)  to ~/.bashrc.  "
    "zsh: add  source <(gdn completion zsh)  to ~/.zshrc, after compinit.  "
    "fish: gdn completion fish > ~/.config/fish/completions/gdn.fish"
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that teaches a shell to complete gdn's commands."""
    from click.shell_completion import ShellComplete, get_completion_class

    from goondan.kernel.cli.program import group

    made = get_completion_class(shell)
    if made is None:
        raise AssertionError(f"click knows no {shell}")
    # The method of the base class, because that of the bash class starts a bash to ask for its version.
    output.write(*ShellComplete.source(made(group, {}, "gdn", "_GDN_COMPLETE")).rstrip("\n").split("\n"))


COMMANDS = {"explain": explain, "schema": schema, "completion": completion}

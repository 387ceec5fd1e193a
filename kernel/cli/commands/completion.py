"""`gdn completion SHELL`: the script with which a shell completes commands, options, agents, tools and instances.

The script calls `gdn` with _GDN_COMPLETE in its environment; completions.py has the answers.

Source: docs/design/commands.md section 3.
"""

from __future__ import annotations

import click


@click.command(
    epilog="bash: add  source <(gdn completion bash)  to ~/.bashrc.  "
    "zsh: add  source <(gdn completion zsh)  to ~/.zshrc, after compinit.  "
    "fish: gdn completion fish > ~/.config/fish/completions/gdn.fish"
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> int:
    """Print the script that teaches a shell to complete gdn's commands."""
    from click.shell_completion import ShellComplete, get_completion_class

    from goondan.kernel.cli import group
    from goondan.kernel.cli.output import write

    made = get_completion_class(shell)
    if made is None:
        raise AssertionError(f"click knows no {shell}")
    # The method of the base class, because that of the bash class starts a bash to ask for its version.
    write(*ShellComplete.source(made(group, {}, "gdn", "_GDN_COMPLETE")).rstrip("\n").split("\n"))
    return 0

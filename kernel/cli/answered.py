"""What a person is told about an answer besides its text. It goes to stderr, so a pipe gets the text alone.

Source: docs/design/commands.md section 2.
"""

from __future__ import annotations

import sys

from kernel.cli.output import is_terminal, write, write_text
from kernel.cli.terminal import printable, style_of
from schemas.frames import Answer

#: The exit status of `gdn send` for an answer that was cut off.
CUT_OFF_STATUS = 3


def tell_reasoning(answer: Answer) -> None:
    """Print the reasoning, unless the terminal on stdout has shown it while it came."""
    if answer.reasoning and not is_terminal(sys.stdout):
        write_text(answer.reasoning, stream=sys.stderr)


def tell_cut_off(answer: Answer) -> None:
    """Say that an answer was cut off, if it was."""
    if not answer.cut_off:
        return
    reason = f" ({printable(answer.finish_reason)})" if answer.finish_reason else ""
    told = (
        f"gdn: the answer was cut off at the model's limit of tokens{reason}; max_tokens in the Model's params sets it"
    )
    write(style_of(sys.stderr).warning(told), stream=sys.stderr)

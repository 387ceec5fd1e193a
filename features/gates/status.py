"""What the gates before model servers have learned, for `gdn ps` and `gdn usage`."""

from __future__ import annotations

from goondan.kernel.cli.operator_question import Document, Learned
from goondan.kernel.cli.rules.plain import one_line
from goondan.schemas.text.times import age

#: The most of a Model's name that is shown (characters).
MAX_NAME = 80


def line(row: Document) -> str:
    """One line for a server of which something was learned."""
    limits = [f"{row['concurrent']} at once"] if row["concurrent"] is not None else []
    limits += [f"{row['perMinute']:g} requests a minute"] if row["perMinute"] is not None else []
    what = f"at most {' and '.join(limits)}" if limits else "asked with care"
    why = "it said that it accepts little more"
    if row["refusals"]:
        refused = "1 request" if row["refusals"] == 1 else f"{row['refusals']} requests"
        why = f"it refused {refused}, the last one {age(row['lastMs'] / 1000)} ago"
    names = ", ".join(f"Model/{one_line(name, MAX_NAME)}" for name in row["models"]) or "a model"
    learned = age(row["learnedMs"] / 1000)
    return f"the server of {names}: {what}, learned {learned} ago: {why} (gdn ps --forget-limits)"


LEARNED = Learned("gates", line)

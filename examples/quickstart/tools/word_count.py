"""A tool in one file: a function, and `handlers` to say under which export it is called.

It runs in a jail. It sees this folder and the agent's workspace, and reaches no network.
"""

from pathlib import Path


def count(ctx, input):
    """Count the lines, words and characters of `text`, or of the file at `path`. Errors become the call's result."""
    text = input.get("text")
    if text is None:
        if "path" not in input:
            raise ValueError("give a text or a path")
        text = Path(ctx.workdir, input["path"]).read_text(encoding="utf-8")
    return {"lines": len(text.splitlines()), "words": len(text.split()), "characters": len(text)}


handlers = {"count": count}

"""A tool in one file: functions, and `handlers` to say under which export each is called.

It runs in a jail: it sees this folder (to read) and the agent's workspace, `ctx.workdir` (to write), and reaches no
network. It may import the standard library and files of this folder.
"""

from pathlib import Path

FILE = "notes.txt"


def add(ctx, input):
    """Arguments fit the schema in goondan.yaml already; an exception becomes an error that the model can read."""
    text = " ".join(input["text"].split())
    if not text:
        raise ValueError("the note is empty")
    with Path(ctx.workdir, FILE).open("a", encoding="utf-8") as notes:
        notes.write(text + "\n")
    return {"count": len(read(ctx))}


def list_all(ctx, input):
    """Whatever a handler returns must be JSON: here an object with a list."""
    return {"notes": read(ctx)}


def read(ctx):
    """The notes of this workspace. Not in `handlers`, so nobody can call it from outside."""
    try:
        return Path(ctx.workdir, FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []


handlers = {"add": add, "list": list_all}

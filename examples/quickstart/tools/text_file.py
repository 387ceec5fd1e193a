"""A tool in one file: functions, and `handlers` to say under which export each is called.

It runs in a jail. It sees this folder and the working directory, and reaches no network. What a function returns goes
to the model; what it raises becomes one structured error, with the exception's message. Arguments fit the schema in
goondan.yaml already.
"""

from pathlib import Path

#: A longer file would fill the model's memory, and the jail's.
MAX_BYTES = 1_000_000


def count(ctx, input):
    """Lines, words and characters of the file at `path`."""
    text = read(ctx, input["path"])
    return {"lines": len(text.splitlines()), "words": len(text.split()), "characters": len(text)}


def show(ctx, input):
    """Lines of the file at `path` with their numbers, and how many there are in all."""
    lines = read(ctx, input["path"]).splitlines()
    first = input.get("from", 1)
    shown = lines[first - 1 :][: input.get("lines", 200)]
    ctx.logger.info(input["path"], f"{len(shown)} of {len(lines)} lines")
    return {"text": "\n".join(f"{number}: {line}" for number, line in enumerate(shown, first)), "lines": len(lines)}


def read(ctx, path):
    """The text of a file in the working directory."""
    with Path(ctx.workdir, path).open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"{path} has more than {MAX_BYTES} bytes; look at a part of it with another tool")
    return data.decode("utf-8", "replace")


handlers = {"count": count, "show": show}

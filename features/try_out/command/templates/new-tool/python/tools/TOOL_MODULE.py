"""The tool TOOL-NAME: functions, and `handlers` to say under which export each is called.

It runs in a jail: it sees this folder (to read) and the agent's workspace, `ctx.workdir` (to write), and reaches no
network. It may import the standard library and files of this folder.
"""


def run(ctx, input):
    """Arguments fit the schema in the manifest already; an exception becomes an error that the model can read."""
    return {"words": len(input["text"].split())}


handlers = {"run": run}

"""A tool is one file: a dictionary of handlers, each of which takes a context and the arguments."""


def count(ctx, input):
    text = input["text"]
    return {"lines": len(text.splitlines()), "words": len(text.split()), "characters": len(text)}


handlers = {"count": count}

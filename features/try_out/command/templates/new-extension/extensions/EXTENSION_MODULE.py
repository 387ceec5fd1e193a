"""Refuses tool calls whose arguments have a forbidden word. docs/extensions.md has all that an extension can do."""


def register(api, config):
    """Called once for each agent process."""

    async def guard(ctx):
        word = forbidden(ctx.args, config["deny"])
        if word is not None:
            api.deny(f"{word} is not allowed here")  # the model is told, and `gdn denied` lists it
        result = await ctx.next()  # exactly once
        api.logger.info(ctx.tool_name, result.status)
        return result

    api.pipeline.register("toolCall", guard)


def forbidden(args, words):
    """The first of the words that stands in an argument; None when there is none."""
    texts = [text.split() for text in args.values() if isinstance(text, str)]
    return next((word for word in words for text in texts if word in text), None)

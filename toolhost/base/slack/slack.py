"""The bundled tool `slack`: a bot's messages, reactions and files, by the Slack Web API.

The token is sent only to the API and, for a download, to hosts of Slack or to the host of the given apiBaseUrl. Any
other address, also one of a redirect, is an error before a request is made.

Source: docs/design/tools.md section 9; requirements SLACK-01 to SLACK-23; recorded parity `slack__*`.
"""

from __future__ import annotations

from goondan_base import bot_api
from goondan_base.arguments import WHITE_SPACE, InvalidInput, non_empty, string
from goondan_tool import ToolContext

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from typing import Any

SLACK = bot_api.Service(
    api="slack",
    title="Slack",
    base="https://slack.com/api",
    variables=("SLACK_BOT_TOKEN", "SLACK_TOKEN", "BRAIN_SLACK_BOT_TOKEN"),
    wanted="SLACK_BOT_TOKEN/SLACK_TOKEN/BRAIN_SLACK_BOT_TOKEN",
)
#: Slack's own hosts: this one and those below it, over https only.
SLACK_DOMAIN = "slack.com"
HTTPS_PORT = 443
#: The number of messages of one read: the default, the default for a search of one message, and the most.
DEFAULT_LIMIT, DEFAULT_LIMIT_OF_ONE, MOST_MESSAGES = 20, 1, 1000

#: The names that a message's timestamp may have, in their order.
TIMESTAMPS = ("messageTs", "ts", "timestamp")


# --- exports --------------------------------------------------------------------------------------------------------


def send(bot: bot_api.Bot, ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`slack__send`: a message to a channel, or to a thread in it."""
    channel, text = channel_id(input), non_empty(input, "text")
    body = bot_api.given(
        channel=channel,
        text=text,
        thread_ts=string(input, "threadTs", "") if "threadTs" in input else None,
        mrkdwn=bot_api.optional_flag(input, "mrkdwn"),
        unfurl_links=bot_api.optional_flag(input, "unfurlLinks"),
        unfurl_media=bot_api.optional_flag(input, "unfurlMedia"),
        reply_broadcast=bot_api.optional_flag(input, "replyBroadcast"),
    )
    said = call(bot, "chat.postMessage", body)
    message = said.get("message")
    return {
        "ok": True,
        "channelId": bot_api.trimmed(said.get("channel")) or channel,
        "messageTs": bot_api.trimmed(said.get("ts")),
        "text": (bot_api.trimmed(message.get("text")) if isinstance(message, dict) else None) or text,
    }


def read(bot: bot_api.Bot, ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`slack__read`: messages of a channel or a thread, or one message by its timestamp."""
    channel = channel_id(input)
    message, thread = bot_api.first_text(input, *TIMESTAMPS), bot_api.first_text(input, "threadTs")
    inclusive = bot_api.optional_flag(input, "inclusive")
    body = bot_api.given(
        channel=channel,
        ts=thread,
        latest=bot_api.first_text(input, "latest") or message,
        oldest=bot_api.first_text(input, "oldest"),
        inclusive=True if inclusive is None and message is not None else inclusive,
        limit=bot_api.within_most(
            input, "limit", DEFAULT_LIMIT if message is None else DEFAULT_LIMIT_OF_ONE, MOST_MESSAGES
        ),
        cursor=bot_api.first_text(input, "cursor"),
    )
    method = "conversations.history" if thread is None else "conversations.replies"
    said = call(bot, method, body)
    listed, more = said.get("messages"), said.get("response_metadata")
    messages = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    found = (item for item in messages if message is not None and bot_api.trimmed(item.get("ts")) == message)
    return {
        "ok": True,
        "channelId": channel,
        "method": method,
        "messageTs": message,
        "threadTs": thread,
        "count": len(messages),
        "found": next(found, None),
        "messages": messages,
        "hasMore": said.get("has_more") is True,
        "nextCursor": bot_api.trimmed(more.get("next_cursor")) if isinstance(more, dict) else None,
    }


def edit(bot: bot_api.Bot, ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`slack__edit`: another text for a message."""
    channel, message = channel_id(input), message_ts(input)
    body = bot_api.given(
        channel=channel, ts=message, text=non_empty(input, "text"), mrkdwn=bot_api.optional_flag(input, "mrkdwn")
    )
    return {**changed(call(bot, "chat.update", body), channel, message), "edited": True}


def delete(bot: bot_api.Bot, ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`slack__delete`: delete a message."""
    channel, message = channel_id(input), message_ts(input)
    return {**changed(call(bot, "chat.delete", {"channel": channel, "ts": message}), channel, message), "deleted": True}


def react(bot: bot_api.Bot, ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`slack__react`: add one reaction for each name. All names are checked first. The first failure ends the call."""
    channel, message = channel_id(input), message_ts(input)
    names = list(dict.fromkeys(name for item in bot_api.emoji_names(input) if (name := emoji_name(item))))
    if not names:
        raise InvalidInput("Provide 'emoji' or 'emojis' to add Slack reaction.")
    for done, name in enumerate(names):
        try:
            call(bot, "reactions.add", {"channel": channel, "timestamp": message, "name": name})
        except bot_api.ApiError as error:
            if done:
                error.suggestion = (
                    f"Added before it failed: {', '.join(names[:done])}; not added: {name} and later ones."
                )
            raise
    return {"ok": True, "channelId": channel, "messageTs": message, "emojis": names, "reactionCount": len(names)}


def download_file(bot: bot_api.Bot, ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`slack__downloadFile`: download a file by its address, into the result, the workdir, or both."""
    url = bot_api.first_text(input, "url", "fileUrl", "downloadUrl")
    if url is None:
        raise InvalidInput("Provide 'url' (or 'fileUrl'/'downloadUrl') to download Slack file.")
    wanted = bot_api.Wanted(ctx, input)
    _, most = bot.timeout_ms, bot_api.most_bytes(input)  # checked in this order
    file = bot.download(url, authorization(bot), most, lambda address: foreign(address, bot.base))
    return {
        "ok": True,
        "url": url,
        "contentType": file.content_type,
        "contentLength": file.content_length,
        "etag": file.etag,
        "contentDisposition": file.content_disposition,
        **wanted.shaped(file),
    }


handlers = bot_api.exported(
    SLACK, send=send, read=read, edit=edit, delete=delete, react=react, downloadFile=download_file
)


# --- arguments and answers ------------------------------------------------------------------------------------------


def channel_id(input: dict[str, Any]) -> str:
    """The channel, under either of its names."""
    return needed_text(input, "channelId", "channel")


def needed_text(input: dict[str, Any], *names: str) -> str:
    """The first of these arguments that is a text and not blank. An error names the first of the names."""
    found = bot_api.first_text(input, *names)
    if found is None:
        raise InvalidInput(f"'{names[0]}' must be a non-empty string")
    return found


def message_ts(input: dict[str, Any]) -> str:
    """The timestamp that names a message, under any of its names."""
    return needed_text(input, *TIMESTAMPS)


def emoji_name(given: str) -> str:
    """The name without the colons around it. `::` alone is not changed, and the API refuses it."""
    name = given
    if len(given) > 2 and given[0] == given[-1] == ":":
        name = given[1:-1].strip(WHITE_SPACE)
    if any(c in WHITE_SPACE for c in name):
        raise InvalidInput(f"Invalid emoji name '{name}'. Emoji names must not contain whitespace.")
    return name


def call(bot: bot_api.Bot, method: str, body: dict[str, Any]) -> dict[str, Any]:
    """Call a method, and return its answer. Raises ApiError."""
    headers = {**authorization(bot), "Content-Type": "application/json; charset=utf-8"}
    return bot.call(method, f"{bot.base}/{method}", body, headers, refusal)


def changed(said: dict[str, Any], channel: str, message: str) -> dict[str, Any]:
    """The message that was changed: as the API names it, otherwise as the call named it."""
    return {
        "ok": True,
        "channelId": bot_api.trimmed(said.get("channel")) or channel,
        "messageTs": bot_api.trimmed(said.get("ts")) or message,
    }


def authorization(bot: bot_api.Bot) -> dict[str, str]:
    """The header with the token."""
    return {"Authorization": f"Bearer {bot.token}"}


def refusal(said: dict[str, Any]) -> str:
    """The API's text about a failure, as the end of a sentence. Empty when there is none."""
    text = bot_api.trimmed(said.get("error"))
    return "" if text is None else f": {text}"


def foreign(url: str, base: str) -> str | None:
    """The reason why the token must not be sent to an address: its server is neither Slack's nor the API's. None: it
    may be.
    """
    from goondan_base.fetch import Address, Unreachable

    try:
        address = Address(url)
    except Unreachable as error:
        return str(error)
    own = address.host == SLACK_DOMAIN or address.host.endswith("." + SLACK_DOMAIN)
    if own and address.scheme == "https" and address.port == HTTPS_PORT:
        return None
    try:
        same = address.origin == Address(base).origin
    except Unreachable:
        same = False
    if same:
        return None
    return f"the bot token is sent to https hosts of {SLACK_DOMAIN} and to the host of apiBaseUrl only, not to " + (
        address.authority
    )

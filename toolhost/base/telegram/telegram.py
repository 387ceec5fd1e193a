"""The bundled tool `telegram`: a bot's messages, reactions and files, by the Telegram Bot API.

The token is part of every address, so no address is shown: `downloadUrl` has `bot***` in its place. No redirect is
followed, because it could lead the token to another server.

Source: docs/design/tools.md section 9; requirements TELEGRAM-01 to TELEGRAM-21; recorded parity `telegram__*`.
"""

from __future__ import annotations

from goondan_base import bot_api
from goondan_base.arguments import WHITE_SPACE, InvalidInput, as_text, flag, non_empty, string
from goondan_base.redaction import HIDDEN
from goondan_tool import ToolContext, ToolError

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from typing import Any

TELEGRAM = bot_api.Service(
    api="telegram",
    title="Telegram",
    base="https://api.telegram.org",
    variables=("TELEGRAM_BOT_TOKEN", "BOT_TOKEN", "TELEGRAM_TOKEN", "BRAIN_TELEGRAM_BOT_TOKEN"),
    wanted="TELEGRAM_BOT_TOKEN/BOT_TOKEN/TELEGRAM_TOKEN",
)
#: Parse mode in its canonical spelling -> the API's spelling.
PARSE_MODES = {"markdown": "Markdown", "markdownv2": "MarkdownV2", "markdown-v2": "MarkdownV2", "html": "HTML"}
#: The spellings that a refusal names, as recorded.
NAMED_MODES = '["Markdown", "MarkdownV2", "HTML", "markdown", "markdownv2", "markdown-v2", "html"]'
ACTIONS = (
    "typing", "upload_photo", "record_video", "upload_video", "record_voice", "upload_voice", "upload_document",
    "choose_sticker", "find_location", "record_video_note", "upload_video_note",
)  # fmt: skip
#: The largest size (bytes). No file is so large, and the integers of every system can hold it.
MOST_SIZE = 1 << 63
#: The characters that stay unchanged in the part of an address with the token: those of an RFC 3986 path segment.
SEGMENT_SAFE = ":@!$&'()*+,;=-._~"
FILE_SAFE = SEGMENT_SAFE + "/"


# --- exports --------------------------------------------------------------------------------------------------------


def send(bot: bot_api.Bot, ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`telegram__send`: a message to a chat."""
    chat = chat_id(input)
    body = bot_api.given(
        chat_id=chat,
        text=non_empty(input, "text"),
        parse_mode=parse_mode(input, "send"),
        disable_notification=bot_api.optional_flag(input, "disableNotification"),
        disable_web_page_preview=bot_api.optional_flag(input, "disableWebPagePreview"),
        reply_to_message_id=message_id(input, "replyToMessageId") if "replyToMessageId" in input else None,
        allow_sending_without_reply=bot_api.optional_flag(input, "allowSendingWithoutReply"),
    )
    made = as_object(result(bot, "sendMessage", body))
    return {
        "ok": True,
        "chatId": chat,
        "messageId": above_zero(made.get("message_id")),
        "date": bot_api.integer(made.get("date")),
        "text": bot_api.trimmed(made.get("text")),
    }


def edit(bot: bot_api.Bot, ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`telegram__edit`: another text for a message."""
    chat, message = chat_id(input), message_id(input, "messageId")
    body = bot_api.given(
        chat_id=chat,
        message_id=message,
        text=non_empty(input, "text"),
        parse_mode=parse_mode(input, "edit"),
        disable_web_page_preview=bot_api.optional_flag(input, "disableWebPagePreview"),
    )
    made = as_object(result(bot, "editMessageText", body))
    return {"ok": True, "chatId": chat, "messageId": above_zero(made.get("message_id")) or message, "edited": True}


def delete(bot: bot_api.Bot, ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`telegram__delete`: delete a message."""
    chat, message = chat_id(input), message_id(input, "messageId")
    result(bot, "deleteMessage", {"chat_id": chat, "message_id": message})
    return {"ok": True, "chatId": chat, "messageId": message, "deleted": True}


def react(bot: bot_api.Bot, ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`telegram__react`: set the bot's reactions to a message, in place of its earlier ones. `clear` removes all."""
    chat, message = chat_id(input), message_id(input, "messageId")
    is_big, clear = bot_api.optional_flag(input, "isBig"), flag(input, "clear", False)
    emojis = [] if clear else list(dict.fromkeys(bot_api.emoji_names(input)))
    if not clear and not emojis:
        raise InvalidInput(
            "Provide 'emoji' or 'emojis' to set message reaction, or set 'clear=true' to remove reactions."
        )
    body = bot_api.given(
        chat_id=chat,
        message_id=message,
        reaction=[{"type": "emoji", "emoji": emoji} for emoji in emojis],
        is_big=is_big,
    )
    result(bot, "setMessageReaction", body)
    return {
        "ok": True,
        "chatId": chat,
        "messageId": message,
        "cleared": clear,
        "emojis": emojis,
        "reactionCount": len(emojis),
    }


def set_chat_action(bot: bot_api.Bot, ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`telegram__setChatAction`: show what the bot is doing. The result has the API's own spelling."""
    chat = chat_id(input)
    asked = string(input, "action" if "action" in input else "status", "typing")
    action = spelled(asked).replace("-", "_")
    if action not in ACTIONS:
        known = ", ".join(ACTIONS).replace("_", "-")
        raise InvalidInput(f"Unsupported chat action '{asked}'. Use one of: {known}.")
    result(bot, "sendChatAction", {"chat_id": chat, "action": action})
    return {"ok": True, "chatId": chat, "status": action, "action": action}


def download_file(bot: bot_api.Bot, ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`telegram__downloadFile`: download a file by its id, into the result, the workdir, or both."""
    from urllib.parse import quote

    asked = bot_api.first_text(input, "fileId", "file_id")
    if asked is None:
        raise InvalidInput("Provide 'fileId' (or 'file_id') for Telegram file download.")
    _, most = bot.timeout_ms, bot_api.most_bytes(input)  # checked in this order
    wanted = bot_api.Wanted(ctx, input)
    made = result(bot, "getFile", {"file_id": asked})
    if not isinstance(made, dict):
        raise bot.failed("getFile returned invalid result payload")
    file_id, path, size = (
        bot_api.trimmed(made.get("file_id")),
        bot_api.trimmed(made.get("file_path")),
        made.get("file_size"),
    )
    if file_id is None or path is None:
        raise bot.failed("getFile result missing file_id/file_path")
    url = f"{bot.base}/file/bot{quote(bot.token, safe=SEGMENT_SAFE)}/{quote(path, safe=FILE_SAFE)}"
    file = bot.download(url, {}, most, lambda address: None if address == url else "it was redirected")
    return {
        "ok": True,
        "fileId": file_id,
        "fileUniqueId": bot_api.trimmed(made.get("file_unique_id")),
        "filePath": path,
        "fileSize": cut_off(size),
        "downloadUrl": f"{bot.base}/file/bot{HIDDEN}/{path}",
        "contentType": file.content_type,
        **wanted.shaped(file),
    }


handlers = bot_api.exported(
    TELEGRAM,
    send=send,
    edit=edit,
    delete=delete,
    react=react,
    setChatAction=set_chat_action,
    downloadFile=download_file,
)


# --- arguments and answers ------------------------------------------------------------------------------------------


def chat_id(input: dict[str, Any]) -> str:
    """The chat: a user name with @, or a number, also as a text."""
    value = input.get("chatId")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and value.is_integer():
        return as_text(value)
    text = bot_api.trimmed(value)
    if text is None:
        raise InvalidInput("'chatId' must be a non-empty string or integer")
    return text


def message_id(input: dict[str, Any], name: str) -> int:
    """The number of a message in its chat, also as a text."""
    value = above_zero(input.get(name))
    if value is None:
        raise InvalidInput(f"'{name}' must be a positive integer")
    return value


def above_zero(value: Any) -> int | None:
    """An integer above 0. None for anything else."""
    found = bot_api.integer(value)
    return found if found is not None and found > 0 else None


def cut_off(value: Any) -> int | None:
    """A number without its fraction. None for a value that is no number, and for one that is too large for a size."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MOST_SIZE:
        return None
    return int(value)


def parse_mode(input: dict[str, Any], export: str) -> str | None:
    """The API's name of a parse mode in any letter case (TELEGRAM-06). An enum of a schema cannot express that."""
    asked = bot_api.trimmed(string(input, "parseMode", ""))
    if asked is None:
        return None
    mode = PARSE_MODES.get(spelled(asked))
    if mode is None:
        raise ToolError(
            f"Invalid arguments for tool 'telegram__{export}': args.parseMode: value must be one of {NAMED_MODES}",
            code="E_TOOL_INVALID_ARGS",
        )
    return mode


def spelled(given: str) -> str:
    """A word in its canonical spelling: small letters, and dashes between its parts."""
    parts = given.translate(dict.fromkeys(map(ord, WHITE_SPACE + "_"), " ")).split(" ")
    return "-".join(part for part in parts if part).lower()


def result(bot: bot_api.Bot, method: str, body: dict[str, Any]) -> Any:
    """Call a method, and return its `result`. Raises ApiError."""
    from urllib.parse import quote

    url = f"{bot.base}/bot{quote(bot.token, safe=SEGMENT_SAFE)}/{method}"
    said = bot.call(method, url, body, {"Content-Type": "application/json"}, refusal)
    return said.get("result")


def as_object(value: Any) -> dict[str, Any]:
    """The value if it is an object, otherwise an empty object."""
    return value if isinstance(value, dict) else {}


def refusal(said: dict[str, Any]) -> str:
    """The API's text about a failure, as the end of a sentence. Empty when there is none."""
    text, code = bot_api.trimmed(said.get("description")), said.get("error_code")
    if text is None:
        return ""
    return f" (code {code}): {text}" if isinstance(code, int) and not isinstance(code, bool) else f": {text}"

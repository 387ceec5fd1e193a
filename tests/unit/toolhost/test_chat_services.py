"""The bundled tools `telegram` and `slack` without a network: arguments, tokens, places, and what is not shown."""

from __future__ import annotations

import posix
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.kernel.bundle.documents import base_tools
from goondan.kernel.bundle.rules.plan import tool_spec
from goondan.toolhost.base.goondan_base import bot_api
from goondan.toolhost.base.goondan_base.arguments import InvalidInput
from goondan.toolhost.base.goondan_base.bot_api import Bot
from goondan.toolhost.base.slack import slack
from goondan.toolhost.base.telegram import telegram
from goondan.toolhost.inside.api import ToolError

SERVICES = {"telegram": telegram.TELEGRAM, "slack": slack.SLACK}
#: Looks like a token, is none, and is found in a text when it should not be there.
TOKEN = "123456:AAF-not-a-real-token"


@pytest.fixture(autouse=True)
def no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for service in SERVICES.values():
        for name in service.variables:
            monkeypatch.delitem(posix.environ, name.encode(), raising=False)


def context(workdir: str = "/w", output_limit: int = 1 << 20) -> Any:
    return SimpleNamespace(workdir=workdir, cancelled=False, output_limit=output_limit)


def refusal(tool: Any, export: str, **input: Any) -> Exception:
    """What an export raises before it makes any request."""
    with pytest.raises((InvalidInput, ToolError)) as caught:
        tool.handlers[export](context(), {"token": TOKEN, "apiBaseUrl": "http://127.0.0.1:1", **input})
    assert TOKEN not in str(caught.value)
    assert "request failed" not in str(caught.value)
    return caught.value


@pytest.mark.requirement("TELEGRAM-02", "SLACK-02")
@pytest.mark.parametrize("name", SERVICES)
def test_the_token_is_the_argument_else_the_first_variable_that_is_set(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = SERVICES[name]
    documented = {
        "telegram": ("TELEGRAM_BOT_TOKEN", "BOT_TOKEN", "TELEGRAM_TOKEN", "BRAIN_TELEGRAM_BOT_TOKEN"),
        "slack": ("SLACK_BOT_TOKEN", "SLACK_TOKEN", "BRAIN_SLACK_BOT_TOKEN"),
    }
    assert service.variables == documented[name]
    for variable in reversed(service.variables):
        monkeypatch.setitem(posix.environ, variable.encode(), f"from {variable}".encode())
        assert Bot(service, context(), {}).token == f"from {variable}"
    assert Bot(service, context(), {"token": "given"}).token == "given"
    assert Bot(service, context(), {"token": ""}).token == f"from {service.variables[0]}"
    monkeypatch.setitem(posix.environ, service.variables[0].encode(), b"")
    assert Bot(service, context(), {}).token == f"from {service.variables[1]}"


@pytest.mark.parametrize("name", SERVICES)
def test_without_a_token(name: str) -> None:
    with pytest.raises(ToolError) as caught:
        Bot(SERVICES[name], context(), {})
    assert caught.value.code == "E_TOKEN_MISSING"
    assert all(variable in str(caught.value.suggestion) for variable in SERVICES[name].variables)


@pytest.mark.parametrize("token", ["abcd\r\nX-Evil: 1", "abcd\nef", "ab\0cd", "abcd\x7f"])
@pytest.mark.parametrize("name", SERVICES)
def test_a_token_with_a_line_break_is_refused_and_not_shown(name: str, token: str) -> None:
    with pytest.raises(InvalidInput, match="bot token holds a line break") as caught:
        Bot(SERVICES[name], context(), {"token": token})
    assert "abcd" not in str(caught.value)


@pytest.mark.requirement("TELEGRAM-03", "SLACK-03")
def test_what_every_export_takes() -> None:
    bots = {name: Bot(service, context(), {"token": TOKEN}) for name, service in SERVICES.items()}
    assert bots["telegram"].base == "https://api.telegram.org"
    assert bots["slack"].base == "https://slack.com/api"
    assert bot_api.DEFAULT_TIMEOUT_MS == 15_000
    odd = {"token": TOKEN, "apiBaseUrl": " http://h:1/x// ", "timeoutMs": 2.5}
    bot = Bot(slack.SLACK, context(), odd)
    assert (bot.base, bot.timeout_ms) == ("http://h:1/x/", 2)
    for value in (0, -1, -0.5):
        with pytest.raises(InvalidInput, match="'timeoutMs' must be a positive number"):
            _ = Bot(slack.SLACK, context(), {"token": TOKEN, "timeoutMs": value}).timeout_ms


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just(f"a {TOKEN} b"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", TOKEN, "c"]), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_the_token_is_hidden_wherever_it_stands(value: Any) -> None:
    bot = Bot(slack.SLACK, context(), {"token": TOKEN})
    assert TOKEN not in repr(bot.hidden(value))
    assert bot.hidden(bot.hidden(value)) == bot.hidden(value)


def test_a_files_own_bytes_are_not_touched() -> None:
    bot = Bot(slack.SLACK, context(), {"token": "AAAA"})
    assert bot.hidden({"base64": "AAAA", "dataUrl": "data:x;base64,AAAA", "etag": '"AAAA"'}) == {
        "base64": "AAAA",
        "dataUrl": "data:x;base64,AAAA",
        "etag": '"***"',
    }
    assert Bot(slack.SLACK, context(), {"token": " "}).hidden("a b") == "a b"  # no token is that short


@pytest.mark.parametrize(
    ("value", "expected"),
    [(42, 42), (" 42 ", 42), (42.0, 42), ("007", 7), (0, 0), (-5, -5), (1.5, None), ("1.5", None), ("-1", None),
     ("x", None), ("", None), ("٤", None), (True, None), (None, None), ("9" * 5000, None), ([1], None)],
)  # fmt: skip
def test_integers_of_arguments_and_answers(value: Any, expected: int | None) -> None:
    assert bot_api.integer(value) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b'{"a": 1}', {"a": 1}), (b'\xef\xbb\xbf{"a": 1}', {"a": 1}), (b"null", None), (b"", None), (b"<html>", None),
     (b'{"a": NaN}', None), (b"[" * 100_000, None), (b"9" * 10_000, None), (b'"\xff"', "\ufffd")],
)  # fmt: skip
def test_answers_that_are_json_and_that_are_none(data: bytes, expected: Any) -> None:
    assert bot_api.parsed(data) == expected


# --- arguments, checked before the first request


@pytest.mark.requirement("TELEGRAM-06")
def test_parse_modes_in_any_letter_case() -> None:
    for spelled in ("Markdown", "MARKDOWN", "mArKdOwN", " markdown "):
        assert telegram.parse_mode({"parseMode": spelled}, "send") == "Markdown"
    for spelled in ("MarkdownV2", "MARKDOWNV2", "markdown-v2", "Markdown_V2"):
        assert telegram.parse_mode({"parseMode": spelled}, "send") == "MarkdownV2"
    assert telegram.parse_mode({"parseMode": "hTmL"}, "send") == "HTML"
    assert telegram.parse_mode({}, "send") is None
    for export in ("send", "edit"):
        error = refusal(telegram, export, chatId="1", messageId=1, text="x", parseMode="bold")
        assert getattr(error, "code", None) == "E_TOOL_INVALID_ARGS"
        assert str(error).startswith(f"Invalid arguments for tool 'telegram__{export}': args.parseMode: value must be")


@pytest.mark.requirement("TELEGRAM-13")
def test_a_reaction_needs_an_emoji_or_clear() -> None:
    for more in ({}, {"emoji": " "}, {"emojis": [" ", ""]}, {"clear": False}):
        assert "Provide 'emoji' or 'emojis'" in str(refusal(telegram, "react", chatId="1", messageId=1, **more))


@pytest.mark.requirement("TELEGRAM-16")
def test_another_chat_action_is_refused() -> None:
    assert "Unsupported chat action 'dancing'" in str(refusal(telegram, "setChatAction", chatId="1", action="dancing"))


@pytest.mark.requirement("TELEGRAM-19", "SLACK-21")
def test_a_download_needs_to_know_what() -> None:
    for more in ({}, {"fileId": " "}, {"file_id": ""}):
        assert str(refusal(telegram, "downloadFile", **more)).startswith("Provide 'fileId' (or 'file_id')")
    for more in ({}, {"url": " "}, {"fileUrl": "", "downloadUrl": " "}):
        assert str(refusal(slack, "downloadFile", **more)).startswith("Provide 'url' (or 'fileUrl'/'downloadUrl')")


@pytest.mark.requirement("TELEGRAM-21", "SLACK-20")
@pytest.mark.parametrize(("value", "said"), [(0, "a positive number"), (-1, "a positive number"),
                                             (0.5, "between 1 and 20000000"), (20_000_001, "between 1 and 20000000"),
                                             (1e300, "between 1 and 20000000")])  # fmt: skip
def test_how_large_a_file_may_be(value: float, said: str) -> None:
    for tool, more in ((telegram, {"fileId": "F"}), (slack, {"url": "https://files.slack.com/x"})):
        assert str(refusal(tool, "downloadFile", maxBytes=value, **more)) == f"'maxBytes' must be {said}"


@pytest.mark.requirement("SLACK-09")
@pytest.mark.parametrize(("value", "said"), [(0, "a positive number"), (1001, "between 1 and 1000"),
                                             (0.9, "between 1 and 1000")])  # fmt: skip
def test_how_many_messages(value: float, said: str) -> None:
    assert str(refusal(slack, "read", channelId="C", limit=value)) == f"'limit' must be {said}"


@pytest.mark.requirement("SLACK-17")
def test_a_slack_reaction_needs_a_name() -> None:
    cases: list[dict[str, Any]] = [{}, {"emoji": ""}, {"emojis": []}, {"emoji": ": :"}]
    for more in cases:
        error = refusal(slack, "react", channelId="C", messageTs="1.1", **more)
        assert str(error) == "Provide 'emoji' or 'emojis' to add Slack reaction."


# --- where the Slack token may go


@pytest.mark.requirement("SLACK-22")
@pytest.mark.parametrize(
    "url",
    ["https://slack.com/x", "https://files.slack.com/files-pri/a", "https://FILES.SLACK.COM/x", "https://a.b.slack.com:443",
     "http://127.0.0.1:8080/slack-files/x"],
)  # fmt: skip
def test_the_token_goes_to_slack_and_to_the_given_api(url: str) -> None:
    assert slack.foreign(url, "http://127.0.0.1:8080/api") is None


@pytest.mark.requirement("SLACK-22")
@pytest.mark.parametrize(
    "url",
    ["https://evil.example/x", "http://files.slack.com/x", "https://files.slack.com:8443/x", "https://slack.com.evil.example/",
     "https://notslack.com/", "https://evil.example/?slack.com", "https://slack.com@evil.example/",
     "https://evil.example\\@slack.com/", "https://127.0.0.1:8080/x", "http://127.0.0.1:8081/x", "http://127.0.0.1/x",
     "file:///etc/passwd", "data:text/plain,hi", "not a url", ""],
)  # fmt: skip
def test_the_token_goes_nowhere_else(url: str) -> None:
    assert slack.foreign(url, "http://127.0.0.1:8080/api")


# --- what is saved, and what an output can hold


def file_of(size: int, content_type: str | None = "text/plain") -> Any:
    return SimpleNamespace(data=b"x" * size, content_type=content_type)


@pytest.mark.requirement("TELEGRAM-20", "SLACK-23")
def test_what_a_download_returns() -> None:
    assert bot_api.Wanted(context(), {}).shaped(file_of(1)) == {
        "sizeBytes": 1,
        "savedPath": None,
        "base64": "eA==",
        "dataUrl": "data:text/plain;base64,eA==",
    }
    for nothing in (file_of(1, None), file_of(0)):
        assert bot_api.Wanted(context(), {}).shaped(nothing)["dataUrl"] is None
    assert bot_api.Wanted(context(), {"includeDataUrl": False}).shaped(file_of(1))["dataUrl"] is None
    shaped = bot_api.Wanted(context(), {"includeBase64": False}).shaped(file_of(1))
    assert (shaped["base64"], shaped["dataUrl"]) == (None, None)


def test_what_no_output_can_hold_is_not_saved_either(tmp_path: Path) -> None:
    ctx = context(str(tmp_path), output_limit=bot_api.FIELDS_ROOM + 100)
    with pytest.raises(ToolError, match="the file has 60 bytes; as base64 and data URL") as caught:
        bot_api.Wanted(ctx, {"savePath": "x"}).shaped(file_of(60))
    assert caught.value.code == "E_TOOL_LIMIT"
    assert list(tmp_path.iterdir()) == []
    assert bot_api.Wanted(ctx, {"includeDataUrl": False, "savePath": "x"}).shaped(file_of(60))["base64"]
    saved = bot_api.Wanted(ctx, {"includeBase64": False, "outputPath": "a/b/c"}).shaped(file_of(600))["savedPath"]
    assert saved == f"{tmp_path}/a/b/c"
    assert (tmp_path / "a/b/c").read_bytes() == b"x" * 600


@pytest.mark.requirement("TELEGRAM-18", "SLACK-20")
def test_places_outside_of_the_workdir(tmp_path: Path) -> None:
    workdir = tmp_path / "work"
    workdir.mkdir()
    (workdir / "out").symlink_to(tmp_path)
    (workdir / "file").symlink_to(tmp_path / "target")
    (workdir / "loop").symlink_to("loop")
    for path in ("../x", "/etc/x", "a/../../x", "out/x", "file", str(tmp_path / "work2" / "x"), "/"):
        with pytest.raises(ToolError) as caught:
            bot_api.place(context(str(workdir)), "savePath", path)
        assert caught.value.code == "E_SANDBOX_DENIED", path
    with pytest.raises(InvalidInput, match="null bytes"):
        bot_api.place(context(str(workdir)), "savePath", "a\0b")
    for path in ("x", "a/./b/../c", str(workdir / "x"), 'it\'s "quoted"', "한글"):
        where = bot_api.place(context(str(workdir)), "savePath", path)
        assert Path(bot_api.save(where, b"1")).read_bytes() == b"1"
    assert not (tmp_path / "target").exists()


def test_places_that_are_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"old")
    for path, code in (("folder", "EISDIR"), (".", "EISDIR"), ("new/", "EISDIR"), ("file/x", "ENOTDIR")):
        with pytest.raises(ToolError) as caught:
            bot_api.save(bot_api.place(context(str(tmp_path)), "savePath", path), b"1")
        assert caught.value.code in (code, "EEXIST"), path
    with pytest.raises(ToolError) as caught:
        bot_api.save(bot_api.place(context(str(tmp_path)), "savePath", "n" * 300), b"1")
    assert caught.value.code == "ENAMETOOLONG"
    assert (tmp_path / "file").read_bytes() == b"old"
    assert not list(tmp_path.rglob("*.part"))


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.text(max_size=3))
NAMES = st.sampled_from(
    sorted({name for tool in ("telegram", "slack") for export in tool_spec(base_tools()[tool]).exports
            for name in [*(export.parameters or {})["properties"], *export.aliases]} - {"apiBaseUrl", "timeoutMs"})
)  # fmt: skip


@given(
    st.sampled_from([(tool, export) for tool in (telegram, slack) for export in tool.handlers]),
    st.dictionaries(NAMES, VALUES, max_size=8),
)
def test_any_arguments_give_an_error_in_words(call: tuple[Any, str], input: dict[str, Any]) -> None:
    """Also without a schema before it; nobody listens at that address, so no call can succeed."""
    tool, export = call
    with pytest.raises((InvalidInput, ToolError)) as caught:
        tool.handlers[export](context(), {**input, "apiBaseUrl": "http://127.0.0.1:1"})
    assert str(caught.value)


def test_an_error_about_arguments_does_not_hold_the_token_either() -> None:
    assert "***" in str(refusal(telegram, "setChatAction", chatId="1", action=TOKEN))
    assert "***" in str(refusal(slack, "downloadFile", url="https://files.slack.com/x", savePath=f"/{TOKEN}"))

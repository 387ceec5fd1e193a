"""The common part of the bundled tools for chat services: the bot's token, calls of the web API, downloads.

Rules.
- The token is used only for requests. Every result and every error of a handler passes `Bot.hidden` (see `exported`).
- Before the first request these are checked, in this order: the token, the arguments, the place to save to, and last
  the options of the request (timeoutMs, apiBaseUrl).
- The size of an answer is limited, whatever its headers say. The size of a file is limited by the caller.
- Errors are worded `[service] method failed: …` (the service has refused) or `[service] method request failed: …`
  (there was no answer). They have no code of their own, so that the host can set E_SANDBOX_DENIED when the sandbox was
  the reason.
- A download is saved in the workdir: whole or not at all, and nowhere else. A jail can also write to private memory. A
  file there would be lost with the jail, so that is refused too.

Source: docs/design/tools.md section 9; requirements TELEGRAM-02 to -04, -18 to -21, SLACK-02 to -04, -20 to -23;
recorded parity.
"""

from __future__ import annotations

import posix

from goondan_tool import ToolContext, ToolError

from .arguments import WHITE_SPACE, InvalidInput, absolute, as_text, flag, number, string, strings
from .redaction import Redactor

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from .fetch import Answer

    Handler = Callable[[ToolContext, dict[str, Any]], dict[str, Any]]

DEFAULT_TIMEOUT_MS = 15_000
#: The limit of a file's size when the call names none (bytes), and the highest limit that it may name.
DEFAULT_MAX_BYTES = 3_000_000
MOST_BYTES = 20_000_000
#: The longest answer of an API (bytes). No output could hold more.
MAX_ANSWER = 4 << 20
#: How much more than the limit of a file is read (bytes), so that the error can tell its size.
LOOK_AHEAD = 1 << 20
#: The most redirects of one download.
MAX_REDIRECTS = 5
REDIRECTS = (301, 302, 303, 307, 308)
#: The most digits of an integer of an API.
MAX_DIGITS = 18
#: The size of a result besides the file itself (bytes): an address of 8 KiB, some headers.
FIELDS_ROOM = 16 << 10


class Service:
    """One chat service: its names, the address of its API, and the variables that can hold a bot's token, in their
    order.
    """

    __slots__ = ("api", "base", "title", "variables", "wanted")

    def __init__(self, api: str, title: str, base: str, variables: tuple[str, ...], wanted: str) -> None:
        self.api = api
        self.title = title
        self.base = base
        self.variables = variables
        self.wanted = wanted


class ApiError(ToolError):
    """The service has refused, or has not answered."""


class Bot:
    """The bot of a service for one call. Raises InvalidInput, and ToolError E_TOKEN_MISSING."""

    def __init__(self, service: Service, ctx: ToolContext, input: dict[str, Any]) -> None:
        self.service = service
        self.token = _token(service, input)
        self._redact = Redactor(self.token)
        self._input = input
        self._cancelled: Callable[[], bool] = lambda: ctx.cancelled

    @property
    def timeout_ms(self) -> int:
        """How long to wait for the head of an answer (milliseconds)."""
        return int(positive(self._input, "timeoutMs", DEFAULT_TIMEOUT_MS))

    @property
    def base(self) -> str:
        """The address of the API, without a slash at its end."""
        return (trimmed(string(self._input, "apiBaseUrl", "")) or self.service.base).removesuffix("/")

    def hidden(self, value: Any) -> Any:
        """A JSON value with `***` in place of the token in all texts. The bytes of a file are not changed."""
        if isinstance(value, str):
            return self._redact(value)
        if isinstance(value, dict):
            return {
                self.hidden(key): item if key in ("base64", "dataUrl") else self.hidden(item)
                for key, item in value.items()
            }
        return [self.hidden(item) for item in value] if isinstance(value, list) else value

    def call(
        self, method: str, url: str, body: dict[str, Any], headers: Mapping[str, str], reason: Callable[[Any], str]
    ) -> dict[str, Any]:
        """POST a JSON object, and return the answer's object, which has `ok: true`. Raises ApiError.

        `reason` words the answer's text about a failure: `: text` or ` (code 1): text`. It is empty when there is none.
        """
        from json import dumps

        data = dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        with self._send("POST", url, method, headers, data) as answer:
            found = self._read(answer, MAX_ANSWER + 1, method)
            if len(found) > MAX_ANSWER:
                raise self.failed(f"{method} failed: the answer has more than {MAX_ANSWER} bytes")
            said = parsed(found)
            if isinstance(said, dict) and said.get("ok") is True and 200 <= answer.status < 300:
                return said
            told = reason(said) if isinstance(said, dict) else ""
            wait = answer.header("retry-after") if answer.status == 429 else None
            raise self.failed(
                f"{method} failed{told or ': ' + status_line(answer)}",
                f"The service is busy: wait {wait} seconds." if wait is not None and wait.isdigit() else None,
            )

    def download(self, url: str, headers: Mapping[str, str], most: int, allowed: Callable[[str], str | None]) -> File:
        """GET a file of at most `most` bytes. Raises ApiError.

        `allowed` gives the reason why an address must not be requested. None: it may be. Every redirect is checked too.
        """
        from urllib.parse import urljoin

        what = "file download"
        for _ in range(MAX_REDIRECTS + 1):
            refused = allowed(url)
            if refused is not None:
                raise self.failed(f"{what} request failed: {refused}")
            with self._send("GET", url, what, headers, None) as answer:
                location = answer.header("location")
                if answer.status in REDIRECTS and location:
                    try:
                        url = urljoin(url, location)
                    except ValueError:
                        raise self.failed(f"{what} request failed: it was redirected to what is no URL") from None
                    continue
                if not 200 <= answer.status < 300:
                    raise self.failed(f"{what} failed: {status_line(answer)}")
                return File(self._limited(answer, what, most), answer)
        raise self.failed(f"{what} request failed: more than {MAX_REDIRECTS} redirects")

    def failed(self, text: str, suggestion: str | None = None) -> ApiError:
        """The error to raise."""
        return ApiError(f"[{self.service.api}] {text}", suggestion=suggestion)

    def _limited(self, answer: Answer, what: str, most: int) -> bytes:
        size = answer.length
        data = b"" if size is not None and size > most else self._read(answer, most + 1, what)
        if len(data) > most:
            rest = len(self._read(answer, LOOK_AHEAD, what))
            size = None if rest == LOOK_AHEAD else len(data) + rest
        elif size is None or size <= most:
            return data
        found = f"more than {most + LOOK_AHEAD}" if size is None else size
        raise ApiError(
            f"{self.service.title} file exceeds maxBytes limit ({found} > {most})",
            suggestion=f"Ask for more with maxBytes (at most {MOST_BYTES}), and save it with savePath.",
        )

    def _send(self, method: str, url: str, what: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        from .fetch import TimedOut, Unreachable, send

        milliseconds = self.timeout_ms
        seconds = milliseconds / 1000
        try:
            return send(method, url, headers=headers, body=body, timeout_s=seconds, cancelled=self._cancelled)
        except TimedOut as error:
            late = f"{self.service.title} API request timed out after {as_text(milliseconds)}ms"
            raise self.failed(f"{what} request failed: {late}") from error
        except Unreachable as error:
            raise self.failed(f"{what} request failed: {error}") from error

    def _read(self, answer: Answer, most: int, what: str) -> bytes:
        from .fetch import Unreachable

        try:
            return answer.read(most)
        except Unreachable as error:
            raise self.failed(f"{what} request failed: {error}") from error


class File:
    """A downloaded file: its bytes, and the values of some headers (None: the header is missing)."""

    __slots__ = ("content_disposition", "content_length", "content_type", "data", "etag")

    def __init__(self, data: bytes, answer: Answer) -> None:
        self.data = data
        self.content_type = answer.header("content-type") or None
        self.content_length = answer.length
        self.etag = answer.header("etag")
        self.content_disposition = answer.header("content-disposition")


class Wanted:
    """The arguments of a download. Raises InvalidInput, and ToolError E_SANDBOX_DENIED for a place outside the
    workdir.
    """

    def __init__(self, ctx: ToolContext, input: dict[str, Any]) -> None:
        self._ctx = ctx
        self._base64 = flag(input, "includeBase64", True)
        self._data_url = flag(input, "includeDataUrl", True)
        # When both spellings reach a handler, the documented one counts, also when it is blank.
        name = "savePath" if "savePath" in input else "outputPath"
        given = trimmed(string(input, name, ""))
        self._place: tuple[str, str] | None = None
        if given is not None:
            self._place = place(ctx, name, given)

    def shaped(self, file: File) -> dict[str, Any]:
        """The fields of a result that every download has: sizeBytes, savedPath, base64, dataUrl. Saves the file.

        Raises ToolError E_TOOL_LIMIT for a file that no output can hold, before anything is saved.
        """
        encoded = data_url = None
        if self._base64:
            # An empty file is no picture, and a file without a type has no data address.
            both = self._data_url and bool(file.data) and file.content_type is not None
            prefix = f"data:{file.content_type};base64,"
            size = (len(file.data) + 2) // 3 * 4
            self._check_size(2 * size + len(prefix) if both else size, len(file.data))
            from binascii import b2a_base64

            encoded = b2a_base64(file.data, newline=False).decode("ascii")
            data_url = prefix + encoded if both else None
        saved = None
        if self._place is not None:
            saved = save(self._place, file.data)
        return {"sizeBytes": len(file.data), "savedPath": saved, "base64": encoded, "dataUrl": data_url}

    def _check_size(self, size: int, of: int) -> None:
        if size + FIELDS_ROOM > self._ctx.output_limit:
            raise ToolError(
                f"the file has {of} bytes; as base64{' and data URL' if self._data_url else ''} that is more than an "
                f"output may have, which is {self._ctx.output_limit}",
                code="E_TOOL_LIMIT",
                suggestion="Save it with savePath and includeBase64: false, or leave one out: includeDataUrl: false.",
            )


# --- the place of a download ------------------------------------------------------------------------------------------

#: The length of the random name under which a file is first written (bytes). So it meets no file of another call.
NAME_BYTES = 8


def place(ctx: ToolContext, name: str, given: str) -> tuple[str, str]:
    """The place that the argument `name` says: its absolute path, and the real path without links.

    Raises InvalidInput for null bytes, and ToolError E_SANDBOX_DENIED for a path that leads out of the workdir, also
    through a link.
    """
    from posixpath import realpath

    from goondan_tool.sandbox import within

    if "\0" in given:
        raise InvalidInput(f"'{name}' must not contain null bytes")
    path = absolute(ctx.workdir, given)
    real = realpath(path)
    if not within(real, realpath(ctx.workdir)):
        raise ToolError(
            f"{path} is outside of the workdir, and downloads are saved there only",
            code="E_SANDBOX_DENIED",
            suggestion=f"Use a path in the workdir, such as {path.rstrip('/').rpartition('/')[2] or 'download'}.",
        )
    return path, real


def save(where: tuple[str, str], data: bytes) -> str:
    """Write the file, and return its path. It replaces an existing file. Missing folders are made.

    Raises ToolError with the name of the system's error as its code.
    """
    import os
    from errno import EIO, EISDIR

    from .reasons import name_of, reason_of

    path, real = where
    folder = os.path.dirname(real)
    part = os.path.join(folder, f".{os.urandom(NAME_BYTES).hex()}.part")
    operation, at = "mkdir", folder
    try:
        os.makedirs(folder, exist_ok=True)
        operation, at = "open", path
        if os.path.isdir(real) or path.endswith("/"):
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            with open(fd, "wb", buffering=0) as file:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) or 0 :]
            os.replace(part, real)
        except BaseException:
            os.unlink(part)
            raise
    except OSError as error:
        number = error.errno or EIO
        at = error.filename if operation == "mkdir" and isinstance(error.filename, str) else at
        raise ToolError(f"{name_of(number)}: {reason_of(number)}, {operation} '{at}'", code=name_of(number)) from None
    return path


# --- arguments and answers ------------------------------------------------------------------------------------------


def trimmed(value: Any) -> str | None:
    """A text without white space around it. None for an empty text, and for a value that is no text."""
    return (value.strip(WHITE_SPACE) or None) if isinstance(value, str) else None


def first_text(input: dict[str, Any], *names: str) -> str | None:
    """The first of these arguments that is a text and not blank, trimmed."""
    return next((text for name in names if (text := trimmed(input.get(name))) is not None), None)


def optional_flag(input: dict[str, Any], name: str) -> bool | None:
    """A boolean that may be left out. Then it is not sent."""
    return flag(input, name, False) if name in input else None


def positive(input: dict[str, Any], name: str, default: float) -> float:
    """A number above 0."""
    value = number(input, name, default)
    if value <= 0:
        raise InvalidInput(f"'{name}' must be a positive number")
    return value


def within_most(input: dict[str, Any], name: str, default: int, most: int) -> int:
    """A number from 1 to `most`, its fraction cut off."""
    value = int(positive(input, name, default))
    if not 1 <= value <= most:
        raise InvalidInput(f"'{name}' must be between 1 and {most}")
    return value


def most_bytes(input: dict[str, Any]) -> int:
    """`maxBytes` of a download."""
    return within_most(input, "maxBytes", DEFAULT_MAX_BYTES, MOST_BYTES)


def integer(value: Any) -> int | None:
    """An integer, also in the form of a text. None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str):
        digits = value.strip(WHITE_SPACE)
        return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS else None
    return value if isinstance(value, int) else None


def emoji_names(input: dict[str, Any]) -> list[str]:
    """The names in `emoji` and then in `emojis`: trimmed, without blank ones."""
    names = [string(input, "emoji", ""), *(strings(input, "emojis") if "emojis" in input else [])]
    return [name for given in names if (name := trimmed(given)) is not None]


def given(**fields: Any) -> dict[str, Any]:
    """The body of a request: the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def parsed(data: bytes) -> Any:
    """The JSON value of an answer. None for null, and for a text that is no JSON."""
    from json import loads

    try:
        return loads(data.decode("utf-8-sig", "replace"), parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None


def status_line(answer: Answer) -> str:
    """The status of an answer in words."""
    return f"HTTP {answer.status} {answer.reason}".rstrip()


def exported(
    service: Service, **handlers: Callable[[Bot, ToolContext, dict[str, Any]], dict[str, Any]]
) -> dict[str, Handler]:
    """Handlers that get their bot as an argument, by the names of their exports. Their outputs and errors never contain
    the token.
    """
    return {name: _with_bot(service, handler) for name, handler in handlers.items()}


def _with_bot(service: Service, handler: Callable[[Bot, ToolContext, dict[str, Any]], dict[str, Any]]) -> Handler:

    def run(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
        bot = Bot(service, ctx, input)
        try:
            output: dict[str, Any] = bot.hidden(handler(bot, ctx, input))
        except (InvalidInput, ToolError) as error:
            error.args = tuple(map(bot.hidden, error.args))
            if isinstance(error, ToolError):
                error.suggestion = bot.hidden(error.suggestion)
            raise
        return output

    return run


def _no_number(name: str) -> Any:
    raise ValueError(name)


def _token(service: Service, input: dict[str, Any]) -> str:
    token = string(input, "token", "")
    for variable in service.variables:
        token = token or posix.environ.get(variable.encode(), b"").decode("utf-8", "replace")
    if not token:
        raise ToolError(
            f"{service.title} bot token not found. Provide 'token' or set {service.wanted}.",
            code="E_TOKEN_MISSING",
            suggestion=f"Start the kernel with one of {', '.join(service.variables)} in its environment.",
        )
    if any(c < " " or c == "\x7f" for c in token):
        raise InvalidInput(f"the {service.title} bot token holds a line break or another control character")
    return token

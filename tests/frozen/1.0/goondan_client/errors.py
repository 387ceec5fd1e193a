"""The one exception of this package."""

from __future__ import annotations


class GoondanError(Exception):
    """What went wrong, with a stable code.

    - `code`: for programs, for example `E_AGENT_NOT_FOUND`.
    - `message`: what is wrong, in one sentence. It may come from outside: treat it as data.
    - `suggestion`: what to do about it; None where there is nothing to say.
    - `retry_after`: after how many seconds to try again; only with `E_OVERLOADED`.
    """

    def __init__(
        self, code: str, message: str, suggestion: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.suggestion, self.retry_after = code, message, suggestion, retry_after

"""Hides values of the person's environment in texts about a bundle: problems, JSON documents, tables. Pure.

A bundle can put a value anywhere with `${NAME}`, and its modules can raise errors with the values that they were given.
Such texts end up in logs of a CI. So two kinds of values are hidden: values that look like a secret, by the name of
their variable or by their form, and values of variables that the bundle names. A value that the documents contain
anyway, such as the name of an agent, is no secret and stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from goondan.schemas.text.redaction import Redactor

#: Variables whose values are places and settings, and not secrets. Hiding `/root` would make every path unreadable.
_PUBLIC: Final = re.compile(
    r"(?:HOME|PATH|PWD|OLDPWD|USER|LOGNAME|SHELL|TERM|LANG|LANGUAGE|TZ|HOSTNAME|EDITOR|PAGER|TMPDIR|SSH_AUTH_SOCK"
    r"|DBUS_SESSION_BUS_ADDRESS|LC_.*|XDG_.*|GOONDAN_.*)\Z"
)
_SECRET_NAME: Final = re.compile(
    r"KEY|TOKEN|SECRET|PASS|PWD|CRED|AUTH|PRIVATE|COOKIE|SESSION|DSN|WEBHOOK|SIGN", re.IGNORECASE
)
#: Beginnings that vendors give their keys, private keys, JSON Web Tokens, and URLs with a password. The last letter of
#: a scheme is enough: `[a-z]+` would be tried from each letter of a long word to its end.
_SECRET_VALUE: Final = re.compile(
    r"(?:sk|pk|rk|hf|ghp|gho|ghu|ghs|ghr|github_pat|glpat|xox[abeoprs]|npm|pypi|dop_v1|SG|AKIA|ASIA|AIza|ya29|eyJ)"
    r"[-_.A-Za-z0-9]{12,}|-----BEGIN |[a-z]://[^/\s:@]*:[^/\s@]+@"
)
#: Values that are settings, whatever the name of their variable is.
_SETTINGS: Final = frozenset(("true", "false", "none", "null", "auto", "default", "enabled", "disabled", "required"))
#: The shortest value that is hidden only because the bundle names its variable (characters). Shorter ones would match
#: ordinary words.
_SHORTEST_NAMED: Final = 8
#: When a secret has several lines, as a private key has, each line of this length is hidden by itself.
_SHORTEST_LINE: Final = 16


def is_secret_by_name(variable: str) -> bool:
    """Whether a variable of this name probably holds a secret."""
    return not _PUBLIC.match(variable) and _SECRET_NAME.search(variable) is not None


class EnvironmentRedactor:
    """Takes the values out of texts. `env` is the person's environment, `named` what the bundle names of it, `written`
    the bytes of the bundle's documents. The work begins with the first text.
    """

    def __init__(self, env: Mapping[str, str], named: Iterable[str], written: Iterable[bytes]) -> None:
        self._env = env
        self._named = frozenset(named)
        self._written = tuple(written)
        self._redactor: Redactor | None = None

    def __call__(self, text: str) -> str:
        """`text` with `***` in the place of every value."""
        if self._redactor is None:
            self._redactor = Redactor(*hidden_values(self._env, self._named, self._written))
        return self._redactor(text)

    def all_of(self, value: Any) -> Any:
        """A JSON value with every text and every key in it passed through this."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, dict):
            return {self.all_of(key): self.all_of(item) for key, item in value.items()}
        return [self.all_of(item) for item in value] if isinstance(value, list | tuple) else value


def hidden_values(env: Mapping[str, str], named: frozenset[str], written: Iterable[bytes]) -> list[str]:
    """The values that must not be shown."""
    documents = tuple(written)
    found: list[str] = []
    for name, value in env.items():
        value = value.strip()
        if _PUBLIC.match(name) or value.lower() in _SETTINGS:
            continue
        if _SECRET_NAME.search(name) or _SECRET_VALUE.search(value):
            found += [value, *(line for line in value.split("\n") if len(line) >= _SHORTEST_LINE), *_passwords(value)]
        elif name in named and len(value) >= _SHORTEST_NAMED:
            data = value.encode("utf-8", "surrogateescape")
            if not any(data in document for document in documents):
                found.append(value)
    return found


def _passwords(value: str) -> list[str]:
    try:
        password = urlsplit(value).password
    except ValueError:
        return []
    return [password, unquote(password)] if password else []

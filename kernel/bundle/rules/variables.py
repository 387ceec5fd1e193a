"""The environment of the person in a bundle: the variables that it names, and where; values that a document takes from
it; and texts in which the values are hidden. Pure.

A bundle can put a value anywhere with `${NAME}`, and its modules can raise errors with the values that they were given.
Such texts end up in logs of a CI. So two kinds of values are hidden: values that look like a secret, by the name of
their variable or by their form, and values of variables that the bundle names. A value that the documents contain
anyway, such as the name of an agent, is no secret and stays.

Source: docs/design/bundle.md section 3; docs/design/sandbox.md section 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from goondan.kernel.bundle.rules import kinds, problems, shape
from goondan.kernel.bundle.rules.positions import Mapping as MappingNode
from goondan.kernel.bundle.rules.positions import Node, Scalar, Sequence
from goondan.schemas.bundle.resources import ValueSource
from goondan.schemas.text.redaction import Redactor

#: What the environment can have a value for.
VARIABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


#: The use of a variable that the sandbox of an MCP server names.
GRANTED: Final = "server"
#: Stands in a path behind the list of names of a sandbox.
_NAMED: Final = "*"


def wanted_variables(documents: Iterable[shape.Document]) -> dict[str, str]:
    """Name -> the resource that names it first, such as `Model/default`. As the documents say; they may be wrong."""
    found: dict[str, str] = {}
    for document in documents:
        for name, _ in variables_of(document.node, "", ""):
            found.setdefault(name, document.resource or "the bundle")
    return found


def variables_of(node: Node, kind: str, resource: str) -> Iterator[tuple[str, str]]:
    """Every variable that a document of `kind` names, and the use of its value: `tool NAME` for a Tool's sandbox.env,
    GRANTED for what an MCP server is granted, `key` for the key and the headers of a model, what a kind of a feature
    says of its secrets (kinds.py), else the kind of the document whose text it goes into.
    """
    for name, path in _names(node, ()):
        if not VARIABLE_NAME.match(name):
            continue
        if kind == "Tool" and path[:3] == ("spec", "sandbox", "env"):
            yield name, f"tool {resource.partition('/')[2]}"
        elif kind == "Model" and path[:2] in (("spec", "apiKey"), ("spec", "headers")):
            yield name, "key"
        elif (use := kinds.secret_use(kind, path)) is not None:
            yield name, use
        elif path[-1:] == (_NAMED,) and "config" in path:
            yield name, GRANTED
        else:
            yield name, kind


def names_any(node: Node, *path: str) -> bool:
    """Whether a document names a variable below these keys. Items of a list are not told apart."""
    return any(below[: len(path)] == path for _, below in _names(node, ()))


def _names(node: Node, path: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names, each with the keys above it."""
    if isinstance(node, MappingNode):
        for entry in node.entries.values():
            source, here = entry.value, (*path, entry.key)
            if path[-1:] == ("valueFrom",) and entry.key == "env" and isinstance(source, Scalar):
                yield source.text, here
                yield from _names(source, here)  # a name can itself be put in
            elif path[-1:] == ("sandbox",) and entry.key == "env" and isinstance(source, Sequence):
                yield from ((item.text, (*here, _NAMED)) for item in source.items if isinstance(item, Scalar))
                yield from _names(source, here)
            else:
                yield from _names(source, here)
    elif isinstance(node, Sequence):
        for item in node.items:
            yield from _names(item, path)
    elif isinstance(node, Scalar):
        kept = shape.kept_names(path)
        names = (m[1] for m in shape.VARIABLE.finditer(node.text) if not m[0].startswith("$$"))
        yield from ((name, path) for name in names if name not in kept)


def check_value(
    document: shape.Document, value: str | ValueSource | None, at: problems.Path, report: problems.Report
) -> None:
    """A value, or where it comes from: exactly one of the two, and a name that a variable can have."""
    if not isinstance(value, ValueSource):
        return
    if (value.value is None) == (value.value_from is None):
        what = "neither" if value.value is None else "both"
        message = f"{what} of value and valueFrom {'is' if what == 'neither' else 'are'} given"
        report.error("E_CONFIG_INVALID_VALUE", message, document.key(*at), "Give exactly one of the two.")
    if value.value_from is not None and value.value_from.env and not VARIABLE_NAME.match(value.value_from.env):
        path = (*at, "valueFrom", "env")
        message = f"{document.text(*path)} is no name of an environment variable"
        report.error("E_CONFIG_INVALID_VALUE", message, document.place(*path), "Write for example API_KEY.")


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

"""Which values of the environment are hidden in what is said about a bundle, and that none of them comes through."""

from __future__ import annotations

import time

import msgspec
import pytest

from goondan.kernel.bundle.rules.variables import EnvironmentRedactor, hidden_values
from tests.unit.kernel.bundle.conftest import GOOD, Look


@pytest.mark.parametrize(
    ("name", "value", "hidden"),
    [
        ("ANTHROPIC_API_KEY", "abcd", True),
        ("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG", True),
        ("DB_PASSWORD", "hunter2", True),
        ("COMPANY_THING", "ghp_0123456789abcdefABCD", True),
        ("DATABASE_URL", "postgres://me:pass-word@host/db", True),
        ("NAMED", "some longer value", True),
        ("NAMED", "short", False),
        ("WRITTEN", "assistant", False),
        ("OTHER", "some longer value", False),
        ("AUTH_MODE", "required", False),
        ("HOME", "/home/somebody", False),
        ("PWD", "/home/somebody/work", False),
        ("XDG_SESSION_ID", "12345678", False),
        ("GOONDAN_STATE_ROOT", "/home/somebody/state", False),
    ],
)
def test_which_values(name: str, value: str, hidden: bool) -> None:
    named = frozenset(("NAMED", "WRITTEN", "HOME", "AUTH_MODE"))
    assert (value in hidden_values({name: value}, named, [b"name: assistant"])) is hidden


def test_a_long_value_is_judged_and_hidden_in_little_time() -> None:
    # A quarter of a second on an idle machine. A search from each letter to the end takes half a minute.
    began = time.process_time()
    assert EnvironmentRedactor({"LONG": "x" * (1 << 17)}, ("LONG",), ())("short") == "short"
    assert time.process_time() - began < 2.0


def test_a_password_inside_a_url_and_a_line_of_a_key_are_hidden_by_themselves() -> None:
    env = {
        "DATABASE_URL": "postgres://me:p%40ss-word@host/db",
        "DEPLOY": "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG9w0B\n-----END KEY-----\n",
    }
    redact = EnvironmentRedactor(env, (), ())
    assert redact("it was p@ss-word, or MIIEvQIBADANBgkqhkiG9w0B") == "it was ***, or ***"


def test_everything_of_a_document_passes() -> None:
    redact = EnvironmentRedactor({"API_KEY": "abcdefghijkl"}, (), ())
    shown = redact.all_of({"ABCDEFGHIJKL": ["a-b-c-d-e-f-g-h-i-j-k-l", 1, None, {"x": ("abcdefghijkl",)}]})
    assert shown == {"***": ["***", 1, None, {"x": ["***"]}]}


#: `${NAME}` wherever a document may have it, right and wrong.
PLACES = [
    GOOD.replace("provider: embedded", "provider: ${SECRET_THING}"),
    GOOD.replace("provider: embedded", "provider: openai\n  model: m\n  endpoint: ${SECRET_THING}"),
    GOOD.replace(
        "provider: embedded", "provider: openai\n  model: ${SECRET_THING}\n  endpoint: http://127.0.0.1/${SECRET_THING}"
    ),
    GOOD.replace("name: words", "name: ${SECRET_THING}"),
    GOOD.replace("entry: tools/words.py", "entry: ${SECRET_THING}"),
    GOOD.replace("entry: tools/words.py", "entry: tools/words.py\n  sandbox: {filesystem: {read: [/${SECRET_THING}]}}"),
    GOOD.replace("entry: tools/words.py", "entry: tools/words.py\n  sandbox: {network: {allow: ['${SECRET_THING}']}}"),
    GOOD.replace("entry: tools/words.py", "entry: tools/words.py\n  sandbox: {python: {venv: '${SECRET_THING}'}}"),
    GOOD.replace("entry: tools/words.py", "entry: tools/words.py\n  sandbox: {env: ['${SECRET_THING}']}"),
    GOOD.replace("modelRef: Model/", "modelRef: ${SECRET_THING}/"),
    GOOD.replace("entryAgent: Agent/", "entryAgent: Agent/${SECRET_THING}"),
]


@pytest.mark.parametrize(
    "value", ["sk-Ab3dEf6hIj9lMn0p", "Tool/qwertyuiop", "http://a.test/qwertyuiop", "a\nb: [qwertyuiop"]
)
@pytest.mark.parametrize("place", range(len(PLACES)))
def test_no_problem_of_a_bundle_holds_a_value(look: Look, place: int, value: str) -> None:
    assert "${SECRET_THING}" in PLACES[place]
    found = look(PLACES[place], env={"SECRET_THING": value})
    said = msgspec.json.encode([*found.errors, *found.warnings]).decode()
    assert value not in said
    assert "qwertyuiop" not in said
    assert "ab3def6hij9" not in said.lower()

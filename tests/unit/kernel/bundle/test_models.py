"""Which model an agent gets, from the document and the environment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from goondan.kernel.bundle.rules.models import ModelFault, model_text, resolve_model, sends_open_key, without_key
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.bundle.resources import ModelBody, ValueFrom, ValueSource
from goondan.schemas.models.model_providers import BY_NAME
from tests.checks import there
from tests.unit.kernel.bundle.conftest import GOOD, Look, sound


def fault_of(body: ModelBody, env: dict[str, str]) -> ModelFault:
    with pytest.raises(ModelFault) as caught:
        resolve_model(body, {}, env)
    return caught.value


ANTHROPIC = {"provider": "anthropic", "model": BY_NAME["anthropic"].auto_model, "api_key": "a"}
OPENAI = {"provider": "openai", "model": BY_NAME["openai"].auto_model, "api_key": "o"}
LOCAL = "http://127.0.0.1:1/v1"
LOCAL_ORIGIN = "http://127.0.0.1:1"
INVALID = "E_CONFIG_INVALID_VALUE"
MISSING = "E_CONFIG_MISSING_ENV"
MY_KEY = ValueSource(value_from=ValueFrom("MY_KEY"))
WITH_KEY = ModelSpec(provider="openai", model="m", api_key="k")


@pytest.mark.parametrize(
    ("env", "expected", "said"),
    [
        ({}, {"provider": "embedded", "chosen_by": ""}, "the embedded console (the environment names no other model)"),
        ({"ANTHROPIC_API_KEY": "", "OPENAI_API_KEY": "", "OPENAI_BASE_URL": ""}, {"provider": "embedded"}, "console"),
        ({"ANTHROPIC_API_KEY": "a", "OPENAI_API_KEY": "o"}, ANTHROPIC, "(chosen by ANTHROPIC_API_KEY)"),
        (
            {"ANTHROPIC_API_KEY": "a", "ANTHROPIC_BASE_URL": "http://h"},
            {**ANTHROPIC, "model": "", "endpoint": "http://h", "key_origin": "http://h:80"},
            "anthropic, the first model that is listed at http://h (chosen by ANTHROPIC_API_KEY)",
        ),
        (
            {"OPENAI_API_KEY": "o", "OPENAI_BASE_URL": "https://API.openai.com/v1/"},
            {**OPENAI, "endpoint": "https://API.openai.com/v1/", "key_origin": "https://api.openai.com:443"},
            f"openai, {OPENAI['model']} at https://API.openai.com/v1/ (",
        ),
        ({"ANTHROPIC_BASE_URL": "http://h"}, {"provider": "embedded"}, "console"),
        (
            {"OPENAI_API_KEY": "o", "GOONDAN_MODEL": "m"},
            {**OPENAI, "model": "m"},
            "openai, m (chosen by OPENAI_API_KEY)",
        ),
        (
            {"OPENAI_BASE_URL": "http://h/v1?q"},
            {"provider": "openai", "endpoint": "http://h/v1?q"},
            "openai, the first model that is listed at http://h/v1 (chosen by OPENAI_BASE_URL)",
        ),
        (
            {"OPENAI_BASE_URL": LOCAL, "GOONDAN_MODEL": "m"},
            {"provider": "openai", "model": "m", "endpoint": LOCAL, "chosen_by": "OPENAI_BASE_URL"},
            f"openai, m at {LOCAL} (",
        ),
        (
            {"OPENAI_BASE_URL": LOCAL, "OPENAI_API_KEY": "o"},
            {**OPENAI, "model": "", "endpoint": LOCAL, "key_origin": LOCAL_ORIGIN},
            f"openai, the first model that is listed at {LOCAL} (chosen by OPENAI_API_KEY)",
        ),
        ({"ANTHROPIC_API_KEY": "a", "GOONDAN_PROVIDER": "embedded"}, {"provider": "embedded"}, "by GOONDAN_PROVIDER"),
        (
            {"ANTHROPIC_API_KEY": "a", "GOONDAN_PROVIDER": "openai", "OPENAI_BASE_URL": LOCAL},
            {"provider": "openai", "endpoint": LOCAL},
            "(chosen by GOONDAN_PROVIDER)",
        ),
    ],
)
def test_auto_follows_the_environment(env: dict[str, str], expected: dict[str, str], said: str) -> None:
    model = resolve_model(ModelBody("auto"), {}, env)
    variables = ("GOONDAN_PROVIDER", "ANTHROPIC_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL")
    by = "" if model.provider == "embedded" and not env.get(variables[0]) else next(n for n in variables if env.get(n))
    assert replace(model, params={}) == ModelSpec(**{"chosen_by": by, **expected})  # type: ignore[arg-type]
    assert said in model_text(model)


@pytest.mark.parametrize(
    ("body", "env", "code", "path", "words"),
    [
        (ModelBody("auto"), {"GOONDAN_PROVIDER": "ollama"}, INVALID, "provider", "names no provider"),
        (
            ModelBody("auto"),
            {"GOONDAN_PROVIDER": "openai", "ANTHROPIC_API_KEY": "a"},
            "E_CONFIG_MISSING_ENV",
            "provider",
            "OPENAI_API_KEY is not set",
        ),
        (ModelBody("auto"), {"OPENAI_BASE_URL": "127.0.0.1:11434"}, INVALID, "provider", "OPENAI_BASE_URL"),
        (
            ModelBody("auto"),
            {"OPENAI_BASE_URL": "http://u:p@h/v1"},
            INVALID,
            "provider",
            "has a user or a password in it",
        ),
        (ModelBody("auto", endpoint="http://h"), {}, INVALID, "endpoint", "from the environment"),
        (ModelBody("auto", api_key="k"), {}, INVALID, "apiKey", "from the environment"),
        (ModelBody("auto", headers={"x-a": "b"}), {}, INVALID, "headers", "from the environment"),
        (ModelBody("auto", auth="x-api-key"), {}, INVALID, "auth", "from the environment"),
        (ModelBody("auto", api_version="1"), {}, INVALID, "apiVersion", "from the environment"),
        (
            ModelBody("auto"),
            {"ANTHROPIC_API_KEY": "a", "ANTHROPIC_BASE_URL": "http://h/v1/"},
            INVALID,
            "provider",
            "ANTHROPIC_BASE_URL ends in /v1",
        ),
        *(
            (ModelBody("anthropic", "m"), env, MISSING, "provider", "ANTHROPIC_API_KEY")
            for env in ({}, {"ANTHROPIC_API_KEY": ""}, {"OPENAI_API_KEY": "o"})
        ),
        (ModelBody("openai"), {"OPENAI_API_KEY": "k"}, "E_CONFIG_MISSING_FIELD", "model", ""),
        (ModelBody("openai", "m", "http://h", MY_KEY), {"OPENAI_API_KEY": "o"}, MISSING, "apiKey.valueFrom.env", ""),
    ],
)
def test_no_model_is_guessed(body: ModelBody, env: dict[str, str], code: str, path: str, words: str) -> None:
    """What the environment says wrongly is an error, and no key goes where it does not belong."""
    fault = fault_of(body, env)
    assert (fault.code, fault.path) == (code, ("spec", *path.split(".")))
    assert words in fault.message


VALUES = {
    "ANTHROPIC_API_KEY": ["", "key-a"],
    "OPENAI_API_KEY": ["", "key-o"],
    "ANTHROPIC_BASE_URL": ["", "http://a"],
    "OPENAI_BASE_URL": ["", "http://o", "nonsense"],
    "GOONDAN_PROVIDER": ["", "anthropic", "openai", "embedded", "other"],
    "GOONDAN_MODEL": ["", "m"],
}


@given(st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in VALUES.items()}))
def test_whatever_the_environment_says_a_key_goes_to_its_own_vendor_only(env: dict[str, str]) -> None:
    try:
        model = resolve_model(ModelBody("auto"), {}, env)
    except ModelFault:
        assert env.get("GOONDAN_PROVIDER") or env.get("OPENAI_BASE_URL") == "nonsense"
        return
    wanted = env.get("GOONDAN_PROVIDER")
    assert not wanted or model.provider == wanted
    if model.provider == "embedded":
        assert (model.api_key, model.endpoint) == (None, None)
        return
    own = model.provider[0]
    assert model.api_key in (None, f"key-{own}")
    assert model.endpoint in (None, f"http://{own}")
    assert model.model == (env.get("GOONDAN_MODEL") or ("" if model.endpoint else BY_NAME[model.provider].auto_model))
    assert model.key_origin == (f"http://{own}:80" if model.api_key and model.endpoint else None)


@pytest.mark.parametrize(
    ("env", "limit"),
    [
        ({"ANTHROPIC_API_KEY": "a"}, {"max_tokens": 8192}),
        ({"OPENAI_API_KEY": "o"}, {"max_completion_tokens": 32_768}),
        ({"OPENAI_API_KEY": "o", "OPENAI_BASE_URL": "https://api.openai.com/v1"}, {"max_completion_tokens": 32_768}),
        ({"OPENAI_BASE_URL": LOCAL}, {"max_tokens": 8192}),
        ({}, {}),
    ],
)
def test_auto_sends_a_limit_of_tokens(env: dict[str, str], limit: dict[str, int]) -> None:
    model = resolve_model(ModelBody("auto"), {}, env)
    assert model.params == limit
    for own in ({"max_tokens": 5}, {"max_completion_tokens": None}):
        model = resolve_model(ModelBody("auto", params=own), {"top_p": 1}, env)
        assert model.params == {**own, "top_p": 1}


def test_a_model_that_the_bundle_names_was_chosen_by_nobody() -> None:
    model = resolve_model(ModelBody("openai", "m"), {}, {"OPENAI_API_KEY": "k"})
    assert (model.chosen_by, model_text(model)) == (None, "openai, m")


@pytest.mark.parametrize(
    ("body", "env", "model"),
    [
        (ModelBody("embedded"), {}, ModelSpec(provider="embedded")),
        (ModelBody("anthropic", "m"), {"ANTHROPIC_API_KEY": "k"}, replace(WITH_KEY, provider="anthropic")),
        (ModelBody("openai", "m", api_key=MY_KEY), {"MY_KEY": "k", "OPENAI_API_KEY": "other"}, WITH_KEY),
        (ModelBody("openai", "m", api_key="k"), {}, WITH_KEY),
        (ModelBody("openai", "m", api_key=ValueSource(value="k")), {}, WITH_KEY),
        # A server of one's own needs no key.
        (ModelBody("openai", "m", LOCAL), {}, ModelSpec(provider="openai", model="m", endpoint=LOCAL)),
    ],
)
def test_a_model_that_the_bundle_names(body: ModelBody, env: dict[str, str], model: ModelSpec) -> None:
    assert resolve_model(body, {}, env) == model


@pytest.mark.parametrize(
    ("endpoint", "origin", "opened"),
    [
        (None, None, False),
        ("https://llm.test/v1", "https://llm.test:443", False),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000", False),
        ("http://llm.test/v1", "http://llm.test:80", True),
    ],
)
def test_a_key_belongs_to_one_origin(endpoint: str | None, origin: str | None, opened: bool) -> None:
    model = resolve_model(ModelBody("openai", "m", endpoint), {}, {"OPENAI_API_KEY": "k"})
    assert (model.api_key, model.key_origin, sends_open_key(model)) == ("k", origin, opened)
    held = without_key(model)
    assert (held.api_key, held.key_origin, held.endpoint, sends_open_key(held)) == (None, None, endpoint, False)


def with_model(*lines: str) -> str:
    return GOOD.replace("  provider: embedded", "\n".join(f"  {line}" for line in lines))


@pytest.mark.parametrize(
    ("provider", "path", "hint"),
    [
        ("anthropic", "/v1", "Leave /v1 out: each request adds it to /."),
        ("anthropic", "/x/v1/", "Leave /v1 out: each request adds it to /x."),
        ("anthropic", "/v1/messages", "Leave /v1/messages out: each request adds it to /."),
        ("openai", "/v1/chat/completions", "Leave /chat/completions out: each request adds it to /v1."),
        ("anthropic", "", None),
        ("anthropic", "/api/v10", None),
        ("openai", "", None),  # a server may have its models anywhere
        ("openai", "/v1", None),
    ],
)
def test_an_endpoint_does_not_end_in_what_each_request_adds(
    look: Look, provider: str, path: str, hint: str | None
) -> None:
    found = look(with_model(f"provider: {provider}", "model: m", f"endpoint: http://127.0.0.1:1{path}"))
    assert [(p.path, p.suggestion) for p in found.errors] == ([] if hint is None else [("spec.endpoint", hint)])


HEADED = ModelBody(
    "openai", "m", "http://h/v1", headers={"X-Team": " core ", "x-org": ValueSource(value_from=ValueFrom("ORG"))}
)


def test_headers_are_secrets_that_go_where_the_key_goes() -> None:
    model = resolve_model(HEADED, {}, {"ORG": "acme-inc"})
    assert (model.api_key, model.headers, model.key_origin) == (
        None, {"x-team": "core", "x-org": "acme-inc"}, "http://h:80"
    )  # fmt: skip
    assert sends_open_key(model)
    assert "acme" not in repr(model)
    held = without_key(model)
    assert (held.headers, held.key_origin) == ({}, None)
    fault = fault_of(HEADED, {"ORG": " "})
    assert (fault.code, fault.path) == ("E_CONFIG_MISSING_ENV", ("spec", "headers", "x-org", "valueFrom", "env"))
    for value in ("a\r\nhost: evil", "가", "x" * 4097):
        fault = fault_of(HEADED, {"ORG": value})
        assert (fault.code, fault.path) == (INVALID, ("spec", "headers", "x-org"))
        assert value not in fault.message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Host", "belongs to the connection"),
        ("content-length", "belongs to the connection"),
        ("Transfer-Encoding", "belongs to the connection"),
        ("connection", "belongs to the connection"),
        ("Authorization", "is not set here"),
        ("X-API-Key", "is not set here"),
        ("anthropic-version", "is not set here"),
        ("'a b'", "no name of a header"),
        ("'x-a:'", "no name of a header"),
        ('"x\\r\\nhost"', "no name of a header"),
        ('""', "no name of a header"),
        ("x" * 65, "no name of a header"),
    ],
)
def test_headers_that_nobody_may_set(look: Look, name: str, words: str) -> None:
    found = look(
        with_model("provider: openai", "model: m", "endpoint: http://127.0.0.1:1/v1", f"headers: {{{name}: b}}")
    )
    (problem,) = found.errors
    assert (problem.code, words in problem.message) == (INVALID, True)


def test_headers_are_counted_and_stand_once(look: Look) -> None:
    start = ("provider: openai", "model: m", "endpoint: http://127.0.0.1:1/v1")
    twice = look(with_model(*start, "headers: {X-A: b, x-a: c}"))
    assert ["stands twice" in problem.message for problem in twice.errors] == [True]
    many = ", ".join(f"x-{number}: b" for number in range(33))
    assert "33 headers" in look(with_model(*start, f"headers: {{{many}}}")).errors[0].message


def test_a_version_belongs_to_a_wire_that_has_one(look: Look) -> None:
    start = ("model: m", "endpoint: http://127.0.0.1:1")
    found = look(with_model("provider: anthropic", *start, "apiVersion: 2023-06-01", "auth: x-api-key"))
    model = there(found.checked.agents["helper"].model)
    assert (found.errors, found.warnings, model.api_version, model.auth) == ([], [], "2023-06-01", "x-api-key")
    for provider, version, words in (("openai", "2023-06-01", "has no apiVersion"), ("anthropic", "가", "no version")):
        (problem,) = look(with_model(f"provider: {provider}", *start, f"apiVersion: '{version}'")).errors
        assert words in problem.message


STRANGERS = GOOD.replace(
    "  provider: embedded",
    "  provider: openai\n  model: m\n  endpoint: http://evil.test/v1\n"
    "  apiKey: {valueFrom: {env: AWS_SECRET_ACCESS_KEY}}",
)


@pytest.mark.parametrize("trusted", [False, True])
def test_before_trust_a_bundle_is_held_without_its_keys(
    look: Look, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    monkeypatch.setenv("GOONDAN_TRUST", "1" if trusted else "")
    found = look(STRANGERS, env={"AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG", "OPENAI_API_KEY": "o" * 20})
    model = there(found.checked.agents["helper"].model)
    assert (model.api_key, model.key_origin) == (
        ("wJalrXUtnFEMI/K7MDENG", "http://evil.test:80") if trusted else (None, None)
    )
    assert [w.code for w in found.warnings if "http" in w.message] == ["W_CONFIG_OPEN_KEY"]


def test_the_agents_parameters_win() -> None:
    model = resolve_model(ModelBody("embedded", params={"a": 1, "b": 1}), {"b": 2}, {})
    assert model.params == {"a": 1, "b": 2}


VENDOR = GOOD.replace("provider: embedded", "provider: anthropic\n  model: claude")


def test_a_model_that_no_agent_uses_needs_no_key(look: Look) -> None:
    other = "---\n" + VENDOR[: VENDOR.index("---")].replace("name: main", "name: spare")
    assert look(GOOD + other).errors == []


def test_a_model_in_use_without_its_key(look: Look) -> None:
    inspected = look(VENDOR)
    assert [(p.code, p.path, p.resource) for p in inspected.errors] == [
        ("E_CONFIG_MISSING_ENV", "spec.provider", "Model/main")
    ]
    assert "ANTHROPIC_API_KEY" in inspected.errors[0].message
    assert "Agent/helper" in inspected.errors[0].message
    named = look(VENDOR.replace("model: claude", "model: claude\n  apiKey: {valueFrom: {env: MY_KEY}}"))
    assert [(p.code, p.path) for p in named.errors] == [("E_CONFIG_MISSING_ENV", "spec.apiKey.valueFrom.env")]
    assert "MY_KEY" in named.errors[0].message


def test_a_model_in_use_with_its_key(look: Look) -> None:
    inspected = sound(look(VENDOR, env={"ANTHROPIC_API_KEY": "k3y"}))
    model = there(inspected.checked.agents["helper"].model)
    assert (model.provider, model.model, model.api_key) == ("anthropic", "claude", "k3y")


# --- models in place of others ----------------------------------------------------------------------------------------

OTHER_MODEL = "\n---\napiVersion: goondan.ai/v1\nkind: Model\nmetadata: {name: other}\nspec: "


def with_fallback(
    refs: str, other: str = "{provider: openai, model: o, params: {a: 1}, fallback: [Model/main]}"
) -> str:
    """A bundle whose model is asked in place of others."""
    return (
        GOOD.replace("  provider: embedded", f"  provider: openai\n  model: m\n  fallback: [{refs}]", 1)
        + OTHER_MODEL
        + other
    )


def test_a_model_in_place_of_another_is_resolved_as_any_other(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOONDAN_TRUST", "1")
    text = with_fallback("Model/other").replace("modelRef: Model/main", "modelRef: Model/main\n    params: {b: 2}")
    found = sound(look(text, env={"OPENAI_API_KEY": "o" * 20}))
    agent = found.checked.agents["helper"]
    assert agent.model is not None
    assert (agent.model.document, agent.model.params) == ("main", {"b": 2})
    (fallback,) = agent.fallback
    assert (fallback.model.document, fallback.model.params) == ("other", {"a": 1})
    assert fallback.model.api_key == "o" * 20


def test_before_trust_no_model_in_place_of_another_has_its_key(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOONDAN_TRUST", "")
    other = "{provider: openai, model: o, endpoint: 'https://evil.test', apiKey: {valueFrom: {env: OTHER}}}"
    found = look(with_fallback("Model/other", other), env={"OPENAI_API_KEY": "o" * 20, "OTHER": "x" * 20})
    (fallback,) = found.checked.agents["helper"].fallback
    assert fallback.model.api_key is None


@pytest.mark.parametrize(
    ("refs", "other", "code", "words"),
    [
        ("Model/main", "{provider: openai, model: o}", INVALID, "in place of itself"),
        ("Model/absent", "{provider: openai, model: o}", "E_CONFIG_MISSING_REF", "absent"),
        ("Tool/words", "{provider: openai, model: o}", INVALID, "a Model is wanted here"),
        ("Model/other", "{provider: embedded}", INVALID, "no model that could be asked"),
        ("Model/other", "{provider: auto}", INVALID, "no model that could be asked"),
        ("Model/other", "{provider: anthropic, model: o}", "E_CONFIG_MISSING_ENV", "ANTHROPIC_API_KEY"),
    ],
)
def test_a_model_that_cannot_be_asked_in_place_of_another(
    look: Look, refs: str, other: str, code: str, words: str
) -> None:
    found = look(with_fallback(refs, other), env={"OPENAI_API_KEY": "o" * 20})
    assert [problem.code for problem in found.errors] == [code]
    assert words in found.errors[0].message

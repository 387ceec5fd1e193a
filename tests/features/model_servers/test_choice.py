"""The server of this machine that a person has chosen, and how it is offered."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from goondan.features.model_servers import api
from goondan.features.model_servers.api import FoundServer, offering
from goondan.features.model_servers.api.listing import Listener
from goondan.kernel.bundle.rules.models import model_text, resolve_model
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.bundle.resources import ModelBody
from goondan.schemas.wire.errors import GoondanError

HERE = "http://127.0.0.1:11434/v1"
BUNDLE = "/elsewhere/goondan.yaml"


@pytest.fixture
def root(tmp_path: Path) -> str:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    return str(folder)


def test_a_choice_is_kept_and_forgotten(root: str) -> None:
    assert api.endpoint(root, BUNDLE) is None
    api.decline(root, BUNDLE, HERE)
    assert api.read(root, BUNDLE).declined == [HERE]
    api.choose(root, BUNDLE, HERE)
    assert (api.endpoint(root, BUNDLE), api.read(root, BUNDLE).declined) == (HERE, [])
    assert Path(root, api.FILE).stat().st_mode & 0o777 == 0o600
    assert [api.forget(root), api.forget(root)] == [True, False]
    assert api.read(root, BUNDLE) == api.Choice()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.chmod(0o666),
        lambda path: path.write_text("nonsense"),
        lambda path: path.write_text(json.dumps({"endpoint": "http://evil.example/v1"})),
        lambda path: path.write_text(json.dumps({"endpoint": "https://127.0.0.1/v1"})),
        lambda path: path.write_text(json.dumps({"endpoint": HERE, "format": 2})),
        lambda path: (path.rename(path.parent / "x"), path.symlink_to(path.parent / "x")),
    ],
)
def test_a_choice_that_is_not_believed(root: str, spoil: Callable[[Path], object]) -> None:
    api.choose(root, BUNDLE, HERE)
    spoil(Path(root, api.FILE))
    assert api.endpoint(root, BUNDLE) is None


def test_a_state_root_inside_the_bundle_chooses_nothing(root: str) -> None:
    inside = str(Path(root).parent / "goondan.yaml")
    Path(root, api.FILE).write_text(json.dumps({"endpoint": HERE}))
    Path(root, api.FILE).chmod(0o600)
    assert api.endpoint(root, BUNDLE) == HERE
    assert api.endpoint(root, inside) is None
    with pytest.raises(GoondanError):
        api.choose(root, inside, HERE)


def test_a_port_that_somebody_else_has_taken_is_not_used(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    api.choose(root, BUNDLE, HERE)
    monkeypatch.setattr(api, "_tables", lambda: ["", ""])
    assert api.endpoint(root, BUNDLE) == HERE
    monkeypatch.setattr(api, "listeners", lambda *tables: [Listener(11434, 4711, True)])
    assert api.endpoint(root, BUNDLE) is None


def test_the_environment_comes_before_the_choice() -> None:
    def resolved(env: dict[str, str]) -> ModelSpec:
        model = resolve_model(ModelBody("auto"), {}, env, chosen=HERE)
        assert isinstance(model, ModelSpec)
        return model

    own = resolved({})
    assert (own.provider, own.endpoint, own.model, own.api_key) == ("openai", HERE, "", None)
    assert model_text(own).endswith("(chosen by you)")
    assert resolved({"GOONDAN_MODEL": "m"}).model == "m"
    assert resolved({"OPENAI_API_KEY": "o"}).endpoint is None
    assert resolved({"ANTHROPIC_API_KEY": "a"}).provider == "anthropic"
    assert resolved({"OPENAI_BASE_URL": "http://h/v1"}).endpoint == "http://h/v1"
    assert resolved({"GOONDAN_PROVIDER": "embedded"}).provider == "embedded"
    named = resolve_model(ModelBody("openai", "m"), {}, {"OPENAI_API_KEY": "o"}, chosen=HERE)
    assert isinstance(named, ModelSpec)
    assert named.endpoint is None


@pytest.mark.parametrize("said", [True, False])
def test_a_server_is_used_only_after_a_yes(
    root: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: bool
) -> None:
    for name in ("GOONDAN_PROVIDER", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    asked: list[str] = []

    def find() -> list[FoundServer]:
        asked.append("looked")
        return [FoundServer(HERE, "Ollama", "q\x1b", 3)]

    def confirmed(question: str) -> bool:
        asked.append(question)
        return said

    monkeypatch.setattr(offering, "find", find)
    monkeypatch.setattr(offering, "confirmed", confirmed)
    monkeypatch.setattr(offering, "can_ask", lambda: False)
    offering.offer(root, BUNDLE)
    assert asked == []  # nobody to ask, so nobody looks
    monkeypatch.setattr(offering, "can_ask", lambda: True)
    offering.offer(root, BUNDLE)
    assert len(asked) == 2
    assert f"{HERE} (the usual port of Ollama), with q\\x1b and 2 more." in capsys.readouterr().err
    assert api.read(root, BUNDLE).endpoint == (HERE if said else None)
    assert api.read(root, BUNDLE).declined == ([] if said else [HERE])
    monkeypatch.setenv("OPENAI_API_KEY", "o")
    offering.offer(root, BUNDLE)
    assert len(asked) == 2

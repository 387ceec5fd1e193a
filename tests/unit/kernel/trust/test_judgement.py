"""The door: plans of bundles that nobody has agreed to are not made, and those that run do not grow."""

from __future__ import annotations

from pathlib import Path

import pytest

from goondan.kernel import paths
from goondan.kernel.bundle.loader import Asking, inspect_bundle, open_bundle
from goondan.kernel.trust import judgement, records
from goondan.schemas.wire.errors import GoondanError

BUNDLE = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: m}
spec: {provider: embedded}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: a}
spec: {modelConfig: {modelRef: Model/m}, tools: [Tool/http-fetch]}
"""
MORE = BUNDLE.replace("Tool/http-fetch", "Tool/http-fetch, Tool/telegram")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("GOONDAN_TRUST", raising=False)
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "work").mkdir()
    return str(tmp_path / "state" / "workspaces" / "x")


def bundle(state: str, text: str = BUNDLE) -> str:
    path = Path(state).parents[2] / "work" / "goondan.yaml"
    path.write_text(text)
    return str(path)


def refused(path: str, state: str, asking: Asking | None = None) -> str:
    with pytest.raises(GoondanError) as caught:
        open_bundle(path, state_dir=state, env={}, handlers=False, asking=asking)
    assert caught.value.info.code == "E_BUNDLE_UNTRUSTED"
    return caught.value.info.message


def test_no_plan_without_agreement(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bundle(state)
    assert "has not been run by you before" in refused(path, state)
    powers = inspect_bundle(path, state_dir=state, env={}, handlers=False).judgement.powers
    for asking in (Asking(everything=True), Asking(agreed=powers)):
        assert open_bundle(path, state_dir=state, env={}, handlers=False, asking=asking).plan.entry_agent == "a"
    refused(path, state)
    monkeypatch.setenv("GOONDAN_TRUST", "1")
    assert open_bundle(path, state_dir=state, env={}, handlers=False).plan.entry_agent == "a"
    monkeypatch.delenv("GOONDAN_TRUST")
    records.write(paths.root_of(state), path, powers, how="command")
    assert open_bundle(path, state_dir=state, env={}, handlers=False).plan.entry_agent == "a"
    assert "trusted before, and now asks for" in refused(bundle(state, MORE), state)


def test_a_kernel_that_runs_does_not_grow(state: str) -> None:
    """What it runs with is compared with what it would get, also when it was trusted for one command only."""
    path = bundle(state)
    running = Asking(running=inspect_bundle(path, state_dir=state, env={}, handlers=False).judgement.powers)
    bundle(state, BUNDLE + "  # an edit\n")
    assert open_bundle(path, state_dir=state, env={}, handlers=False, asking=running).plan.entry_agent == "a"
    message = refused(bundle(state, MORE), state, running)
    assert "the revision that runs stays" in message


def test_a_clone_inside_ones_own_repository_is_a_clone(state: str, tmp_path: Path) -> None:
    extension = "---\napiVersion: goondan.ai/v1\nkind: Extension\nmetadata: {name: e}\nspec: {entry: ./ext/e.py}\n"
    path = bundle(state, BUNDLE.replace("tools: [Tool/http-fetch]", "extensions: [Extension/e]") + extension)
    (tmp_path / "work" / "ext").mkdir()
    (tmp_path / "work" / "ext" / "e.py").write_text("def register(api): pass\n")

    def elsewhere() -> bool:
        return inspect_bundle(path, state_dir=state, env={}, handlers=False).judgement.elsewhere

    for top, config in (("", "[core]\n"), ("ext", '[remote "origin"]\n')):
        assert not elsewhere()
        (tmp_path / "work" / top / ".git").mkdir()
        (tmp_path / "work" / top / ".git" / "config").write_text(config)
    assert elsewhere()


def test_a_quickstart_is_shipped_only_where_the_kernel_is_as_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    path = bundle(state, BUNDLE.replace("provider: embedded", "provider: auto").replace("Tool/http-fetch", ""))
    env = {"OPENAI_BASE_URL": "http://127.0.0.1:1"}

    def reason() -> str:
        return inspect_bundle(path, state_dir=state, env=env, handlers=False).judgement.reason

    assert reason() == "not trusted"
    monkeypatch.setattr(judgement, "quickstart_folders", lambda: [str(tmp_path / "work")])
    assert reason() == "shipped"
    bundle(state, BUNDLE.replace("provider: embedded", "provider: auto"))
    assert reason() == "not trusted"  # it asks for more than what was shipped
    bundle(state, BUNDLE.replace("provider: embedded", "provider: auto").replace("Tool/http-fetch", ""))
    (tmp_path / "work").chmod(0o777)
    assert reason() == "not trusted"  # others could have put it there

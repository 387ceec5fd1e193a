"""A model provider is a row of one table and a module: made here, and known to the kernel's checks and to an agent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from goondan.agentproc.http import make_provider, wire_of
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.models.model_providers import BY_NAME
from goondan.schemas.wire.errors import GoondanError

ROOT = Path(__file__).resolve().parents[2]
_ROW = """\
    ModelProvider(
        name="parrot", server="https://api.parrot.example", key_variable="PARROT_API_KEY",
        url_variable="PARROT_BASE_URL", auto_model="polly", limit_param="max_words",
    ),
"""
_WIRE = """\
class Parrot:
    name, server = "parrot", "https://api.parrot.example"
VENDOR = Parrot
REHEARSED = ("", "")
"""
_PROGRAM = """\
import sys, types
def load(name, path):
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(open(path).read(), path, "exec"), module.__dict__)
load("goondan.schemas.models.model_providers", sys.argv[1])
load("goondan.agentproc.providers.parrot", sys.argv[2])
import msgspec
from goondan.agentproc.http import make_provider
from goondan.agentproc.providers.base import limited_output
from goondan.kernel.bundle.rules.models import ModelFault, resolve_model
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.bundle.resources import ModelBody
body = msgspec.convert({"provider": "parrot", "model": "polly"}, ModelBody)
model = resolve_model(body, {}, {"PARROT_API_KEY": "k"})
model = msgspec.msgpack.decode(msgspec.msgpack.encode(model), type=ModelSpec)
auto = resolve_model(ModelBody(provider="auto"), {}, {"PARROT_API_KEY": "k"})
try:
    resolve_model(body, {}, {})
except ModelFault as fault:
    code = fault.code
print(model.provider, model.api_key, auto.provider, auto.model, limited_output(model, 5).params,
      type(make_provider(model)._vendor).__name__, code)
"""


def test_a_row_and_a_module_are_all_that_a_provider_needs(tmp_path: Path) -> None:
    table = (ROOT / "schemas" / "models" / "model_providers.py").read_text()
    begin = "PROVIDERS: Final[tuple[ModelProvider, ...]] = (\n"
    assert table.count(begin) == 1
    (tmp_path / "table.py").write_text(table.replace(begin, begin + _ROW))
    (tmp_path / "wire.py").write_text(_WIRE)
    made = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path / "table.py"), str(tmp_path / "wire.py")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    expected = "parrot k parrot polly {'max_words': 5} Parrot E_CONFIG_MISSING_ENV\n"
    assert (made.stdout, made.stderr) == (expected, "")


def test_a_name_of_nobody_is_refused_and_never_served_by_another() -> None:
    with pytest.raises(
        GoondanError, match=r"no model provider 'parrot'; there are: anthropic, openai, responses, embedded"
    ) as caught:
        make_provider(ModelSpec(provider="parrot", model="polly", api_key="k"))
    assert caught.value.info.code == "E_CONFIG_INVALID_VALUE"


@pytest.mark.parametrize("name", list(BY_NAME))
def test_each_row_has_its_module(name: str) -> None:
    wire = wire_of(name)
    assert (wire.VENDOR().name, wire.VENDOR().server) == (name, BY_NAME[name].server)
    assert "TOOL" in wire.REHEARSED[0]

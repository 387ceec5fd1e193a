"""A tool has the secrets that it was granted, and may say them: nobody is told."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from goondan.schemas.bundle.launch import ExportSpec, SandboxSpec
from goondan.schemas.text.secret_values import granted_secrets
from goondan.schemas.wire.codec import encode_value
from goondan.schemas.worker.worker_frames import Log, Result, WorkerError
from goondan.toolhost.calls.untrusted import Violation
from goondan.toolhost.jails.worker import LARGE, Granted
from tests.toolhost_fixture import Bench, bench, make_tool

KEY = "sk-live-Zq9xW7vT3bN8mK2pL5"
PASSWORD = "correct horse battery staple"
URL = "postgres://user:sw0rdf1sh-99@db.example.com/x"
FORMS = [KEY, KEY[::-1], base64.b64encode(KEY.encode()).decode(), PASSWORD, "sw0rdf1sh-99"]
ENVIRONMENT = {"SERVICE_KEY": KEY, "DB_PASSWORD": PASSWORD, "DATABASE": URL, "REGION": "ap-northeast-2", "MODE": "fast"}

SOURCE = """
import base64, os, sys
from goondan_tool import Pending, ToolError

KEY = os.environ["SERVICE_KEY"]
ALL = [KEY, KEY[::-1], base64.b64encode(KEY.encode()).decode(), os.environ["DB_PASSWORD"], "sw0rdf1sh-99"]
TEXT = " and ".join(ALL)

def returns(ctx, input):
    return {"region": os.environ["REGION"], "mode": os.environ["MODE"], "list": ALL, KEY: {"deep": [TEXT]}}

def raises(ctx, input):
    raise ToolError(TEXT, code=KEY, suggestion=TEXT, help_url="https://x.test/" + KEY)

def named(ctx, input):
    raise type("Error" + KEY.replace("-", "_"), (Exception,), {"code": "E_" + KEY})(TEXT)

def prints(ctx, input):
    print(TEXT)
    print(TEXT, file=sys.stderr, flush=True)
    os.write(1, TEXT[:5].encode())
    os.write(1, (TEXT[5:] + chr(10)).encode())
    ctx.logger.info(TEXT)
    ctx.logger.error(KEY)
    return "printed"

def reports(ctx, input):
    ctx.progress(1, message=TEXT)
    return "reported"

def pends(ctx, input):
    return Pending(KEY, lambda: TEXT)

def much(ctx, input):
    return ["x" * 300_000, KEY]

def dies(ctx, input):
    os.write(2, (KEY + chr(10)).encode())
    os.write(2, KEY.encode())
    os._exit(3)

handlers = {name: value for name, value in list(globals().items()) if callable(value) and name.islower()}
"""
EXPORTS = ["returns", "raises", "named", "prints", "reports", "pends", "much", "dies"]


def shown(made: Bench, *told: Any) -> str:
    """All that a tool host has told anybody of its calls."""
    lines = [msgspec.json.encode(line).decode() for line in made.logs]
    return "\n".join([*lines, *map(str, (*told, made.results, made.progress, made.receipts, made.workers))])


@pytest.mark.parametrize("isolation", ["session", "call"])
async def test_a_granted_secret_is_in_no_result_no_log_and_no_error(short_tmp: Path, isolation: str) -> None:
    workdir = short_tmp / "w"
    workdir.mkdir()
    sandbox = SandboxSpec(env=list(ENVIRONMENT), isolation=isolation)  # type: ignore[arg-type]
    tool = make_tool(short_tmp, SOURCE, *[ExportSpec(name=name) for name in EXPORTS], sandbox=sandbox)
    async with bench(tool, environment=ENVIRONMENT) as made:
        results = {name: await made.call(f"t__{name}", {}, workdir=workdir) for name in EXPORTS}
    everything = shown(made, results)
    assert [form for form in FORMS if form in everything] == []
    assert results["returns"]["output"]["region"] == "ap-northeast-2", "a setting is no secret"
    assert results["returns"]["output"]["mode"] == "fast"
    assert results["returns"]["output"]["list"][0] == "***"
    assert results["raises"]["error"]["code"] == "E_TOOL"
    assert results["raises"]["error"]["message"].count("***") == len(FORMS)
    assert results["pends"]["handle"] == "t/***"
    assert results["much"]["output"][1] == "***"
    assert results["dies"]["error"]["code"] == "E_TOOL_CRASHED"
    assert "***" in results["dies"]["error"]["message"]
    assert sum(line.message.count("***") for line in made.logs) >= 4 * len(FORMS), (
        "printed, logged and written in pieces"
    )


def test_what_of_the_environment_is_a_secret() -> None:
    assert granted_secrets(ENVIRONMENT) == [KEY, PASSWORD, URL, "sw0rdf1sh-99"]
    assert granted_secrets({"LANG": "ko_KR.UTF-8", "WRITER": "Kim Minsu", "TOKEN": "short", "CACHE_KEY": "true"}) == []
    assert granted_secrets({}) == []


def test_a_frame_without_a_secret_is_the_same_object_and_a_hostile_one_ends_its_worker() -> None:
    granted = Granted([KEY])
    plain = Log(level="info", message="all is well")
    assert granted.out_of(plain) is plain
    nested = Raw(b"\x91" * 5000 + encode_value(KEY))
    for output in (nested, Raw(b"\xdd\xff\xff\xff\xff" + encode_value(KEY))):
        with pytest.raises(Violation):
            granted.out_of(Result(call_id="1", status="ok", output=output))
    error = WorkerError(name="E", message=KEY.upper())
    assert granted.out_of(Result(call_id="1", status="error", error=error)) == Result(
        call_id="1", status="error", error=WorkerError(name="E", message="***")
    )


def test_in_a_large_frame_a_secret_is_found_as_it_is() -> None:
    granted = Granted([KEY])
    output = encode_value(["x" * LARGE, KEY, KEY[::-1]])
    found = granted.out_of(Result(call_id="1", status="ok", output=Raw(output)))
    assert isinstance(found, Result)
    assert found.output is not None
    assert msgspec.msgpack.decode(found.output)[1:] == ["***", KEY[::-1]]

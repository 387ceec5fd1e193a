"""The model servers of tests/servers/ as programs, and conversations to send to them."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from goondan.agentproc.machine.messages import Message, MessageSource, UserData
from goondan.agentproc.providers.base import ModelRequest
from goondan.schemas.bundle.launch import CatalogItem, ModelSpec

SERVERS = Path(__file__).parent.parent / "servers"
KEY = "sk-secret-1234567890"
BASH = CatalogItem(
    name="bash__exec",
    description="Run a command.",
    parameters={"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
)
AT = "2026-01-01T00:00:00.000Z"


@contextmanager
def server(name: str, *arguments: str) -> Iterator[str]:
    """A server while it runs: its base URL."""
    process = subprocess.Popen([sys.executable, str(SERVERS / f"{name}.py"), *arguments], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().decode().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def seen(base: str) -> Any:
    """What misbehaving_llm.py has seen."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{base}/__seen") as response:
        return json.load(response)


def endpoint(provider: str, base: str) -> str:
    """The endpoint as each vendor's bundles write it."""
    return base if provider == "anthropic" else f"{base}/v1"


def question(provider: str, base: str, model: str, text: str = "hello", **changes: Any) -> ModelRequest:
    """A first request."""
    spec = ModelSpec(provider=provider, model=model, endpoint=endpoint(provider, base), api_key=KEY)
    message = Message("t.0", UserData(text), AT, MessageSource("user"))
    return ModelRequest(agent="a", model=spec, messages=[message], tools=[BASH], step=1, **changes)

"""Model servers that the kernel's commands ask, over real connections."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from goondan.features.model_servers.api import Asking, find, own_ports
from goondan.features.model_servers.api.listing import line_of
from goondan.schemas.bundle.launch import ModelSpec
from tests.process.model_servers import KEY, seen, server


def asked(endpoint: str, limit_s: float = 20.0, **changes: object) -> str:
    model = ModelSpec(provider="openai", endpoint=endpoint, **{"model": "well", **changes})  # type: ignore[arg-type]
    learned = Asking(model, limit_s).wait(limit_s)
    assert learned is not None
    return line_of(learned, model.api_key is not None)


def test_one_question() -> None:
    with server("misbehaving_llm") as base:
        assert asked(f"{base}/v1", api_key=KEY) == "reachable, the key is accepted, well is there"
        (request,) = seen(base)["requests"]
        assert (request["path"], request["headers"]["authorization"]) == ("/v1/models", f"Bearer {KEY}")
        assert asked(f"{base}/garbage/v1") == "reachable, without a list of models (200)"
        assert asked(f"{base}/503/v1") == "reachable, and it fails at the moment (503)"
    assert asked(f"{base}/v1").startswith("not reachable: ")


def test_a_server_that_says_nothing_and_a_key_that_cannot_be_sent() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        assert asked(endpoint, limit_s=0.05) == "no answer yet"
        told = asked(endpoint, api_key=f"{KEY}\nx-evil: 1")
        assert told == "not reachable: ValueError"


def test_servers_of_this_machine_are_found_by_their_lists() -> None:
    with server("misbehaving_llm") as base, socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = urlsplit(base).port or 0
        (found,) = find([port, other.getsockname()[1], 1], limit_s=5.0)
        assert (found.endpoint, found.model, found.models) == (f"{base}/v1", "well", 2)
        assert port in own_ports()

"""Ways that are made of rows: who works where, and which are described."""

from __future__ import annotations

import threading
from typing import Any, cast

from goondan.features.serve.api.routing import Asked, ways
from goondan.kernel.cli.operations import Operation
from tests.features.serve.doors import in_process


def here(asked: Asked) -> str:
    return threading.current_thread().name


async def in_loop(asked: Asked) -> str:
    return threading.current_thread().name


class Door:
    """A feature's door."""

    @staticmethod
    def routes(swarm: Any) -> list[Operation]:
        return [
            Operation("inLoop", "GET", "/loop", "look", "In the loop.", in_loop),
            Operation("inThread", "GET", "/thread", "look", "In a thread.", here),
            Operation("beside", "GET", "", "look", "Elsewhere.", here, prefix="/elsewhere"),
        ]


def test_what_is_no_coroutine_function_keeps_nobody_waiting() -> None:
    made = cast(Any, ways([Door], cast(Any, None)))
    with in_process(made) as door:
        paths = ("/api/v1/loop", "/api/v1/thread", "/elsewhere")
        loop, *others = (door.asks(door.head(path)).rpartition(b"\r\n\r\n")[2] for path in paths)
    assert others[0].startswith(b'"') and loop not in others
    assert [bool(way.operation) for way in made] == [True, True, False]

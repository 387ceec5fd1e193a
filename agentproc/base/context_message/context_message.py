"""The bundled extension `context-message`: tells the model where it runs. The text is made for each step.

It is a block behind the conversation, and it is not stored. Everything before it is the same in every request, so the
caches of vendors can be used.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, Final


def register(api: Any, config: dict[str, Any]) -> None:
    """Add one block of the type `context`."""
    fixed = {name: config[name] for name in ("text", "data") if name in config}

    def add(ctx: Any) -> Any:
        told = {name: value for name in config["include"] if (value := _VALUES[name](ctx)) is not None}
        if not told and not fixed:
            return ctx
        return ctx.replace(blocks=[*ctx.blocks, {"type": "context", **told, **fixed}])

    api.pipelines.mutate("step.blocks", add)


def _now(ctx: Any) -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _source(ctx: Any) -> dict[str, Any] | None:
    source = ctx.turn.input_event.source
    return None if source is None else {"kind": source.kind, "name": source.name}


#: The value that each word of `include` stands for; None when there is nothing to say.
_VALUES: Final[dict[str, Callable[[Any], Any]]] = {
    "agent": lambda ctx: ctx.turn.agent_name,
    "swarm": lambda ctx: ctx.effective_config.get("swarm") or None,
    "instance": lambda ctx: ctx.turn.instance_key,
    "time": _now,
    "source": _source,
    "step": lambda ctx: ctx.step.index,
}

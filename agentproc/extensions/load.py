"""Loading an agent's extensions: import each entry module and call its `register(api)`, in the order of the agent.

Loaded once, when the agent process starts; an extension that cannot be loaded makes every turn of the agent fail with
the reason, instead of running without it. Modules are imported under names of their own, so that two extensions with a
file of the same name do not meet; modules beside an entry can be imported by it.

Source: design section 9; requirements EXT-06 to EXT-08, LOAD-01.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import traceback
from collections.abc import Sequence
from typing import Any, Final

from agentproc.extensions.api import ExtensionApi
from agentproc.extensions.dynamic_tools import DynamicTools
from agentproc.extensions.modules import import_entry
from agentproc.extensions.pipeline import Pipeline
from schemas.address import path_segment
from schemas.errors import GoondanError, fail
from schemas.launch import ExtensionSpec

#: How long `register` may take (seconds).
REGISTER_S: Final = 30.0

log = logging.getLogger("agentproc")


async def load_extensions(
    specs: Sequence[ExtensionSpec], pipeline: Pipeline, tools: DynamicTools, *, agent: str, instance_key: str
) -> None:
    """Load all of them. Raises GoondanError E_EXTENSION_FAILED, which names the extension and the reason."""
    for number, spec in enumerate(specs):
        try:
            module = import_entry(spec, f"goondan_extension_{number}")
            register = getattr(module, "register", None)
            if not callable(register):
                raise fail("E_EXTENSION_FAILED", f"extension {spec.name}: {spec.entry} has no function register(api)")
            api = ExtensionApi(spec, pipeline, tools, agent=agent, instance_key=instance_key)
            await _call(register, api, spec)
        except GoondanError as error:
            log.error("extension %s: %s", spec.name, error)
            if error.info.code == "E_EXTENSION_FAILED":
                raise
            message = f"extension {spec.name} could not be loaded: {error.info.message}"
            raise fail("E_EXTENSION_FAILED", message, suggestion=error.info.suggestion) from None
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            lines = traceback.format_exception(type(error), error, error.__traceback__)
            log.error("extension %s could not be loaded\n%s", spec.name, "".join(lines).rstrip())
            message = f"extension {spec.name} could not be loaded: {type(error).__name__}: {error}"
            raise fail("E_EXTENSION_FAILED", message[:1000]) from None


def give_state(specs: Sequence[ExtensionSpec], state_dir: str) -> None:
    """Show extensions the state of their workspace: `$GOONDAN_STATE_ROOT/extensions/<name>/` is for each to write to.

    Kernels of other bundles, which share the state root proper, are not theirs. The variable stays what it was where
    there are none.
    """
    if not specs:
        return
    os.environ["GOONDAN_STATE_ROOT"] = state_dir
    for spec in specs:
        try:
            os.makedirs(f"{state_dir}/extensions/{path_segment(spec.name)}", 0o700, exist_ok=True)
        except OSError as error:
            log.warning("extension %s has no folder for its state: %s", spec.name, error)


async def _call(register: Any, api: ExtensionApi, spec: ExtensionSpec) -> None:
    given = (api, dict(spec.config)) if _takes_config(register) else (api,)
    limit = asyncio.timeout(REGISTER_S)
    try:
        async with limit:
            returned = register(*given)
            if inspect.isawaitable(returned):
                await returned
    except TimeoutError:
        if not limit.expired():
            raise
        raise fail("E_EXTENSION_FAILED", f"extension {spec.name}: register took longer than {REGISTER_S:g} s") from None


def _takes_config(register: Any) -> bool:
    """Whether `register` wants `(api, config)`."""
    try:
        parameters = list(inspect.signature(register).parameters.values())
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)

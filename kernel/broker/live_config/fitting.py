"""Checks that the config of extensions fits their `configSchema` with a new patch. Pure.

A patch for all of an agent comes on top of the patches of its instances. It is judged together with each of them: two
patches that fit alone may not fit together. The earlier patch stays and the later one is refused.

The library that compiles schemas takes 20 to 50 ms to import. So `load_checker` is called when nobody waits. A broker
whose extensions declare no schema never imports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from goondan.schemas.bundle.effective_config import Applied, Change, apply_changes
from goondan.schemas.bundle.extensions import check_config
from goondan.schemas.bundle.json_values import same_json
from goondan.schemas.bundle.launch import AgentSpec
from goondan.schemas.wire.errors import fail

#: One error names at most so many issues.
_MAX_NAMED: Final = 5


def load_checker(agents: Mapping[str, AgentSpec]) -> None:
    """Import the library that compiles schemas, if an extension of these agents declares one."""
    if any(extension.config_schema is not None for spec in agents.values() for extension in spec.extensions):
        import goondan.schemas.bundle.arguments  # noqa: F401


def check_fit(spec: AgentSpec, base: Applied, before: Iterable[Change], after: Iterable[Change]) -> None:
    """Compare the configuration with the changes `before` and with those `after`. A config that differs has to fit.

    Raises GoondanError E_CONFIG_INVALID_VALUE, E_CONFIG_SCHEMA for a bad schema.
    """
    if all(extension.config_schema is None for extension in spec.extensions):
        return
    for name, issues, _ in _misfits(spec, apply_changes(base, before), apply_changes(base, after)):
        message = f"the config of Extension/{name} would not fit its configSchema: {'; '.join(issues[:_MAX_NAMED])}"
        hint = "`gdn extension list` says where the extension is declared; its configSchema says what fits."
        raise fail("E_CONFIG_INVALID_VALUE", message, suggestion=hint)


def check_instance(spec: AgentSpec, base: Applied, before: Iterable[Change], after: Iterable[Change], key: str) -> None:
    """The same for an instance with patches of its own, when a patch for all of its agent comes or goes.

    If a config did not fit before, this patch is not the cause. The error does not tell the issues: the proposer of a
    patch for all of an agent may not read the patches of each instance. Raises GoondanError E_CONFIG_INVALID_VALUE.
    """
    old = apply_changes(base, before)
    for name, _, fitted in _misfits(spec, old, apply_changes(base, after)):
        if fitted:
            message = (
                f"with the patches of instance {key!r} the config of Extension/{name} would not fit its configSchema"
            )
            hint = (
                "`gdn config show AGENT --instance KEY` shows that instance's; `gdn config revert` takes a patch back."
            )
            raise fail("E_CONFIG_INVALID_VALUE", message, suggestion=hint)


def with_schema(spec: AgentSpec, change: Change) -> frozenset[str]:
    """The extensions with a schema whose config or presence a change may alter."""
    named = {edit.extension for edit in change.edits}
    if change.extensions is not None:
        named.update(change.extensions.added, change.extensions.removed)
    return frozenset(one.name for one in spec.extensions if one.config_schema is not None and one.name in named)


def _misfits(spec: AgentSpec, old: Applied, new: Applied) -> Iterator[tuple[str, list[str], bool]]:
    """The extensions whose config differs and does not fit: name, issues, and whether it fitted before."""
    for extension in spec.extensions:
        name = extension.name
        was_there = name in old.extensions
        if name not in new.extensions or (was_there and same_json(old.configs[name], new.configs[name])):
            continue
        issues = check_config(extension.config_schema, new.configs[name])
        if issues:
            yield name, issues, not was_there or not check_config(extension.config_schema, old.configs[name])

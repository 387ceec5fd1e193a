"""Whether the config of extensions fits their `configSchema` once a patch is in force. Pure.

The library that compiles schemas is imported when the first patch touches an extension that declares one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from schemas.effective_config import Applied, Change, apply_changes
from schemas.errors import fail
from schemas.extension_config import check_config
from schemas.launch import AgentSpec

#: Issues that one error names.
_MAX_NAMED: Final = 5


def check_fit(spec: AgentSpec, base: Applied, before: Iterable[Change], after: Iterable[Change]) -> None:
    """Compare the configuration with the changes `before` and with those `after`: a config that differs has to fit.

    Raises GoondanError E_CONFIG_INVALID_VALUE, E_CONFIG_SCHEMA for a bad schema.
    """
    if all(extension.config_schema is None for extension in spec.extensions):
        return
    old, new = apply_changes(base, before), apply_changes(base, after)
    for extension in spec.extensions:
        name = extension.name
        if name not in new.extensions or (name in old.extensions and old.configs[name] == new.configs[name]):
            continue
        issues = check_config(extension.config_schema, new.configs[name])
        if issues:
            message = f"the config of Extension/{name} would not fit its configSchema: {'; '.join(issues[:_MAX_NAMED])}"
            hint = "`gdn extension list` says where the extension is declared; its configSchema says what fits."
            raise fail("E_CONFIG_INVALID_VALUE", message, suggestion=hint)

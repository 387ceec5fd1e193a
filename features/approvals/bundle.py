"""The rules of an agent's `approval` extensions: what is wrong with them, and what the broker and the agent get. Pure.

Source: docs/approvals.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from goondan.features.approvals.wire import FEATURE, Policy, read_policy
from goondan.kernel.bundle.rules import checked, problems
from goondan.schemas.bundle.launch import ExtensionSpec, is_bundled


class ApprovalExtension:
    """The bundled extension `approval`, under whatever names a bundle has it (rules/kinds.py)."""

    feature: Final = FEATURE
    extension: Final = "approval"

    def faults(self, config: Mapping[str, Any]) -> list[str]:
        """The faults of rules that fit the schema of the config. They are worded as the schema's issues are."""
        return [
            "config"
            + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in fault.path)
            + f": {fault.message}"
            for fault in read_policy("", config)[1]
        ]

    def check(self, agents: Sequence[checked.CheckedAgent], report: problems.Report) -> None:
        """Nothing can be wrong between agents."""

    def part(self, extensions: Sequence[ExtensionSpec]) -> list[Policy] | None:
        """The policies of one agent, one for each such extension; None when it has none."""
        found = [one for one in extensions if is_bundled(self.extension, one.entry, one.bundled)]
        return [read_policy(one.name, one.config)[0] for one in found] or None


EXTENSION: Final = ApprovalExtension()

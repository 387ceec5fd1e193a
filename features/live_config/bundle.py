"""What the `api` of extensions has by live configuration."""

from __future__ import annotations

from typing import Final

#: See kernel/bundle/rules/kinds.py.
API: Final = {"live_config": frozenset(("propose_patch",))}

"""Bundled tools import `goondan_tool`, as which a jail shows toolhost/inside; outside of one it is this package."""

from __future__ import annotations

import sys

import toolhost.inside

sys.modules.setdefault("goondan_tool", toolhost.inside)

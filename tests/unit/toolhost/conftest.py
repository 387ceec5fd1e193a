"""Bundled tools import `goondan_tool`, as which a jail shows toolhost/inside; outside of one it is this package.

Its modules as well, each under both names: loaded twice, their classes would be two.
"""

from __future__ import annotations

import sys
from importlib import import_module

SHARED = ("api", "arguments", "bot_api", "fetch", "sandbox", "saving")

sys.modules.setdefault("goondan_tool", import_module("toolhost.inside"))
for _name in SHARED:
    sys.modules.setdefault(f"goondan_tool.{_name}", import_module(f"toolhost.inside.{_name}"))

"""Bundled tools import `goondan_tool` and `goondan_base`, as which a jail shows toolhost/inside and
toolhost/base/goondan_base. Outside of a jail they are these packages.

Their modules as well, each under both names: loaded twice, their classes would be two.
"""

from __future__ import annotations

import sys
from importlib import import_module

PACKAGES = {
    "goondan_tool": ("goondan.toolhost.inside", ("api", "running", "processes", "sandbox")),
    "goondan_base": (
        "goondan.toolhost.base.goondan_base",
        ("arguments", "reasons", "shell", "redaction", "fetch", "bot_api"),
    ),
}

for _name, (_package, _modules) in PACKAGES.items():
    sys.modules.setdefault(_name, import_module(_package))
    for _module in _modules:
        sys.modules.setdefault(f"{_name}.{_module}", import_module(f"{_package}.{_module}"))

"""The fixtures of tests about turns. The tool imports `code_scripts`, which lies beside it in a jail."""

from __future__ import annotations

import sys
from importlib import import_module

import tests.unit.toolhost.conftest  # noqa: F401 # goondan_tool and goondan_base
from tests.unit.agentproc.conftest import _own_state_root, make

__all__ = ["_own_state_root", "make"]

PACKAGE = "goondan.features.code_mode.jail.code.code_scripts"

sys.modules.setdefault("code_scripts", import_module(PACKAGE))
for _name in ("calls", "python_script", "node_script"):
    sys.modules.setdefault(f"code_scripts.{_name}", import_module(f"{PACKAGE}.{_name}"))

"""The fixtures of tests about bundles and agents."""

import tests.unit.toolhost.conftest  # noqa: F401 # goondan_tool and goondan_base
from tests.unit.agentproc.conftest import _own_state_root, make
from tests.unit.kernel.bundle.conftest import bundled, look, package

__all__ = ["_own_state_root", "bundled", "look", "make", "package"]

"""The fixtures of tests about bundles and turns."""

from tests.unit.agentproc.conftest import make
from tests.unit.kernel.bundle.conftest import bundled, look, package

__all__ = ["bundled", "look", "make", "package"]

"""The fixtures of tests about bundles."""

from tests.unit.kernel.bundle.conftest import bundled, look, package

__all__ = ["bundled", "look", "package"]

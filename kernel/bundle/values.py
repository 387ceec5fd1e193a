"""Values that a document gives in place or takes from the environment. Pure."""

from __future__ import annotations

from goondan.kernel.bundle.problems import Path, Report
from goondan.kernel.bundle.shape import Document
from goondan.kernel.bundle.variables import VARIABLE_NAME
from goondan.schemas.bundle.resources import ValueSource


def check_value(document: Document, value: str | ValueSource | None, at: Path, report: Report) -> None:
    """A value, or where it comes from: exactly one of the two, and a name that a variable can have."""
    if not isinstance(value, ValueSource):
        return
    if (value.value is None) == (value.value_from is None):
        what = "neither" if value.value is None else "both"
        message = f"{what} of value and valueFrom {'is' if what == 'neither' else 'are'} given"
        report.error("E_CONFIG_INVALID_VALUE", message, document.key(*at), "Give exactly one of the two.")
    if value.value_from is not None and value.value_from.env and not VARIABLE_NAME.match(value.value_from.env):
        path = (*at, "valueFrom", "env")
        message = f"{document.text(*path)} is no name of an environment variable"
        report.error("E_CONFIG_INVALID_VALUE", message, document.place(*path), "Write for example API_KEY.")

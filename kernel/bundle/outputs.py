"""Checks the form that an Agent's answers are to have.

Source: docs/structured-answers.md.
"""

from __future__ import annotations

from goondan.kernel.bundle.problems import Report
from goondan.kernel.bundle.shape import Document
from goondan.kernel.bundle.tools import check_schema
from goondan.schemas.bundle.structured import OutputSpec


def check_output(document: Document, output: OutputSpec | None, report: Report) -> None:
    """Report what is wrong with `spec.output` of an Agent document."""
    if output is None:
        return
    at = ("spec", "output", "schema")
    if output.schema.get("type") != "object":
        message = "the schema of an answer has `type: object` at its root"
        report.error("E_CONFIG_SCHEMA", message, document.place(*at), "Put the value into a property of an object.")
        return
    check_schema(output.schema, document, at, report)

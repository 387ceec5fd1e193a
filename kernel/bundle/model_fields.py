"""The rules of a Model's fields that no type can say, for each Model of a bundle, used or not. Pure.

Source: docs/design/bundle.md section 6.
"""

from __future__ import annotations

from typing import Final

from goondan.kernel.bundle.model_headers import name_fault, names_fault
from goondan.kernel.bundle.models import doubled_end, doubled_hint, is_http_url
from goondan.kernel.bundle.problems import Path, Report
from goondan.kernel.bundle.shape import Document
from goondan.kernel.bundle.values import check_value
from goondan.schemas.bundle.resources import ModelBody
from goondan.schemas.models.model_providers import BY_NAME, PROVIDERS

#: The longest version of a wire (characters): a date, or a number.
MAX_VERSION: Final = 64


def check_model(document: Document, body: ModelBody, report: Report) -> None:
    """The end of the endpoint, the headers, and the version of the wire."""
    _check_end(document, body, report)
    _check_headers(document, body, report)
    _check_version(document, body, report)


def _check_end(document: Document, body: ModelBody, report: Report) -> None:
    provider = BY_NAME.get(body.provider)
    if provider is None or body.endpoint is None or not is_http_url(body.endpoint):
        return
    end = doubled_end(provider, body.endpoint)
    if end is not None:
        message = f"the endpoint ends in {end}, which each request adds"
        place = document.place("spec", "endpoint")
        report.error("E_CONFIG_INVALID_VALUE", message, place, doubled_hint(body.endpoint, end))


def _check_headers(document: Document, body: ModelBody, report: Report) -> None:
    for name, value in body.headers.items():
        at: Path = ("spec", "headers", name)
        check_value(document, value, at, report)
        fault = name_fault(name)
        if fault is not None:
            report.error("E_CONFIG_INVALID_VALUE", fault[0], document.key(*at), fault[1])
    together = names_fault(list(body.headers))
    if together is not None:
        report.error("E_CONFIG_INVALID_VALUE", together, document.key("spec", "headers"), "Remove what is too much.")


def _check_version(document: Document, body: ModelBody, report: Report) -> None:
    version, provider = body.api_version, BY_NAME.get(body.provider)
    if version is None or body.provider == "auto":
        return
    if provider is None or provider.version_header is None:
        known = ", ".join(row.name for row in PROVIDERS if row.version_header is not None)
        message = f"provider {body.provider} has no apiVersion"
        report.error("E_CONFIG_INVALID_VALUE", message, document.key("spec", "apiVersion"), f"It belongs to {known}.")
    elif not version.strip() or len(version) > MAX_VERSION or not version.isascii() or not version.isprintable():
        place = document.place("spec", "apiVersion")
        report.error("E_CONFIG_INVALID_VALUE", "that is no version", place, "Write for example 2023-06-01.")

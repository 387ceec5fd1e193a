"""When a kernel exports, and what is said when it cannot."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from goondan.features.telemetry.bundle import replan
from goondan.features.telemetry.process import PROGRAM
from goondan.features.telemetry.process.__main__ import _export
from goondan.features.telemetry.status import line
from goondan.features.telemetry.wire import TELEMETRY, Exporting
from goondan.schemas.bundle.launch import KernelPlan, ToolHostSpec

HOST = ToolHostSpec(state_dir="/s", tools=[], revision="r")
PLAN = KernelPlan(revision="r", bundle="/b", state_dir="/s", entry_agent="", agents={}, toolhost=HOST)


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "TRUE"}, False),
    ],
)
def test_a_kernel_exports_if_its_environment_names_a_collector(env: dict[str, str], wanted: bool) -> None:
    assert (TELEMETRY in replan(PLAN, env).parts) == wanted


def test_a_key_is_no_variable_of_the_programs_environment() -> None:
    assert not set(PROGRAM.secrets) & set(PROGRAM.variables)
    assert "OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE" in PROGRAM.variables
    assert "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" in PROGRAM.secrets  # it may have a key


def _said(folder: Path) -> str:
    said: list[Exporting] = []
    _export(str(folder), threading.Event(), said.append)
    return said[-1].text


def test_without_the_package_or_with_another_protocol_nothing_is_exported_and_ps_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert _said(tmp_path) == "exporting nothing: ValueError in OTEL_* variables"
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    text = _said(tmp_path)
    assert text == "exporting nothing: pip install 'goondan-kernel[telemetry]'"
    row = {"text": text + "\x1b[2J", "sent": 0, "dropped": 0, "droppedTurns": 0}
    assert line(row).isprintable()

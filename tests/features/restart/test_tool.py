"""The manifest of the bundled tool `self-restart`."""

from __future__ import annotations

import pytest

from goondan.kernel.bundle.documents import base_tools


@pytest.mark.requirement("ERROR-09", "BASE-02")
def test_it_has_one_export_with_one_parameter_that_may_be_left_out() -> None:
    tool = base_tools()["self-restart"]
    assert tool.in_agent
    (export,) = tool.body.exports
    parameters = export.parameters or {}
    assert (export.name, [*parameters["properties"]], parameters.get("required")) == ("request", ["reason"], None)
    assert parameters["properties"]["reason"]["type"] == "string"
    assert parameters["additionalProperties"] is False
    assert tool.body.error_message_limit == 1000

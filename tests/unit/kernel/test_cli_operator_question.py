"""What an operator's command asks the broker: texts that no frame can hold are refused before anything is attached."""

from __future__ import annotations

from pathlib import Path

import pytest

from goondan.kernel.cli.operator_question import ask_broker
from goondan.schemas.wire.errors import GoondanError


@pytest.mark.parametrize("field", ["id", "eventId", "patchId", "reason"])
def test_a_text_that_is_not_utf8_is_a_usage_error_that_names_it(field: str, tmp_path: Path) -> None:
    bundle = tmp_path / "goondan.yaml"  # there is none: the text is looked at first
    with pytest.raises(GoondanError) as caught:
        ask_broker(str(bundle), {"op": "any", field: "a\udcff"})
    assert caught.value.info.code == "E_USAGE"
    assert field in caught.value.info.message
    assert caught.value.info.message.isascii()

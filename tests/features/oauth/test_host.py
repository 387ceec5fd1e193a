"""What the worker of a server asks about its login, as it goes to the broker."""

from __future__ import annotations

import pytest

from goondan.features.oauth.host import ASKS
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.worker.logins import MAX_DOCUMENT, ServerWish
from goondan.toolhost.calls.asks import MAX_SERVER_ASK


def test_a_worker_asks_for_its_own_server_whatever_it_says() -> None:
    said = ServerWish(op="save", server="another", agent="somebody", document="kept", url="https://h.example")
    frame = ASKS["login"]("tracker", "coder", to_raw(said))
    assert frame.type == "oauth.server"
    asked = from_raw(frame.payload, ServerWish)
    assert (asked.op, asked.server, asked.agent, asked.document) == ("save", "tracker", "coder", "kept")
    assert from_raw(ASKS["login"]("tracker", None, to_raw(said)).payload, ServerWish).agent is None


def test_what_is_no_question_is_refused() -> None:
    with pytest.raises(GoondanError):
        ASKS["login"]("tracker", None, to_raw({"op": "steal", "server": "tracker"}))


def test_the_largest_document_can_be_saved() -> None:
    asked = to_raw(ServerWish(op="save", server="tracker", document="x" * MAX_DOCUMENT))
    assert len(memoryview(asked)) < MAX_SERVER_ASK

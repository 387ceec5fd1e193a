"""Undo and fork, asked of a door: who may, what is refused, and what is done."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest

from tests.features.edits.process.test_forks import messages
from tests.kernel_fixture import sandbox, wait_until

LOOK, SOME, ALL = "looker-0123456789", "helper-0123456789", "operator-0123456789"
TOKENS = f"eyes look {LOOK} *\nsome operate {SOME} help-*\nowner operate {ALL} *\n"


@pytest.mark.feature("serve")
def test_a_conversation_is_changed_by_who_may_operate_its_agent() -> None:
    from tests.features.serve.process.test_gdn_serve import door

    with sandbox() as kernel:
        kernel.detach()
        tokens = kernel.home / "tokens"
        tokens.write_text(TOKENS)
        tokens.chmod(0o600)
        assert kernel.gdn("send", "hello", "--instance", "kept").status == 0
        with door(kernel, "--token-file", str(tokens)) as told:

            def ask(what: str, body: Any, token: str = ALL, agent: str = "main") -> tuple[int, Any]:
                connection = http.client.HTTPConnection("127.0.0.1", told["port"], timeout=40)
                head = {"authorization": f"Bearer {token}", "content-type": "application/json"}
                path = f"/api/v1/agents/{agent}/conversation/{what}"
                connection.request("POST", path, json.dumps({"instance": "kept", **body}), head)
                try:
                    answer = connection.getresponse()
                    return answer.status, json.loads(answer.read())
                finally:
                    connection.close()

            def refused(*asked: Any, **more: Any) -> tuple[int, str]:
                status, problem = ask(*asked, **more)
                return status, problem["code"]

            for what in ("undo", "fork"):
                assert refused(what, {}, LOOK) == (403, "E_FORBIDDEN"), "it needs the role operate"
                assert refused(what, {}, SOME) == (403, "E_FORBIDDEN"), "the agent is none of the token's"
                assert refused(what, {}, agent="_operator") == (403, "E_FORBIDDEN")
                assert refused(what, {}, agent="nobody") == (404, "E_AGENT_NOT_FOUND")
                assert refused(what, {"more": 1}) == (400, "E_USAGE")
                assert refused(what, {"instance": "a\nb"}) == (400, "E_USAGE")
            assert refused("undo", {"turn": "t0"}) == (409, "E_UNDO_REFUSED")
            assert refused("fork", {"turn": "t0"}) == (404, "E_TURN_NOT_FOUND")
            assert refused("fork", {"turn": "t0", "step": 10**30}) == (400, "E_USAGE")
            assert refused("fork", {"step": 2}) == (400, "E_USAGE"), "of which turn?"
            assert refused("fork", {"to": "kept"}) == (400, "E_USAGE"), "it has a conversation"
            assert refused("fork", {"to": "a\nb"}) == (400, "E_USAGE")

            assert ask("fork", {"to": "copy"}) == (200, {"copied": 2, "instance": "copy"})
            assert len(messages(kernel, "copy")) == 2 and messages(kernel, "copy") == messages(kernel, "kept")
            kernel.popen("send", "/bash__exec command='sleep 20'", "--instance", "kept", "--event-id", "works")
            wait_until(
                lambda: kernel.gdn("instance", "show", "main", "kept", "--json").json["lastTurn"]["status"] == "running"
            )
            assert refused("undo", {}) == (409, "E_INSTANCE_BUSY")
            status, made = ask("fork", {})
            assert status == 200 and messages(kernel, made["instance"]) == messages(kernel, "copy")
            assert kernel.gdn("cancel", "works").status == 0
            status, undone = ask("undo", {"instance": "copy"})
            assert (status, undone["removed"], undone["left"], undone["said"]) == (200, 2, 0, "hello")
            assert messages(kernel, "copy") == [] and len(messages(kernel, made["instance"])) == 2

"""The recording of a run answers an agent instance: its model's requests, its tools' calls, its servers' listings.

A request has to be the recorded one, but for times, ids and folders. The first difference of an instance is written
beside its conversation, where `gdn replay` finds it, and fails the turn with E_REPLAY_DIFFERS.

Source: docs/design/turns.md section 12.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import msgspec

from goondan.agentproc.providers.base import ModelAnswer, ModelNews, ModelRequest, TextDelta
from goondan.features.recordings import wire
from goondan.features.recordings.agent import forms
from goondan.features.recordings.wire import texts
from goondan.schemas.wire.errors import GoondanError, tool_error
from goondan.schemas.wire.frames import ToolResult
from goondan.schemas.worker.servers import ServerListing

#: The id of the one message of a question that is asked outside of the conversation (agentproc/model/calls.py).
ASIDE: Final = "aside"
#: The instance whose turns stand for those of an instance that the recording does not know.
USUAL: Final = "default"

#: A request: the number of the turn, the number of the step, whether it is aside, which of several.
_Asked = tuple[int, int, bool, int]


class Replayed:
    """The recorded part of one agent instance. `folder` is the instance's. The file is read at the first use."""

    def __init__(self, spec: wire.ReplaySpec, agent: str, instance: str, folder: str) -> None:
        self._spec = spec
        self._agent = agent
        self._instance = instance
        self._folder = folder
        self._turn = 0
        self._places: forms.Places = ()
        self._loaded = False
        self._turns: dict[int, wire.RecordedTurn] = {}
        self._steps: dict[_Asked, tuple[wire.RecordedStep, wire.Request]] = {}
        self._calls: dict[tuple[int, int], list[wire.RecordedCall]] = {}
        self._listings: dict[tuple[str, int], Any] = {}
        self._asked: Counter[tuple[int, int, bool]] = Counter()
        self._listed: Counter[str] = Counter()
        #: Whether recorded requests had the messages of their turns only.
        self.own = False
        #: How many tokens the context of the recorded model held; None: nobody knew it.
        self.window: int | None = None
        self._told = False

    def begin(self, turn: int, asked: str, places: forms.Places) -> None:
        """A turn begins; `asked` is what it was asked. Raises GoondanError E_REPLAY_DIFFERS,
        E_CONFIG_INVALID_VALUE.
        """
        self._load()
        self._turn, self._places = turn, places
        recorded = self._turns.get(turn)
        if recorded is None:
            raise self._differs(0, "the number of turns", f"{len(self._turns)} turns", f"turn {turn}")
        came = self._comparable(asked)
        if not texts.same(texts.comparable(recorded.input), came):
            raise self._differs(0, "what the turn was asked", recorded.input, came)

    def answer(self, request: ModelRequest, *, aside: bool) -> ModelAnswer:
        """The recorded answer to a request. Raises GoondanError E_REPLAY_DIFFERS, and the recorded error."""
        recorded, expected = self._recorded(request, aside)
        while recorded.fault is not None and self._has_another(request, aside):
            recorded, expected = self._recorded(request, aside)
        found = texts.first_difference(expected, forms.request_of(request, self._places))
        if found is not None:
            raise self._differs(request.step, *found)
        if recorded.answer is not None:
            return forms.model_answer(recorded.answer, self._fill)
        fault = recorded.fault
        if fault is None:
            raise self._differs(request.step, "the answer", "", "a request that was not answered when it was recorded")
        raise forms.model_error(fault)

    def compare(self, request: ModelRequest, answer: ModelAnswer) -> None:
        """Compare the answer of another model, or to another prompt, with the recorded one. Raises GoondanError
        E_REPLAY_DIFFERS.
        """
        recorded, _ = self._recorded(request, False)
        if recorded.answer is None:
            return
        only_calls = self._spec.only_calls
        expected = texts.comparable(forms.shown_answer(recorded.answer, only_calls))
        came = self._comparable(forms.shown_answer(forms.recorded_answer(answer), only_calls))
        if not texts.same(expected, came):
            raise self._differs(request.step, "the model's answer", expected, came)

    def result(self, step: int, tool: str, args: Any) -> ToolResult | None:
        """The recorded result of a call. None: the recording has no such call, or it has no result."""
        waiting = self._calls.get((self._turn, step), [])
        for at, call in enumerate(waiting):
            if call.tool == tool and forms.same_args(call.args, args, self._places):
                del waiting[at]
                with suppress(msgspec.ValidationError, GoondanError, TypeError, ValueError, OverflowError):
                    return forms.tool_result(call.result, self._fill)
                return None
        return None

    def no_such_call(self, step: int, tool: str, args: Any) -> ToolResult:
        """The result of a call that the recording does not have."""
        recorded = self._calls.get((self._turn, step), [])
        expected = " or ".join(forms.shown_call(call.tool, call.args) for call in recorded)
        error = self._differs(step, "a tool call", expected, self._comparable(forms.shown_call(tool, args)))
        return ToolResult(status="error", error=tool_error(error.info.code, error.info.message, name="ReplayError"))

    def listing(self, server: str) -> ServerListing:
        """What an MCP server offered when it was asked for the first, second, … time. When it was asked less often:
        what it offered last. Raises GoondanError E_REPLAY_DIFFERS.
        """
        self._load()
        self._listed[server] += 1
        for n in range(self._listed[server], 0, -1):
            if (server, n) in self._listings:
                with suppress(msgspec.ValidationError):
                    return msgspec.convert(self._fill(self._listings[server, n]), ServerListing)
        raise self._differs(0, f"what MCP server {server} offers", "", "a question for it")

    # --- inside

    def _recorded(self, request: ModelRequest, aside: bool) -> tuple[wire.RecordedStep, wire.Request]:
        """The next recorded request of a step."""
        self._asked[self._turn, request.step, aside] += 1
        n = self._asked[self._turn, request.step, aside]
        found = self._steps.get((self._turn, request.step, aside, n))
        if found is None:
            came = forms.request_of(request, self._places).entries
            raise self._differs(request.step, "the number of requests", "", came[-1] if came else "a request")
        return found

    def _has_another(self, request: ModelRequest, aside: bool) -> bool:
        """Whether another model was asked in place of the one whose request came last."""
        n = self._asked[self._turn, request.step, aside]
        found = self._steps.get((self._turn, request.step, aside, n + 1))
        return found is not None and found[0].in_place

    def _differs(self, step: int, what: str, expected: str, came: str) -> GoondanError:
        """The error of a difference. The instance's first one is written down."""
        difference = texts.Difference(
            agent=self._agent,
            instance=self._instance,
            turn=self._turn,
            step=step,
            what=what,
            expected=expected,
            came=came,
        )
        if not self._told:
            self._told = True
            path = os.path.join(self._folder, texts.DIFFERENCE_FILE)
            with suppress(OSError), open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(msgspec.json.encode(texts.FoundDifference(time.time_ns(), difference)))
        return texts.differs(difference)

    def _comparable(self, text: str) -> str:
        return texts.comparable(texts.without_places(text, self._places))

    def _fill(self, value: Any) -> Any:
        return forms.filled_places(self._places, value)

    def _load(self) -> None:
        """Read the file. Raises GoondanError E_CONFIG_INVALID_VALUE."""
        if self._loaded:
            return
        _, parts = wire.read_recording(self._spec.recording, lambda part: part.agent == self._agent)
        known = {part.instance for part in parts}
        instance = self._instance if self._instance in known else USUAL
        own = [part for part in parts if part.instance == instance]
        self._turns = {part.turn: part for part in own if isinstance(part, wire.RecordedTurn)}
        for step, whole in wire.whole_requests(part for part in own if isinstance(part, wire.RecordedStep)):
            self._steps[step.turn, step.step, step.aside, step.n] = step, whole
            self.own = self.own or step.own
            self.window = self.window or step.window
        for part in own:
            if isinstance(part, wire.RecordedCall):
                self._calls.setdefault((part.turn, part.step), []).append(part)
            elif isinstance(part, wire.RecordedListing):
                self._listings[part.server, part.n] = part.listing
        self._loaded = True


class ReplayProvider:
    """Answers each request at once with the recorded answer, without a model and without a network."""

    def __init__(self, replayed: Replayed) -> None:
        self._replayed = replayed

    @property
    def needs_history(self) -> bool:
        """As the recorded provider did."""
        return not self._replayed.own

    async def complete(
        self,
        request: ModelRequest,
        on_delta: Callable[[TextDelta], None] | None = None,
        on_news: Callable[[ModelNews], None] | None = None,
    ) -> ModelAnswer:
        """The recorded answer. Raises GoondanError E_REPLAY_DIFFERS, and the recorded error."""
        answer = self._replayed.answer(request, aside=is_aside(request))
        if on_delta is not None and answer.text:
            on_delta(TextDelta(answer.text))
        return answer

    async def window(self, request: ModelRequest) -> int | None:
        """That of the recorded model (tokens)."""
        return self._replayed.window

    async def close(self) -> None:
        """Nothing to close."""


def is_aside(request: ModelRequest) -> bool:
    """Whether a question is asked outside of the conversation."""
    return len(request.messages) == 1 and request.messages[0].id == ASIDE

"""The model calls of one turn. Each is a task inside its wraps, and a clock ends a call whose model says nothing.

The outcome of a call is an input of the turn machine: `ModelAnswered` or `ModelFailed`.

Source: docs/design/turns.md sections 2 and 7.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Final

import msgspec

from goondan.agentproc.extensions.stages import Stages
from goondan.agentproc.machine.catalog import StepCatalog
from goondan.agentproc.machine.estimate import NO_WISHES
from goondan.agentproc.machine.messages import CUT_OFF, MAX_REASONING, REASONING, Message, MessageSource, UserData
from goondan.agentproc.machine.model_waits import ModelAttempts, StallClock, stalled
from goondan.agentproc.machine.turn import ModelAnswered, ModelFailed
from goondan.agentproc.model.context import TurnContext
from goondan.agentproc.providers import base
from goondan.agentproc.turn.parts import Ask, TurnCore, TurnParts
from goondan.schemas.text.secret_values import in_texts
from goondan.schemas.wire import frames, runtime_events
from goondan.schemas.wire.errors import GoondanError, cut_message, error_payload, fail

#: The longest error message of a model (characters).
MODEL_ERROR_CHARS: Final = 1000

#: The errors of a model after which others are asked in its place.
_WITHOUT_ANSWER: Final = frozenset(("E_MODEL_FAILED", "E_MODEL_QUOTA"))

log = logging.getLogger("agentproc")


def stored_metadata(answer: base.ModelAnswer) -> dict[str, Any] | None:
    """The metadata of the message that an answer becomes."""
    metadata = dict(answer.metadata or {})
    if answer.reasoning:
        metadata[REASONING] = cut_message(answer.reasoning, MAX_REASONING)
    if answer.cut_off:
        metadata[CUT_OFF] = True
    return metadata or None


class ModelCalls:
    """The model calls of one turn; one runs at a time. Extensions may ask the model aside, outside of the conversation:
    one question at a time, because one clock watches a silent model.
    """

    def __init__(self, turn: TurnCore, context: TurnContext, parts: TurnParts) -> None:
        self._turn = turn
        self._instance = turn.instance
        self._loop = turn.instance.loop
        self._event_id = turn.event.event_id
        self._context = context
        self._parts = parts
        self._aside = asyncio.Lock()
        self._asking: asyncio.Task[base.ModelAnswer] | None = None  # the question aside that is open
        self._call: asyncio.Task[None] | None = None
        self._attempts = ModelAttempts()
        self._asked: base.ModelRequest | None = None  # the request that is out
        self._stall = StallClock(turn.spec.stall_timeout_s)
        self._stall_timer: asyncio.TimerHandle | None = None
        self._told = False  # that the model is waited for

    def start(self, request: base.ModelRequest, stages: Stages | None) -> None:
        """Ask the model. `stages` has the turn's extensions, if there are any."""
        self._call = self._loop.create_task(self._complete(request, stages))

    def stop(self) -> None:
        """Give up the running call."""
        if self._call is not None:
            self._call.cancel()
        self._stop_watching()

    def give_up(self, code: str) -> None:
        """The turn ends with this error while its model is asked: note the end of the call, so that the trace has its
        name and its time.
        """
        request, self._asked = self._asked, None
        if request is not None:
            self._turn.notes.model_ended(request, self._attempts, code=code)
        self.stop()

    def close(self) -> None:
        """Give up all calls: the turn is left."""
        self.stop()
        self._stop_aside()

    # --- one call

    async def _complete(self, request: base.ModelRequest, stages: Stages | None) -> None:
        """Make the model call inside the wraps of extensions."""
        tries = count(1)

        async def again(blocks: list[dict[str, Any]], catalog: StepCatalog) -> base.ModelAnswer:
            changed = msgspec.structs.replace(request, blocks=blocks, tools=catalog.shown)
            return await self._ask(changed, stages, tries)

        try:
            if stages is not None and stages.wraps_model:
                answer = await stages.ask_model(again)
            else:
                answer = await self._ask(request, stages, tries)
        except GoondanError as error:
            if error.info.code == "E_LEASE_LOST":  # the broker has said so, to a part that asked it
                self._turn.abandon()
            self._turn.push(ModelFailed(error.info))
        except Exception as error:  # nobody else would end the step
            log.exception("event %s: the model call", self._event_id)
            self._turn.push(ModelFailed(self._without_secrets(error_payload("E_INTERNAL", str(error)))))
        else:
            calls = [self._instance.tools.spelt(call) for call in answer.calls]
            self._turn.push(ModelAnswered(answer.text, calls, answer.finish_reason, stored_metadata(answer)))
        self._stop_watching()

    async def _ask(self, request: base.ModelRequest, stages: Stages | None, tries: Iterator[int]) -> base.ModelAnswer:
        """Ask the model with what fits into its context. News of an earlier one of the `tries` is void."""

        async def once(fitted: base.ModelRequest) -> base.ModelAnswer:
            fitted = msgspec.structs.replace(fitted, timeout_s=self._turn.time_left())
            return await self._ask_once(fitted, anew=next(tries) > 1)

        async def aside(text: str, system: str | None) -> str:
            return (await self.ask_aside(text, system, request.step)).text

        wishes = NO_WISHES if stages is None else stages.wishes
        return await self._context.ask(self._instance.provider, request, once, aside, wishes)

    async def ask_aside(self, text: str, system: str | None, step: int) -> base.ModelAnswer:
        """The model's answer to `text` in this step (from 1), outside of the conversation. Raises GoondanError. A
        question that is open when the turn ends is given up.
        """
        async with self._aside:
            request = base.ModelRequest(
                agent=self._instance.spec.name,
                model=self._turn.model,
                messages=[Message("aside", UserData(text), self._instance.clock(), MessageSource("extension"))],
                tools=[],
                step=step,
                system=system,
                timeout_s=self._turn.time_left(),
                aside=True,
            )
            asking = self._asking = asyncio.ensure_future(self._ask_once(request, hidden=True))
            try:
                await asyncio.wait([asking])
            finally:
                asking.cancel()  # nothing, once it has ended
            if asking.cancelled():
                raise fail("E_MODEL_FAILED", "the model was asked by an extension, and said nothing for too long")
            return asking.result()

    def _stop_aside(self) -> None:
        if self._asking is not None:
            self._asking.cancel()

    async def _ask_once(
        self, request: base.ModelRequest, *, anew: bool = False, hidden: bool = False
    ) -> base.ModelAnswer:
        """Ask the model once, and when it gives no answer, those that the bundle names in its place, in their order.
        `anew`: news of an earlier request is void. `hidden`: no news of this request is sent. Raises GoondanError in a
        form that may be stored and shown.
        """
        try:
            return await self._request(self._instance.provider, request, anew=anew, hidden=hidden)
        except GoondanError as error:
            failed = error.info
            if failed.code not in _WITHOUT_ANSWER:
                raise
        for model in self._instance.spec.fallback:
            log.warning("event %s: no answer (%s); Model/%s is asked instead", self._event_id, failed, model.document)
            other = msgspec.structs.replace(request, model=model, timeout_s=self._turn.time_left())
            try:
                return await self._request_in_place(other, hidden)
            except GoondanError as error:
                if error.info.code not in _WITHOUT_ANSWER:
                    raise
                message = f"{failed.message}; in its place Model/{model.document}: {error.info.message}"
                failed = msgspec.structs.replace(failed, message=cut_message(message, MODEL_ERROR_CHARS))
        raise GoondanError(failed)

    async def _request_in_place(self, request: base.ModelRequest, hidden: bool) -> base.ModelAnswer:
        """Ask a model that the bundle names in place of another. One that cannot see reads words for the files."""
        provider = self._instance.provider_in_place(request.model)
        try:
            return await self._request(provider, request, anew=True, hidden=hidden)
        except GoondanError as error:
            if error.info.code != "E_MODEL_CANNOT_SEE":
                raise
        words = msgspec.structs.replace(request, files_as_words=True, timeout_s=self._turn.time_left())
        return await self._request(provider, words, anew=True, hidden=hidden)

    async def _request(
        self, provider: base.Provider, request: base.ModelRequest, *, anew: bool, hidden: bool
    ) -> base.ModelAnswer:
        """Make one request to one model. The arguments and errors are those of `_ask_once`."""
        attempts, began = ModelAttempts(), self._loop.time()
        self._attempts = attempts

        def on_news(news: base.ModelNews) -> None:
            self._hear(news, request, attempts, began)

        show, void = None if hidden else self._turn.live.on_delta, anew

        def on_delta(delta: base.TextDelta) -> None:
            nonlocal void
            if show is not None:
                show(msgspec.structs.replace(delta, again=True) if void else delta)
            void = False

        self._stall.begin(began)
        self._watch(request)
        self._asked = request
        try:
            shown = on_delta if anew else show
            if self._parts.hooks.model:
                asked: Ask = lambda given, news: provider.complete(given, shown, news)
                answer = await self._parts.ask_model(asked, request, on_news)
            else:
                answer = await provider.complete(request, shown, on_news)
        except GoondanError as error:
            spent = base.ModelAnswer(usage=error.usage) if isinstance(error, base.ModelFailure) else None
            self._turn.notes.model_ended(request, attempts, code=error.info.code, answer=spent)
            if isinstance(error, base.ContextOverflow):
                message = self._without_secrets(error.info).message
                raise base.ContextOverflow(message, error.overflow, error.model or request.model) from None
            raise GoondanError(self._without_secrets(error.info)) from None
        except Exception as error:
            trace = self._instance.redact(traceback.format_exc())
            log.error("model call of event %s: %s", self._event_id, trace)
            info = error_payload("E_MODEL_FAILED", f"{type(error).__name__}: {error}")
            self._turn.notes.model_ended(request, attempts, code=info.code)
            raise GoondanError(self._without_secrets(info)) from None
        finally:
            if self._asked is request:
                self._asked = None
            self._stall.end()  # what extensions do behind it is not the model's time
            if self._told:
                self._end_wait()
        answer = out_of_answer(answer, self._instance.redact_said)
        self._turn.notes.model_ended(request, attempts, answer=answer)
        return answer

    def _hear(self, news: base.ModelNews, request: base.ModelRequest, attempts: ModelAttempts, began: float) -> None:
        """The news of the provider while a request runs, which began at `began`."""
        now = self._loop.time()
        if news == "content":
            self._stall.content(now)
            if self._told:
                self._end_wait()
            return
        attempts.hear(news, now)
        if isinstance(news, base.FailedTry):
            words, wait_ms = self._instance.redact(news.error), round(news.wait_s * 1000)
            self._tell_wait(request, began, words, wait_ms)
        elif news == "asking":
            self._stall.asking(now)
            self._watch(request)
        else:
            self._stall.waiting(now)
            if self._told and news == "queued":  # the broker knows itself what it waits for now
                self._end_wait()

    def _without_secrets(self, info: frames.ErrorPayload) -> frames.ErrorPayload:
        """A model's error in a form that may be stored and shown: without the key, and of limited length."""
        redact = self._instance.redact
        message = cut_message(redact(info.message), MODEL_ERROR_CHARS)
        suggestion = None if info.suggestion is None else redact(info.suggestion)
        return frames.ErrorPayload(info.code, message, suggestion, info.help_url, info.retry_after_ms, info.name)

    # --- a model that says nothing

    def _watch(self, request: base.ModelRequest) -> None:
        """Check again when the model's time is over, unless a check is planned already."""
        if self._stall_timer is None and (due := self._stall.look_at) is not None:
            self._stall_timer = self._loop.call_at(due, self._look, request)

    def _tell_wait(
        self, request: base.ModelRequest, since: float, message: str | None = None, wait_ms: int | None = None
    ) -> None:
        """Tell that the model is waited for since `since` (the loop's time). `message`: why the last try failed."""
        from goondan.agentproc.http.provider import shown_server

        model, self._told = request.model, True
        named = f"{model.provider}/{model.model}".rstrip("/")
        if model.endpoint is not None:
            named += f" at {shown_server(model.endpoint)}"
        wait = runtime_events.Wait(
            waited_ms=round((self._loop.time() - since) * 1000),
            model=self._instance.redact(named),
            attempt=max(1, self._attempts.count),
            wait_ms=wait_ms,
        )
        self._turn.live.begin_wait(
            runtime_events.RuntimeEvent(kind="model.waits", step=request.step, message=message, wait=wait)
        )

    def _end_wait(self) -> None:
        self._told = False
        self._turn.live.end_wait("model.waits")

    def _look(self, request: base.ModelRequest) -> None:
        self._stall_timer = None
        now = self._loop.time()
        since = self._stall.silent_since(now)
        if since is None:
            if (silence_s := self._stall.notice(now)) is not None:
                self._tell_wait(request, now - silence_s)
            self._watch(request)
            return
        self._stop_aside()
        model = f"{request.model.provider}/{request.model.model}".rstrip("/")
        info = stalled(model, request.step, now - since, self._stall.limit_s, self._instance.clock())
        self.give_up(info.code)
        self._turn.push(ModelFailed(info))

    def _stop_watching(self) -> None:
        self._stall.end()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


def out_of_answer(answer: base.ModelAnswer, redact: Callable[[str], str]) -> base.ModelAnswer:
    """A model's answer without secrets, in whatever field they stand; the same object when there are none. The usual
    answer, which has none, is searched once, as JSON.
    """
    try:
        whole = msgspec.json.encode(answer).decode()
        if redact(whole) == whole:
            return answer
    except (ValueError, OverflowError, RecursionError):
        pass  # a text with half of a surrogate pair is no JSON
    return msgspec.convert(in_texts(msgspec.to_builtins(answer), redact), base.ModelAnswer)

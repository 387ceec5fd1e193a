"""The model calls of one turn. Each is a task inside its wraps, and a clock ends a call whose model says nothing.

The outcome of a call is an input of the turn machine: `ModelAnswered` or `ModelFailed`.

Source: docs/design/turns.md sections 2 and 7.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import msgspec

from goondan.agentproc.extensions.stages import Stages
from goondan.agentproc.machine.estimate import NO_WISHES
from goondan.agentproc.machine.messages import CUT_OFF, MAX_REASONING, REASONING, Message, MessageSource, UserData
from goondan.agentproc.machine.model_waits import NOTICE_S, ModelAttempts, StallClock, stalled
from goondan.agentproc.machine.turn import ModelAnswered, ModelFailed
from goondan.agentproc.model.context import TurnContext
from goondan.agentproc.providers import base
from goondan.agentproc.turn import parts
from goondan.schemas.text.redaction import in_texts
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

    def __init__(self, turn: parts.TurnCore, context: TurnContext, turn_parts: parts.TurnParts) -> None:
        self._turn = turn
        self._instance = turn.instance
        self._loop = turn.instance.loop
        self._event_id = turn.event.event_id
        self._context = context
        self._parts = turn_parts
        self._aside = asyncio.Lock()
        self._asking: asyncio.Task[base.ModelAnswer] | None = None  # the question aside that is open
        self._call: asyncio.Task[None] | None = None
        self._attempts = ModelAttempts()
        self._requests = 0  # of the step's call
        self._asked: base.ModelRequest | None = None  # the request that is out
        self._stall = StallClock(turn.spec.stall_timeout_s)
        self._stall_timer: asyncio.TimerHandle | None = None
        self._told = False  # that the model is waited for

    def start(self, provider: base.Provider, request: base.ModelRequest, stages: Stages | None) -> None:
        """Ask the model. `stages` has the turn's extensions, if there are any."""
        self._call = self._loop.create_task(self._complete(provider, request, stages))

    def stop(self) -> None:
        """Give up the running call."""
        if self._call is not None:
            self._call.cancel()
        self._stall.end()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

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
        if self._asking is not None:
            self._asking.cancel()

    # --- one call

    async def _complete(self, provider: base.Provider, request: base.ModelRequest, stages: Stages | None) -> None:
        """Make the model call inside the wraps of extensions."""
        self._requests = 0
        try:
            if stages is not None and stages.wraps_model:
                answer = await stages.ask_model(
                    lambda blocks, catalog: self._ask(
                        provider, msgspec.structs.replace(request, blocks=blocks, tools=catalog.shown), stages
                    )
                )
            else:
                answer = await self._ask(provider, request, stages)
        except GoondanError as error:
            if error.info.code == "E_LEASE_LOST":  # the broker has said so, to a part that asked it
                self._turn.abandon()
            self._turn.push(ModelFailed(error.info))
        except Exception as error:  # nobody else would end the step
            log.exception("event %s: the model call", self._event_id)
            self._turn.push(ModelFailed(self._without_secrets(error_payload("E_INTERNAL", str(error)))))
        else:
            calls = list(map(self._instance.tools.spelt, answer.calls))
            self._turn.push(ModelAnswered(answer.text, calls, answer.finish_reason, stored_metadata(answer)))

    def _ask(
        self, provider: base.Provider, request: base.ModelRequest, stages: Stages | None
    ) -> Awaitable[base.ModelAnswer]:
        """Ask the model with what fits into its context."""
        once = self._ask_once if self._instance.spec.fallback else partial(self._request, provider)
        if not provider.needs_history:
            return once(request)

        async def aside(text: str, system: str | None) -> str:
            return (await self.ask_aside(text, system, request.step)).text

        step = None if stages is None else stages.step
        return self._context.ask(provider, request, once, aside, NO_WISHES if step is None else step.wishes)

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
                aside=True,
            )
            asking = self._asking = asyncio.ensure_future(self._ask_once(request))
            try:
                await asyncio.wait([asking])
            finally:
                asking.cancel()  # nothing, once it has ended
            if asking.cancelled():
                raise fail("E_MODEL_FAILED", "the model was asked by an extension, and said nothing for too long")
            return asking.result()

    async def _ask_once(self, request: base.ModelRequest) -> base.ModelAnswer:
        """Ask the model once, and when it gives no answer, those that the bundle names in its place, in their order.
        Raises GoondanError in a form that may be stored and shown.
        """
        try:
            return await self._request(self._instance.provider, request)
        except GoondanError as error:
            failed = error.info
            if failed.code not in _WITHOUT_ANSWER:
                raise
        for model in self._instance.spec.fallback:
            log.warning("event %s: no answer (%s); Model/%s is asked instead", self._event_id, failed, model.document)
            try:
                return await self._request_in_place(msgspec.structs.replace(request, model=model))
            except GoondanError as error:
                if error.info.code not in _WITHOUT_ANSWER:
                    raise
                message = f"{failed.message}; in its place Model/{model.document}: {error.info.message}"
                failed = msgspec.structs.replace(failed, message=cut_message(message, MODEL_ERROR_CHARS))
        raise GoondanError(failed)

    async def _request_in_place(self, request: base.ModelRequest) -> base.ModelAnswer:
        """Ask a model that the bundle names in place of another. One that cannot see reads words for the files."""
        provider = self._instance.provider_in_place(request.model)
        try:
            return await self._request(provider, request)
        except GoondanError as error:
            if error.info.code != "E_MODEL_CANNOT_SEE":
                raise
        return await self._request(provider, msgspec.structs.replace(request, files_as_words=True))

    async def _request(self, provider: base.Provider, request: base.ModelRequest) -> base.ModelAnswer:
        """Make one request to one model, in the time that the turn has left. News of an earlier one of the step's
        requests is void; a question aside has none. Raises GoondanError as `_ask_once`.
        """
        if (left_s := self._turn.time_left()) is not None:
            request = msgspec.structs.replace(request, timeout_s=left_s)
        attempts, began = ModelAttempts(), self._loop.time()
        self._attempts = attempts
        on_news: parts.OnNews = partial(self._hear, request, attempts, began)
        show: base.OnDelta | None = None
        if not request.aside:
            self._requests += 1
            show = self._turn.live if self._requests == 1 else VoidBefore(self._turn.live)
        self._asked = request
        self._stall.begin(began)
        if self._stall_timer is None:
            self._watch()
        try:
            if self._parts.hooks.model:
                asked: parts.Ask = lambda given, news: provider.complete(given, show, news)
                answer = await self._parts.ask_model(asked, request, on_news)
            else:
                answer = await provider.complete(request, show, on_news)
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

    def _hear(self, request: base.ModelRequest, attempts: ModelAttempts, began: float, news: base.ModelNews) -> None:
        """The news of the provider while a request runs, which began at `began`."""
        if attempts.last is None and news == "asking":  # the clock has begun with the call
            attempts.last, attempts.count = news, 1
            return
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
            if self._stall_timer is None:
                self._watch()
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

    def _watch(self) -> None:
        """Check again when the model's time is over, where no check is planned already. One that comes too early plans
        the next one, so a quick call plans none. None is later than the first notice about a call that begins now.
        """
        if (due := self._stall.look_at) is not None:
            self._stall_timer = self._loop.call_at(min(due, self._loop.time() + NOTICE_S), self._look)

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

    def _look(self) -> None:
        self._stall_timer, request = None, self._asked
        if request is None:
            return
        now = self._loop.time()
        since = self._stall.silent_since(now)
        if since is None:
            if (silence_s := self._stall.notice(now)) is not None:
                self._tell_wait(request, now - silence_s)
            self._watch()
            return
        if self._asking is not None:
            self._asking.cancel()
        model = f"{request.model.provider}/{request.model.model}".rstrip("/")
        info = stalled(model, request.step, now - since, self._stall.limit_s, self._instance.clock())
        self.give_up(info.code)
        self._turn.push(ModelFailed(info))


class VoidBefore(msgspec.Struct):
    """Passes pieces on. The first one makes earlier ones void."""

    #: Gets them.
    show: base.OnDelta
    #: No piece was passed on.
    void: bool = True

    @property
    def wanted(self) -> int:
        """See OnDelta."""
        return self.show.wanted

    def __call__(self, delta: base.TextDelta) -> None:
        """See OnDelta."""
        self.show(msgspec.structs.replace(delta, again=True) if self.void else delta)
        self.void = False


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

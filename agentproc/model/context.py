"""The context of one turn: makes each request of its model fit, and asks again with less when a server refuses it.

What is shown is decided in agentproc/machine/context_shape.py. Here it is stored, the server is asked for its window,
and refusals are learned from. What one instance remembers of its context from turn to turn is in its conversation's
file.

Rules.
- What is left out is stored before a request without it goes out. Another process shows the same.
- A refusal has true numbers. They are learned, the request is cut by them, and the model is asked again, at most
  MOST_REFUSALS times in a step. Each request is shorter than the one before, or asks for a shorter answer.
- What does not fit although everything is left out that may be ends the step with E_CONTEXT_OVERFLOW. The next turn has
  another last message, and goes on.

Source: docs/design/turns.md section 10.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from msgspec import Struct, structs

from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.conversation.transcript import Transcript
from goondan.agentproc.machine import context_shape, estimate
from goondan.agentproc.machine.messages import Message, Presented, UserData, is_kept
from goondan.agentproc.providers.base import ContextOverflow, ModelAnswer, ModelRequest, Provider, Usage, output_limit
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.models.server_answers import LEAST_WINDOW, known_window
from goondan.schemas.wire import codec, errors, frames

#: The name under which the file keeps it.
NAME: Final = "context"
#: How often a server is asked for its window in a process, as long as it does not say.
ASKS: Final = 3


class Kept(Struct, frozen=True, omit_defaults=True):
    """What is kept."""

    #: The model and the server that the next three belong to.
    model: str = ""
    #: The tokens of a byte.
    ratio: float = estimate.FIRST_GUESS
    #: The window that a refusal has told (tokens).
    told: int | None = None
    #: What was known of the window before that refusal (tokens).
    known: int | None = None
    #: What is left out of the conversation.
    shape: context_shape.Shape = context_shape.Shape()
    #: The last request in this shape that a vendor has counted.
    counted: estimate.Counted | None = None


class ContextMemory:
    """The memory of one instance."""

    def __init__(self, store: ConversationStore) -> None:
        self._store = store
        #: What its conversation has cost once, and need not cost again in the next turn.
        self.presented = Presented()
        self.sizes = estimate.MessageSizes()
        self.view = context_shape.View()
        #: The tools of its last request.
        self.tools = context_shape.Offered()
        self._kept: Kept | None = None
        self._stored: Kept | None = None
        self._model: ModelSpec | None = None  # that was asked for last
        #: Its window by the table (tokens); None: the table does not have it.
        self.table: int | None = None
        #: What the server has said of its window in this process (tokens). None: it does not say, or was not asked.
        self.listed: int | None = None
        #: How often it may still be asked. Some servers say it of a model only after its first answer.
        self.asks_left = ASKS

    def of(self, model: ModelSpec) -> Kept:
        """What is kept. What was learned of another model is forgotten."""
        if self._kept is None:
            self._kept = self._stored = self._read()
        if model is self._model:
            return self._kept
        self._model, self.table = model, known_window(model.model)
        name = f"{model.provider}/{model.model}@{model.endpoint or ''}"
        if self._kept.model != name:
            self._kept = Kept(model=name, shape=self._kept.shape)
            self.listed, self.asks_left = None, ASKS
        return self._kept

    def _read(self) -> Kept:
        data = self._store.remembered(NAME)
        try:
            kept = Kept() if data is None else msgspec.msgpack.decode(data, type=Kept)
        except msgspec.DecodeError:
            return Kept()  # of another version: it is learned anew
        if estimate.LEAST_RATIO <= kept.ratio <= estimate.MOST_RATIO:
            return kept
        return structs.replace(kept, ratio=estimate.FIRST_GUESS)

    def count(self, kept: Kept, counted: estimate.Counted) -> None:
        """A vendor has counted a request in the shape that is kept."""
        told = None if kept.told is None or counted.tokens > kept.told else kept.told
        self._kept = structs.replace(kept, ratio=estimate.corrected(kept.ratio, counted), told=told, counted=counted)

    def forget_told(self, kept: Kept) -> Kept:
        """Forget what a refusal has told of the window."""
        self._kept = structs.replace(kept, told=None, known=None)
        return self._kept

    def store(self, kept: Kept) -> Kept:
        """Keep this, stored in a transaction of its own. Raises GoondanError as the store does."""
        with self._store.write():
            self._write(kept)
        self._kept = kept
        return kept

    def end_turn(self, messages: list[Message] | None) -> bool:
        """The conversation is this after a turn; None: it is not known. A short one is kept for the next turn. Whether
        it is.
        """
        if messages is not None and is_kept(len(messages), self.sizes.total):
            self._store.keep_messages(messages)
            return True
        self._store.forget_messages()
        self.presented, self.sizes, self.view = Presented(), estimate.MessageSizes(), context_shape.View()
        return False

    def keep(self) -> None:
        """Store what a vendor's counts have changed (inside the store's `write`)."""
        if self._kept is not None and self._kept is not self._stored:
            self._write(self._kept)

    def _write(self, kept: Kept) -> None:
        self._store.remember(NAME, codec.encode_value(kept))
        self._stored = kept


#: How often a step's request is made shorter after a refusal. The first refusal tells the numbers. Another one comes
#: when what is left has more tokens of a byte than what was left out.
MOST_REFUSALS: Final = 4
#: A request that is guessed to be shorter fits into every context (tokens): nobody is asked for the window.
SURE_TOKENS: Final = 1500
#: After a refusal the request has at most so much of its size.
SMALLER: Final = 0.8
#: How many more tokens a refused request has than was thought, when its server does not say.
UNTOLD: Final = 1.3
#: How often a summary is tried with smaller pieces after the server has refused one.
MOST_PIECES: Final = 3
#: A summary has at most this part of what a conversation is cut to.
SUMMARY_PART: Final = 4
#: A question for a summary has at most so many tokens where nobody knows the window.
UNKNOWN: Final = 2000

log = logging.getLogger("agentproc")


class _Parts(Struct, frozen=True):
    """A request that is to fit."""

    #: The request that is to fit.
    request: ModelRequest
    #: The whole conversation.
    messages: list[Message]
    #: The bytes of each message.
    sizes: list[int]
    #: The bytes of what stands beside the conversation.
    fixed: int
    #: Asks the model outside of the conversation.
    aside: estimate.AskModel
    #: What extensions wish.
    wishes: estimate.Wishes


class _Fitted(Struct, frozen=True):
    """A request as it goes out."""

    #: The request as it goes out.
    request: ModelRequest
    #: Its bytes.
    size: int


class TurnContext:
    """The context of one turn."""

    def __init__(self, memory: ContextMemory, transcript: Transcript) -> None:
        self._memory = memory
        self._transcript = transcript
        self._opening: str | None = None
        self._asked = False  # for the window
        self._through = 0  # the place behind the last message that was left out
        self._result_size = context_shape.USUAL_BYTES

    def read(self, args: Any) -> frames.ToolResult:
        """The result of a call of the tool that reads a part of a result."""
        return context_shape.read(self._transcript.next_messages, args, self._result_size)

    async def ask(
        self,
        provider: Provider,
        request: ModelRequest,
        once: Callable[[ModelRequest], Awaitable[ModelAnswer]],
        aside: estimate.AskModel,
        wishes: estimate.Wishes,
    ) -> ModelAnswer:
        """Ask the model with as much of the conversation as fits. `once` makes one request, `aside` asks for a summary.
        Raises what `once` raises, and GoondanError E_CONTEXT_OVERFLOW with the numbers.
        """
        parts = self._parts(request, aside, wishes)
        fitted = await self._fit(provider, parts)
        refusals = 0
        while True:
            try:
                answer = await once(fitted.request)
            except ContextOverflow as refusal:
                refusals += 1
                shorter = await self._shorter(refusal, parts, fitted) if refusals <= MOST_REFUSALS else None
                if shorter is None:
                    raise self._too_long(parts, fitted, refusal.info.message) from None
                fitted = shorter
            else:
                self._count(fitted, answer.usage)
                return answer

    # --- one request

    def _parts(self, request: ModelRequest, aside: estimate.AskModel, wishes: estimate.Wishes) -> _Parts:
        memory = self._memory
        tools = memory.tools.of(request.tools)
        if tools is not request.tools:
            request = structs.replace(request, tools=tools)
        if self._opening is None:
            own = self._transcript.own_messages
            self._opening = next((message.id for message in own if isinstance(message.data, UserData)), "")
        fixed = estimate.text_size(request.system) + memory.tools.size
        if request.blocks:
            fixed += estimate.blocks_size(request.blocks)
        messages = request.messages
        return _Parts(request, messages, memory.sizes.of(messages), fixed, aside, wishes)

    async def _fit(self, provider: Provider, parts: _Parts) -> _Fitted:
        """The request with what fits of its conversation. Raises GoondanError."""
        request, memory, wishes = parts.request, self._memory, parts.wishes
        kept = memory.of(request.model)
        size = self._size(parts, kept.shape)
        unsaid = request.model.context_tokens is None and memory.listed is None and memory.asks_left and not self._asked
        if unsaid and estimate.tokens_of(size, kept.ratio) > SURE_TOKENS:
            self._asked = True  # once in a turn until it says: the request is long enough to be in danger
            memory.asks_left -= 1
            memory.listed = await provider.window(request)
        known = self._known(request)
        window = None if known is None and kept.told is None else self._window(request, kept)
        if window is None and wishes is estimate.NO_WISHES:
            return self._fitted(parts, kept, size, window)
        if kept.told is not None and known not in (None, kept.known):
            kept = memory.forget_told(kept)  # the model has another window now
            window = self._window(request, kept)
        shorter = self._shorten_new(parts, kept, window)
        if shorter is not kept:
            kept, size = shorter, self._size(parts, shorter.shape)
        tokens = self._tokens(kept, size)
        forced = window is not None and tokens > window.high
        if forced or (wishes is not estimate.NO_WISHES and self._unwished(parts, kept, tokens)):
            kept = await self._jump(parts, kept, self._low(parts, kept, window), forced=forced)
            size = self._size(parts, kept.shape)
        fitted = self._fitted(parts, kept, size, window)
        # A refusal may have told wrong numbers: then the server is asked again.
        if known is not None and int(size * estimate.surely(kept.ratio)) > known:
            raise self._too_long(parts, fitted, f"the context of {request.model.model} is exceeded")
        return fitted

    def _unwished(self, parts: _Parts, kept: Kept, tokens: int) -> bool:
        """Whether extensions wish that a request of so many tokens is cut."""
        shown = len(parts.messages) - self._begin(parts, kept.shape)
        return parts.wishes.too_much(shown, tokens - estimate.tokens_of(parts.fixed, kept.ratio))

    def _fitted(
        self, parts: _Parts, kept: Kept, size: int, window: estimate.Window | None, answer: int | None = None
    ) -> _Fitted:
        if answer is None and window is not None:
            answer = window.answer_beside(self._tokens(kept, size))
        request = structs.replace(
            parts.request,
            messages=self._memory.view.of(parts.messages, kept.shape, self._opening),
            max_tokens=answer,
            left_out=kept.shape.left_out if kept.shape.through and self._begin(parts, kept.shape) else 0,
            shortened=len(kept.shape.shortened),
        )
        return _Fitted(request, size)

    def _size(self, parts: _Parts, shape: context_shape.Shape) -> int:
        """The bytes of a request that shows the conversation in this shape."""
        if not shape.through and not shape.shortened:
            return parts.fixed + self._memory.sizes.total
        begin = self._begin(parts, shape)
        shown = context_shape.shown_sizes(parts.messages[begin:], parts.sizes[begin:], shape)
        size = parts.fixed + sum(shown)
        if begin:
            size += estimate.text_size(context_shape.note_of(shape)) + self._opening_size(parts, begin)
        return size

    def _begin(self, parts: _Parts, shape: context_shape.Shape) -> int:
        """The index of the first message that is shown. It is sought once."""
        if not shape.through:
            return 0
        messages, begin = parts.messages, self._through
        if not (0 < begin <= len(messages) and messages[begin - 1].id == shape.through):
            begin = self._through = context_shape.begin_of(messages, shape)
        return begin

    def _opening_size(self, parts: _Parts, begin: int) -> int:
        """The bytes of the message that began the turn, if it stands before `begin`."""
        opening = context_shape.index_of(parts.messages, self._opening)
        return parts.sizes[opening] if 0 <= opening < begin else 0

    def _tokens(self, kept: Kept, size: int) -> int:
        return estimate.tokens_of(size, kept.ratio, kept.counted)

    def _count(self, fitted: _Fitted, usage: Usage | None) -> None:
        """Learn from what the vendor counted."""
        if usage is not None and usage.input_tokens > 0:
            kept = self._memory.of(fitted.request.model)
            self._memory.count(kept, estimate.counted(fitted.size, usage.input_tokens))

    # --- the window

    def _window(self, request: ModelRequest, kept: Kept) -> estimate.Window | None:
        """The window of the model; None: nobody knows it."""
        tokens = estimate.least(self._known(request), kept.told)
        return None if tokens is None else estimate.Window(tokens, output_limit(request.model))

    def _known(self, request: ModelRequest) -> int | None:
        """The window by what the bundle, the server or the table says (tokens)."""
        return request.model.context_tokens or self._memory.listed or self._memory.table

    # --- less of the conversation

    def _shorten_new(self, parts: _Parts, kept: Kept, window: estimate.Window | None) -> Kept:
        """Shorten the results that are longer than one may be. Raises GoondanError as the store does."""
        if window is None:
            return kept
        share = estimate.size_of(int(window.tokens * parts.wishes.result_share), max(kept.ratio, estimate.FIRST_GUESS))
        self._result_size = max(share, context_shape.LEAST_RESULT)
        if self._memory.sizes.largest <= self._result_size + estimate.AROUND:
            return kept
        new = context_shape.long_results(parts.messages, parts.sizes, kept.shape, self._result_size)
        if not new:
            return kept
        counted = kept.counted
        shape = structs.replace(kept.shape, shortened={**kept.shape.shortened, **new})
        whole = counted is not None and counted.size <= self._size(parts, shape)  # what was counted is shown as it was
        return self._memory.store(structs.replace(kept, shape=shape, counted=counted if whole else None))

    def _low(self, parts: _Parts, kept: Kept, window: estimate.Window | None) -> int:
        """The bytes that a request is cut to."""
        lows = [] if window is None else [estimate.size_of(window.low, kept.ratio)]
        if (tokens := parts.wishes.kept_tokens) is not None:
            lows.append(estimate.size_of(tokens, kept.ratio) + parts.fixed)
        return min(lows) if lows else self._size(parts, kept.shape)

    async def _jump(self, parts: _Parts, kept: Kept, low: int, *, forced: bool) -> Kept:
        """Leave out so much that the request has at most `low` bytes, if that is possible. `forced`: it does not fit as
        it is. Raises GoondanError as the store does.
        """
        messages, old = parts.messages, kept.shape
        begin, sizes = context_shape.begin_of(messages, old), context_shape.shown_sizes(messages, parts.sizes, old)
        summarised = parts.wishes.summarise is not None
        summary_size = max(0, low - parts.fixed) // SUMMARY_PART if summarised else 0
        room = low - parts.fixed - max(estimate.text_size(context_shape.note_of(old)), summary_size)
        cut = context_shape.find_cut(messages, sizes, begin, room, parts.wishes.kept_messages)
        if opening := self._opening_size(parts, cut):
            cut = context_shape.find_cut(messages, sizes, begin, room - opening, parts.wishes.kept_messages)
        shape = old
        if cut > begin:
            summary = await self._summary(parts, kept, messages[begin:cut], summary_size) if summarised else ""
            if summarised and not summary and not forced:
                return kept
            rest = {message.id for message in messages[cut:]}
            shape = context_shape.Shape(
                through=messages[cut - 1].id,
                left_out=cut - (0 <= context_shape.index_of(messages, self._opening) < cut),
                summary=summary or old.summary,
                shortened={name: most for name, most in old.shortened.items() if name in rest},
            )
        over = self._size(parts, shape) - low
        if forced and over > 0:
            sizes = context_shape.shown_sizes(messages, parts.sizes, shape)
            begin = context_shape.begin_of(messages, shape)
            shorter = context_shape.squeezed(messages[begin:], sizes[begin:], over)
            shape = structs.replace(shape, shortened={**shape.shortened, **shorter})
        return kept if shape == old else self._memory.store(structs.replace(kept, shape=shape, counted=None))

    async def _summary(self, parts: _Parts, kept: Kept, messages: list[Message], size: int) -> str:
        """The summary of what was left out so far and of these messages, in at most `size` bytes; "" when there is
        none.
        """
        summarise = parts.wishes.summarise
        if summarise is None:
            raise AssertionError("only what can be summarised is")
        window = self._window(parts.request, kept)
        lows = (parts.wishes.max_tokens, None if window is None else window.low)
        tokens = [most for most in lows if most is not None]
        most = max(
            estimate.size_of(min(tokens, default=UNKNOWN), max(kept.ratio, estimate.FIRST_GUESS)),
            context_shape.LEAST_RESULT,
        )
        for _ in range(MOST_PIECES):
            try:
                return context_shape.within(await summarise(parts.aside, kept.shape.summary, messages, most), size)
            except ContextOverflow as refusal:
                most //= 2
                log.warning("the conversation could not be summarised: %s", refusal.info.message)
            except errors.GoondanError as error:
                if error.info.code == "E_LEASE_LOST":
                    raise
                log.warning("the conversation could not be summarised: %s", error.info.message)
                break
        return ""

    # --- after a refusal

    async def _shorter(self, refusal: ContextOverflow, parts: _Parts, fitted: _Fitted) -> _Fitted | None:
        """A shorter request after a refusal; None: there is none. Raises GoondanError as the store does."""
        said, kept = refusal.overflow, self._memory.of(parts.request.model)
        if refusal.model not in (None, parts.request.model):
            return await self._shorter_in_place(refusal, parts, fitted)
        before = self._window(parts.request, kept)
        tokens = said.tokens or int(self._tokens(kept, fitted.size) * UNTOLD)
        told = said.window or (int(tokens / UNTOLD) if before is None else before.tokens)
        ratio = estimate.counted(fitted.size, tokens).ratio
        kept = structs.replace(
            kept, told=max(told, LEAST_WINDOW), known=self._known(parts.request), ratio=ratio, counted=None
        )
        kept = self._memory.store(kept)
        window = self._window(parts.request, kept)
        if window is None:
            raise AssertionError("a refusal tells a window")
        if said.tokens is not None and said.tokens <= window.high:
            answer = window.tokens - said.tokens
            asked = fitted.request.max_tokens
            if asked is None or answer < asked:  # it was the answer that did not fit
                return self._fitted(parts, kept, fitted.size, window, answer)
        kept = self._shorten_new(parts, kept, window)
        low = min(self._low(parts, kept, window), int(fitted.size * SMALLER))
        if self._size(parts, kept.shape) > low:
            kept = await self._jump(parts, kept, low, forced=True)
        size = self._size(parts, kept.shape)
        return self._fitted(parts, kept, size, window) if size < fitted.size else None

    async def _shorter_in_place(self, refusal: ContextOverflow, parts: _Parts, fitted: _Fitted) -> _Fitted | None:
        """The same, where a model that was asked in place of the step's has refused. Its numbers are no news of the
        step's model, so only what is left out is kept.
        """
        kept = self._memory.of(parts.request.model)
        said = refusal.overflow
        tokens = said.tokens or int(self._tokens(kept, fitted.size) * UNTOLD)
        low = int(fitted.size * min(SMALLER, estimate.LOW * (said.window or tokens) / tokens))
        kept = await self._jump(parts, kept, low, forced=True)
        size = self._size(parts, kept.shape)
        return self._fitted(parts, kept, size, self._window(parts.request, kept)) if size < fitted.size else None

    def _too_long(self, parts: _Parts, fitted: _Fitted, words: str) -> errors.GoondanError:
        """The error of a step whose request does not fit although nothing more can be left out."""
        request = fitted.request
        kept = self._memory.of(request.model)
        window = self._window(request, kept)
        shares = {
            "the system prompt": estimate.text_size(request.system),
            f"the definitions of {len(request.tools)} tools": self._memory.tools.size,
            "what extensions add": estimate.blocks_size(request.blocks),
            "the messages that cannot be left out": fitted.size - parts.fixed,
        }
        told = ", ".join([f"{estimate.tokens_of(size, kept.ratio)} of {name}" for name, size in shares.items() if size])
        largest = max(shares, key=lambda name: shares[name])
        context = "" if window is None else f" of the {window.tokens} tokens of the context"
        message = f"{words} (the least that this step can send{context}: about {told} tokens)"
        advice = {
            "the system prompt": "Shorten the agent's system prompt",
            "what extensions add": "Let the agent's extensions add less",
            "the messages that cannot be left out": "Send a shorter message",
        }.get(largest, "Give the agent fewer tools")
        return errors.fail("E_CONTEXT_OVERFLOW", message, suggestion=f"{advice}, or use a model with a larger context.")

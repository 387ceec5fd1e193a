"""One agent instance: the state that it keeps from turn to turn, and the parts that a turn works with.

It is made once for each process. runner.py knows which event is worked on, and run.py runs a turn.

An answer that has to fit a schema is JSON. A model that was not held to it may put it into a code fence, which is taken
off. The check is that of a tool's arguments, with its bounded cost.

Source: docs/design/structured-answers.md section 2.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from msgspec import Raw

from goondan.agentproc.calls import caller, servers, swarm
from goondan.agentproc.conversation.files import InstanceFiles
from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.extensions import dynamic_tools, engine, events, loaded, workspaces
from goondan.agentproc.extensions.points.pipeline import Pipeline
from goondan.agentproc.http import make_provider
from goondan.agentproc.machine import catalog, questions
from goondan.agentproc.machine.messages import Message
from goondan.agentproc.machine.verdicts import Judge, Verdict
from goondan.agentproc.model.context import ContextMemory
from goondan.agentproc.providers.base import SHORTEST_SAID, Provider, read_json, redactor_of, storable
from goondan.agentproc.start.blocked_loop import LoopWatch
from goondan.agentproc.start.log import KnownSecrets
from goondan.agentproc.turn.configuration import Configuration
from goondan.schemas.bundle.address import instance_dir, instance_workdir
from goondan.schemas.bundle.launch import AgentSpec, ModelSpec, OutputSpec
from goondan.schemas.system.trace_index import TraceIndex
from goondan.schemas.text import redaction, times
from goondan.schemas.wire.codec import check_depth, encode_value
from goondan.schemas.wire.frames import Frame

if TYPE_CHECKING:
    from goondan.schemas.bundle.arguments import ArgumentChecker

# --- answers that have to fit a schema --------------------------------------------------------------------------------


#: How many violations a message names.
MAX_VIOLATIONS: Final = 8
_FENCE: Final = re.compile(r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL)


class OutputRule:
    """Judges the answers of one agent. The schema is compiled at the first answer."""

    def __init__(self, spec: OutputSpec) -> None:
        self._spec = spec
        self._checker: ArgumentChecker | None = None

    def judge(self, answer: str) -> Verdict:
        """What an answer of the model is."""
        text = answer.strip()
        fenced = _FENCE.fullmatch(text)
        text = text if fenced is None else fenced.group(1).strip()
        try:
            value = storable(read_json(text))
            encoded = encode_value(value)
            check_depth(encoded)
        except ValueError as error:
            return Verdict(None, text, [f"it is no JSON: {str(error)[:120]}"])
        except (RecursionError, OverflowError):
            return Verdict(None, text, ["it is nested too deep, or has a number that is too large"])
        violations = self._violations(value, len(encoded))
        return Verdict(None if violations else Raw(encoded), text, violations)

    def _violations(self, value: Any, size: int) -> list[str]:
        if self._checker is None:
            from goondan.schemas.bundle.arguments import compile_arguments  # most agents have no schema

            self._checker = compile_arguments(self._spec.schema, {})
        _, issues = self._checker.apply(value, size)
        shown = ["answer" + issue.removeprefix("args") for issue in issues[:MAX_VIOLATIONS]]
        more = len(issues) - len(shown)
        return [*shown, f"and {more} more"] if more else shown


def now_rfc3339() -> str:
    """The time, RFC 3339 in UTC with milliseconds."""
    return times.rfc3339(time.time())


class Instance:
    """One agent instance."""

    def __init__(
        self,
        spec: AgentSpec,
        instance_key: str,
        link: caller.AgentLink,
        store: ConversationStore,
        *,
        provider: Provider | None = None,
        secrets: KnownSecrets | None = None,
    ) -> None:
        """`provider` is the model, None for the one that the specification names. The process's log hides `secrets`."""
        loop = asyncio.get_running_loop()
        self.instance_key = instance_key
        self.link = link
        #: The conversation.
        self.store = store
        self.loop = loop
        self.clock = now_rfc3339
        #: The middleware that extensions have registered.
        self.pipeline = Pipeline()
        #: The tools that extensions have registered.
        self.tools = dynamic_tools.DynamicTools()
        self.catalog = catalog.Catalog(spec, self.tools)
        self.events = events.EventBus()
        files = instance_dir(spec.state_dir, spec.name, instance_key)
        self._workdir = instance_workdir(spec.state_dir, spec.name, instance_key)
        #: The pictures and PDFs of the conversation.
        self.files = InstanceFiles(files, durable=spec.durability == "power", max_bytes=spec.conversation_mb << 20)
        self.place = loaded.InstancePaths(spec.name, instance_key, files, spec.state_dir)
        self.secrets = secrets or KnownSecrets()
        #: What is asked of MCP servers outside of calls.
        self.servers = servers.Servers(link)
        self.config = Configuration(spec)
        #: Ends layers of middleware that take too long.
        self.watch = engine.Watch()
        #: Finds out which code blocks the event loop.
        self.loop_watch = LoopWatch(files)
        self.workspaces = workspaces.Workspaces(self.pipeline, self.events, self.watch)
        self.extensions = loaded.Extensions(
            self.pipeline,
            self.tools,
            self.events,
            self.place,
            self.config,
            workdir=lambda: self.workspaces.workdir,
            servers=self.servers,
        )
        #: What is known of the model's context, and what is left out of the conversation.
        self.context = ContextMemory(store)
        #: Who may ask the model servers, and when.
        self.caller = caller.ToolCaller(link, loop, self.tools.folder_of)
        self.acks = caller.ResultAcks(link, loop)
        #: Where the turns of each trace are found.
        self.index = TraceIndex(spec.state_dir)
        self._given = provider
        self._provider: Provider | None = None
        #: What makes the providers that features bring, by their names in `ModelSpec.provider`.
        self.providers: dict[str, Callable[[ModelSpec], Provider]] = {}
        self._others: dict[str, Provider] = {}  # of the models in `fallback`, by their documents
        self._redactor: redaction.Redactor | None = None
        self._said_redactor: redaction.Redactor | None = None
        self._rule: tuple[OutputSpec, Judge] | None = None

    @property
    def spec(self) -> AgentSpec:
        """The bundle's specification of the agent. It can be replaced between two steps at any time (configuration.py),
        but not its model.
        """
        return self.config.current.spec

    def workdir_of(self, event: Frame) -> str:
        """The folder that an event's turn works in."""
        return event.workdir or self._workdir

    def redact(self, text: str) -> str:
        """A text without the secrets of the agent's model, and without the tokens of its extensions."""
        if self._redactor is None:
            self._redactor = redactor_of(*self.spec.models)
        return self.secrets.redact(self._redactor(text))

    def redact_said(self, text: str) -> str:
        """The same of what a model says, which may be a file's content: secrets of SHORTEST_SAID characters only."""
        if self._said_redactor is None:
            self._said_redactor = redactor_of(*self.spec.models, shortest=SHORTEST_SAID)
        return self.secrets.redact(self._said_redactor(text))

    @property
    def judge(self) -> Judge | None:
        """Judges an answer by the agent's output schema; None: it has none, or its model is the console."""
        spec = self.spec
        if spec.output is None or spec.model.provider == "embedded":
            return None
        if self._rule is None or self._rule[0] is not spec.output:
            self._rule = spec.output, OutputRule(spec.output).judge
        return self._rule[1]

    @property
    def provider(self) -> Provider:
        """The model, made when it is first needed."""
        if self._provider is None:
            self._provider = self._make_provider(self.spec.model)
        return self._provider

    def provider_in_place(self, model: ModelSpec) -> Provider:
        """The provider of a model that is asked in place of the agent's own, made when it is first needed."""
        found = self._others.get(model.document)
        if found is None:
            found = self._others[model.document] = self._make_provider(model, in_place=True)
        return found

    def _make_provider(self, model: ModelSpec, *, in_place: bool = False) -> Provider:
        make = self.providers.get(model.provider)
        if make is not None:
            return make(model)
        return make_provider(model) if self._given is None or in_place else self._given

    @property
    def _made(self) -> list[Provider]:
        return [one for one in (self._provider, *self._others.values()) if one is not None]

    def end_turn(self, messages: list[Message] | None) -> None:
        """The conversation is this after a turn; None: it is not known. What is not kept, nobody keeps."""
        if not self.context.end_turn(messages):
            for provider in self._made:
                provider.forget()

    def notice(self, ended: questions.Ended) -> None:
        """Tell extensions about the answer to a question that was asked without waiting (EVENTS-11)."""
        if ended.answer is not None:
            self.events.emit(swarm.DELEGATION_RESULT, ended.answer, emitter="the kernel")

    async def close(self) -> None:
        """Let the extensions clean up, stop timers, and close the file and the model's connections."""
        await self.extensions.close()
        self.watch.close()
        self.loop_watch.close()
        self.acks.close()
        self.caller.abandon()
        self.store.close()
        self.index.close()
        for provider in self._made:
            await provider.close()

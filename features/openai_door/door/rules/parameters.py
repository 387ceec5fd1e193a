"""Which parameters OpenAI's doors take, which they pass over, and which they refuse, each with its reason.

A parameter that would change what the answer means is refused, so that nobody believes that it was obeyed. One that
tunes how a model writes is passed over: many programs send it always, and how an agent's model writes is said in its
Model. A value that changes nothing (`n: 1`, `tools: []`) is taken everywhere. What OpenAI does not know either is
refused.

Source: https://platform.openai.com/docs/api-reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from goondan.features.openai_door.door.rules.faults import refused

#: Most characters of a caller's word that an error repeats.
MAX_REPEATED: Final = 64


class Parameter(Struct, frozen=True):
    """What becomes of one parameter."""

    #: `used`; `ignored`: any value of its form is passed over; `refused`: only values that change nothing are taken.
    does: Literal["used", "ignored", "refused"]
    #: The form of its values, for msgspec.
    form: Any
    #: Why, in one sentence.
    why: str = ""
    #: Of one that is refused: the values that change nothing, beside null.
    same: tuple[Any, ...] = ()


_Names = list[str]
_Map = dict[str, Any]
_USED_TEXT: Final = Parameter("used", str)
_USED_FLAG: Final = Parameter("used", bool | None)
_MODEL: Final = "How a model writes is said in the agent's Model (`params`)."
_LIMIT: Final = "The agent's Model says how long an answer may be; an answer that was cut off says `length`."
_TOOLS: Final = "An agent has the tools of its bundle; it calls no tools of the program that asks."
_TOOL_USE: Final = "Which of its own tools an agent calls is said in its bundle."
_ODDS: Final = "An agent's answer has no log probabilities."
_CACHE: Final = "What a vendor keeps is said in the agent's Model (`caching`)."
_SEARCH: Final = "An agent searches with tools of its bundle only."
_MODERATION: Final = "An agent's answer is moderated by extensions of its bundle only."

#: What both doors have.
_BOTH: Final[Mapping[str, Parameter]] = {
    "model": _USED_TEXT,
    "stream": _USED_FLAG,
    "user": Parameter("used", str | None, "It names the conversation, among those of your token."),
    "temperature": Parameter("ignored", float | None, _MODEL),
    "top_p": Parameter("ignored", float | None, _MODEL),
    "parallel_tool_calls": Parameter("ignored", bool | None, _TOOL_USE),
    "metadata": Parameter("used", dict[str, str] | None, "A response shows it again."),
    "service_tier": Parameter("ignored", str | None, _MODEL),
    "safety_identifier": Parameter("ignored", str | None, "It is not passed on."),
    "prompt_cache_key": Parameter("ignored", str | None, _CACHE),
    "prompt_cache_options": Parameter("ignored", _Map | None, _CACHE),
    "prompt_cache_retention": Parameter("ignored", str | None, _CACHE),
    "store": Parameter(
        "used", bool | None, "The conversation is kept in any case; a response that is not stored is not."
    ),
    "stream_options": Parameter("used", _Map | None),
    "top_logprobs": Parameter("refused", int | None, _ODDS, (0,)),
    "tools": Parameter("refused", list[Any] | None, _TOOLS, ([],)),
    "tool_choice": Parameter("refused", str | _Map | None, _TOOL_USE, ("auto", "none")),
    "moderation": Parameter("refused", Any, _MODERATION),
}
CHAT: Final[Mapping[str, Parameter]] = {
    **_BOTH,
    "messages": Parameter("used", list[Any]),
    "response_format": Parameter("used", _Map | None, "`text`, or the schema that the agent has (`output.schema`)."),
    "max_tokens": Parameter("ignored", int | None, _LIMIT),
    "max_completion_tokens": Parameter("ignored", int | None, _LIMIT),
    "frequency_penalty": Parameter("ignored", float | None, _MODEL),
    "presence_penalty": Parameter("ignored", float | None, _MODEL),
    "repetition_penalty": Parameter("ignored", float | None, _MODEL),
    "top_k": Parameter("ignored", float | None, _MODEL),
    "min_p": Parameter("ignored", float | None, _MODEL),
    "seed": Parameter("ignored", int | None, _MODEL),
    "reasoning_effort": Parameter("ignored", str | None, _MODEL),
    "verbosity": Parameter("ignored", str | None, _MODEL),
    "prediction": Parameter("ignored", _Map | None, "It would only make the answer quicker."),
    "n": Parameter("refused", int | None, "An agent gives one answer: a turn may have called tools.", (1,)),
    "stop": Parameter("refused", str | _Names | None, "An agent's answer is not cut at a word.", ([],)),
    "logprobs": Parameter("refused", bool | None, _ODDS, (False,)),
    "logit_bias": Parameter("refused", _Map | None, _MODEL, ({},)),
    "functions": Parameter("refused", list[Any] | None, _TOOLS, ([],)),
    "function_call": Parameter("refused", str | _Map | None, _TOOL_USE, ("auto", "none")),
    "modalities": Parameter("refused", _Names | None, "An agent answers with text.", (["text"],)),
    "audio": Parameter("refused", _Map | None, "An agent answers with text."),
    "web_search_options": Parameter("refused", _Map | None, _SEARCH),
}
RESPONSES: Final[Mapping[str, Parameter]] = {
    **_BOTH,
    "input": Parameter("used", str | list[Any]),
    "instructions": Parameter("used", str | None, "They stand before the message: the agent's own prompt goes first."),
    "previous_response_id": Parameter("used", str | None),
    "background": Parameter("used", bool | None, "The turn goes on when the connection ends."),
    "text": Parameter("used", _Map | None, "`format` as `response_format`; `verbosity` is passed over."),
    "include": Parameter(
        "refused",
        _Names | None,
        "A response has nothing of this: what the agent's tools did is in its trace.",
        ([], ["reasoning.encrypted_content"]),
    ),
    "max_output_tokens": Parameter("ignored", int | None, _LIMIT),
    "reasoning": Parameter("ignored", _Map | None, _MODEL),
    "truncation": Parameter("ignored", str | None, "The agent keeps its conversation within its model's context."),
    "max_tool_calls": Parameter("refused", int | None, "The agent's policy says how many steps a turn may have."),
    "conversation": Parameter(
        "refused", Any, "Name the conversation by `previous_response_id`, by `user`, or by the header."
    ),
    "context_management": Parameter("refused", list[Any] | None, "The agent keeps its conversation itself.", ([],)),
    "prompt": Parameter("refused", _Map | None, "There are no stored prompts: the agent has one."),
}


def check(given: Mapping[str, Any], table: Mapping[str, Parameter]) -> None:
    """Raise RefusedError for a parameter of another form, one that is refused, and one that nobody knows."""
    for name, value in given.items():
        row = table.get(name)
        if row is None:
            shown = name[:MAX_REPEATED]
            raise refused(f"Unrecognized request argument supplied: {shown}", shown, "unknown_parameter")
        try:
            msgspec.convert(value, row.form)
        except msgspec.ValidationError as error:
            raise refused(f"Invalid type for '{name}': {error}.", name, "invalid_type") from None
        if row.does == "refused" and value is not None and value not in row.same:
            raise refused(f"'{name}' is not supported here. {row.why}", name, "unsupported_parameter")


def check_format(wanted: Any, param: str, schema: Mapping[str, Any] | None) -> None:
    """Raise RefusedError unless answers have this form already. `wanted`: the value of `response_format`, or of
    `text.format`. `schema`: the JSON Schema of the agent's answers, None without one.
    """
    if wanted is None:
        return
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return
    if kind not in ("json_object", "json_schema"):
        raise refused(f"'{param}' has a type `text`, `json_object` or `json_schema`.", param, "invalid_value")
    if schema is None:
        message = (
            f"'{param}' is not supported by this agent: it answers in words. The form of an agent's answers is said in "
            "its bundle (`output.schema`)."
        )
        raise refused(message, param, "unsupported_parameter")
    if kind == "json_schema":
        named = wanted.get("json_schema", wanted)
        asked = named.get("schema") if isinstance(named, dict) else None
        if not isinstance(asked, dict) or _bare(asked) != _bare(schema):
            message = (
                f"'{param}' is another schema than the one that this agent's answers have. Ask for that one, for "
                "`json_object`, or for nothing."
            )
            raise refused(message, param, "unsupported_parameter")


#: What of a schema only describes.
_WORDS: Final = frozenset({"title", "description", "$schema", "$id", "examples", "$comment", "default"})


def _bare(schema: Any, *, names: bool = False) -> Any:
    """A schema without what only describes. `names`: the keys of this object are names of fields, or of definitions."""
    if isinstance(schema, dict):
        kept = schema.items() if names else [(key, value) for key, value in schema.items() if key not in _WORDS]
        return {key: _bare(value, names=not names and key in ("properties", "$defs")) for key, value in kept}
    if isinstance(schema, list):
        parts = [_bare(part) for part in schema]
        return sorted(parts, key=str) if all(isinstance(part, str) for part in parts) else parts
    return schema

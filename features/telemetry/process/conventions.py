"""The names of OpenTelemetry's conventions that we send, and their version. Our own names begin with `goondan.`.

They are literals, because the package that has them as constants moves them from one version to the next.

Source: OpenTelemetry semantic conventions 1.44.0, and those for generative AI that they point to.
"""

from __future__ import annotations

from typing import Final

#: The version of the conventions, as each batch of spans says it.
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
#: What makes our spans: the name of the instrumentation scope.
SCOPE: Final = "goondan"

# Operations (`gen_ai.operation.name`), which are the first words of names of spans as well.
INVOKE_AGENT: Final = "invoke_agent"
CHAT: Final = "chat"
EXECUTE_TOOL: Final = "execute_tool"

# Attributes.
OPERATION: Final = "gen_ai.operation.name"
AGENT: Final = "gen_ai.agent.name"
CONVERSATION: Final = "gen_ai.conversation.id"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
RESPONSE_MODEL: Final = "gen_ai.response.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
CACHE_WRITE_TOKENS: Final = "gen_ai.usage.cache_creation.input_tokens"
REASONING_TOKENS: Final = "gen_ai.usage.reasoning.output_tokens"
TOOL: Final = "gen_ai.tool.name"
TOOL_TYPE: Final = "gen_ai.tool.type"
TOOL_CALL: Final = "gen_ai.tool.call.id"
ERROR_TYPE: Final = "error.type"
# Only if contents are wanted.
ARGUMENTS: Final = "gen_ai.tool.call.arguments"
RESULT: Final = "gen_ai.tool.call.result"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"

#: Providers of ours that the conventions know by another name. One that they do not know keeps its own.
PROVIDERS: Final = {"responses": "openai"}

# What a jail shows as this package, for the type checker. Tools import it by the name that it has there.
from toolhost.inside import AgentError as AgentError
from toolhost.inside import Logger as Logger
from toolhost.inside import Message as Message
from toolhost.inside import Pending as Pending
from toolhost.inside import Runtime as Runtime
from toolhost.inside import ToolContext as ToolContext
from toolhost.inside import ToolError as ToolError

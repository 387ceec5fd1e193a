# What a jail shows as this package, for the type checker. Tools import it by the name that it has there.
from goondan.toolhost.inside import AgentError as AgentError
from goondan.toolhost.inside import Logger as Logger
from goondan.toolhost.inside import Message as Message
from goondan.toolhost.inside import Pending as Pending
from goondan.toolhost.inside import Runtime as Runtime
from goondan.toolhost.inside import ToolContext as ToolContext
from goondan.toolhost.inside import ToolError as ToolError

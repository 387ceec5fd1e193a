"""The tool host's side of MCP servers: their workers, their sessions, and who is attached to them.

    template_link   the SDK template, and the workers that it forks for us
    server_jail     one server with its worker: a jail and a process beside it, or the worker alone
    servers         who is attached to which session, and what they are told

Everything else about a server is as it is for a tool: one session (toolhost/sessions), calls, deadlines, receipts.

Source: docs/design/processes.md; docs/design/sandbox.md section 8.
"""

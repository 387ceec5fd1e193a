"""The MCP worker: a process outside of any jail that stands between the tool host and one MCP server.

It speaks schemas/WORKER.md (section 10) with the tool host, and the Model Context Protocol with the server. A server is
hostile: what it says is bounded and cleaned before anything of it goes on. The official SDK (`mcp`) is imported here,
and by nothing else of the tool host.

    start       what the launcher starts, by its place
    template    the process that has the SDK, warmed up, and forks workers
    worker      the process: its loop, its channel to the host, what each frame of the host sets going
    client      one server: how it is connected, listed, watched
    calling     one call, from its arguments to its result, with the questions that the server asks meanwhile; tasks
    stdio, http the two ways to a server: a descriptor, or connections that the host hands over; login
    protocol    pure: what of a server's messages is let through, and its answers as ours

`install.py` is a tool that `gdn mcp add` runs in a jail. It belongs to no worker.

Source: docs/design/tools.md section 11.
"""

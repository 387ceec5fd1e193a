"""The MCP worker: a process outside of any jail that stands between the tool host and one MCP server.

It speaks schemas/WORKER.md (section 10) with the tool host, and the Model Context Protocol with the server. A server is
hostile: what it says is bounded and cleaned (toolhost/server_messages/), before anything of it goes on. The official
SDK (`mcp`) is imported by this package and by the results of that one, and by nothing else of the tool host.

    worker      the process: its loop, its channel to the host, what each frame of the host sets going
    client      one server: how it is connected, listed, watched
    calling     one call, from its arguments to its result, with the questions that the server asks meanwhile
    stdio, http the two ways to a server: a descriptor, or connections that the host hands over

Source: docs/design/tools.md section 11.
"""

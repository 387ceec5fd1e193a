"""The tool host: it runs tool handlers in jails and answers their calls on the bus.

`python -m goondan.toolhost --endpoint ipc://…/tools.sock --token-fd N`. It trusts nothing that comes out of a jail.

    app, host               the process: its link, its decisions put into effect
    sessions/               jails with their calls: what is decided about them; pure
    serving/                what is decided about them, done
    calls/                  calls from their arguments to their one result; pure
    jails/                  live jails: their launch, what comes out of them, their end; their side of the egress proxy
    facts/                  what this host and the paths of one jail are, looked up
    policy/, seccomp/       what a jail sees and may do, computed: pure
    limits, watch/          what jails may use; what Linux counts of that, and what is looked for from outside
    privileges/, drop_privileges    what this process can have done here, as an ordinary user or by what stays root
    launcher/, egress/      processes of their own: what stays root, and the way to the network
    traffic/                what jails say on the network, and what they may reach: pure
    inside/, base/          what runs in jails: the worker, the bundled tools
    survey, inspection      what this machine can do, what a module exports

A room imports only rooms below it (the layers contract in pyproject.toml). docs/architecture.md has the way of a call.
"""

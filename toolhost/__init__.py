"""The tool host: it runs tool handlers in jails and answers their calls on the bus.

`python -m goondan.toolhost --endpoint ipc://…/tools.sock --token-fd N`. It trusts nothing that comes out of a jail.

    app, host               the process: its link, its decisions put into effect
    serving/                what is decided about calls and jails, done
    jails/                  live jails: their launch, what comes out of them, their end; their side of the egress proxy
    calls/                  calls from their arguments to their one result, and the sessions that they run in; pure
    lookup/                 what this host and the paths of one jail are, looked up
    watch/                  what Linux counts of what jails use, and what is looked for from outside
    privileges/, drop_privileges    what this process can have done here, as an ordinary user or by what stays root
    policy/                 what a jail sees, may do and may use, computed: pure
    launcher/, egress/      processes of their own: what stays root, and the way to the network
    traffic/                what jails say on the network, and what they may reach: pure
    inside/, base/          what runs in jails: the worker, the bundled tools
    survey, inspection      what this machine can do, what a module exports

A room imports only rooms below it (the layers contract in pyproject.toml). docs/architecture.md has the way of a call.
"""

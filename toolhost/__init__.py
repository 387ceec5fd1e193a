"""The tool host: it runs tool handlers in jails and answers their calls on the bus.

`python -m toolhost --endpoint ipc://…/tools.sock --token-fd N`. It trusts nothing that comes out of a jail.

    app, host, network      the process: its link, its decisions put into effect, its side of the egress proxy
    calls/                  calls from their arguments to their one result
    jails/                  live jails: their launch, what comes out of them, their end
    policy/, seccomp/       what a jail sees and may do, computed
    limits/                 what jails use, and which limit they have reached
    privileges/             what a host that root has started gives up, and its links to what stays root
    launcher/, egress/      processes of their own: what stays root, and the way to the network
    inside/, base/          what runs in jails: the worker, the bundled tools
    survey, probe, diagnosis, inspection, disk      what this machine can do, what a module exports
"""

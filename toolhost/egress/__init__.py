"""The egress proxy: the only way from a jail to the network, in a process of its own.

`addresses`, `binary`, `heads` and `rules` are pure: they parse what jails and resolvers write, and
decide. `proxy` is their shell. `listen` makes listening sockets inside a jail's network namespace. `messages` are what
the tool host and the proxy send each other.

Everything here imports the standard library, goondan.schemas.hosts, and from goondan.toolhost.inside what puts up
walls, so the process can be started without site packages.
"""

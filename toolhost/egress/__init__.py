"""The egress proxy: the only way from a jail to the network, in a process of its own.

`addresses`, `dns`, `heads`, `hello` and `rules` are pure: they parse what jails and resolvers say and decide. `proxy`
is their shell, `listen` makes listening sockets inside a jail's network namespace, `messages` is how the tool host
speaks to the proxy. Everything here imports the standard library, schemas.hosts and what
jails put their walls up with (toolhost.inside), so that the process can be started without site packages.
"""

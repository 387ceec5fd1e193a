"""The egress proxy: the only way from a jail to the network, in a process of its own.

`proxy` parses and judges with the modules of toolhost/traffic, connects and relays. `listen` makes
listening sockets inside a jail's network namespace.

Everything here imports the standard library, goondan.schemas.worker.hosts, toolhost/traffic, and from
goondan.toolhost.inside what puts up walls, so the process can be started without site packages.
"""

"""What jails say on the network, parsed, and what they may reach, judged. Pure.

`rules` judges. `protocols` parses what jails and resolvers write. `messages` are what the tool
host and the egress proxy (toolhost/egress/) send each other.

Everything here imports the standard library and goondan.schemas.worker.hosts, as the proxy is started without site
packages.
"""

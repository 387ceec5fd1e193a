"""The launcher and the privileged helper: programs of one thread that act for the tool host.

The launcher executes one launch plan at a time and chooses nothing. Namespaces, mounts and another user have to be set
between fork and exec; the tool host has threads and an event loop, so it cannot do that. Under root the launcher and
the privileged helper keep root's powers. They have no link to the bus, read no file of a bundle, and import nothing but
the standard library.

`allow_list.py` is what tool host and launcher say to each other, and what is refused. `program.py` has the loops of
both programs, `staging.py` makes the mounts, `operations.py` is what the helper does, `places.py` opens paths,
`syscalls.py` has the system calls that Python does not have. The tool host's ends are `toolhost/jails/launch.py` and
`toolhost/privileges/`.

Source: docs/design/sandbox.md sections 3.1 and 3.2; docs/decisions/022.
"""

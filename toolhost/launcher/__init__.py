"""The launcher: a single-threaded program of its own that executes one launch plan at a time and chooses nothing.

What must happen between fork and exec (namespaces, mounts, another user id) cannot be done in the tool host, which has
threads and an event loop, and under root it is the one part that keeps root's powers for jails. It has no link to the
bus, reads no file of a bundle, and imports nothing but the standard library.

`request.py` is what the two say to each other, `program.py` the loop, `staging.py` the mounts, `calls.py` the system
calls that Python does not have. The tool host's end is `toolhost/jails/launch.py`.

Source: docs/design/sandbox.md sections 3.1 and 3.2; docs/decisions/022.
"""
